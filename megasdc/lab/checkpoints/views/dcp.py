"""View of a ``torch.distributed.checkpoint`` (DCP) folder: tensors as blocks in the files of ranks.

Names are the keys of the saved dictionary: ``{"model": model.state_dict()}`` gives the names of the model, because
outer keys in ``_WRAPPERS`` are dropped; others are kept. Moments are found where
``torch.distributed.checkpoint.state_dict`` and torch's optimizers store them, ``...state.<name>.exp_avg``. Values that
are not tensors, optimizer steps and random generators are read when the view is opened.

Reader for the ``.metadata`` of ``torch.distributed.checkpoint`` (DCP) that runs nothing the pickle names.

The file is a plain pickle. Placeholder records replace the few classes that DCP of torch 2.4 to 2.13 writes there, so
that nothing that the pickle names is created or called; any other name is refused.

Source: torch 2.13, ``torch/distributed/checkpoint/{metadata,filesystem}.py``.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from megasdc.checkpoint.allowlist import MEMBER, check_regular, load_part, refuse_classes
from megasdc.checkpoint.tensor_files import BlockArrangement, Places, TensorBlock
from megasdc.checkpoint.views import Copy, Entry, Piece, Scalar, Slot, View, WriterRank, flatten, value_text
from megasdc.common.errors import CheckpointError

METADATA_FILE = ".metadata"
_RECORDS = frozenset(
    f"torch.distributed.checkpoint.metadata.{name}"
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
) | {
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
}  # fmt: skip
"""Names allowed besides ``torch.Size``, data types and ordered dictionaries."""


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, or a whole value, in bytes of a file that are a complete ``torch.save`` file.

    ``offsets``: index of its first element, by dimension; ``sizes``: its shape; both are empty for a value.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Item:
    """A tensor, or a value (``shape`` is None, one chunk); ``path``: the keys of its dictionaries, and its own."""

    path: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


class _Record:
    """Placeholder for an object of any class in the pickle; ``state``: the state that the pickle sets."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["state"][name]
        except (KeyError, TypeError):
            raise AttributeError(f"{name} is not in it") from None


def read_dcp_metadata(folder: Path) -> list[Item]:
    """All items of the folder, in the order of saving.

    CheckpointError if the file is missing, damaged or unsafe, or blocks do not cover a tensor exactly.
    """
    path = folder / METADATA_FILE
    check_regular(path)
    try:
        with open(path, "rb") as file:
            content = _unpickle(path, file)
        places = {(key.fqn, tuple(_offset(key))): info for key, info in content.storage_data.items()}
        paths = content.planner_data or {}
        return [
            _item(path, name, tuple(map(str, paths.get(name, (name,)))), record, places)
            for name, record in content.state_dict_metadata.items()
        ]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: the save did not finish, or the file was not copied") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except Exception as error:  # arbitrary bytes may trip the unpickler over anything; whatever it is, the file is bad
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _offset(key: _Record) -> tuple[int, ...]:
    offset = key.state.get("offset")
    return () if offset is None else tuple(offset)


def _unpickle(path: Path, file: BinaryIO) -> Any:
    """The pickle's object; CheckpointError if it names a class that is not allowed."""
    kinds: dict[str, type] = {}  # new ones for every file: a pickle can set attributes of a class that it names

    def member(kind: Any, name: Any) -> _Record:
        """Placeholder for an enum member."""
        if kind not in kinds.values() or not isinstance(name, str):
            raise refuse_classes(path, [MEMBER])
        return _Record(name)

    class Restricted(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            """Placeholder for a class of DCP; called by the unpickler."""
            full = f"{module}.{name}"
            if full in _RECORDS:
                return kinds.setdefault(full, type(name, (_Record,), {}))
            if full == MEMBER:
                return member
            if full == "torch.Size":
                return tuple
            if full == "collections.OrderedDict":
                return dict
            if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
            raise refuse_classes(path, [full])

        def persistent_load(self, pid: Any) -> Any:
            raise CheckpointError(f"{path} refers to objects outside it, which the metadata of DCP does not")

    return Restricted(file).load()


def _item(path: Path, name: str, keys: tuple[str, ...], record: _Record, places: dict[Any, _Record]) -> Item:
    """One entry of the metadata; CheckpointError if a block's file is unknown, or blocks do not cover the tensor."""
    if type(record).__name__ == "BytesStorageMetadata":
        return Item(keys, None, None, (_chunk(path, name, (), (), places),))
    shape = tuple(record.size)
    chunks = tuple(_chunk(path, name, tuple(one.offsets), tuple(one.sizes), places) for one in record.chunks)
    _check_cover(path, name, shape, chunks)
    return Item(keys, shape, record.properties.state[0], chunks)


def _chunk(
    path: Path, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], places: dict[Any, _Record]
) -> Chunk:
    info = places.get((name, offsets))
    if info is None:
        raise CheckpointError(f"{path} does not say where {name} from {list(offsets)} on lies")
    if info.state.get("transform_descriptors"):
        kinds = ", ".join(info.transform_descriptors)
        raise CheckpointError(f"{path} says that {name} was saved with {kinds}, which is not supported; save it plain")
    if Path(info.relative_path).name != info.relative_path:
        raise CheckpointError(f"{path} says that {name} lies in {info.relative_path}, which is no file of its folder")
    return Chunk(offsets, sizes, info.relative_path, info.offset, info.length)


def _check_cover(path: Path, name: str, shape: tuple[int, ...], chunks: tuple[Chunk, ...]) -> None:
    """CheckpointError unless blocks cover a tensor: all inside it, none overlapping, with as many elements in total."""
    told = f"{path} divides {name} of shape {list(shape)} into blocks"
    order = sorted(chunks, key=lambda chunk: chunk.offsets)
    for place, one in enumerate(order):
        ends = tuple(start + size for start, size in zip(one.offsets, one.sizes, strict=True))
        inside = all(0 <= start <= end <= size for start, end, size in zip(one.offsets, ends, shape, strict=True))
        if not inside:
            raise CheckpointError(f"{told} of which that at {list(one.offsets)} does not lie in it")
        for other in order[place + 1 :]:
            if shape and other.offsets[0] >= ends[0]:
                break
            far = zip(one.offsets, ends, other.offsets, other.sizes, strict=True)
            if all(start < begin + size and begin < end for start, end, begin, size in far):
                raise CheckpointError(f"{told} of which those at {list(one.offsets)} and {list(other.offsets)} overlap")
    held = sum(torch.Size(chunk.sizes).numel() for chunk in chunks)
    if held != torch.Size(shape).numel():
        raise CheckpointError(f"{told} of {held} elements together, not {torch.Size(shape).numel()}")


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
        return BlockArrangement(tuple(TensorBlock(offsets, sizes, self.shape) for offsets, sizes in pairs))


def open_dcp(path: Path) -> View:
    """Open the view of a folder with ``.metadata`` and files ``__RANK_N.distcp``, with every block located.

    CheckpointError if the metadata cannot be read, are unsafe or inconsistent, or two tensors have one name.
    """
    entries: dict[tuple[str, Slot], Entry] = {}
    scalars: dict[str, Scalar] = {}
    problems: list[str] = []
    ranks: set[int | None] = set()
    for item in read_dcp_metadata(path):
        name, kind = name_and_slot(item.path)
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


def name_and_slot(path: tuple[str, ...]) -> _Place:
    """The name and the slot of a tensor that was saved under nested dictionaries."""
    if (found := _STATE.fullmatch(".".join(path))) is not None:
        return found["name"], found["kind"]  # type: ignore[return-value]
    while len(path) > 1 and path[0] in _WRAPPERS:
        path = path[1:]
    return ".".join(path), "weight"


def _owner(chunk: Chunk) -> WriterRank:
    found = _FILE.fullmatch(chunk.file)
    return WriterRank() if found is None else WriterRank(int(found[1]))


def _values(path: Path, item: Item, name: str) -> dict[str, Scalar]:
    """Leaves of a value, as text; CheckpointError if its file cannot be read or its pickle is refused."""
    (chunk,) = item.chunks
    file = path / chunk.file
    try:
        value = load_part(file, chunk.start, chunk.num_bytes)
    except FileNotFoundError:
        return {name: Scalar(None, file, _owner(chunk))}
    return {key: Scalar(value_text(leaf), file, _owner(chunk)) for key, leaf in flatten(name, value)}


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
