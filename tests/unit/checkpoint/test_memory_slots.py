"""Which steps count as held where the writer fails, or a step holds NaN?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasdc.checkpoint.places import Problem
from megasdc.checkpoint.snapshots import memory_saver
from megasdc.checkpoint.snapshots.memory_saver import MemorySaver
from megasdc.checkpoint.snapshots.messages import Answer
from megasdc.parallel.dims import ParallelDims


def saver_of(folder: Path, answers: list[Answer]) -> Any:
    """A saver of one rank whose writer answers so."""
    place: Any = SimpleNamespace(gather=lambda own: [own], leader=True, node="here")
    saver: Any = MemorySaver(folder, "run", 1, ParallelDims(1, 1, 1, 0), place, torch.device("cpu"), 1)
    saver._writer = SimpleNamespace(answer=lambda: answers.pop(0) if answers else None, close=lambda: None)
    return saver


def sent(saver: Any, step: int) -> Any:
    """The slot that is being made whole for a step."""
    slot = next(one for one in saver._slots if not one.step)
    slot.step = step
    saver._sent.append(slot)
    return slot


def test_a_slot_that_failed_is_not_whole_where_another_holds_nan(tmp_path: Path) -> None:
    """The step before both counts; the failure is told to all ranks after that."""
    saver = saver_of(tmp_path, [Answer(), Answer("no room")])
    for step in (1, 2):
        sent(saver, step)
    assert saver._own_newest() == 1
    next(one for one in saver._slots if not one.step).step = 3
    saver._give_up_non_finite(3)
    assert saver._own_newest() == 1
    assert saver._problem is not None and saver._problem.text == "no room"


def test_what_a_run_went_on_from_stays_where_its_first_snapshot_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing newer is held yet."""
    held = SimpleNamespace(record=SimpleNamespace(rank=0, step=4), folder=Path("slot_0"))
    monkeypatch.setattr(memory_saver, "find_held", lambda *_: ([held], []))
    saver = saver_of(tmp_path, [])
    assert saver.adopt(4)
    failed = sent(saver, 5)
    saver._problem = Problem("no room", True)
    assert "no room" in saver._give_up()
    assert [one.step for one in saver._slots] == [4, 0, 0] and failed.step == 0
