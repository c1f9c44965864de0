"""Which slice is due, and which differences of updates are ruled on."""

from __future__ import annotations

import torch

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


def test_settings_that_differ_hide_no_wrong_update_of_other_ranks() -> None:
    """Only updates are not compared whose owner and checker used different settings, wherever the ranks are."""
    claims = {(rank + 1) % 4: Claim(rank, 0, torch.tensor([3]), 1, 2, same_inputs=True) for rank in range(4)}
    used = [7, 7, 5, 7]
    assert [rank for rank, one in claims.items() if comparable(one, rank, used) is None] == [2, 3]
    assert all(comparable(one, rank, ()) is one for rank, one in claims.items())
    assert comparable(None, 2, used) is None
