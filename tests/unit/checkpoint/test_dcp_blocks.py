"""Do the blocks of a tensor make it up? Whatever way it was cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasdc.checkpoint.formats.dcp_metadata import Chunk, _check_cover
from megasdc.errors import CheckpointError

Block = tuple[tuple[int, int], tuple[int, int]]
LEFT: list[Block] = [((0, 0), (2, 4)), ((2, 0), (2, 4))]


def _check(*blocks: Block) -> None:
    chunks = tuple(Chunk(offsets, sizes, "file", 0, 1) for offsets, sizes in blocks)
    _check_cover(Path(".metadata"), "weight", (4, 8), chunks)


def test_blocks_that_only_touch_do_not_overlap() -> None:
    """Two blocks of half the height beside one of the whole; one column more, and they overlap."""
    _check(*LEFT, ((0, 4), (4, 4)))
    with pytest.raises(CheckpointError, match="overlap"):
        _check(*LEFT, ((0, 3), (4, 4)))
