"""What is in a checkpoint of any format or layout? Logical tensors, and values besides.

Nothing is read when a view is opened but what says where tensors lie, so a view is small however large the checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megasdc.checkpoint.files import hash_file
from megasdc.checkpoint.manifest import FileRecord
from megasdc.checkpoint.pieces import Copy, Owner
from megasdc.errors import CheckpointError

GLOBAL_GENERATORS = "/random generators"
"""How names of scalars end that stand for the global generators of a rank."""
Slot = Literal["weight", "master", "exp_avg", "exp_avg_sq", "scalar"]
TENSOR_SLOTS: tuple[Slot, ...] = ("weight", "master", "exp_avg", "exp_avg_sq")
"""Weights that the model computes with; the optimizer's own copy, first and second moment."""


@dataclass(frozen=True)
class Entry:
    """A logical tensor.

    Attributes:
        copies: at least one; they must hold the same bits.
        real_rows: rows without the vocabulary's padding; None: it is no tensor over the vocabulary.
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
        value: as text; None: the file that must hold it is not there.
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
        layout: of the ranks that saved it; None: a format without one.
        slots: those that the format has.
        entries: by (fqn, slot).
        scalars: by name; names of one rank begin with ``rank``.
        records: what the manifest says of files, by path.
        problems: files of values that cannot be read; those of tensors are noticed when a tensor is read.
        notes: what to know about its files.
        derived: weights that follow from master weights, of a format that holds none.
        save_id: of the save, the same in all copies of it; None: not known.
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
        """Whether a file has other bytes than when it was saved; None: no manifest says. Reads the file once.

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


def _other_bytes(file: Path, record: FileRecord) -> bool:
    """Whether a file is not as a manifest says."""
    try:
        return not file.exists() or hash_file(file) != record.xxh3_128
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
