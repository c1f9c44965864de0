"""What a rank tells the others of a write that failed."""

from __future__ import annotations

from pathlib import Path

import torch

from megasdc.checkpoint.snapshot import OwnWriter, capture
from megasdc.checkpoint.writer_process import StoreTask, TaskResult


def _failed(folder: Path, name: str) -> TaskResult:
    writer = OwnWriter()
    writer.send(StoreTask([capture({"x": torch.zeros(1_000_000)}, name)], folder))
    return writer.poll_result()


def test_want_of_room_is_told_apart(tmp_path: Path) -> None:
    """A full disk is waited for; a file that is a folder is not."""
    (tmp_path / "taken").mkdir()
    full, folder = _failed(Path("/dev"), "full"), _failed(tmp_path, "taken")
    assert full.is_storage and full.no_room and "/dev/full" in full.problem and "the disk is full" in full.problem
    assert folder.is_storage and not folder.no_room and "Is a directory" in folder.problem


def test_a_folder_that_this_host_does_not_see_has_a_remedy(tmp_path: Path) -> None:
    """Where the leader has made it on another host; the setting that this takes is named."""
    absent = _failed(tmp_path / "elsewhere", "x.pt")
    assert absent.is_storage and not absent.no_room and "set megasdc.checkpoint.storage to node_local" in absent.problem
