"""Comparison of two sets of traces: the first divergence and its rank.

The first divergence is by execution order over all ranks. Results are recorded before collectives mix ranks, so the
rank that comes first in this order computed a different value, and others received it. Not so from ``reduced_grad``
on with several replicas, whose results come after a sum over them; ``megasdc.sdc.golden_compare`` decides who can be
named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megasdc.common.addresses import (
    ACCUMULATED_GRAD,
    FORWARD,
    MICRO_BATCH_PHASES,
    PARAMETER,
    REDUCED_GRAD,
    UPDATE,
    Address,
)
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace

_STEP_PHASES = {ACCUMULATED_GRAD: 1, REDUCED_GRAD: 2, UPDATE: 3, PARAMETER: 4}


@dataclass(frozen=True)
class Divergence:
    """One result that differs from the expected one.

    Args:
        place: how many results the rank recorded before it.
        expected: expected checksum; None where no result was expected.
        got: computed checksum; None where there is none.
        against: rank that computed the expected value, where the layouts differ; None: the same rank.
    """

    rank: int
    address: Address
    place: int
    expected: int | None
    got: int | None
    against: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Result of comparing several ranks' traces.

    Args:
        compared: results that were compared, over all ranks.
        divergences: in execution order over all ranks.
        first: the earliest of ``divergences``; of several ranks only where several were wrong at the same place.
    """

    compared: int
    divergences: tuple[Divergence, ...]
    first: tuple[Divergence, ...]

    @property
    def counts(self) -> dict[int, int]:
        """Number of divergences by rank; ranks without any are absent."""
        counts: dict[int, int] = {}
        for divergence in self.divergences:
            counts[divergence.rank] = counts.get(divergence.rank, 0) + 1
        return counts


def execution_key(address: Address, place: int, dims: ParallelDims) -> tuple[int, ...]:
    """Sort key of a result in the order in which one replica computes a step.

    A micro-batch runs forward through the stages and backward through them in reverse; micro-batches do not influence
    each other before gradients are reduced. Ranks of one stage run the same program, so the number of earlier results
    orders them too.

    Args:
        place: how many results its rank recorded before it.
    """
    if address.phase not in MICRO_BATCH_PHASES:
        return address.step, _STEP_PHASES[address.phase], 0, 0, 0, place
    assert address.micro_batch is not None, "every result of these phases belongs to a micro-batch"
    forward = address.phase == FORWARD
    stage = dims.pp_rank if forward else dims.pipeline - 1 - dims.pp_rank
    return address.step, 0, address.micro_batch, int(not forward), stage, place


def compare_traces(expected: Mapping[int, Trace], got: Mapping[int, Trace], layout: ParallelDims) -> Comparison:
    """Compare every rank's trace with the expected one.

    Args:
        expected: trace by global rank.
        got: trace by global rank; of the same layout.

    Raises:
        ValueError: the ranks are not the same.
    """
    if set(expected) != set(got):
        raise ValueError(f"traces of ranks {sorted(got)} are compared with those of ranks {sorted(expected)}")
    compared = 0
    found: list[Divergence] = []
    for rank in sorted(expected):
        found += compare_rank(rank, expected[rank], got[rank])
        compared += max(len(expected[rank]), len(got[rank]))
    return in_execution_order(compared, found, layout)


def in_execution_order(compared: int, found: Iterable[Divergence], layout: ParallelDims) -> Comparison:
    """Sort divergences of several ranks of one layout by execution order; ``compared`` is passed on."""
    places = {}
    keyed = []
    for one in found:
        if one.rank not in places:
            places[one.rank] = ParallelDims(layout.tensor, layout.pipeline, layout.data, one.rank)
        keyed.append((execution_key(one.address, one.place, places[one.rank]), one))
    keyed.sort(key=lambda pair: (pair[0], pair[1].rank))
    first = tuple(one for key, one in keyed if key == keyed[0][0])
    return Comparison(compared, tuple(one for _, one in keyed), first)


def compare_rank(rank: int, expected: Trace, got: Trace) -> list[Divergence]:
    """Every difference between two traces of one rank: in the order of ``got``, then what ``got`` lacks."""
    if expected.addresses == got.addresses:
        pairs = enumerate(zip(got.addresses, expected.checksums, got.checksums, strict=True))
        return [Divergence(rank, address, place, a, b) for place, (address, a, b) in pairs if a != b]
    wanted = {address: (place, value) for place, (address, value) in enumerate(_pairs(expected))}
    found = []
    for place, (address, value) in enumerate(_pairs(got)):
        known = wanted.pop(address, None)
        if known is None or known[1] != value:
            found.append(Divergence(rank, address, place, None if known is None else known[1], value))
    return found + [Divergence(rank, address, place, value, None) for address, (place, value) in wanted.items()]


def _pairs(trace: Trace) -> list[tuple[Address, int]]:
    return list(zip(trace.addresses, trace.checksums, strict=True))
