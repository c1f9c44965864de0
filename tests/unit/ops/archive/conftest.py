"""Checkpoints to archive."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the checkpoints 2 and 4 of a run."""
    from run_to_archive import write_run

    return write_run(tmp_path / "run", monkeypatch)
