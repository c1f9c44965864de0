"""View of a checkpoint as one model: its logical tensors and values, and their storage locations at any layout.

A ``View`` is of any format; opening one reads only the metadata that locates tensors, so it is small however large the
checkpoint is. A ``Copy`` of a logical tensor is made of ``Piece``s: locations of its elements, and the rank that wrote
them. ``open_deepspeed`` opens that of a checkpoint of DeepSpeed's pipeline engine with ZeRO-1. ``locate_states`` and
``locate_universal`` locate what one rank loads, for ``megasdc.checkpoint.load``.

Weights: one file per pipeline layer and tensor rank. Master weights and moments: the parameters of a stage are
concatenated into one flat tensor per group, padded (``shard_elements``); each rank has one contiguous shard. Offsets
are computed from the shapes, as in DeepSpeed's own load; the map in each file (``param_slice_mappings``) must agree, or
it is another rank's file. ``BF16_Optimizer`` and ``DeepSpeedZeroOptimizer`` differ in that the second saves the last
rank's master weights without the padding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.files import (
    SHARED_STATE_FILE,
    UNIVERSAL_OPTIMIZER,
    find_prefix,
    hash_file,
    layer_file,
    parameter_file,
    rank_state_file,
    shard_elements,
    shard_file,
    stage_file,
)
from megasdc.checkpoint.manifest import (
    FileRecord,
    Layout,
    Manifest,
    UniversalManifest,
    counters_of,
    model_of,
    parse_type,
    read_manifest,
    read_other_nodes,
    read_shared_state,
)
from megasdc.checkpoint.tensor_files import Arrangement, Extent, ExtentReader, OpenCopy, Places, StateFiles
from megasdc.checkpoint.verify import find_missing
from megasdc.common.errors import CheckpointError
from megasdc.config.model import ModelSection
from megasdc.model.sharding import TIED_EMBEDDING, Split, parameter_splits, split_name, torch_name
from megasdc.optim.zero1 import Fragment
from megasdc.parallel.dims import ParallelDims
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

    ``owner``: rank that wrote it; ``numel``: number of elements; ``stored``: function that returns the stored tensor
    that contains it (extent, or values), which must have ``shape`` and ``dtype`` unless None; ``start``: index of its
    first element there; ``holds``: description of another piece that the file claims to hold; empty: it does not.
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

    ``shards``: pieces of each tensor rank that it is split over, in order; ``split``: way in which it is split.
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
        """Map of elements to pieces."""
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


GLOBAL_GENERATORS = "/random generators"
"""Suffix of names of scalars that stand for the global generators of a rank."""
Slot = Literal["weight", "master", "exp_avg", "exp_avg_sq", "scalar"]
OPTIMIZER_SLOTS: tuple[Slot, ...] = ("master", "exp_avg", "exp_avg_sq")
"""The optimizer's master weights, first and second moment."""
TENSOR_SLOTS: tuple[Slot, ...] = ("weight", *OPTIMIZER_SLOTS)
"""Weights that the model computes with, and the optimizer's states."""


@dataclass(frozen=True)
class Entry:
    """A logical tensor: at least one copy, all of which must be bitwise equal.

    ``real_rows``: rows without the vocabulary's padding; None: not split over the vocabulary, or not known.
    """

    copies: tuple[Copy, ...]
    real_rows: int | None = None

    @classmethod
    def of_piece(cls, piece: Piece, shape: tuple[int, ...], real_rows: int | None = None) -> Entry:
        """A tensor with a single copy, in one piece."""
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

    ``layout``: layout of the ranks that saved it, None for a format without one; ``records``: the manifest's records by
    path; ``problems``: messages on files of scalars that cannot be read (those of tensors are found on reading);
    ``notes``: remarks for the user; ``derived``: weights from master weights, if the format stores none.
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
        """Whether a file changed since it was saved; None: it is in no manifest.

        The file is read at the first call; CheckpointError if that is not possible.
        """
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


_STAGE_SCALARS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
Fragments = dict[str, tuple[int, int]]
"""For each parameter in a shard: offset in the shard, and number of elements."""


def shard_fragments(shapes: dict[str, torch.Size], replicas: int) -> tuple[int, list[Fragments]]:
    """Number of elements of each rank's ZeRO-1 shard of a group, with padding, and the fragments in each shard.

    ``shapes``: shapes of the group's parameters on one stage and tensor rank, in order; ``replicas``: number of shards.
    """
    total = sum(prod(shape) for shape in shapes.values())
    length = shard_elements(total, replicas)
    found: list[Fragments] = [{} for _ in range(replicas)]
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape)
        while offset < end:
            dp_rank, start = divmod(offset, length)
            numel = min(end - offset, length - start)
            found[dp_rank][name] = (start, numel)
            offset += numel
    return length, found


def locate_shards(
    files: StateFiles,
    shards: Sequence[tuple[Path, WriterRank]],
    group: int,
    shapes: dict[str, torch.Size],
    needed: Collection[int] | None = None,
) -> tuple[dict[tuple[str, Slot], tuple[Piece, ...]], dict[str, Scalar]]:
    """Locate master weights and moments of a group of a stage's parameters; also step and learning rate of each rank.

    ``shards``: file and writer of each shard, by dp rank; ``shapes``: shapes of the group's parameters on this stage
    and tensor rank, in order; ``needed``: dp ranks whose files are opened, None: all. CheckpointError if the map in a
    file is none that ZeRO-1 makes.
    """
    laid = shard_fragments(shapes, len(shards))
    found: dict[tuple[str, Slot], list[Piece]] = {}
    scalars: dict[str, Scalar] = {}
    for dp_rank, (file, owner) in enumerate(shards):
        if needed is not None and dp_rank not in needed:
            continue
        scalars |= _shard_scalars(files, file, owner, group)
        for name, slot, piece in _shard_pieces(files, file, owner, group, dp_rank, laid):
            found.setdefault((name, slot), []).append(piece)
    return {key: tuple(pieces) for key, pieces in found.items()}, scalars


def _shard_pieces(
    files: StateFiles, file: Path, owner: WriterRank, group: int, dp_rank: int, laid: tuple[int, list[Fragments]]
) -> Iterator[tuple[str, Slot, Piece]]:
    """Yield name, slot and piece of a group's parameters in the file that must hold the shard of ``dp_rank``."""
    length, expected = laid
    holds = _check_map(files, file, group, dp_rank, expected)
    lean = _master_length(files, file, dp_rank, laid)
    state = ("base_optimizer_state", "state", group)
    places: dict[Slot, tuple[int, tuple[Any, ...]]] = {
        "master": (lean, ("single_partition_of_fp32_groups", group)),
        "exp_avg": (length, (*state, "exp_avg")),
        "exp_avg_sq": (length, (*state, "exp_avg_sq")),
    }
    for name, (start, numel) in expected[dp_rank].items():
        for slot, (size, keys) in places.items():
            stored = partial(files.tensor, file, "optimizer_state_dict", *keys)
            yield name, slot, Piece(file, owner, numel, stored, start, (size,), torch.float32, holds)


def _shard_scalars(files: StateFiles, file: Path, owner: WriterRank, group: int) -> dict[str, Scalar]:
    """Step and learning rate of one group in one rank's file; empty if the file cannot be read."""
    try:
        base = files.load(file)["optimizer_state_dict"]["base_optimizer_state"]
        found = {"step": base["state"][group]["step"], "lr": base["param_groups"][group]["lr"]}
    except CheckpointError:
        return {}  # reported when its tensors are read
    except (FileNotFoundError, KeyError, IndexError, TypeError):
        found = {"step": None, "lr": None}
    scalars: dict[str, Scalar] = {}
    for key, value in found.items():
        scalar = Scalar(None if value is None else value_text(value), file, owner)
        scalars[f"rank {owner.rank:05d}/group {group}/{key}"] = scalar
        if owner.rank == 0:
            scalars[f"optimizer/group {group}/{key}"] = scalar
    return scalars


def read_stage(
    files: StateFiles, file: Path, owner: WriterRank, pp_rank: int, tp_rank: int
) -> tuple[dict[str, Any], dict[str, Scalar]]:
    """Read a stage file; returns its content and its counters as scalars.

    The content has ``param_shapes``: shapes by name, for each group. CheckpointError if the file is missing, or lacks
    required keys.
    """
    try:
        state: dict[str, Any] = files.load(file)
        found = {key: state[key] for key in _STAGE_SCALARS}
        if not all(shape.numel() for shapes in state["param_shapes"] for shape in shapes.values()):
            raise ValueError("a parameter without elements")
    except (FileNotFoundError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{file} does not say which parameters its stage has: {error!r}") from error
    scalars: dict[str, Scalar] = {}
    for name, value in flatten("", found):
        scalars[f"rank of stage {pp_rank} tensor {tp_rank}/{name}"] = Scalar(value_text(value), file, owner)
        if pp_rank == tp_rank == 0:
            scalars[f"engine/{name}"] = Scalar(value_text(value), file, owner)
    return state, scalars


def value_text(value: Any) -> str:
    """Text of a value that is not a tensor of the model; different values give different texts."""
    if not isinstance(value, Tensor):
        return repr(value)
    return repr(value.item()) if value.numel() == 1 else state_digest(value)


def state_digest(state: Any) -> str:
    """XXH3-128 of all values of a nested state."""
    found = xxhash.xxh3_128()
    for name, value in flatten("", state):
        content: Any = repr(value).encode()
        if isinstance(value, Tensor):
            content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found.update(name.encode() + b"\0" + content)
    return found.hexdigest()


def _check_map(files: StateFiles, file: Path, group: int, dp_rank: int, expected: list[Fragments]) -> str:
    """Description of the other shard that the file claims to hold; empty: it has the expected one."""
    try:
        mapping = files.load(file)["optimizer_state_dict"]["param_slice_mappings"][group]
        found = {name: (address.start, address.numel) for name, address in mapping.items()}
    except (FileNotFoundError, CheckpointError):
        return ""  # reported when the piece is read
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} does not say which parameters it has: {error!r}") from error
    if found == expected[dp_rank]:
        return ""
    if found in expected:
        return f"the shard of dp rank {expected.index(found)}"
    if set(found) & {name for fragments in expected for name in fragments}:
        raise CheckpointError(
            f"{file} has parameters elsewhere than ZeRO-1 lays them by default; parameter_alignment and "
            "round_robin_gradients are not supported"
        )
    return "the shard of another stage"


def _master_length(files: StateFiles, file: Path, dp_rank: int, laid: tuple[int, list[Fragments]]) -> int:
    """Number of elements of a group's master weights in one rank's file.

    The optimizer that omits the last rank's padding is the one that saves ``zero_stage``.
    """
    length, expected = laid
    try:
        padded = "zero_stage" not in files.load(file)["optimizer_state_dict"]
    except (FileNotFoundError, CheckpointError, KeyError, TypeError):
        return length  # reported when the piece is read
    if padded or dp_rank != len(expected) - 1:
        return length
    real = sum(numel for fragments in expected for _, numel in fragments.values())
    return max(0, real - length * dp_rank)


def open_deepspeed(path: Path) -> View:
    """Open the view of a checkpoint, ``step_NNNNNNNN``, with every piece located.

    CheckpointError if the manifest, ``megasdc.json`` or the file of a stage cannot be read, files of other nodes are
    missing, or the layout of parameters is not supported.
    """
    return _Opening(path).view()


@dataclass(frozen=True)
class TensorSource:
    """Elements of a checkpoint from which a rank fills its part of a parameter's state.

    ``copy``: a run of the rank's own shard, flat, or the whole parameter; ``first``: index in the shard of the copy's
    first element; ``split``: division of a whole parameter among the tensor ranks, REPLICATED: it is the shard.
    """

    copy: Copy
    first: int = 0
    split: Split = Split.REPLICATED


@dataclass(frozen=True)
class States:
    """Locations of what a rank loads: of its parameters, its optimizer's states, and everything else.

    Attributes:
        origins: origin of each state of the rank's parameters, by name in the pipeline and slot.
        shapes: shape of every parameter that is located, by its name in the pipeline.
        is_whole: whether ``shapes`` are unsharded, not those of a tensor rank's shards.
        stage: content of a stage file: counters and learning rate schedule.
        optimizer: state of the optimizer other than tensors of the model, with ``base_optimizer_state``: settings and
            values of each parameter group.
    """

    origins: dict[tuple[str, Slot], TensorSource]
    shapes: dict[str, list[int]]
    is_whole: bool
    stage: dict[str, Any]
    optimizer: dict[str, Any]


def locate_states(path: Path, dims: ParallelDims, fragments: Mapping[str, Fragment]) -> States:
    """Locate what a rank loads of a checkpoint of any layout; only files that hold some of it are opened.

    Args:
        path: folder of the checkpoint.
        dims: position of the rank in its own layout.
        fragments: parts of parameters that it owns, by name in the pipeline.

    Raises:
        CheckpointError: manifest, ``megasdc.json`` or a file cannot be read, or parameters are elsewhere than expected.
    """
    return _Opening(path).states(dims, fragments)


def locate_universal(
    path: Path, manifest: UniversalManifest, model: ModelSection, dims: ParallelDims, groups: Sequence[Sequence[str]]
) -> States:
    """Locate what a rank loads of a universal checkpoint.

    Args:
        model: model section of the run that it was made from.
        dims: position of the rank in its own layout.
        groups: names in the pipeline of the rank's parameters, by parameter group.

    Raises:
        CheckpointError: a file cannot be read.
    """
    files, origins = StateFiles(), {}
    splits = parameter_splits(model) if dims.tensor > 1 else {}
    for name in (name for names in groups for name in names if name in manifest.parameters):
        shape = tuple(manifest.parameters[name])
        split = splits.get(name, Split.REPLICATED)
        for slot in UNIVERSAL_STATES:
            piece = replace(universal_piece(files, path, name, slot, shape), dtype=None)
            origins[name, slot] = TensorSource(Copy(shape, ((piece,),)), split=split)
    try:
        stage, _ = read_stage(files, path / stage_file(), WriterRank(), 0, 0)
        optimizer = files.load(path / UNIVERSAL_OPTIMIZER)
        steps = [path / parameter_file(names[0], "step") for names in groups]
        values = {index: {"step": load_checked(file)} if file.exists() else {} for index, file in enumerate(steps)}
        base = {"param_groups": optimizer["param_groups"], "state": values}
    except (OSError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    return States(origins, manifest.parameters, True, stage, {**optimizer, "base_optimizer_state": base})


UNIVERSAL_STATES: dict[Slot, str] = {"master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Names of a parameter's files in a universal checkpoint, by slot."""


def universal_piece(files: StateFiles, path: Path, name: str, slot: Slot, shape: tuple[int, ...]) -> Piece:
    """The file of one state of a parameter in a universal checkpoint, unsharded; ``name``: its name in the pipeline."""
    file = path / parameter_file(name, UNIVERSAL_STATES[slot])
    return Piece(file, WriterRank(), prod(shape), partial(files.tensor, file, "param"), 0, shape, torch.float32)


def shared_scalars(path: Path) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """Counters and loader position in a checkpoint's ``megasdc.json``, and its content; else CheckpointError."""
    state = read_shared_state(path)
    found = {
        name if name.startswith("loader/") else f"run/{name}": Scalar(
            repr(value), path / SHARED_STATE_FILE, WriterRank()
        )
        for name, value in flatten("", counters_of(state))
    }
    return found, state


class _Opening:
    """Reader of the metadata of a checkpoint of DeepSpeed, for ``open_deepspeed`` and ``locate_states``."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, StateFiles()
        manifest = read_manifest(path)
        self.layout, self.manifest = manifest.layout, manifest
        self.hosts = {rank: node for node, ranks in manifest.nodes.items() for rank in ranks}
        self.records = manifest.by_name()
        for other in read_other_nodes(path):
            _same_save(path, manifest, other)
            self.records |= other.by_name()
        self.prefix = find_prefix(self.records)
        self.scalars: dict[str, Scalar] = {}
        self.copies: dict[tuple[str, Slot], list[Copy]] = {}
        self.problems: list[str] = []

    @cached_property
    def splits(self) -> dict[str, Split]:
        """Split of every parameter, by its name with backend ``torch``."""
        model = model_of(read_shared_state(self.path), self.path)
        return {torch_name(name): split for name, split in parameter_splits(model).items()}

    def view(self) -> View:
        """The complete view."""
        manifest = self.manifest
        if manifest.storage == "node_local" and (lacking := find_missing(self.path, manifest, set(self.records))):
            raise CheckpointError("; ".join(lacking))
        self.scalars, state = shared_scalars(self.path)
        real_rows = int(state["vocab_size"]) if state.get("vocab_size") else None
        for pp_rank in range(self.layout.pipeline):
            stages = [self._stage(pp_rank, tp_rank) for tp_rank in range(self.layout.tensor)]
            self._add_weights(stages[0]["param_shapes"], pp_rank)
            for group in range(len(stages[0]["param_shapes"])):
                self._add_states([stage["param_shapes"][group] for stage in stages], pp_rank, group)
        self._add_rng()
        self._add_empty_layers()
        return View(
            path=self.path,
            kind="DeepSpeed pipeline with ZeRO-1",
            layout=str(self.layout),
            slots=("weight", "master", "exp_avg", "exp_avg_sq", "scalar"),
            entries={
                key: Entry(tuple(copies), real_rows if self.splits[key[0]] is Split.VOCABULARY else None)
                for key, copies in self.copies.items()
            },
            scalars=self.scalars,
            problems=self.problems,
            records={self.path / name: record for name, record in self.records.items()},
            save_id=self.manifest.save_id,
        )

    def states(self, dims: ParallelDims, fragments: Mapping[str, Fragment]) -> States:
        """Locations of what a rank loads; see ``locate_states``."""
        stages = self.layout.stages_for(dims)
        as_here = self.layout == Layout.of(dims)
        is_whole = self.layout.tensor != dims.tensor
        origins: dict[tuple[str, Slot], TensorSource] = {}
        shapes: dict[str, list[int]] = {}
        first: dict[str, Any] = {}
        for numbers in stages:
            contents = [self._stage(*divmod(number, self.layout.tensor)) for number in numbers]
            first = first or contents[0]
            for group, of_group in enumerate(contents[0]["param_shapes"]):
                for name, shape in of_group.items():
                    split = self._split(name) if is_whole else Split.REPLICATED
                    shapes[name] = list(whole_shape(tuple(shape), split, self.layout.tensor))
                if not of_group.keys().isdisjoint(fragments) and not as_here:
                    of_ranks = [content["param_shapes"][group] for content in contents]
                    found = self._origins(dims, numbers, group, of_ranks)
                    origins = found | origins if not dims.is_last_stage else origins | found  # a tied one is in two
        shards = self.layout.shards_for(dims, [sum(map(prod, of.values())) for of in first["param_shapes"]])
        file = self.path / shard_file(min(shards), stages[0][0], self.prefix)
        try:
            optimizer = self.files.load(file)["optimizer_state_dict"]
            if as_here:
                origins = {
                    key: origin for one in fragments.items() for key, origin in self._origins_of(file, optimizer, *one)
                }
        except (FileNotFoundError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} does not say which parameters it has: {error!r}") from error
        return States(origins, shapes, is_whole, first, optimizer)

    def _origins_of(
        self, file: Path, optimizer: dict[str, Any], name: str, fragment: Fragment
    ) -> Iterator[tuple[tuple[str, Slot], TensorSource]]:
        """Yield the origin of each state of a fragment in the file of the rank that had this one's place in the layout.

        The parameters are where they are here, however ZeRO-1 was configured to lay them.
        """
        group = fragment.group
        address = optimizer["param_slice_mappings"][group].get(name)
        is_there = address is not None and (address.start, address.numel) == (fragment.start, fragment.numel)
        holds = "" if is_there else f"{name} elsewhere than this run does"
        state = ("base_optimizer_state", "state", group)
        for slot in OPTIMIZER_SLOTS:
            keys = ("single_partition_of_fp32_groups", group) if slot == "master" else (*state, slot)
            stored = partial(self.files.tensor, file, "optimizer_state_dict", *keys)
            piece = Piece(file, WriterRank(), fragment.numel, stored, fragment.start, holds=holds)
            yield (name, slot), TensorSource(Copy((fragment.numel,), ((piece,),)), fragment.offset)

    def _origins(
        self, dims: ParallelDims, stages: Sequence[int], group: int, shapes_of: list[dict[str, torch.Size]]
    ) -> dict[tuple[str, Slot], TensorSource]:
        """Origins of the states of one group of a stage's parameters, by the layout that ZeRO-1 gives them.

        ``stages``: numbers of the stage files of the tensor ranks that are read; ``shapes_of``: shapes of the group's
        parameters on each of them.
        """
        total = sum(map(prod, shapes_of[0].values()))
        needed = sorted(self.layout.shards_for(dims, [total]))
        start = needed[0] * shard_elements(total, self.layout.data)
        begins = dict(zip(shapes_of[0], accumulate(map(prod, shapes_of[0].values()), initial=0), strict=False))
        of_ranks = [
            self._shards(*divmod(number, self.layout.tensor), group, shapes, needed)
            for number, shapes in zip(stages, shapes_of, strict=True)
        ]
        found: dict[tuple[str, Slot], TensorSource] = {}
        for name, slot in of_ranks[0]:
            split = self._split(name) if self.layout.tensor != dims.tensor else Split.REPLICATED
            shards = tuple(of_rank[name, slot] for of_rank in of_ranks)
            if split is Split.REPLICATED:
                numel = sum(piece.numel for piece in shards[0])
                found[name, slot] = TensorSource(Copy((numel,), (shards[0],)), max(0, start - begins[name]))
            else:
                shape = whole_shape(tuple(shapes_of[0][name]), split, self.layout.tensor)
                found[name, slot] = TensorSource(Copy(shape, shards, split), split=split)
        return found

    def _shards(
        self, pp_rank: int, tp_rank: int, group: int, shapes: dict[str, torch.Size], needed: Collection[int] | None
    ) -> dict[tuple[str, Slot], tuple[Piece, ...]]:
        """Pieces of master weights and moments of one group of a stage's parameters on one tensor rank."""
        stage = pp_rank * self.layout.tensor + tp_rank
        replicas = [
            (self.path / shard_file(dp_rank, stage, self.prefix), self._owner(pp_rank, dp_rank, tp_rank))
            for dp_rank in range(self.layout.data)
        ]
        found, scalars = locate_shards(self.files, replicas, group, shapes, needed)
        self.scalars |= scalars
        return found

    def _split(self, name: str) -> Split:
        fqn = torch_name(name)
        if fqn not in self.splits:
            raise CheckpointError(f"{self.path} has a parameter {name}, which its model has not")
        return self.splits[fqn]

    def _owner(self, pp_rank: int, dp_rank: int, tp_rank: int) -> WriterRank:
        rank = (pp_rank * self.layout.data + dp_rank) * self.layout.tensor + tp_rank  # tensor ranks vary fastest
        return WriterRank(rank, dp_rank, pp_rank, tp_rank, self.hosts.get(rank))

    def _writer(self, name: str) -> WriterRank:
        record = self.records.get(name)
        if record is None:
            return WriterRank()
        dims = self.layout.dims(record.rank)
        return WriterRank(record.rank, dims.dp_rank, dims.pp_rank, dims.tp_rank, record.node)

    def _stage(self, pp_rank: int, tp_rank: int) -> dict[str, Any]:
        file = self.path / stage_file(pp_rank * self.layout.tensor + tp_rank)
        state, scalars = read_stage(self.files, file, self._writer(file.name), pp_rank, tp_rank)
        self.scalars |= scalars
        return state

    def _add_weights(self, groups: list[dict[str, torch.Size]], pp_rank: int) -> None:
        for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
            if name == TIED_EMBEDDING and pp_rank:
                continue  # saved once, by the first stage
            index, key = split_name(name)
            pieces = [self._weight(index, key, tp_rank, tuple(shape)) for tp_rank in range(self.layout.tensor)]
            self._add(name, "weight", tuple(shape), [(piece,) for piece in pieces])

    def _weight(self, index: int, key: str, tp_rank: int, shape: tuple[int, ...]) -> Piece:
        name = layer_file(index, tp_rank)
        saved = ((self.records[name].tensors or {}) if name in self.records else {}).get(key)
        return Piece(
            self.path / name,
            self._writer(name),
            prod(shape),
            partial(self.files.tensor, self.path / name, key),
            shape=shape,
            dtype=parse_type(saved)[0] if saved else None,
        )

    def _add_states(self, shapes_of: list[dict[str, torch.Size]], pp_rank: int, group: int) -> None:
        """Add master weights and moments of one group of a stage's parameters."""
        pieces: dict[tuple[str, Slot], list[tuple[Piece, ...]]] = {}
        for tp_rank, shapes in enumerate(shapes_of):
            for key, shard in self._shards(pp_rank, tp_rank, group, shapes, None).items():
                pieces.setdefault(key, []).append(shard)
        for (name, slot), shards in pieces.items():
            self._add(name, slot, tuple(shapes_of[0][name]), shards)

    def _add_rng(self) -> None:
        for rank in range(self.manifest.world_size):
            file = self.path / rank_state_file(rank)
            value: str | None = None
            try:
                if file.exists():
                    value = state_digest(load_checked(file))
            except CheckpointError as error:
                self.problems.append(str(error))
                continue
            self.scalars[f"rank {rank:05d}{GLOBAL_GENERATORS}"] = Scalar(value, file, self._writer(file.name))

    def _add_empty_layers(self) -> None:
        """Add files of layers without parameters, which DeepSpeed requires to exist."""
        for name, record in self.records.items():
            if record.tensors == {}:
                value = "is there" if (self.path / name).exists() else None
                self.scalars[f"rank {record.rank:05d}/{name}"] = Scalar(value, self.path / name, self._writer(name))

    def _add(self, name: str, slot: Slot, local: tuple[int, ...], shards: list[tuple[Piece, ...]]) -> None:
        split, tensor = self._split(name), self.layout.tensor
        copies = self.copies.setdefault((torch_name(name), slot), [])
        if split is Split.REPLICATED:
            copies += [Copy(local, (shard,)) for shard in shards]
        else:
            copies.append(Copy(whole_shape(local, split, tensor), tuple(shards), split))


def _same_save(path: Path, manifest: Manifest, other: Manifest) -> None:
    if other.save_id != manifest.save_id:
        raise CheckpointError(f"{path}: the manifest of node {other.node} is of another save of this step")
