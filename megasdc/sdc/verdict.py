"""Verdicts on ranks, from repeats: on the flags and disputes of a ballot, and on ranks that differ from themselves.

All replicas recompute the audited micro-batch n times; what counts is the checksum at the place where they differed,
in those repeats in which everything before it was as in the audit (``repeated_value``).

What is proved, and how:

- A flagged rank differs from a strict majority of replicas. That majority must stand: a rank that itself gives another
  value in a repeat, or fails the golden trace, no longer counts. If too few are left, nothing was proved by the
  majority, and the flag is treated as a dispute.
- Of two that differ, one is wrong, and no vote tells which. But in deterministic mode a healthy rank gives the same
  value for the same inputs each time. So a rank whose repeats differ from its own result was wrong at least once -
  provided that the computation does repeat, for which another rank that gave its own value in *all* repeats is the
  witness. With such a witness, a rank that varies is named. If all vary there is none: the cause may be common to all,
  such as a kernel that is not deterministic, and nobody is named. If each repeats its own value, at least one is
  persistently wrong, and only a golden trace can tell which.
- A rank that fails the golden trace is wrong without any vote.
- So is a rank whose result lies outside of what rounding explains, as the referee computes it in fp64 from the factors
  that all of them had, while another one's lies inside (``megasdc.sdc.referee.referee``); also one of the majority.
- Where the referee does not know what a submodule computes it takes its own code in fp64, and what rounding makes of
  that is estimated: such a ruling has a basis of its own (``OWN_CODE``).
- A flagged rank that passes the golden trace and gives its own value again contradicts the majority: either its fault
  does not show in the golden workload, or the majority has a fault in common that does not. That is treated as a
  dispute too, in which nobody is named.

A dispute that may follow from results that were not compared proves nothing about the ranks where it appeared; only
a golden trace can name one then.

Forward results are compared with those of the activation recompute too, address by address. That is exact, and the rank
is certain, because it is compared with itself. A fault that repeats identically in the recomputation is not detected,
nor is one in the backward pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megasdc.common.addresses import FORWARD, RECOMPUTE, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace, execution_key
from megasdc.sdc.vote import Ballot, Flag

PERSISTENT, INTERMITTENT, NOT_REPRODUCED, INCONCLUSIVE = "persistent", "intermittent", "not_reproduced", "inconclusive"
"""Verdicts, named as in `sdc.policy`."""
MAJORITY, GOLDEN, REPLAY, REFEREE = "relative to the majority", "golden trace", "replay", "referee"
OWN_CODE = "own code in fp64"
"""Basis of rulings where a submodule's own code in fp64 tells which of its results is wrong."""
ROUNDS = "rounds of all replicas"
"""Basis of the finding that a replica of Local-SGD is left out of a round."""
ELSEWHERE, FILE, FOLLOWS = "own results elsewhere", "file of the data", "step and decisions"
"""Bases of rulings: the rank's results with elements in other places on the same device, the data file, and the step
and the decisions from which a place in the data follows."""


@dataclass(frozen=True)
class RankVerdict:
    """The verdict on one rank, or on several of which none can be named.

    Args:
        rank: the wrong rank; None: none can be named.
        verdict: persistent: all repeats gave the same wrong value; intermittent: wrong again but not always or not
            equally, or a second time after an earlier event; not_reproduced: right in all repeats; inconclusive: the
            repeats do not decide, or no rank can be named.
        basis: evidence for the rank; one of the module's bases.
        address: address of its first wrong result, or where ranks first differ; None: only evidence is missing.
        wrong: number of repeats in which it was wrong.
        repeats: number of repeats that count.
        rate_bound: if not reproduced: rates of errors per repeat above this one would have shown one with probability
            0.95 or more.
        suspects: if no rank is named: ranks that may be wrong.
        expected: the right checksum at the address; None: not known.
        got: checksums at the address, of the named rank or of the suspects, by rank; absent: not known.
    """

    rank: int | None
    verdict: str
    basis: str
    address: Address | None
    wrong: int = 0
    repeats: int = 0
    rate_bound: float | None = None
    suspects: tuple[int, ...] = ()
    expected: int | None = None
    got: Mapping[int, int] = field(default_factory=dict)


def rate_bound(repeats: int) -> float:
    """Upper end of the exact one-sided 95 % confidence interval of a rate after ``repeats`` repeats without an error.

    Source: Clopper and Pearson 1934; with no error in n it is the rate p where (1 - p)^n = 0.05.
    """
    return float(1 - 0.05 ** (1 / repeats))


def repeated_value(
    rank: int, place: int, audit: Mapping[int, Trace | None], repeat: Mapping[int, Trace | None], layout: ParallelDims
) -> int | None:
    """The checksum that a rank computed at a place in one repeat, if its inputs were those of the audit.

    Args:
        place: number of the result in the rank's trace, from 0.
        audit: traces of the audited micro-batch by global rank; at least of this rank's replica.
        repeat: traces of one repeat, likewise.

    Returns:
        The checksum; None where the rank has no result there, or where an earlier result of its replica differed from
        the audit, since another value would then prove nothing about this rank.
    """
    original, again = audit.get(rank), repeat.get(rank)
    if original is None or again is None or place >= len(again) or original.addresses[place] != again.addresses[place]:
        return None
    dims = _dims(layout, rank)
    key = execution_key(original.addresses[place], place, dims)
    for other in range(layout.world_size):
        if _dims(layout, other).dp_rank == dims.dp_rank and not _same_before(
            key, _dims(layout, other), audit.get(other), repeat.get(other)
        ):
            return None
    return again.checksums[place]


def _dims(layout: ParallelDims, rank: int) -> ParallelDims:
    return ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)


def _same_before(key: tuple[int, ...], dims: ParallelDims, audit: Trace | None, repeat: Trace | None) -> bool:
    """Whether two traces of a rank are equal in all that comes before a key in execution order."""
    if execution_key(Address(key[0], key[2], FORWARD, "", ""), 0, dims) >= key:
        return True  # everything this rank computes comes later
    if audit is None or repeat is None:
        return False
    addresses = audit.addresses
    end = bisect_left(range(len(audit)), key, key=lambda place: execution_key(addresses[place], place, dims))
    return addresses[:end] == repeat.addresses[:end] and audit.checksums[:end] == repeat.checksums[:end]


def to_repeat(ballot: Ballot) -> tuple[tuple[int, int], ...]:
    """Results whose repeats ``settle`` needs: (global rank, place in its trace)."""
    spots = {(rank, flag.place) for flag in ballot.flagged for rank in (flag.rank, *flag.against)}
    if ballot.dispute is not None:
        spots |= {(rank, ballot.dispute.place) for rank in ballot.dispute.ranks}
    return tuple(sorted(spots))


def find_differences(ballot: Ballot) -> list[tuple[Address, int, Mapping[int, int]]]:
    """Results that differ between ranks with equal inputs: address, place in the trace, and checksums by rank."""
    found: list[tuple[Address, int, Mapping[int, int]]] = [
        (flag.address, flag.place, {flag.rank: flag.got} | dict.fromkeys(flag.against, flag.expected))
        for flag in ballot.flagged
    ]
    if (dispute := ballot.dispute) is not None and dispute.origin:
        found += [(dispute.address, dispute.place, values) for values in dispute.values]
    return found


def settle(
    ballot: Ballot,
    repeats: Mapping[tuple[int, int], Sequence[int | None]],
    golden: Mapping[int, bool] | None = None,
    earlier: Collection[int] = (),
    refereed: Mapping[tuple[int, int], bool] | None = None,
    bases: Mapping[int, str] | None = None,
) -> tuple[RankVerdict, ...]:
    """Rulings on every flag and dispute of a ballot.

    Args:
        repeats: checksum in each repeat, by (global rank, place), for all of ``to_repeat``; None or absent: no
            evidence, as from a rank that died, which counts neither as right nor as wrong.
        golden: whether a rank reproduces the golden trace, by global rank; absent: not verified. Do not pass False for
            a rank that only received another rank's wrong values.
        earlier: ranks that were wrong in an earlier event of the run.
        refereed: whether rounding allows a result, by (global rank, place); absent: undecided. Of the results at a
            place some are True if any is False.
        bases: bases of the referee's rulings, by place; absent: ``REFEREE``.

    Returns:
        One ruling for each named rank, and one without a rank for each position where none can be named and for missing
        evidence; empty if and only if the ballot agreed.
    """

    def case(place: int) -> _Case:
        by_rank = {rank: values for (rank, at), values in repeats.items() if at == place}
        judged = {rank: within for (rank, at), within in (refereed or {}).items() if at == place}
        return _Case(by_rank, golden or {}, frozenset(earlier), judged, (bases or {}).get(place, REFEREE))

    rulings: list[RankVerdict] = []
    for flag in ballot.flagged:
        rulings += case(flag.place).of_flag(flag)
    if (dispute := ballot.dispute) is not None:
        for values in dispute.values:
            rulings += case(dispute.place).of_values(dispute.address, values, dispute.origin)
    if ballot.missing or not ballot.compared:
        rulings.append(RankVerdict(None, INCONCLUSIVE, REPLAY, None, suspects=ballot.missing))
    first: dict[int | tuple[int, ...], RankVerdict] = {}
    for ruling in rulings:
        first.setdefault(ruling.suspects if ruling.rank is None else ruling.rank, ruling)
    return tuple(first.values())


@dataclass(frozen=True)
class _Case:
    """Evidence on all ranks at one place, and the rulings that follow for one position."""

    repeats: Mapping[int, Sequence[int | None]]
    golden: Mapping[int, bool]
    earlier: frozenset[int]
    refereed: Mapping[int, bool] = field(default_factory=dict)
    opinion: str = REFEREE

    def of_flag(self, flag: Flag) -> list[RankVerdict]:
        """Rulings on a flagged rank, and on ranks of its majority that were wrong themselves.

        If the majority falls or the golden trace contradicts it, the flag is ruled on as a dispute.
        """
        values = {flag.rank: flag.got} | dict.fromkeys(flag.against, flag.expected)
        standing = [rank for rank in flag.against if not self.is_proved(rank) and not self.varied(rank, values)]
        contradicted = self.golden.get(flag.rank) and not self.varied(flag.rank, values)
        if 2 * len(standing) <= len(values) or contradicted:
            return self.of_values(flag.address, values, origin=True)
        fallen = [rank for rank in flag.against if rank not in standing]
        rulings = [self.rule(flag.rank, flag.address, flag.got, flag.expected, self.basis(flag.rank, MAJORITY))]
        for rank in fallen:
            rulings.append(self.rule(rank, flag.address, flag.expected, flag.expected, self.basis(rank, REPLAY)))
        return rulings

    def is_proved(self, rank: int) -> bool:
        """Whether a rank is wrong without any vote: by the golden trace or the referee."""
        return self.golden.get(rank) is False or self.refereed.get(rank) is False

    def basis(self, rank: int, other: str) -> str:
        """Basis of the strongest evidence that a rank is wrong; ``other``: the basis where it is not proved."""
        if self.golden.get(rank) is False:
            return GOLDEN
        return self.opinion if self.refereed.get(rank) is False else other

    def of_values(self, address: Address, values: Mapping[int, int], origin: bool) -> list[RankVerdict]:
        """Rulings on ranks that differ without a majority: by the golden trace, by the referee, then by the repeats."""
        failed = [rank for rank in values if self.is_proved(rank)]
        rest = {rank: value for rank, value in values.items() if rank not in failed}
        verified = {value for rank, value in rest.items() if self.golden.get(rank) or self.refereed.get(rank)}
        right = verified.pop() if len(verified) == 1 and len(set(rest.values())) == 1 else None
        rulings = [self.rule(rank, address, values[rank], right, self.basis(rank, REPLAY)) for rank in failed]
        if len(set(rest.values())) < 2:
            return rulings
        return rulings + self.by_replay(address, rest, origin)

    def by_replay(self, address: Address, values: Mapping[int, int], origin: bool) -> list[RankVerdict]:
        """Rulings by the repeats alone: ranks that vary while others do not are named."""
        witnesses = {value for rank, value in values.items() if self.repeated(rank, values)}
        varied = [rank for rank in values if self.varied(rank, values)] if witnesses and origin else []
        rest = {rank: value for rank, value in values.items() if rank not in varied}
        right = next(iter(witnesses)) if len(set(rest.values())) == 1 else None
        rulings = [self.rule(rank, address, values[rank], right, REPLAY) for rank in varied]
        if len(set(rest.values())) > 1 or not rulings:
            rulings.append(RankVerdict(None, INCONCLUSIVE, REPLAY, address, suspects=tuple(rest), got=rest))
        return rulings

    def varied(self, rank: int, values: Mapping[int, int]) -> bool:
        """Whether a rank gave another value than in the audit in any repeat."""
        return any(value not in (None, values[rank]) for value in self.repeats.get(rank, ()))

    def repeated(self, rank: int, values: Mapping[int, int]) -> bool:
        """Whether a rank gave the value of the audit in every repeat."""
        found = self.repeats.get(rank, ())
        return bool(found) and all(value == values[rank] for value in found)

    def rule(self, rank: int, address: Address, original: int, right: int | None, basis: str) -> RankVerdict:
        """Ruling on a wrong rank; ``original``: its value in the audit; ``right``: the right value, None: not known."""
        found = self.repeats.get(rank, ())
        known = [value for value in found if value is not None]
        complete = bool(found) and len(known) == len(found)
        varies = len({original, *known}) > 1
        wrong = sum(value != right if right is not None else value == original for value in known)
        bound = None
        if original == right or (varies and (right is None or wrong)):
            verdict = INTERMITTENT  # right here but wrong elsewhere, or two different values
        elif right is not None and known and not wrong and rank in self.earlier:
            verdict = INTERMITTENT
        elif not complete:
            verdict = INCONCLUSIVE
        elif varies:
            verdict, bound = NOT_REPRODUCED, rate_bound(len(found))
        else:
            verdict = PERSISTENT
        got = {rank: original}
        return RankVerdict(rank, verdict, basis, address, wrong, len(known), bound, expected=right, got=got)


OWN_RECOMPUTATION = "own recomputation"
"""Basis of rulings on ranks that differ from their own recomputation."""


@dataclass(frozen=True)
class Unrepeated:
    """A forward result, and its recomputation with another checksum.

    ``place`` is the number of forward results that the rank recorded before it.
    """

    address: Address
    forward: int
    recompute: int
    place: int = 0


@dataclass(frozen=True)
class Repeats:
    """Comparison of a trace's forward results with their recomputation.

    Args:
        compared: number of results that were computed twice.
        alone: number of forward results without a recomputation.
        unrepeated: results that differ, in forward order.
    """

    compared: int
    alone: int
    unrepeated: tuple[Unrepeated, ...]


def compare_recomputed(trace: Trace) -> Repeats:
    """Compare every forward result of one rank's trace with its recomputation; other phases are ignored."""
    forward, again = _both(trace)
    both = [(place, address) for place, address in enumerate(forward) if address in again]
    found = [Unrepeated(one, forward[one], again[one], place) for place, one in both if forward[one] != again[one]]
    return Repeats(len(both), len(forward) - len(both), tuple(found))


def origins(found: Mapping[int, Unrepeated], layout: ParallelDims) -> dict[int, Unrepeated]:
    """First differences, by global rank, that are not the consequence of another rank's.

    Ranks of a tensor group receive each other's results in the forward pass, and the right ones when it is recomputed.
    So of those that differ in the same micro-batch only the first is known to be wrong; all of them if they begin at
    the same place. Stages and replicas receive nothing twice.

    Args:
        found: first difference of each rank that differs, by global rank.
    """
    first: dict[tuple[int, int | None], int] = {}
    for rank, one in found.items():
        group = rank // layout.tensor, one.address.micro_batch
        first[group] = min(one.place, first.get(group, one.place))
    return {
        rank: one for rank, one in found.items() if one.place == first[rank // layout.tensor, one.address.micro_batch]
    }


def pair_at(trace: Trace, address: Address) -> tuple[int, int] | None:
    """Checksums of a forward result and of its recomputation; None if it was not computed twice."""
    forward, again = _both(trace)
    return (forward[address], again[address]) if address in forward and address in again else None


def _both(trace: Trace) -> tuple[dict[Address, int], dict[Address, int]]:
    """Checksums of forward and of recomputed results, both by the address of the forward result."""
    pairs = list(zip(trace.addresses, trace.checksums, strict=True))
    forward = {address: value for address, value in pairs if address.phase == FORWARD}
    again = {replace(address, phase=FORWARD): value for address, value in pairs if address.phase == RECOMPUTE}
    return forward, again


def judge_recomputed(
    rank: int, found: Unrepeated, again: Sequence[tuple[int, int] | None], earlier: bool
) -> RankVerdict:
    """The ruling on a rank that differs from its own recomputation, from repeats of the micro-batch.

    Not reproduced: in all repeats, every forward result and every recomputation is equal, and equal to one of the two
    values that differed. Persistent: all repeats show the same two values.

    Args:
        found: the first result at which the rank differed from itself.
        again: checksums of the forward result and of its recomputation in each repeat; None: no such result.
        earlier: whether the rank was wrong in an earlier event of the run.
    """
    known = [pair for pair in again if pair is not None]
    first = (found.forward, found.recompute)
    values = {value for pair in known for value in pair}
    wrong = sum(pair[0] != pair[1] for pair in known)
    bound = None
    if len(known) < len(again) or not known:
        verdict = INCONCLUSIVE
    elif all(pair == first for pair in known):
        verdict = PERSISTENT
    elif len(values) == 1 and values <= set(first) and not earlier:
        verdict, bound = NOT_REPRODUCED, rate_bound(len(known))
    else:
        verdict = INTERMITTENT
    expected, got = found.recompute, {rank: found.forward}
    return RankVerdict(
        rank, verdict, OWN_RECOMPUTATION, found.address, wrong, len(known), bound, expected=expected, got=got
    )
