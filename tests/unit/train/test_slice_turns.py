"""Which slice is due, and which differences of updates are ruled on."""

from __future__ import annotations

import torch

from megasdc.parallel.dims import ParallelDims
from megasdc.train.detection.slices.hook import Claim, comparable
from megasdc.train.detection.slices.layout import MISSES, Turn


def test_a_slice_that_is_always_missed_holds_up_no_other() -> None:
    """It is due again, and told when it is given up; steps that were skipped do not count."""
    turn = Turn(7)
    assert not any(turn.end(missed=True, skipped=True) for _ in range(9)) and turn.number == 7
    told = [turn.end(missed=True, skipped=False) for _ in range(MISSES)]
    assert told == [False] * (MISSES - 1) + [True] and turn.number == 8
    assert not turn.end(missed=True, skipped=False) and turn.number == 8
    assert not turn.end(missed=False, skipped=False) and (turn.number, turn.misses) == (9, 0)


def test_settings_that_differ_hide_no_wrong_update_of_other_positions() -> None:
    """Only updates of the position whose replicas used different settings are not compared."""
    claim = Claim(0, 0, torch.tensor([3]), 1, 2, same_inputs=True)
    ranks = [ParallelDims(2, 2, 2, rank) for rank in range(8)]
    dropped = [dims.rank for dims in ranks if comparable(claim, dims, [(0, 1)]) is None]
    assert dropped == [dims.rank for dims in ranks if (dims.pp_rank, dims.tp_rank) == (0, 1)] and len(dropped) == 2
    assert all(comparable(claim, dims, ()) is claim for dims in ranks)
