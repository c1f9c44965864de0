"""Is every range of a tensor read from the right places of its pieces? Against the model's own way of dividing."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megasdc.checkpoint.tensor_files import Extent, ExtentReader, Stamp
from megasdc.checkpoint.views import Copy, Piece, WriterRank
from megasdc.model.sharding import Split, shard_of

SHAPE = (12, 8)


def _in_file(path: Path, shard: torch.Tensor) -> Extent:
    """A shard in a file of its own, after a few other bytes."""
    path.write_bytes(b"head" + shard.numpy().tobytes())
    return Extent(path, Stamp.of(path), 4, shard.dtype, tuple(shard.shape))


def _copy(whole: torch.Tensor, split: Split, tensor: int, ends: tuple[int, ...], folder: Path | None) -> Copy:
    """A copy whose shards are in pieces that end at the given elements; in files, or else in memory."""
    shards = []
    for tp_rank in range(tensor):
        flat = shard_of(whole, split, tensor, tp_rank).reshape(-1)
        stored = flat if folder is None else _in_file(folder / f"{split.name}{tensor}_{tp_rank}", flat)
        places = [0, *(end for end in ends if end < flat.numel()), flat.numel()]
        pieces = [
            Piece(Path("file"), WriterRank(tp=tp_rank), stop - start, partial(_given, stored), start)
            for start, stop in pairwise(places)
        ]
        shards.append(tuple(pieces))
    return Copy(tuple(whole.shape), tuple(shards), split)


def _given(stored: Extent | torch.Tensor) -> Extent | torch.Tensor:
    return stored


@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("ends", [(), (5, 6, 30)])
@pytest.mark.parametrize(
    ("split", "tensor"),
    [(Split.REPLICATED, 1), (Split.COLUMN, 3), (Split.VOCABULARY, 2), (Split.ROW, 2), (Split.ROW, 4), (Split.GATED, 3)],
)
def test_every_range_is_read(split: Split, tensor: int, ends: tuple[int, ...], in_files: bool, tmp_path: Path) -> None:
    """Any range from any element holds what the whole tensor holds there, and its parts say where they lie."""
    whole = torch.arange(96, dtype=torch.int32).view(SHAPE)
    copy = _copy(whole, split, tensor, ends, tmp_path if in_files else None)
    opened = copy.open()
    pieces = [torch.full((piece.numel,), -1, dtype=torch.int32) for piece in copy.pieces]
    with ExtentReader() as reader:
        for start in range(0, 96, 7):
            for stop in (start + 1, start + 3, 96 - start // 2, 96):
                out = torch.empty(max(0, stop - start), dtype=torch.int32)
                opened.fill(start, out, reader)
                assert torch.equal(out, whole.view(-1)[start:stop])
                for number, first, part in opened.arrangement.cut(start, out):
                    pieces[number][first : first + part.numel()] = part.reshape(-1)
    for number, (piece, held) in enumerate(zip(copy.pieces, pieces, strict=True)):
        shard = shard_of(whole, split, tensor, piece.owner.tp or 0).reshape(-1)
        assert torch.equal(held, shard[piece.start : piece.start + piece.numel])
        assert [opened.arrangement.place(number, element) for element in range(piece.numel)] == held.tolist()
    assert torch.equal(copy.read(), whole)
