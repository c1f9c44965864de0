"""A fault that cannot be brought about ends at its time, and the drill is told."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.bench.supervised import faults


def test_a_folder_that_cannot_be_made_full_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no file system of its own, so that each try to make it smaller fails."""
    monkeypatch.setattr(faults, "FULL_S", (0.2, 0.2))
    later = list[Any]()
    run: Any = SimpleNamespace(run=tmp_path, told=[], chance=random.Random(1), later=lambda *what: later.append(what))
    faults._run_folder_full(run)
    assert len(later) == 1 and "was not full at the end: mount: " in run.told[-1]
