"""What is in a checkpoint of any format or layout? Logical tensors, the pieces they lie in, and who owned each piece.

Nothing is read when a view is opened but what says where tensors lie, so a view is small however large the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megasdc.checkpoint.extents import Extent, Reader
from megasdc.checkpoint.files import hash_file
from megasdc.checkpoint.manifest import FileRecord
from megasdc.checkpoint.open_copy import Arrangement, OpenCopy, Places
from megasdc.errors import CheckpointError
from megasdc.model.sharding import Split

GLOBAL_GENERATORS = "/random generators"
"""How names of scalars end that stand for the global generators of a rank."""
Slot = Literal["weight", "master", "exp_avg", "exp_avg_sq", "scalar"]
TENSOR_SLOTS: tuple[Slot, ...] = ("weight", "master", "exp_avg", "exp_avg_sq")
"""Weights that the model computes with; the optimizer's own copy, first and second moment."""


@dataclass(frozen=True)
class Owner:
    """The rank that wrote a piece.

    Attributes:
        rank: global rank; null where the format does not say, as the others.
        dp: its replica.
        pp: its stage.
        tp: its tensor rank.
        host: the node that it was on.
    """

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
    """A piece is not what its place asks for; a difference, not a failure to compare.

    Args:
        kind: missing, or of another shape or type.
        text: what was found.
        pieces: those that are concerned.
    """

    def __init__(self, kind: Literal["missing", "shape", "dtype"], text: str, pieces: list[Piece]) -> None:
        super().__init__(text)
        self.kind: Literal["missing", "shape", "dtype"] = kind
        self.pieces = pieces


@dataclass(frozen=True)
class Piece:
    """A run of elements that lies in one file.

    Attributes:
        file: the file.
        owner: who wrote it.
        numel: elements that its place asks for.
        stored: finds the tensor that it is in: where it lies in the file, or itself.
        start: its first element in there.
        shape: what ``stored`` must have; null: any that is long enough.
        dtype: what ``stored`` must have; null: any.
        holds: whose piece the file says it is, where that is another; else empty.
    """

    file: Path
    owner: Owner
    numel: int
    stored: Callable[[], Extent | Tensor]
    start: int = 0
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    holds: str = ""

    def find(self) -> Extent | Tensor:
        """Its elements, flat.

        Raises:
            PieceError: it is missing, or has another shape or type.
            CheckpointError: the file cannot be read.
        """
        try:
            tensor = self.stored()
        except (FileNotFoundError, KeyError) as error:
            what = "is not there" if isinstance(error, FileNotFoundError) else f"does not hold {error}"
            raise PieceError("missing", f"{self.file.name} {what}", [self]) from error
        if self.dtype is not None and tensor.dtype != self.dtype:
            text = f"{self.file.name} holds {_name(tensor.dtype)}, needed is {_name(self.dtype)}"
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
    """One copy of a whole logical tensor.

    Attributes:
        shape: of the whole tensor, the vocabulary with its padding where the format has it.
        shards: the pieces of each tensor rank that it is divided over, in order.
        split: how tensor ranks divide it.
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
        """Of all pieces, those of a type that is not known with 4 bytes an element; for progress."""
        return sum(piece.numel * (4 if piece.dtype is None else piece.dtype.itemsize) for piece in self.pieces)

    @property
    def arrangement(self) -> Places:
        """Which element lies in which piece."""
        periods = {Split.ROW: self.shape[0] if self.shape else 1, Split.GATED: 2}.get(self.split, 1)
        shards = tuple(tuple(piece.numel for piece in shard) for shard in self.shards)
        numel = prod(self.shape)
        return Arrangement(numel, numel // (periods * len(shards)), shards)

    def open(self) -> OpenCopy:
        """Find all pieces.

        Raises:
            PieceError: pieces are missing, or have another shape or type; the first kind that is met, with all of it.
            CheckpointError: a file cannot be read.
        """
        sources: list[Extent | Tensor] = []
        wrong: list[PieceError] = []
        for piece in self.pieces:
            try:
                sources.append(piece.find())
                if sources[-1].dtype != sources[0].dtype:
                    text = f"{piece.file.name} holds {_name(sources[-1].dtype)}, others {_name(sources[0].dtype)}"
                    raise PieceError("dtype", text, [piece])
            except PieceError as error:
                wrong.append(error)
        if wrong:
            same = [error for error in wrong if error.kind == wrong[0].kind]
            text = "; ".join(str(error) for error in same)
            raise PieceError(wrong[0].kind, text, [piece for error in same for piece in error.pieces])
        return OpenCopy(self.shape, sources[0].dtype, self.arrangement, sources)

    def read(self) -> Tensor:
        """The whole tensor.

        Raises:
            PieceError, CheckpointError: as ``open``.
        """
        found = self.open()
        whole = torch.empty(found.shape, dtype=found.dtype)
        with Reader() as reader:
            found.fill(0, whole.view(-1), reader)
        return whole


@dataclass(frozen=True)
class Entry:
    """A logical tensor.

    Attributes:
        copies: at least one; they must hold the same bits.
        real_rows: rows without the vocabulary's padding; null: it is no tensor over the vocabulary.
    """

    copies: tuple[Copy, ...]
    real_rows: int | None = None

    @property
    def num_bytes(self) -> int:
        """Of all copies; for progress."""
        return sum(copy.num_bytes for copy in self.copies)


@dataclass(frozen=True)
class Scalar:
    """A value that is no tensor of the model: a counter, a rate, a digest of a generator's state.

    Attributes:
        value: as text; null: the file that must hold it is not there.
        file: where it lies.
        owner: who wrote it.
    """

    value: str | None
    file: Path
    owner: Owner


@dataclass
class View:
    """A checkpoint, canonically.

    Attributes:
        path: as it was named.
        kind: its format, for people.
        layout: of the ranks that saved it; null: a format without one.
        slots: those that the format has.
        entries: by (fqn, slot).
        scalars: by name; names of one rank begin with ``rank``.
        records: what the manifest says of files, by path.
        problems: files of values that cannot be read; those of tensors are noticed when a tensor is read.
        notes: what to know about its files.
        derived: weights that follow from master weights, of a format that holds none.
        save_id: of the save, the same in all copies of it; null: not known.
    """

    path: Path
    kind: str
    layout: str | None
    slots: tuple[Slot, ...]
    entries: dict[tuple[str, Slot], Entry] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    records: dict[Path, FileRecord] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    derived: dict[tuple[str, Slot], Entry] = field(default_factory=dict)
    save_id: str | None = None
    _changed: dict[Path, bool | None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def changed(self, file: Path) -> bool | None:
        """Whether a file has other bytes than when it was saved; null: no manifest says. Reads the file once.

        Raises:
            CheckpointError: it cannot be read.
        """
        with self._lock:
            if file not in self._changed:
                record = self.records.get(file)
                self._changed[file] = None if record is None else _other_bytes(file, record)
            return self._changed[file]


def with_derived_weights(views: Sequence[View]) -> list[View]:
    """Let checkpoints of master weights alone be compared with those of weights alone, such as exported models.

    Args:
        views: the checkpoints.

    Returns:
        The same; where one has weights and no master weights, those that have only master weights get the weights that
        follow from these, and a note that says so.
    """
    if not any("weight" in view.slots and "master" not in view.slots for view in views):
        return list(views)
    return [_derive(view) if view.derived and "weight" not in view.slots else view for view in views]


def _derive(view: View) -> View:
    note = f"weights of {view.path} are its master weights, rounded as its run did"
    entries = view.entries | view.derived
    return replace(view, slots=("weight", *view.slots), entries=entries, notes=[*view.notes, note])


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts and lists, each with its path, such as ``groups/0/lr``."""
    items: Any = None
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    if items is None:
        yield name, value
        return
    for key, item in items:
        yield from flatten(f"{name}/{key}" if name else str(key), item)


def whole_shape(local: tuple[int, ...], split: Split, tensor: int) -> tuple[int, ...]:
    """The shape of a parameter whose shards have the shape ``local``."""
    if split is Split.REPLICATED:
        return local
    dim = 1 if split is Split.ROW else 0
    return tuple(size * tensor if place == dim else size for place, size in enumerate(local))


def _other_bytes(file: Path, record: FileRecord) -> bool:
    """Whether a file is not as a manifest says."""
    try:
        return not file.exists() or hash_file(file) != record.xxh3_128
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
