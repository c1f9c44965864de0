"""Views: the logical tensors and values of a checkpoint of any format or layout.

Opening a view reads only the metadata that locates tensors, so a view is small however large the checkpoint is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megasdc.checkpoint.files import hash_file
from megasdc.checkpoint.manifest import FileRecord
from megasdc.checkpoint.pieces import Copy, Piece, WriterRank
from megasdc.common.errors import CheckpointError

GLOBAL_GENERATORS = "/random generators"
"""Suffix of names of scalars that stand for the global generators of a rank."""
Slot = Literal["weight", "master", "exp_avg", "exp_avg_sq", "scalar"]
TENSOR_SLOTS: tuple[Slot, ...] = ("weight", "master", "exp_avg", "exp_avg_sq")
"""Weights that the model computes with; the optimizer's master weights, first and second moment."""


@dataclass(frozen=True)
class Entry:
    """A logical tensor: at least one copy, all of which must be bitwise equal.

    ``real_rows``: rows without the vocabulary's padding; None: not split over the vocabulary, or not known.
    """

    copies: tuple[Copy, ...]
    real_rows: int | None = None

    @classmethod
    def of_piece(cls, piece: Piece, shape: tuple[int, ...], real_rows: int | None = None) -> Entry:
        """A tensor of which there is one copy, in one piece."""
        return cls((Copy(shape, ((piece,),)),), real_rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies; for progress."""
        return sum(copy.num_bytes for copy in self.copies)


@dataclass(frozen=True)
class Scalar:
    """A value that is not a tensor of the model, as text: a counter, a learning rate, a digest of a generator's state.

    None: its file is missing or does not hold it.
    """

    value: str | None
    file: Path
    owner: WriterRank


@dataclass
class View:
    """A checkpoint in canonical form: entries by (fqn, slot), scalars by name (those of one rank begin with ``rank``).

    ``layout``: of the ranks that saved it, None for a format without one; ``problems``: files of values that cannot be
    read, those of tensors are found on reading; ``derived``: weights from master weights, if the format stores none.
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
        """Whether a file changed since it was saved; None: not in a manifest. Reads it once, else CheckpointError."""
        with self._lock:
            if file not in self._changed:
                record = self.records.get(file)
                self._changed[file] = None if record is None else _other_bytes(file, record)
            return self._changed[file]


def with_derived_weights(views: Sequence[View]) -> list[View]:
    """Make checkpoints with only master weights comparable with those with only weights, such as exported models.

    Returns the same views; if one has weights but no master weights, those without weights get weights derived from
    their master weights, and a note that says so.
    """
    if not any("weight" in view.slots and "master" not in view.slots for view in views):
        return list(views)
    return [_derive(view) if view.derived and "weight" not in view.slots else view for view in views]


def _derive(view: View) -> View:
    note = f"weights of {view.path} are its master weights, rounded as its run did"
    entries = view.entries | view.derived
    return replace(view, slots=("weight", *view.slots), entries=entries, notes=[*view.notes, note])


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists, each with its path, such as ``groups/0/lr``."""
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


def _other_bytes(file: Path, record: FileRecord) -> bool:
    """Whether a file differs from its record."""
    try:
        return not file.exists() or hash_file(file) != record.xxh3_128
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
