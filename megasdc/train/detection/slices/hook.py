"""Hooks of the exact checks of slices, and the rulings on what they find; the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.addresses import REDUCED_GRAD, UPDATE, Address
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.model.submodules import list_submodules
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.ballot import Ballot, Dispute
from megasdc.sdc.fp64.bounds import Exact
from megasdc.sdc.fp64.referee import agreed, is_within, judge
from megasdc.sdc.incidents.opinion import Opinion, Outside
from megasdc.sdc.incidents.settled import Settled
from megasdc.sdc.recompute import Unrepeated, judge_recomputed
from megasdc.sdc.replay import ELSEWHERE, INCONCLUSIVE, INTERMITTENT, NOT_REPRODUCED, REFEREE, Ruling, settle
from megasdc.tensors.bits import as_bits
from megasdc.train.detection.budget import Budget
from megasdc.train.detection.slices.layout import Slice, Slices
from megasdc.train.detection.slices.reduction import SumCheck, WrongSum
from megasdc.train.detection.slices.update import STATES, Checked, Update, UpdateSlices, checksum

logger = logging.getLogger(__name__)

SUMS, KEPT_STATE, UPDATES = "reduction", "state", "update"
"""Tiers of findings."""
OWN_COPY, MEAN = "own copy", "mean of the replicas' gradients"
"""Bases of their rulings, besides those of ``megasdc.sdc.replay``."""
REPEATS = 5
ELEMENTS = 1024
"""Most elements of an update that the referee computes."""
Act = Callable[[int, Callable[[Collection[int]], Settled]], bool]
"""Settles a finding of a step: gets the devices found wrong before; returns whether it is to be repaired."""


@dataclass(frozen=True)
class Claim:
    """What a rank found in the update of another, or of its own where there is one replica.

    Args:
        owner: global rank of the update.
        row: which of ``STATES`` differs first.
        elements: of the slice that differ, the first ``ELEMENTS``.
        got: checksum of the owner's row.
        expected: of the checker's.
    """

    owner: int
    row: int
    elements: tuple[int, ...]
    got: int
    expected: int


class Found(Hook):
    """Hook that compares what the step has found, once faults were injected into it and before bounds change it."""

    def __init__(self, checks: SliceChecks) -> None:
        self._checks = checks

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Compare this rank's slices of gradients and state."""
        self._checks.compare()


class SliceChecks(Hook):
    """Checks a slice of each shard in each step: the sum of its gradient, its state since the last step, its update.

    Args:
        size: most elements of a slice.
        act: settles what is found.
        budget: says which steps look at a slice, and measures that.
        sums: whether the sum of gradients can be checked: nothing changes them between a copy and the sum.

    Attributes:
        found: the hook that reads what the step has found; a hook of its own, since it comes after fault injection.
    """

    def __init__(self, size: int, act: Act, budget: Budget, *, sums: bool) -> None:
        self._size, self._act, self._budget, self._with_sums = size, act, budget, sums
        self.found: Hook = Found(self)
        self._sums: SumCheck | None = None
        self._wrong_sum: WrongSum | None = None
        self._tolerant = False
        self._engine: Any = None
        self._host_group: dist.ProcessGroup | None = None
        self._names: dict[int, tuple[str, str]] = {}
        self._looks = False

    def on_start(self, run: Run) -> None:
        """Find out which slices there are, and tell after how many steps all have been looked at."""
        self._engine, self._host_group, self._events = run.engine, run.host_group, run.events
        self._slices = Slices(run.engine, self._size, run.host_group)
        self._sums = SumCheck(run.engine, self._slices) if self._with_sums else None
        self._updates = UpdateSlices(run.engine, self._slices)
        self._names = {
            id(parameter): (submodule.fqn, slot)
            for submodule in list_submodules(run.engine.module)
            for slot, parameter in submodule.parameters.items()
        }
        if run.dims.rank == 0:
            told = {"elements": self._size, "period": self._slices.period, "sums": self._with_sums}
            run.events.emit("start", "slices", step=run.step, **told)
            logger.info(
                "slices of %d elements: all of the optimizer is looked at in %d steps that look at one%s",
                self._size,
                self._slices.period,
                "" if self._with_sums else "; sums of gradients are not, since a bound changes each rank's own before",
            )

    def close(self) -> None:
        """Remove the optimizer's hook."""
        if self._engine is not None:
            self._updates.close()

    # --- a step -------------------------------------------------------------------------------------------------

    def before_step(self, run: Run) -> None:
        """Find out whether this step looks at a slice."""
        self._looks = self._budget.cadence.slices(run.engine.step_number)

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Copy slices of this rank's gradients."""
        if self._sums is not None and self._looks:
            with self._budget.slices:
                self._sums.copy(self._turn(engine.step_number))

    def compare(self) -> None:
        """Compare this rank's slices of the reduced gradient, and of the state that the last step left."""
        if self._looks:
            with self._budget.slices:
                self._wrong_sum = None if self._sums is None else self._sums.compare()
                self._updates.compare_state(self._turn(self._engine.step_number))

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Check the update, agree on what was found, and settle it.

        Raises:
            CorruptionError: on all ranks, where the policy is to halt.

        Collective: all ranks of the world.
        """
        if self._looks:
            self._finish(engine)
        following = engine.step_number + 1
        with self._budget.slices:
            self._updates.keep(self._turn(following) if self._budget.cadence.slices(following) else None)

    def _turn(self, step: int) -> int:
        return self._budget.cadence.turn(step)

    def _finish(self, engine: TrainingEngine) -> None:
        step = engine.step_number
        with self._budget.slices:
            checked = Checked() if engine.is_skipped else self._updates.finish()
            claim = self._claim(checked)
            found = [self._wrong_sum is not None, self._updates.changed is not None, claim is not None]
            flags = torch.tensor(found, dtype=torch.int64)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._host_group)
        sums, states, updates = map(bool, flags.tolist())
        if sums or states or updates:
            self._budget.ignore_step()
        if sums:
            self._act(step, lambda earlier: self._of_sums(step))
        if states:
            self._act(step, lambda earlier: self._of_states(step, earlier))
        if updates:
            exact = not self._tolerant
            ruled = self._settle_updates(engine, claim, checked)
            if exact and self._tolerant and not ruled:  # a fault may be among the differences that rounding explains
                self._settle_updates(engine, self._claim(checked), checked)

    def _settle_updates(self, engine: TrainingEngine, claim: Claim | None, checked: Checked) -> bool:
        """Rule on updates that differ when computed twice, and put right what can be; whether there was a ruling."""
        rulings: list[Ruling] = []

        def find(earlier: Collection[int]) -> Settled:
            settled = self._of_updates(engine.step_number, claim, checked, earlier)
            rulings.extend(settled.rulings)
            return settled

        if self._act(engine.step_number, find):
            self._updates.put(checked)
            engine.optimizer.update_lp_params()
        return bool(rulings)

    def _claim(self, checked: Checked) -> Claim | None:
        """What differs between an update and this rank's computation of it; None: nothing."""
        if checked.other is None or checked.again is None:
            return None
        for row, (got, expected) in enumerate(zip(checked.other.after, checked.again, strict=True)):
            different = as_bits(got.contiguous()) != as_bits(expected.contiguous())
            if self._tolerant and bool(different.any()):
                exact = checked.other.exact(row, torch.arange(len(got)))
                both = is_within(got.cpu().double(), exact) & is_within(expected.cpu().double(), exact)
                different &= ~both.to(different.device)
            if bool(different.any()):
                elements = tuple(different.nonzero().flatten()[:ELEMENTS].tolist())
                dims = self._engine.dims
                owner = self._slices.ranks[(dims.dp_rank - 1) % dims.data]
                return Claim(owner, row, elements, checksum(got), checksum(expected))
        return None

    # --- rulings ------------------------------------------------------------------------------------------------

    def _address(self, step: int, phase: str, due: Slice, element: int, row: int | None = None) -> Address:
        """Of the parameter that an element of a slice is in, or of one of its ``STATES``."""
        parameter = self._slices.parameter_of(due.group, due.piece_at(element))
        fqn, slot = self._names[id(parameter)]
        return Address(step, None, phase, fqn, slot if row is None else f"{slot}.{STATES[row]}")

    def _of_sums(self, step: int) -> Settled:
        """A sum that rounding does not explain: of the owner alone if another rank has a right copy, else of any."""
        dims, wrong = self._engine.dims, self._wrong_sum
        mine = None if wrong is None else (self._address(step, REDUCED_GRAD, wrong.due, wrong.element), wrong)
        found = {rank: one for rank, one in enumerate(gather_objects(mine, self._host_group)) if one is not None}
        copies = (
            {} if self._sums is None else {who: self._sums.copy_at(who, at.element) for who, (_, at) in found.items()}
        )
        witnessed = gather_objects({who: one for who, one in copies.items() if one is not None}, self._host_group)
        rulings, opinions = [], []
        for rank, (address, one) in found.items():
            first = rank - dims.at(rank).dp_rank * dims.tensor
            group = tuple(first + replica * dims.tensor for replica in range(dims.data))
            values = {rank: one.got} | {who: seen[rank] for who, seen in enumerate(witnessed) if rank in seen}
            within = {who: abs(value - one.exact) <= one.bound for who, value in values.items()}
            basis = REFEREE if any(within.values()) else MEAN
            named = rank if basis == REFEREE or len(group) == 1 else None
            rulings.append(Ruling(named, INCONCLUSIVE, basis, address, suspects=group if named is None else ()))
            told = {who: repr(value) for who, value in values.items()}
            opinions.append(
                Opinion(address, within, "", one.elements, Outside((0, one.element), one.exact, one.bound, told))
            )
        return Settled(SUMS, None, tuple(rulings), dims.world_size, opinions=tuple(opinions))

    def _of_states(self, step: int, earlier: Collection[int]) -> Settled:
        """State that changed between two steps: the memory of its rank; the copy was put back before it was read."""
        changed = self._updates.changed
        mine = None if changed is None else self._address(step, UPDATE, changed[0], changed[2], changed[1])
        found = enumerate(gather_objects(mine, self._host_group))
        rulings = [
            Ruling(rank, INTERMITTENT if rank in earlier else NOT_REPRODUCED, OWN_COPY, address)
            for rank, address in found
            if address is not None
        ]
        return Settled(KEPT_STATE, None, tuple(rulings), self._engine.dims.world_size)

    def _of_updates(self, step: int, claim: Claim | None, checked: Checked, earlier: Collection[int]) -> Settled:
        """Two computations of one update that differ: repeats of both, and the referee, tell which is wrong."""
        rank = self._engine.dims.rank
        claims: Mapping[int, Claim] = {
            checker: one for checker, one in enumerate(gather_objects(claim, self._host_group)) if one is not None
        }
        rulings: list[Ruling] = []
        opinions: list[Opinion] = []
        for checker, one in claims.items():
            address, evidence = None, None
            if rank == one.owner and checked.due is not None and checked.own is not None:
                address = self._address(step, UPDATE, checked.due, one.elements[0], one.row)
                evidence = _evidence(checked.own, checked.own.after, one, alone=checker == rank)
            elif rank == checker and checked.other is not None and checked.again is not None:
                evidence = _evidence(checked.other, checked.again, one)
            sent = gather_objects((address, evidence), self._host_group)
            place = next(where for where, _ in sent if where is not None)
            shown = {who: part for who in sorted({checker, one.owner}) if (part := sent[who][1]) is not None}
            if self._is_rounding(step, place, one, list(shown.values())):
                continue
            if checker == one.owner:
                pairs = shown[checker].pairs
                difference = Unrepeated(place, one.got, one.expected)
                ruling = judge_recomputed(checker, difference, pairs, checker in earlier)
                rulings.append(replace(ruling, basis=ELSEWHERE))
                continue
            values = {one.owner: one.got, checker: one.expected}
            opinion = _opinion(place, one, shown)
            opinions.append(opinion)
            dispute = Dispute(place, 0, (), (values,), origin=True)
            repeats = {(who, 0): [pair[0] for pair in shown[who].pairs] for who in values}
            refereed = {(who, 0): within for who, within in opinion.within.items()}
            rulings += settle(Ballot((), dispute, 1, (), ()), repeats, None, earlier, refereed)
        return Settled(UPDATES, None, tuple(rulings), self._engine.dims.world_size, opinions=tuple(opinions))

    def _is_rounding(self, step: int, address: Address, claim: Claim, shown: Sequence[_Shown]) -> bool:
        """Whether both results come again each time and are within rounding; from then on such differences are none."""
        repeats = {pair for one in shown for pair in one.pairs}
        alone = len(shown) == 1  # has both values, one of them elsewhere
        steady = {(claim.got, claim.expected)} if alone else {(claim.got,) * 2, (claim.expected,) * 2}
        if repeats != steady or not all(one.within for one in shown):
            return False
        self._tolerant = True
        if self._engine.dims.rank == 0:
            self._events.emit("sdc", "slices_within_rounding", step=step, address=str(address), elements=claim.elements)
            logger.warning(
                "step %d: %s: computed again, %d elements have other bits each time, which rounding explains; the "
                "update is compared within the bound of rounding from now on",
                step,
                address,
                len(claim.elements),
            )
        return True


@dataclass(frozen=True)
class _Shown:
    """A rank's repeats of an update: checksums of the row as it is and elsewhere; and its elements.

    Args:
        pairs: of each repeat; twice the same where nothing was moved.
        values: of the differing elements, as this rank got them first.
        within: whether what this rank got, and where it checks itself what it got elsewhere, is what rounding allows.
    """

    pairs: tuple[tuple[int, int], ...]
    values: Tensor
    exact: Exact
    within: bool


def _evidence(update: Update, first: Tensor, claim: Claim, *, alone: bool = False) -> _Shown:
    """Repeat an update, of which this rank got ``first``, [3, n]; ``alone``: also with elements in other places."""
    elements = torch.tensor(claim.elements)
    pairs = []
    for _ in range(REPEATS):
        here = checksum(update.again()[claim.row])
        pairs.append((here, checksum(update.again(moved=True)[claim.row]) if alone else here))
    exact, found = update.exact(claim.row, elements), [first]
    found += [update.again(moved=True)] if alone else []
    within = all(bool(is_within(one[claim.row].cpu()[elements].double(), exact).all()) for one in found)
    return _Shown(tuple(pairs), first[claim.row].cpu()[elements], exact, within)


def _opinion(address: Address, claim: Claim, shown: Mapping[int, _Shown]) -> Opinion:
    """What the referee says of the owner's elements and the checker's."""
    count = len(claim.elements)
    reference = agreed([one.exact for one in shown.values()])
    if reference is None:
        return Opinion(address, {}, "ranks computed the elements differently in fp64 too", count)
    within = judge({rank: one.values for rank, one in shown.items()}, reference)
    if not within:
        return Opinion(address, within, "rounding explains all results, or none", count)
    wrong = next(rank for rank, right in within.items() if not right)
    distance = ((shown[wrong].values.double() - reference.values).abs() / reference.bounds).nan_to_num(nan=torch.inf)
    place = int(distance.argmax())
    values = {rank: repr(one.values[place].item()) for rank, one in shown.items()}
    exact, bound = reference.values[place].item(), reference.bounds[place].item()
    return Opinion(address, within, "", count, Outside((0, claim.elements[place]), exact, bound, values))
