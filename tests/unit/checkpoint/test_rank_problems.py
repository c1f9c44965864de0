"""What a rank tells the others of a write that failed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from megasdc.checkpoint.ranks import RankProblem, describe_error


def _failed(file: Path) -> RankProblem:
    with pytest.raises(RuntimeError) as caught:
        torch.save(torch.zeros(1_000_000), file)
    return describe_error(caught.value, f"write {file}")


def test_want_of_room_is_what_torch_does_not_say(tmp_path: Path) -> None:
    """A write that failed without a word may lack room, and is waited for; a file that is a folder is not."""
    full, folder = _failed(Path("/dev/full")), _failed(tmp_path)
    assert full.storage and full.no_room and "no space left" in full.text
    assert folder.storage and not folder.no_room and "Is a directory" in folder.text and "space" not in folder.text


def test_an_open_that_lacks_room_is_told_as_such() -> None:
    """As torch words it, where a file system has no inode left."""
    text = f"[enforce fail at inline_container.cc:747] . open file failed with strerror: {os.strerror(errno.ENOSPC)}"
    assert describe_error(RuntimeError(text), "write x").no_room
