"""How many results of each rank differ from what is taken for right?"""

from __future__ import annotations

import pytest

from megasdc.common.addresses import FORWARD, Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace, count_differing


def traces(*values: int) -> dict[int, Trace]:
    """One result of each replica."""
    return {rank: Trace([Address(3, 0, FORWARD, "x", "output")], [value]) for rank, value in enumerate(values)}


@pytest.mark.parametrize(
    ("values", "wrong", "differing"),
    [
        ((1, 1, 1), (), {}),
        ((1, 2, 1), (), {1}),
        ((1, 2, 1), (1,), {1}),
        ((1, 2, 1), (0, 2), {0, 2}),
        ((1, 2), (), {0, 1}),
        ((1, 2), (0,), {0}),
        ((1, 2), (0, 1), {0, 1}),
        ((1, 2, 3, 3), (2, 3), {0, 1, 2, 3}),
        ((1, 1, 1), (0, 1, 2), {}),
    ],
)
def test_differing_results_are_those_of_the_ranks_that_are_named(
    values: tuple[int, ...], wrong: tuple[int, ...], differing: set[int]
) -> None:
    """Ranks that were named have no say in what is right; where as many have one value as another, all differ."""
    compared, found = count_differing(traces(*values), ParallelDims(1, 1, len(values)), wrong)
    assert compared == len(values)
    assert found == ({FORWARD: {"x": dict.fromkeys(sorted(differing), 1)}} if differing else {})


def test_a_named_rank_stands_for_its_replica() -> None:
    """What its tensor peer and the other stage received from it does not count as right either."""
    layout = ParallelDims(2, 2, 2)  # ranks 0, 1, 4, 5 are replica 0
    values = {rank: 9 if rank in (0, 1, 4, 5) else 7 for rank in range(8)}
    found = count_differing({rank: traces(value)[0] for rank, value in values.items()}, layout, [5])[1]
    assert found == {FORWARD: {"x": {0: 1, 1: 1, 4: 1, 5: 1}}}
