"""Do the blocks of a tensor make it up? Whatever way it was cut."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import TensorProperties

from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.views.dcp import Chunk, _check_cover, read_dcp_metadata

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


class Member:
    """Pickled as the attribute of something, as members of enums are."""

    def __init__(self, of: object, name: object) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[object, tuple[object, object]]:
        return getattr, (self.of, self.name)


@pytest.mark.parametrize(("of", "name"), [(OrderedDict, "fromkeys"), (TensorProperties, 3), (OrderedDict, 3)])
def test_attributes_of_nothing_but_their_own_classes_are_read(tmp_path: Path, of: object, name: object) -> None:
    """Neither of another thing by a name, nor of such a class by what is none."""
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Member(of, name)))
    with pytest.raises(CheckpointError, match="getattr"):
        read_dcp_metadata(tmp_path)
