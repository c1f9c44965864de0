"""The chain from the reduced gradient to the parameters of all ranks: norm, clipping, settings, state, the copy.

Evidence of a step is taken while it runs and agreed on at the next place at which ranks agree anyway: before the next
step mixes gradients, or before a save. So no checkpoint holds what was found, and nothing waits for these checks.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.common.addresses import PARAMETER, REDUCED_GRAD, UPDATE, Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.model.submodules import list_submodules
from megasdc.optim.zero1 import (
    MASTER,
    StateBlock,
    Used,
    blocks_of,
    clip_factor,
    differing_state_blocks,
    finish_digests,
    grouped_parameters,
    is_bf16_optimizer,
    loss_scale,
    master_partitions,
    norms_have_equal_bits,
    own_parameters,
    owned_fragments,
    start_digests,
)
from megasdc.parallel.collectives import Agreed, gather_objects
from megasdc.sdc.budget import CheckBudget
from megasdc.sdc.finding import Finding
from megasdc.sdc.verdict import INCONCLUSIVE, INTERMITTENT, MAJORITY, NOT_REPRODUCED, PERSISTENT, REFEREE, RankVerdict
from megasdc.sdc.vote import majority
from megasdc.tensors.bits import as_bits
from megasdc.tensors.checksum import ChecksumAlgorithm
from megasdc.train.detection.blocks import BlockSums, wrong_of
from megasdc.train.detection.findings import (
    CLIPPING,
    COPY,
    FACTORS,
    NORM,
    NORMS,
    OF_CHAIN,
    PART,
    STATE,
    ChainFindings,
    has_finding,
)

logger = logging.getLogger(__name__)

PARTS, OWN_NORM, OWN_DIGEST, MASTERS = "parts of the norm", "own norm", "own digest", "master shard"
"""Bases of the chain's rulings, besides those of ``megasdc.sdc.verdict``."""
HALF_ULP = 2.0**-24
"""Relative rounding of fp32, in which norms are taken."""
FACTOR_TOLERANCE = 16 * HALF_ULP
"""Largest relative difference of a clip factor from its formula: a few operations in fp32."""
LARGEST_SUMMED_NORM = math.sqrt(torch.finfo(torch.float32).max)
"""Norm above which the sum of squares is more than fp32 holds, though elements and norm are not."""
SMALLEST_SQUARES = 1e-24
"""Sum of squares below which squares of elements may be lost in fp32."""
GRADIENT = "gradient"
"""Submodule of an address that belongs to the whole gradient."""
_Started = dict[tuple[StateBlock, str], int | Tensor]
Act = Callable[[int, Callable[[Collection[int]], Finding]], bool]
"""Settles a finding of a committed step, from its number and a function that rules, given the ranks wrong before."""


class Sums(Hook):
    """Hook that adds up blocks of the gradient once nothing changes it any more before its norm is taken."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Add up; waits for the device in steps that look."""
        self._chain.add_up(engine)


class Chain(Hook):
    """Checks each link from the reduced gradient to the gathered parameters.

    In every step: norm and clip factors have equal bits on all ranks. In steps that look: the norm is what blocks of
    all shards add up to, of which other ranks add due ones again; due blocks of masters and moments are what the last
    step left, and due blocks of the parameters are the cast of their masters. All of those are due within the period
    in which all micro-batches are.

    Args:
        act: settles findings.
        budget: decides which steps look, and measures their time. Where each looks at all that it has, other ranks add
            all blocks of the gradient again; else one set of them.

    Attributes:
        sums: the hook that reads gradients; a hook of its own, since it comes after the last that changes them.
    """

    def __init__(self, run: Run, algorithm: ChecksumAlgorithm, act: Act, budget: CheckBudget) -> None:
        self._engine, self._dims, self._group = run.engine, run.dims, run.host_group
        self._algorithm, self._act, self._budget = algorithm, act, budget
        self.sums: Hook = Sums(self)
        self._optimizer = run.engine.optimizer
        ranks = self._dims.pipeline * self._dims.tensor
        self._compares_bits = norms_have_equal_bits(self._optimizer, self._engine.device, ranks)
        self._names = {
            id(parameter): (submodule.fqn, slot)
            for submodule in list_submodules(run.engine.module)
            for slot, parameter in submodule.parameters.items()
        }
        self._blocks: Sequence[StateBlock] = ()
        self._rounding = 0.0
        self._scale = 1.0
        self._own = 0.0
        self._squares: BlockSums | None = None
        self._sum: Tensor | None = None
        self._exchange: Any = None
        self._step = self._last_step = 0
        self._used = Used()
        self._kept: _Started = {}
        """Digests of the blocks that the next step looks at, as the last step left them."""
        self._now: _Started = {}
        self._pairs: list[tuple[_Started, _Started]] = []
        """Digests that must be equal."""
        self._unequal: list[tuple[StateBlock, Tensor]] = []

    # --- a step -------------------------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Divide the shard into blocks, and begin to keep settings and digests of each step.

        Collective: all ranks of the world.
        """
        self._blocks = blocks_of(self._optimizer)
        fragments = list(owned_fragments(self._optimizer))
        sizes = [one.numel() for group in grouped_parameters(self._optimizer) for one in group]
        largest = torch.tensor([max(sizes), max(len(fragments), len(sizes))], dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        terms, parts = largest.tolist()
        # Terms are positive: a sum of n is off by no more than n roundings, and of many by about their root. The norm
        # shards is taken in fp64, and only parts are added in fp32.
        elements = min(terms, 64 + 4 * math.sqrt(terms)) if is_bf16_optimizer(self._optimizer) else 0
        self._rounding = HALF_ULP * (elements + parts + self._dims.world_size + 8)
        run.engine.step_control.record()
        if not getattr(self._optimizer, "cpu_offload", False):
            self._squares = BlockSums(run.engine, whole=self._budget.whole)
        self._digest_blocks(run.engine.step_number)  # what was loaded, or made, is what the first step is to find

    def restart(self) -> None:
        """Take the state as it is now for what the next step is to find: it was changed on purpose between steps."""
        self._digest_blocks(self._engine.step_number)

    def _digest_blocks(self, following: int) -> None:
        """Start digests of the blocks of the state at which the following step looks."""
        with self._budget.looks:
            self._kept = start_digests(self._optimizer, self._due(following), self._algorithm)
        self._now = {}

    def _due(self, step: int) -> list[StateBlock]:
        """Blocks that a step looks at; the same places in all shards of equal sizes."""
        if not self._budget.looked_at(step):
            return []
        turns = self._budget.turns
        turn = self._budget.cadence.turn(step) % turns
        return [block for place, block in enumerate(self._blocks) if place % turns == turn]

    @property
    def _kept_blocks(self) -> Collection[StateBlock]:
        return dict.fromkeys(block for block, _ in self._kept)

    def before_step(self, run: Run) -> None:
        """Compare due blocks of the parameters, which the last step gathered, with the cast of their masters."""
        self.compare_copy()

    def compare_copy(self) -> None:
        """Compare the blocks of which digests were kept for the next or running step; no sync on a GPU.

        Others may be due by now, as the cadence changes between steps: of those it cannot be told whether a copy is
        wrong or its master has changed.
        """
        self._unequal = []
        if not self._kept:
            return
        with self._budget.looks:
            masters, parameters = master_partitions(self._optimizer), own_parameters(self._optimizer)
            for block in self._kept_blocks:
                held = block.of(parameters[block.group])
                cast = block.of(masters[block.group]).to(device=held.device, dtype=held.dtype)
                self._unequal.append((block, (as_bits(cast) != as_bits(held)).any()))

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Compare due blocks of the state with what the last step left, just before this one uses them."""
        self._scale = loss_scale(engine)
        self._compare_state()

    def _compare_state(self) -> None:
        with self._budget.looks:
            self._now = start_digests(self._optimizer, self._kept_blocks, self._algorithm)

    @torch.no_grad()
    def add_up(self, engine: TrainingEngine) -> None:
        """Add up the squares of each block of the gradient that this rank owns and counts, in fp64.

        Collective: all ranks of the world, in steps that look; one number, which the optimizer's step hides; and the
        replicas, or where there is one the ranks of the model, for blocks that are added up again: the step hides the
        last set of them.
        """
        self._sum = None
        if not self._budget.looked_at(engine.step_number) or self._squares is None:
            return
        with self._budget.looks:
            self._own = self._squares.add_up(self._budget.cadence.turn(engine.step_number))
            self._sum = torch.tensor(self._own, dtype=torch.float64)
        self._exchange = dist.all_reduce(self._sum, group=self._group, async_op=True)

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Keep what the step used, and digests of the blocks at which the next step looks."""
        self._step, self._used = engine.step_number, engine.step_control.pop_used()
        self._pairs.append((self._kept, self._now))
        self._digest_blocks(self._step + 1)

    def before_save(self) -> None:
        """Compare what is about to be saved, since the next step would do so only after the save; no sync on a GPU."""
        self.compare_copy()
        self._compare_state()
        self._pairs.append((self._kept, self._now))

    def pop_findings(self) -> ChainFindings:
        """Findings since the last call.

        Sync: waits for the device.
        """
        step, used, self._step, self._used = self._step, self._used, 0, Used()
        pairs, self._pairs = self._pairs, []
        changed = [
            one for kept, now in pairs for one in differing_state_blocks(finish_digests(kept), finish_digests(now))
        ]
        unequal, self._unequal = self._unequal, []
        copies = [block for block, differs in unequal if bool(differs)]
        state, copy = next(iter(changed), None), next(iter(copies), None)
        if not step:
            return ChainFindings(self._last_step, state=state, copy=copy)
        self._last_step = step
        norm = self._optimizer._global_grad_norm
        norm = math.nan if norm is None else float(norm)
        factors = tuple(sorted({float(one) for one in used.factors})) or (1.0,)
        parts, total = tuple(float(one) for one in used.parts), self._added()
        return ChainFindings(
            step,
            norm,
            factors,
            parts,
            total,
            self._own,
            None if total is None or self._squares is None else self._squares.compare(),
            norm_is_wrong=total is not None
            and not used.skip
            and not is_norm_of(norm * self._scale, total, self._rounding),
            factor_is_wrong=bool(used.factors) and not self._follow(norm, used),
            state=state,
            copy=copy,
            norm_bits=_bits(norm) if self._compares_bits else 0,
            factor_bits=_bits(*factors) if self._compares_bits else 0,
            part_bits=_bits(*parts) if is_bf16_optimizer(self._optimizer) else 0,
        )

    def _added(self) -> float | None:
        """Sum over all ranks of the gradient's squares in the step; None: it was not computed."""
        if self._sum is None:
            return None
        self._exchange.wait()
        return float(self._sum)

    def _follow(self, norm: float, used: Used) -> bool:
        """Whether clip factors follow from the norm; in fp16 norm and clip may have different loss scales."""
        if not (math.isfinite(norm) and norm >= 0):
            return True
        scale = loss_scale(self._engine)
        expected = clip_factor(norm * self._scale / scale, float(self._optimizer.clip_grad)) / scale
        return all(abs(float(one) - expected) <= FACTOR_TOLERANCE * expected for one in used.factors)

    # --- agreement and rulings ----------------------------------------------------------------------------------

    def settle(self, links: ChainFindings, agreed: Agreed) -> None:
        """Settle the findings in a committed step, on which all ranks agree; nothing where there is none.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.

        Collective: all ranks of the world.
        """
        if has_finding(agreed, OF_CHAIN):
            self._budget.ignore_step()
        if agreed[NORM] or agreed[NORMS] or agreed[PART]:
            self._act(links.step, lambda earlier: self._of_norm(links, earlier))
        elif agreed[CLIPPING] or agreed[FACTORS]:
            self._act(links.step, lambda earlier: self._of_clipping(links, earlier))
        if agreed[STATE]:
            self._act(links.step, lambda earlier: self._of_state(links, earlier))

    def _of_norm(self, links: ChainFindings, earlier: Collection[int]) -> Finding:
        """Rule on a wrong norm: on the rank that alone has it, or, if all have it, on the rank whose part is wrong."""
        every: list[ChainFindings] = gather_objects(links, self._group)
        if any(one.block is not None for one in every):
            rulings = self._of_blocks(links.step, every, earlier)
            rest = self._without_blocks(every, links.step, earlier)
            named = {one.rank for one in rulings}
            rulings += tuple(one for one in rest if one.rank is not None and one.rank not in named)
            return Finding(NORM, None, rulings, len(every))
        return Finding(NORM, None, self._without_blocks(every, links.step, earlier), len(every))

    def _without_blocks(
        self, every: Sequence[ChainFindings], step: int, earlier: Collection[int]
    ) -> tuple[RankVerdict, ...]:
        """Rulings on norms and parts alone."""
        address = Address(step, None, REDUCED_GRAD, GRADIENT, "norm")
        within = {rank for rank, one in enumerate(every) if one.sum is not None and not one.norm_is_wrong}
        rulings: list[RankVerdict] = []
        for ranks in self._with_equal_norms():
            norms = {rank: _bits(every[rank].norm) for rank in ranks}
            if len(set(norms.values())) > 1:
                rulings += self._rule(norms, address, earlier, within.intersection(ranks))
        return tuple(rulings) or self._of_parts(every, address, earlier)

    def _with_equal_norms(self) -> list[list[int]]:
        """Ranks whose norms have equal bits: all, or those of each replica."""
        if self._compares_bits:
            return [list(range(self._dims.world_size))]
        replicas: dict[int, list[int]] = {}
        for rank in range(self._dims.world_size):
            replicas.setdefault(self._dims.at(rank).dp_rank, []).append(rank)
        return list(replicas.values())

    def _of_blocks(
        self, step: int, every: Sequence[ChainFindings], earlier: Collection[int]
    ) -> tuple[RankVerdict, ...]:
        """Rule on two sums of the same squares that differ: an exact sum tells which is wrong."""
        squares, rank = self._squares, self._dims.rank
        assert squares is not None, "blocks were added up"
        rulings: list[RankVerdict] = []
        for checker, claim in ((rank, one.block) for rank, one in enumerate(every) if one.block is not None):
            told: Any = None
            has: Any = None
            if rank == claim.owner:
                fqn, slot = self._names[id(squares.parameter_of(claim))]
                address = Address(step, None, REDUCED_GRAD, fqn, f"{slot}, sum of squares")
                told = squares.evidence_on(claim, as_owner=True), address
            if rank == checker:
                has = squares.evidence_on(claim, as_owner=False)
            sent = gather_objects((told, has), self._group)
            (owns, address), received = sent[claim.owner][0], sent[checker][1]
            wrong = wrong_of(claim, checker, owns, received)
            got = {claim.owner: _bits(claim.got), checker: _bits(claim.again)}
            suspects = () if wrong is not None else tuple(got)
            basis = REFEREE if wrong is not None else MAJORITY
            more = {"expected": _bits(owns.exact)} if wrong is not None else {}
            rulings.append(self._ruling(wrong, basis, address, earlier, suspects=suspects, got=got, **more))
        return tuple(rulings)

    def _of_parts(
        self, every: Sequence[ChainFindings], address: Address, earlier: Collection[int]
    ) -> tuple[RankVerdict, ...]:
        """Rule on ranks whose part of the norm differs from the sum of their blocks, or from other replicas' part."""
        address = Address(address.step, None, address.phase, address.fqn, "part of the norm")
        parts = {rank: _bits(*one.parts) for rank, one in enumerate(every)}
        rulings: list[RankVerdict] = []
        for ranks in self._sharing(whole=is_bf16_optimizer(self._optimizer)):
            values = {rank: parts[rank] for rank in ranks}
            known = all(every[rank].sum is not None and every[rank].parts for rank in ranks)
            right = math.fsum(every[rank].own for rank in ranks)
            norms = {rank: _root(sum(every[rank].parts)) for rank in ranks}
            within = {rank for rank, norm in norms.items() if is_norm_of(norm, right, self._rounding)}
            if len(set(values.values())) > 1:
                rulings += self._rule(values, address, earlier, within if known else set())
            elif known and not within:
                named = ranks[0] if len(ranks) == 1 else None
                suspects = () if named is not None else tuple(ranks)
                rulings.append(self._ruling(named, PARTS, address, earlier, suspects=suspects, got=values))
        if not rulings:
            suspects = tuple(range(len(every)))
            rulings.append(self._ruling(None, PARTS, address, earlier, suspects=suspects))
        return tuple(rulings)

    def _sharing(self, *, whole: bool) -> list[list[int]]:
        """Ranks by position of a replica, where each takes the norm of the whole gradient; else each alone."""
        if not whole:
            return [[rank] for rank in range(self._dims.world_size)]
        return self._dims.positions

    def _of_clipping(self, links: ChainFindings, earlier: Collection[int]) -> Finding:
        """Rule on a clip factor that does not follow from the rank's own norm, or differs from most ranks'."""
        every: list[ChainFindings] = gather_objects(links, self._group)
        address = Address(links.step, None, REDUCED_GRAD, GRADIENT, "clip factor")
        factors = {rank: _bits(*one.factors) for rank, one in enumerate(every)}
        wrong = [rank for rank, one in enumerate(every) if one.factor_is_wrong]
        if wrong:
            rulings = tuple(self._ruling(rank, OWN_NORM, address, earlier, got=factors) for rank in wrong)
        else:
            rulings = self._rule(factors, address, earlier, set())
        return Finding(CLIPPING, None, rulings, len(every))

    def _of_state(self, links: ChainFindings, earlier: Collection[int]) -> Finding:
        """Rule on state that changed between two steps, by an error in the memory of its rank."""
        mine = None
        if links.state is not None:
            block, name = links.state
            mine = self._address(links.step, UPDATE, block, name)
        found = {rank: one for rank, one in enumerate(gather_objects(mine, self._group)) if one is not None}
        rulings = tuple(self._ruling(rank, OWN_DIGEST, address, earlier) for rank, address in found.items())
        return Finding(STATE, None, rulings, self._dims.world_size)

    def of_copy(self, links: ChainFindings, earlier: Collection[int]) -> Finding:
        """Rule on parameters that are not the cast of their masters; gathered again, unless the masters have changed.

        Collective: all ranks of the world.
        """
        step, mine, master = self._engine.step_number, None, False
        if links.copy is not None:
            now = finish_digests(start_digests(self._optimizer, self._kept_blocks, self._algorithm))
            changed = [
                block for block, name in differing_state_blocks(finish_digests(self._kept), now) if name == MASTER
            ]
            mine, master = self._address(step, PARAMETER, next(iter(changed), links.copy), None), bool(changed)
        found = gather_objects((mine, master), self._group)
        wrong = {rank: address for rank, (address, _) in enumerate(found) if address is not None}
        if any(is_master for _, is_master in found):
            rulings = [
                self._ruling(rank, OWN_DIGEST, wrong[rank], earlier) for rank, (_, one) in enumerate(found) if one
            ]
            return Finding(STATE, None, tuple(rulings), self._dims.world_size)
        self._optimizer.update_lp_params()
        self.compare_copy()
        again = gather_objects(any(bool(differs) for _, differs in self._unequal), self._group)
        rulings = []
        for rank, address in wrong.items():
            verdict = PERSISTENT if again[rank] else INTERMITTENT if rank in earlier else NOT_REPRODUCED
            rulings.append(RankVerdict(rank, verdict, MASTERS, address, int(again[rank]), 1))
        return Finding(COPY, None, tuple(rulings), self._dims.world_size)

    def _rule(
        self, values: dict[int, int], address: Address, earlier: Collection[int], right: Collection[int]
    ) -> tuple[RankVerdict, ...]:
        """Rulings on ranks that must have equal values: by a strict majority, else by those known to be right."""
        basis, expected = MAJORITY, majority(values, len(values))
        agreeing = {values[rank] for rank in right}
        if expected is None and len(agreeing) == 1:
            basis, expected = PARTS, agreeing.pop()
        if expected is None:
            return (self._ruling(None, MAJORITY, address, earlier, suspects=tuple(values), got=values),)
        wrong = [rank for rank, value in values.items() if value != expected]
        return tuple(self._ruling(rank, basis, address, earlier, expected=expected, got=values) for rank in wrong)

    def _ruling(
        self,
        rank: int | None,
        basis: str,
        address: Address,
        earlier: Collection[int],
        **more: Any,
    ) -> RankVerdict:
        """Ruling on a value that cannot be repeated, since the step has used it."""
        if rank is not None and "got" in more:
            more["got"] = {rank: more["got"][rank]}
        verdict = INTERMITTENT if rank in earlier else INCONCLUSIVE
        return RankVerdict(rank, verdict, basis, address, **more)

    def _address(self, step: int, phase: str, block: StateBlock, name: str | None) -> Address:
        """Address of the first parameter in a block of this rank's shard, or of one of its states."""
        for fragment in owned_fragments(self._optimizer):
            if fragment.group == block.group and fragment.start + fragment.numel > block.start:
                fqn, slot = self._names[id(fragment.parameter)]
                return Address(step, None, phase, fqn, slot if name is None else f"{slot}.{name}")
        return Address(step, None, phase, f"alignment of group {block.group}", name or "values")


def is_norm_of(norm: float, squares: float, rounding: float) -> bool:
    """Whether a norm is the root of a sum of squares within the rounding of fp32.

    Where that sum, rounded, may be more than fp32 holds, both are right: a norm that is near, and one that is not
    finite. Ranks' parts may be finite then and their sum not, and so may groups of parameters and the norm of all.

    Args:
        norm: norm of the gradient as it is stored, loss scale included.
        squares: sum of its elements' squares, in fp64.
        rounding: largest relative difference of norms that rounding explains.
    """
    right = _root(squares)
    if not math.isfinite(norm) or norm < 0:  # DeepSpeed says -1 where it is not finite
        return not right * (1 + rounding) < LARGEST_SUMMED_NORM
    return math.isfinite(right) and (squares < SMALLEST_SQUARES or abs(norm - right) <= rounding * right)


def _root(squares: float) -> float:
    return math.sqrt(squares) if squares >= 0 else math.nan


def _bits(*values: float) -> int:
    """Bits of a number as an integer, the same for all NaN; a 64-bit checksum of several numbers."""
    packed = b"".join(struct.pack("<d", math.nan if math.isnan(value) else value) for value in values)
    return int.from_bytes(packed, "little") if len(values) == 1 else xxhash.xxh3_64_intdigest(packed)
