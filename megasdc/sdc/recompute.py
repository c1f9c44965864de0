"""Comparison of forward results with those of the activation recompute, address by address.

It is exact, and the rank is certain, because it is compared with itself. A fault that repeats identically in the
recomputation is not detected, nor is one in the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megasdc.common.addresses import FORWARD, RECOMPUTE, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import INCONCLUSIVE, INTERMITTENT, NOT_REPRODUCED, PERSISTENT, RankVerdict, rate_bound

OWN_RECOMPUTATION = "own recomputation"
"""Basis of this check's rulings."""


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
    """Result of comparing a trace's forward results with their recomputation; differences in forward order.

    Args:
        compared: results that were computed twice.
        alone: forward results without a recomputation.
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
    """Ranks with a difference that is not the consequence of another rank's.

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
    """Forward and recomputed results, both by the address of the forward result."""
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
        found: where it first differed from itself.
        again: checksums of the forward result and of its recomputation in each repeat; None: none.
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
