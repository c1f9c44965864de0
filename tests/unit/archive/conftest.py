"""Checkpoints to archive: whole, small, with tensors that are large enough for blocks of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the checkpoints 2 and 4 of a run: 3 MB each in two replicas, with ids in ``run.json``."""
    import hand_made
    from run_to_archive import write_identity

    monkeypatch.setitem(hand_made.MODEL, "hidden_size", 96)
    monkeypatch.setitem(hand_made.MODEL, "ffn_hidden_size", 192)
    folder = tmp_path / "run" / "checkpoints"
    for step in (2, 4):
        hand_made.write_checkpoint(folder, step, layout=(1, 1, 2))
    write_identity(folder.parent)
    return folder
