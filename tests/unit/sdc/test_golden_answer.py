"""What follows from a golden workload that a run computes: who is named, of which kind, and nobody without proof."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megasdc.common.addresses import BACKWARD, FORWARD, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden import GoldenAnswer, compare_run, judge_replicas
from megasdc.sdc.trace import Trace
from megasdc.sdc.verdict import GOLDEN, INCONCLUSIVE, INTERMITTENT, NOT_REPRODUCED, PERSISTENT, rate_bound

STEP = 7
RIGHT = (1, 2, 3)


def trace(values: Sequence[int]) -> Trace:
    """Two forward results and a backward one."""
    phases = [(FORWARD, "a"), (FORWARD, "b"), (BACKWARD, "b")]
    return Trace([Address(1, 0, phase, fqn, "output") for phase, fqn in phases], list(values))


def answer(layout: ParallelDims, *runs: Sequence[Sequence[int]], gaps: Sequence[str] = ()) -> GoldenAnswer:
    """What all ranks know after runs of one case, given by rank."""
    found = [
        [
            compare_run(trace(RIGHT), trace(values), ParallelDims(layout.tensor, layout.pipeline, layout.data, rank))
            for values in of_rank
        ]
        for rank, of_rank in enumerate(zip(*runs, strict=True))
    ]
    judged = [judge_replicas([one[number].finding for one in found], layout, gaps) for number in range(len(runs))]
    return GoldenAnswer(found, 1, judged, 0.0)


def test_ranks_that_agree_are_verified() -> None:
    """Nothing follows, and every result of every rank was compared."""
    found = answer(ParallelDims(1, 1, 2), [RIGHT, RIGHT])
    assert found.rulings(STEP) == () and found.verified == {0: True, 1: True} and found.compared == 6
    assert found.counts == {}


A, B = (1, 9, 9), (1, 8, 8)


@pytest.mark.parametrize(
    ("again", "earlier", "verdict", "wrong"),
    [
        ([A, A], [], PERSISTENT, 2),
        ([RIGHT, RIGHT], [], NOT_REPRODUCED, 0),
        ([RIGHT, RIGHT], [1], INTERMITTENT, 0),
        ([RIGHT, RIGHT], [0], NOT_REPRODUCED, 0),
        ([A, RIGHT], [], INTERMITTENT, 1),
        ([A, B], [], INTERMITTENT, 2),
        ([], [], INCONCLUSIVE, 0),
    ],
)
def test_repeats_give_the_verdict(again: list[tuple[int, ...]], earlier: list[int], verdict: str, wrong: int) -> None:
    """The same wrong value each time, never again, anything between; with the checksums of where it began."""
    found = answer(ParallelDims(1, 1, 2), [RIGHT, A], *([RIGHT, one] for one in again))
    (ruling,) = found.rulings(STEP, earlier)
    assert (ruling.rank, ruling.verdict, ruling.basis, ruling.wrong) == (1, verdict, GOLDEN, wrong)
    assert ruling.address == Address(STEP, 0, FORWARD, "b", "output"), "of the step of the run"
    assert (ruling.expected, dict(ruling.got), ruling.repeats) == (2, {1: 9}, len(again))
    assert ruling.rate_bound == (rate_bound(2) if verdict == NOT_REPRODUCED else None)
    assert found.verified == {0: True, 1: False}
    assert found.counts[BACKWARD]["b"] == {1: found.counts[FORWARD]["b"][1]}


def test_a_rank_that_is_wrong_in_a_repeat_alone_is_intermittent() -> None:
    """It was right in the first run, which another rank had repeated."""
    found = answer(ParallelDims(1, 1, 2), [RIGHT, A], [A, A])
    assert {one.rank: one.verdict for one in found.rulings(STEP)} == {0: INTERMITTENT, 1: PERSISTENT}


def test_a_fault_common_to_all_replicas_names_them_all() -> None:
    """Replicas exchange nothing before gradients are reduced: each is judged for itself."""
    found = answer(ParallelDims(1, 1, 3), [A, A, A], [A, A, A])
    assert [(one.rank, one.verdict) for one in found.rulings(STEP)] == [(rank, PERSISTENT) for rank in range(3)]


def test_who_received_a_wrong_value_is_not_named() -> None:
    """Of a tensor group the first in execution order is, and its peer neither verified nor accused."""
    layout = ParallelDims(2, 1, 2)
    found = answer(layout, [(1, 2, 9), (1, 9, 9), RIGHT, RIGHT], [(1, 2, 9), (1, 9, 9), RIGHT, RIGHT])
    assert [one.rank for one in found.rulings(STEP)] == [1]
    assert found.verified == {1: False, 2: True, 3: True}


def test_a_trace_with_gaps_names_nobody_of_several() -> None:
    """What a rank received may be what the trace leaves out; a replica of one rank receives nothing."""
    layout = ParallelDims(2, 1, 2)
    (ruling,) = answer(layout, [RIGHT, A, RIGHT, RIGHT], gaps=["granularity layer"]).rulings(STEP)
    assert (ruling.rank, ruling.verdict, ruling.suspects, ruling.basis) == (None, INCONCLUSIVE, (1,), GOLDEN)
    alone = answer(ParallelDims(1, 1, 2), [RIGHT, A], gaps=["granularity layer"])
    assert [one.rank for one in alone.rulings(STEP)] == [1]
