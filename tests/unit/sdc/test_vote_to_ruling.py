"""From a fault to its ruling: simulated audits and repeats, through the vote and the replay."""

from __future__ import annotations

import random

import pytest

from megasdc.common.addresses import Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import Trace, execution_key
from megasdc.sdc.verdict import (
    GOLDEN,
    INCONCLUSIVE,
    INTERMITTENT,
    MAJORITY,
    NOT_REPRODUCED,
    PERSISTENT,
    REPLAY,
    repeated_value,
    settle,
    to_repeat,
)
from megasdc.sdc.vote import vote

PHASES = ["forward"] * 4 + ["recompute"] * 2 + ["backward", "weight_grad"] * 2
REPEATS = 5
WRONG_IN = {
    PERSISTENT: [True] * REPEATS,
    INTERMITTENT: [False, True, False, False, True],
    NOT_REPRODUCED: [False] * REPEATS,
}
LAYOUTS = [ParallelDims(*sizes) for sizes in [(1, 1, 2), (1, 2, 2), (2, 2, 2), (1, 1, 3), (2, 1, 3), (2, 2, 4)]]


def compute(layout: ParallelDims, fault: tuple[int, int] | None) -> dict[int, Trace]:
    """Traces of one computation of a micro-batch: every value is a hash of all that its replica computed before.

    A fault changes one rank's value at one place, and so what follows from it, the same each time.
    """
    traces = {}
    for replica in range(layout.data):
        order = []
        for rank in range(layout.world_size):
            dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)
            if dims.dp_rank == replica:
                addresses = [Address(9, 0, name, f"{dims.pp_rank}.x{i}", "output") for i, name in enumerate(PHASES)]
                traces[rank] = Trace(addresses, [0] * len(PHASES))
                order += [(execution_key(one, i, dims), rank, i) for i, one in enumerate(addresses)]
        state = before = 1
        last: tuple[int, ...] = ()
        for key, rank, place in sorted(order):
            before = state if key > last else before  # tensor ranks at one place do not see each other
            dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)
            value = hash((before, key, dims.tp_rank, (rank, place) == fault)) % 2**64
            traces[rank].checksums[place] = value
            state, last = hash((state, value)), key
    return traces


def ruled(layout: ParallelDims, fault: tuple[int, int], kind: str, golden: dict[int, bool] | None = None):
    """Audit with a fault, repeat with the fault as its kind says, and settle."""
    audit = compute(layout, fault)
    ballot = vote(audit, layout)
    repeats = [compute(layout, fault if wrong else None) for wrong in WRONG_IN[kind]]
    values = {spot: [repeated_value(*spot, audit, repeat, layout) for repeat in repeats] for spot in to_repeat(ballot)}
    rulings = settle(ballot, values, golden)
    assert all(one.address == audit[fault[0]].addresses[fault[1]] for one in rulings)
    return [(one.rank, one.verdict, one.basis) for one in rulings]


@pytest.mark.parametrize("kind", WRONG_IN)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_fault_is_ruled_as_what_it_is(layout: ParallelDims, kind: str) -> None:
    """With three replicas rank, place and kind are exact; with two a golden trace must name what does not vary."""
    draws = random.Random(1)
    for _ in range(25):
        fault = draws.randrange(layout.world_size), draws.randrange(len(PHASES))
        found = ruled(layout, fault, kind)
        if layout.data > 2:
            assert found == [(fault[0], kind, MAJORITY)]
        elif kind != PERSISTENT:
            assert found == [(fault[0], kind, REPLAY)]
        else:
            assert found == [(None, INCONCLUSIVE, REPLAY)]
            golden = {rank: rank != fault[0] for rank in range(layout.world_size)}
            assert ruled(layout, fault, kind, golden) == [(fault[0], PERSISTENT, GOLDEN)]
