"""View of a ``torch.distributed.checkpoint`` (DCP) folder: tensors as blocks in the files of ranks.

Names are the keys of the saved dictionary: ``{"model": model.state_dict()}`` gives the names of the model, because
outer keys in ``_WRAPPERS`` are dropped; others are kept. Moments are found where
``torch.distributed.checkpoint.state_dict`` and torch's optimizers store them, ``...state.<name>.exp_avg``. Values that
are not tensors, optimizer steps and random generators are read when the view is opened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megasdc.checkpoint.formats.allowlist import load_part
from megasdc.checkpoint.formats.blocks import Block, BlockArrangement
from megasdc.checkpoint.formats.open_copy import Places
from megasdc.checkpoint.formats.pieces import Copy, Owner, Piece
from megasdc.checkpoint.views.view import Entry, Scalar, Slot, View, flatten
from megasdc.checkpoint.views.zero_shards import text_of
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.views.dcp_metadata import Chunk, Item, read_dcp_metadata

_FILE = re.compile(r"__(\d+)_\d+\.distcp")
_WRAPPERS = ("app", "state_dict", "model", "module")
_STATE = re.compile(r"(?:.+\.)?(?:optim|optimizer)\.state\.(?P<name>.+)\.(?P<kind>exp_avg|exp_avg_sq|step)")
_GENERATOR = re.compile(r".*(?:rng|random).*")
_Place = tuple[str, Literal["weight", "exp_avg", "exp_avg_sq", "step"]]


@dataclass(frozen=True)
class Blocks(Copy):
    """A tensor in rectangular blocks that need not be contiguous in it; ``offsets``: of their first elements, in it."""

    offsets: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ()

    @property
    def arrangement(self) -> Places:
        """Maps elements to blocks."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return BlockArrangement(tuple(Block(offsets, sizes, self.shape) for offsets, sizes in pairs))


def open_dcp(path: Path) -> View:
    """Open the view of a folder with ``.metadata`` and files ``__RANK_N.distcp``, with every block located.

    CheckpointError if the metadata cannot be read, are unsafe or inconsistent, or two tensors have one name.
    """
    entries: dict[tuple[str, Slot], Entry] = {}
    scalars: dict[str, Scalar] = {}
    problems: list[str] = []
    ranks: set[int | None] = set()
    for item in read_dcp_metadata(path):
        name, kind = place_of(item.path)
        ranks |= {_owner(chunk).rank for chunk in item.chunks}
        generator = item.dtype == torch.uint8 and _GENERATOR.fullmatch(name)
        if item.shape is None or kind == "step" or generator:
            try:
                scalars |= _values(path, item, f"optimizer state/{name}/step" if kind == "step" else name)
            except CheckpointError as error:
                problems.append(str(error))
        elif (name, kind) in entries:
            raise CheckpointError(
                f"{path} holds two tensors that would be compared as {name} ({kind}), the second in "
                f"{'/'.join(item.path)}; save them in folders of their own"
            )
        else:
            entries[name, kind] = Entry((_copy(path, item),))
    slots = dict.fromkeys(("weight", *sorted(slot for _, slot in entries), "scalar"))
    return View(
        path,
        "torch DCP",
        f"saved by {len(ranks)} rank{'s' * (len(ranks) != 1)}",
        tuple(slots),
        entries,
        scalars,
        problems=problems,
    )


def place_of(path: tuple[str, ...]) -> _Place:
    """The name and the slot of a tensor that was saved under nested dictionaries."""
    if (found := _STATE.fullmatch(".".join(path))) is not None:
        return found["name"], found["kind"]  # type: ignore[return-value]
    while len(path) > 1 and path[0] in _WRAPPERS:
        path = path[1:]
    return ".".join(path), "weight"


def _owner(chunk: Chunk) -> Owner:
    found = _FILE.fullmatch(chunk.file)
    return Owner() if found is None else Owner(int(found[1]))


def _values(path: Path, item: Item, name: str) -> dict[str, Scalar]:
    """Leaves of a value, as text; CheckpointError if its file cannot be read or its pickle is refused."""
    (chunk,) = item.chunks
    file = path / chunk.file
    try:
        value = load_part(file, chunk.start, chunk.num_bytes)
    except FileNotFoundError:
        return {name: Scalar(None, file, _owner(chunk))}
    return {key: Scalar(text_of(leaf), file, _owner(chunk)) for key, leaf in flatten(name, value)}


def _copy(path: Path, item: Item) -> Copy:
    """The copy of a tensor; plain runs of elements if it is split along its first dimension only, or not at all."""
    assert item.shape is not None, "a value is no tensor"
    chunks = sorted(item.chunks, key=lambda chunk: chunk.offsets)
    pieces = tuple(
        Piece(
            path / chunk.file,
            _owner(chunk),
            torch.Size(chunk.sizes).numel(),
            partial(_read, path / chunk.file, chunk),
            shape=chunk.sizes,
            dtype=item.dtype,
        )
        for chunk in chunks
    )
    if all(chunk.sizes[1:] == item.shape[1:] for chunk in chunks):
        return Copy(item.shape, (pieces,))
    offsets, sizes = (tuple(getattr(chunk, key) for chunk in chunks) for key in ("offsets", "sizes"))
    return Blocks(item.shape, (pieces,), offsets=offsets, sizes=sizes)


def _read(file: Path, chunk: Chunk) -> Tensor:
    tensor = load_part(file, chunk.start, chunk.num_bytes)
    if not isinstance(tensor, Tensor):
        raise KeyError(f"a tensor at byte {chunk.start}")
    return tensor
