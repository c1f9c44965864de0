"""Which slice is due, and which differences of updates are ruled on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasdc.parallel.dims import ParallelDims
from megasdc.sdc import slices
from megasdc.sdc.slice_checks import UpdateMismatch, comparable
from megasdc.sdc.slices import MISSES, Slices, Turn


def test_a_slice_that_is_always_missed_holds_up_no_other() -> None:
    """It is due again, and told when it is given up; steps that were skipped do not count."""
    turn = Turn(7)
    assert not any(turn.end(missed=True, skipped=True) for _ in range(9)) and turn.number == 7
    told = [turn.end(missed=True, skipped=False) for _ in range(MISSES)]
    assert told == [False] * (MISSES - 1) + [True] and turn.number == 8
    assert not turn.end(missed=True, skipped=False) and turn.number == 8
    assert not turn.end(missed=False, skipped=False) and (turn.number, turn.misses) == (9, 0)


def test_settings_that_differ_hide_no_wrong_update_of_other_ranks() -> None:
    """Only updates are not compared whose owner and checker used different settings, wherever the ranks are."""
    claims = {(rank + 1) % 4: UpdateMismatch(rank, 0, torch.tensor([3]), 1, 2, same_inputs=True) for rank in range(4)}
    used = [7, 7, 5, 7]
    assert [rank for rank, one in claims.items() if comparable(one, rank, used) is None] == [2, 3]
    assert all(comparable(one, rank, ()) is one for rank, one in claims.items())
    assert comparable(None, 2, used) is None


@pytest.mark.parametrize("sizes", [(2, 2, 3), (1, 2, 2), (3, 1, 2), (1, 1, 4)])
def test_slices_are_those_of_the_ranks_with_the_same_parameters(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]
) -> None:
    """Of the same stage and tensor rank, in the order of replicas; a shard with fewer slices has none that is due."""
    every = [ParallelDims(*sizes, rank) for rank in range(sizes[0] * sizes[1] * sizes[2])]
    own = [[f"{dims.rank}.{number}" for number in range(1 + (dims.dp_rank == 0))] for dims in every]
    monkeypatch.setattr(slices, "gather_objects", lambda value, group: own)
    monkeypatch.setattr(slices, "_cut", lambda optimizer, most: iter(()))
    for dims in every:
        engine: Any = SimpleNamespace(optimizer=None, dims=dims)
        found = Slices(engine, 9, None)
        alike = [one for one in every if (one.pp_rank, one.tp_rank) == (dims.pp_rank, dims.tp_rank)]
        assert found.ranks == tuple(one.rank for one in sorted(alike, key=lambda one: one.dp_rank))
        for turn in range(4):
            due = [f"{rank}.{turn % 2}" if turn % 2 == 0 or number == 0 else None
                   for number, rank in enumerate(found.ranks)]  # fmt: skip
            assert (found.period, found.at(turn)) == (2, due)
