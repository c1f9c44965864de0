"""Pieces and copies of a logical tensor: where its elements are stored, and which rank wrote them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megasdc.checkpoint.tensor_files import Arrangement, Extent, ExtentReader, OpenCopy, Places
from megasdc.model.sharding import Split
from megasdc.tensors.bits import dtype_name


@dataclass(frozen=True)
class WriterRank:
    """The rank that wrote a piece: global, dp, pp and tp rank, and node; None: the format does not store it."""

    rank: int | None = None
    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    host: str | None = None

    def __str__(self) -> str:
        if self.rank is None:
            return "no rank known"
        place = "" if self.dp is None else f" (dp {self.dp}, pp {self.pp}, tp {self.tp})"
        return f"rank {self.rank}{place}" + ("" if self.host is None else f" on {self.host}")


class PieceError(Exception):
    """Pieces are missing, or their shape or type is unexpected; a difference, not a failure to compare."""

    def __init__(self, kind: Literal["missing", "shape", "dtype"], text: str, pieces: list[Piece]) -> None:
        super().__init__(text)
        self.kind: Literal["missing", "shape", "dtype"] = kind
        self.pieces = pieces


@dataclass(frozen=True)
class Piece:
    """A run of contiguous elements in one file.

    ``stored`` returns the stored tensor that contains it (its extent, or its values), which must have ``shape`` and
    ``dtype`` unless None; ``start``: its first element there; ``holds``: another piece that the file claims to hold.
    """

    file: Path
    owner: WriterRank
    numel: int
    stored: Callable[[], Extent | Tensor]
    start: int = 0
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    holds: str = ""

    def find(self) -> Extent | Tensor:
        """Locate its elements, flat; PieceError: missing or unexpected; CheckpointError: not readable."""
        try:
            tensor = self.stored()
        except (FileNotFoundError, KeyError) as error:
            what = "is not there" if isinstance(error, FileNotFoundError) else f"does not hold {error}"
            raise PieceError("missing", f"{self.file.name} {what}", [self]) from error
        if self.dtype is not None and tensor.dtype != self.dtype:
            text = f"{self.file.name} holds {dtype_name(tensor.dtype)}, needed is {dtype_name(self.dtype)}"
            raise PieceError("dtype", text, [self])
        if self.shape is not None and tuple(tensor.shape) != self.shape:
            text = f"{self.file.name} holds shape {list(tensor.shape)}, needed is {list(self.shape)}"
            raise PieceError("shape", text, [self])
        if tensor.numel() < self.start + self.numel:
            text = f"{self.file.name} holds {tensor.numel()} elements, needed are {self.start + self.numel}"
            raise PieceError("shape", text, [self])
        if isinstance(tensor, Extent):
            return tensor.run(self.start, self.numel)
        return tensor.detach().reshape(-1)[self.start : self.start + self.numel]


@dataclass(frozen=True)
class Copy:
    """One copy of a whole logical tensor; ``shape`` includes the vocabulary's padding if the format stores it.

    ``shards``: for each tensor rank that it is split over, its pieces in order.
    """

    shape: tuple[int, ...]
    shards: tuple[tuple[Piece, ...], ...]
    split: Split = Split.REPLICATED

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, by tensor rank, then in order of their elements."""
        return [piece for shard in self.shards for piece in shard]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces, for progress; 4 bytes per element where the type is not known."""
        return sum(piece.numel * (4 if piece.dtype is None else piece.dtype.itemsize) for piece in self.pieces)

    @property
    def arrangement(self) -> Places:
        """Maps elements to pieces."""
        periods = {Split.ROW: self.shape[0] if self.shape else 1, Split.GATED: 2}.get(self.split, 1)
        shards = tuple(tuple(piece.numel for piece in shard) for shard in self.shards)
        numel = prod(self.shape)
        return Arrangement(numel, numel // (periods * len(shards)), shards)

    def open(self) -> OpenCopy:
        """Locate all pieces; PieceError: lists all with the first kind of problem; CheckpointError: not readable."""
        sources: list[Extent | Tensor] = []
        wrong: list[PieceError] = []
        for piece in self.pieces:
            try:
                sources.append(piece.find())
                if sources[-1].dtype != sources[0].dtype:
                    types = [dtype_name(sources[place].dtype) for place in (-1, 0)]
                    raise PieceError("dtype", f"{piece.file.name} holds {types[0]}, others {types[1]}", [piece])
            except PieceError as error:
                wrong.append(error)
        if wrong:
            same = [error for error in wrong if error.kind == wrong[0].kind]
            text = "; ".join(str(error) for error in same)
            raise PieceError(wrong[0].kind, text, [piece for error in same for piece in error.pieces])
        return OpenCopy(self.shape, sources[0].dtype, self.arrangement, sources)

    def read(self) -> Tensor:
        """Read the whole tensor; errors as in ``open``."""
        found = self.open()
        whole = torch.empty(found.shape, dtype=found.dtype)
        with ExtentReader() as reader:
            found.fill(0, whole.view(-1), reader)
        return whole


def whole_shape(local: tuple[int, ...], split: Split, tensor: int) -> tuple[int, ...]:
    """The unsharded shape of a parameter whose shards have the shape ``local``."""
    if split is Split.REPLICATED:
        return local
    dim = 1 if split is Split.ROW else 0
    return tuple(size * tensor if place == dim else size for place, size in enumerate(local))
