"""Faults of the live campaign: cases drawn by a seed, the same on every rank.

Each row asks another question: how many ranks are wrong, how often a fault comes again, and where it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD, Address
from megasdc.config.faults import COLLECTIVE, OPTIMIZER_STATE, TOKENS, FaultSpec
from megasdc.faults.injector import Draws
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.rows import PRODUCTS

CLEAN = "clean"
ALONE, PAIR, PAIR_GOLDEN = "one wrong of three or more", "one wrong of two", "one wrong of two, golden trace"
TWO_WRONG = "two wrong of three or more, different places"
MAJORITY, MAJORITY_GOLDEN = "wrong majority, no golden trace", "wrong majority, golden trace"
UNIT, VALUES = "one wrong unit, elements moved", "one wrong with the values, elements moved"
RECOMPUTED = "recompute check, no audit, not persistent"
SHARED_TOKENS, PARAMETERS = "tokens of the audited micro-batch", "parameters after the all-gather"
OTHER_FORWARD = "another micro-batch, forward, recomputed"
OTHER, SUM, SHARD, STEPPED, STATE = (
    "another micro-batch",
    "gradient given to the sum",
    "reduced gradient",
    "update",
    "optimizer state",
)
ROWED = "product whose rows are summed, no audit"
SLICED = (SUM, SHARD, STEPPED, STATE)
"""Rows that slices of the optimizer show."""
ONCE, ALWAYS, SOMETIMES = "transient", "persistent", "intermittent"
TWICE = "in two steps"
"""So that each group of the optimizer is in a slice once."""
PERSISTENCE: dict[str, dict[str, Any]] = {
    ONCE: {"once": True},
    ALWAYS: {"same_elements": True},
    SOMETIMES: {"probability": 0.5},
    TWICE: {},
}
"""Persistences of a fault, each a part of a spec."""
AUDITED, GOLDEN, CHECKED, EVERYTHING = "audit", "audit and golden trace", "always on", "everything"
PERMUTED, SUMMED = "permuted audit", "sums of rows"
"""Modes: the checks of a case."""
MODES = {
    CLEAN: EVERYTHING,
    ALONE: AUDITED,
    PAIR: AUDITED,
    PAIR_GOLDEN: GOLDEN,
    TWO_WRONG: AUDITED,
    MAJORITY: AUDITED,
    MAJORITY_GOLDEN: GOLDEN,
    RECOMPUTED: CHECKED,
    UNIT: PERMUTED,
    VALUES: PERMUTED,
    ROWED: SUMMED,
}
"""By row; the others have everything."""
FIRST_STEPS = range(2, 51)
"""Steps with which cases begin, but for those of rows, which begin when the product is due."""
LONG = 3
"""Steps of a case that covers the time after the fault, which is in the second, and of a clean one."""


@dataclass(frozen=True)
class Target:
    """One fault of a case: its rank, the address that it changes, and its spec for the injector.

    ``shows`` is the address where it shows first; None: it shows elsewhere, or nowhere.
    """

    rank: int
    address: Address
    shows: Address | None
    kind: str
    spec: FaultSpec


@dataclass(frozen=True)
class Case:
    """Faults of one trial, which takes ``steps`` from ``first_step`` on; ``row`` is the question that it belongs to.

    ``persistence`` is empty in a clean one. By replica: samples ``consumed`` before, and micro-batches ``completed`` in
    each step; empty: all.
    """

    row: str
    first_step: int
    steps: int
    persistence: str
    targets: tuple[Target, ...]
    consumed: tuple[int, ...]
    completed: tuple[int, ...] = ()

    @property
    def uneven(self) -> bool:
        """Whether replicas complete different numbers of micro-batches."""
        return len(set(self.completed)) > 1

    @property
    def mode(self) -> str:
        """The mode: which checks run."""
        return MODES.get(self.row, EVERYTHING)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with a fault."""
        return tuple(sorted(target.rank for target in self.targets))


def weights_of_rows(replicas: int, *, recompute: bool) -> dict[str, int]:
    """Frequency of each row in a layout."""
    if replicas == 1:
        weights = {UNIT: 80, VALUES: 6}
    elif replicas == 2:
        weights = {PAIR: 52, PAIR_GOLDEN: 9, UNIT: 9, SHARED_TOKENS: 3, PARAMETERS: 4}
    else:
        weights = {ALONE: 56, TWO_WRONG: 5, MAJORITY: 2, UNIT: 5, SHARED_TOKENS: 3, PARAMETERS: 4}
        weights |= {MAJORITY_GOLDEN: 3} if replicas == 3 else {}
    weights |= {OTHER: 4, SUM: 3, SHARD: 3, STEPPED: 3, STATE: 3, ROWED: 12}
    return weights | ({RECOMPUTED: 14, OTHER_FORWARD: 2} if recompute else {})


def deal_rows(weights: Mapping[str, int], count: int, draw: random.Random) -> list[str]:
    """Rows of ``count`` cases in random order, each in proportion to its weight, by largest remainders."""
    total = sum(weights.values())
    shares = {row: divmod(weight * count, total) for row, weight in weights.items()}
    left = count - sum(whole for whole, _ in shares.values())
    more = sorted(shares, key=lambda row: -shares[row][1])[:left]
    rows = [row for row, (whole, _) in shares.items() for _ in range(whole + (row in more))]
    draw.shuffle(rows)
    return rows


class Cases:
    """Draws cases for one layout and type, with a generator that is seeded equally on all ranks.

    ``addresses`` are those that each rank computes in any step, by global rank; ``kinds`` are parts of specs, by name;
    ``linear`` are the linear layers of each rank, in order.
    """

    def __init__(
        self,
        addresses: Sequence[Sequence[Address]],
        dims: ParallelDims,
        kinds: Mapping[str, Mapping[str, Any]],
        precision: str,
        draw: random.Random,
        micro_batches: int,
        linear: Sequence[Sequence[str]],
    ) -> None:
        self._addresses, self._linear = addresses, linear
        self._dims = dims
        self._kinds = kinds
        self._precision = precision
        self._draw = draw
        self._micro_batches = micro_batches
        self._recompute = any(one.phase == RECOMPUTE for one in addresses[0])

    def case(self, row: str) -> Case:
        """Draw a case of a row."""
        first = self._draw.choice(FIRST_STEPS)
        consumed = tuple(2 * first + self._draw.randrange(4) for _ in range(self._dims.data))
        if row == ROWED:
            target, persistence = self._product(self._draw.randrange(self._dims.world_size))
            return Case(row, target.address.step, 1, persistence, (target,), consumed)
        if row == CLEAN:
            completed = tuple(self._draw.randint(1, self._micro_batches) for _ in range(self._dims.data))
            return Case(row, first, LONG, "", (), consumed, completed)
        short = row in MODES
        step = first if short else first + 1
        persistence, targets = self._targets(row, step)
        return Case(row, first, 1 if short else LONG, persistence, tuple(targets), consumed)

    def _targets(self, row: str, step: int) -> tuple[str, list[Target]]:
        draw, rank = self._draw, self._draw.randrange(self._dims.world_size)
        if row in (ALONE, PAIR):
            persistence = draw.choice([ONCE, ALWAYS, SOMETIMES])
            return persistence, [self._target(rank, step, 0, self._phases(), persistence)]
        if row in (UNIT, VALUES):
            persistence = draw.choice([ONCE, ALWAYS, SOMETIMES]) if row == UNIT else ALWAYS
            bound_to = "unit" if row == UNIT else "values"
            return persistence, [self._target(rank, step, 0, self._phases(), persistence, bound_to=bound_to)]
        if row == PAIR_GOLDEN:
            return ALWAYS, [self._target(rank, step, 0, self._phases(), ALWAYS)]
        if row == TWO_WRONG:
            persistence = draw.choice([ONCE, ALWAYS])
            ranks = [self._of_replica(one) for one in draw.sample(range(self._dims.data), 2)]
            first = self._target(ranks[0], step, 0, self._phases(), persistence)
            second = first
            while _same_place(first.address, second.address):
                second = self._target(ranks[1], step, 0, self._phases(), persistence)
            return persistence, [first, second]
        if row in (MAJORITY, MAJORITY_GOLDEN):
            return ALWAYS, self._equal(rank, step)
        if row == RECOMPUTED:
            persistence = draw.choice([ONCE, SOMETIMES])
            micro_batch = draw.randrange(self._micro_batches)
            return persistence, [self._target(rank, step, micro_batch, [FORWARD], persistence, recomputed=True)]
        persistence = TWICE if row in SLICED else ONCE
        return persistence, [self._elsewhere(row, rank, step, persistence)]

    def _product(self, rank: int) -> tuple[Target, str]:
        """A fault of a product in the step in which its rows are summed, and its persistence."""
        persistence = self._draw.choice([ONCE, ALWAYS, SOMETIMES])
        products = [(fqn, phase) for fqn in self._linear[rank] for phase in PRODUCTS]
        turn, micro_batch = self._draw.randrange(len(products)), self._draw.randrange(self._micro_batches)
        fqn, phase = products[turn]
        step = self._micro_batches * (turn + len(products)) + micro_batch
        name = self._draw.choice(list(self._kinds))
        address = Address(step, micro_batch, phase, fqn, PRODUCTS[phase])
        spec = self._spec(rank, address, persistence, self._kinds[name])
        return Target(rank, address, address, name, spec), persistence

    def _elsewhere(self, row: str, rank: int, step: int, persistence: str) -> Target:
        """A fault of what no audited micro-batch computes, transient unless it is of what slices show."""
        if row == SHARED_TOKENS:
            ends = [one for one in range(self._dims.world_size) if self._tokens_of(one)]
            return self._tokens(self._draw.choice(ends), step)
        if row == OTHER_FORWARD:
            return self._target(rank, step, 1, [FORWARD], ONCE, recomputed=True)
        if row == OTHER:
            phases = [BACKWARD, WEIGHT_GRAD] if self._recompute else [FORWARD, BACKWARD, WEIGHT_GRAD]
            return replace(self._target(rank, step, 1, phases, ONCE), shows=None)
        if row == PARAMETERS:
            found = self._target(rank, step, None, [PARAMETER], ONCE)
            return replace(found, shows=replace(found.address, step=step + 1))
        phase = {SUM: COLLECTIVE, SHARD: REDUCED_GRAD, STATE: OPTIMIZER_STATE}.get(row, UPDATE)
        return replace(self._target(rank, step, None, [phase], persistence), shows=None)

    def _phases(self) -> list[str]:
        """Phases of a micro-batch in which a fault can be injected, each as likely."""
        return [FORWARD, BACKWARD, WEIGHT_GRAD] + ([RECOMPUTE] if self._recompute else [])

    def _target(
        self,
        rank: int,
        step: int,
        micro_batch: int | None,
        phases: Sequence[str],
        persistence: str,
        *,
        recomputed: bool = False,
        **more: Any,
    ) -> Target:
        phase = self._draw.choice(phases)
        listed = {OPTIMIZER_STATE: UPDATE, COLLECTIVE: WEIGHT_GRAD}.get(phase, phase)
        fitting = [one for one in self._addresses[rank] if one.phase == listed and one.micro_batch in (micro_batch, 0)]
        fitting = fitting or [one for one in self._addresses[rank] if one.phase == listed]
        if recomputed:
            again = {(one.fqn, one.slot) for one in self._addresses[rank] if one.phase == RECOMPUTE}
            fitting = [one for one in fitting if (one.fqn, one.slot) in again]
        chosen = self._draw.choice(fitting)
        kinds = list(self._fitting_kinds(phase))
        if more.get("bound_to") == "unit" and chosen.fqn == "loss":
            kinds.remove("column")  # is all of it, so that none is anywhere else
        name = self._draw.choice(kinds)
        address = Address(step, micro_batch, phase, chosen.fqn, chosen.slot)
        kind = {**self._kinds[name], **more}
        return Target(rank, address, address, name, self._spec(rank, address, persistence, kind))

    def _fitting_kinds(self, phase: str) -> Iterator[str]:
        """BF16_Optimizer computes the norm of each replica by itself: one whose shard alone is not finite skips the
        step while the others wait for it in the all-gather, and the run hangs (DeepSpeed 0.19.8).
        """
        for name, kind in self._kinds.items():
            may_be_huge = kind.get("value") is not None or (
                kind["kind"] in ("bit_flip", "stuck_at_1") and kind.get("bits") not in ("sign", "mantissa")
            )
            if not (phase == REDUCED_GRAD and self._precision == "bf16" and may_be_huge):
                yield name

    def _spec(self, rank: int, address: Address, persistence: str, kind: Mapping[str, Any]) -> FaultSpec:
        """A spec that fires at the address when it comes first; persistent ones in the golden workload too."""
        while True:
            place: dict[str, Any] = {
                "rank": rank,
                "submodule": address.fqn,
                "phase": address.phase,
                "slot": address.slot,
                "steps": [1 if persistence == ALWAYS else address.step, address.step + (persistence == TWICE)],
                "micro_batches": None if address.micro_batch is None else [address.micro_batch],
                "seed": self._draw.randrange(1 << 30),
            }
            spec = FaultSpec(**{**place, **kind, **PERSISTENCE[persistence]})
            draws = Draws(spec, 0, rank)
            if draws.fires(address.step, address.micro_batch, f"{address.fqn} {address.slot}", 0):
                return spec

    def _equal(self, healthy: int, step: int) -> list[Target]:
        """The same wrong value on all replicas but one, at one place."""
        own = ParallelDims(self._dims.tensor, self._dims.pipeline, self._dims.data, healthy)
        others = [healthy + (replica - own.dp_rank) * self._dims.tensor for replica in range(self._dims.data)]
        model = self._target(healthy, step, 0, self._phases(), ALWAYS)
        kind = {"kind": "bit_flip", "pattern": "indices", "indices": [self._draw.randrange(16)]}
        kind["bits"] = [self._draw.randrange(8, 14)]
        return [
            Target(rank, model.address, model.address, "equal bit", self._spec(rank, model.address, ALWAYS, kind))
            for rank in others
            if rank != healthy
        ]

    def _tokens_of(self, rank: int) -> list[str]:
        place = ParallelDims(self._dims.tensor, self._dims.pipeline, self._dims.data, rank)
        return (["tokens"] if place.is_first_stage else []) + (["labels"] if place.is_last_stage else [])

    def _tokens(self, rank: int, step: int) -> Target:
        address = Address(step, 0, TOKENS, TOKENS, self._draw.choice(self._tokens_of(rank)))
        kind = {"kind": "bit_flip", "bits": [self._draw.randrange(7)], "submodule": "*"}
        return Target(rank, address, None, "one bit of an id", self._spec(rank, address, ONCE, kind))

    def _of_replica(self, replica: int) -> int:
        """A random rank of a replica."""
        ranks = range(self._dims.world_size)
        return self._draw.choice([rank for rank in ranks if rank // self._dims.tensor % self._dims.data == replica])


def _same_place(first: Address, second: Address) -> bool:
    return (first.phase, first.fqn, first.slot) == (second.phase, second.fqn, second.slot)
