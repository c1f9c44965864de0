"""A checkpoint's description of itself: ``manifest.json``, shared state in ``megasdc.json``, digests of its files.

The manifest names every file with its size, checksum and writer. It includes its own checksum, so that a changed byte
anywhere in the folder is found. With node-local storage each node has its own manifest; they share ``save_id``, which
is new for every save.

A universal checkpoint holds unsharded tensors by name for a run of any layout: what DeepSpeed's ``ds_to_universal``
wrote (``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt``, ``zero/optimizer_state.pt`` and the files of the stages),
the ``megasdc.json`` of the checkpoint that it was made from, and a manifest of its own, ``universal.json``, by which it
is told from a checkpoint of a layout.

``Content`` of a file: digests by tensor and by block of a tensor, small enough to copy where the file cannot be; each
byte is read once. A block is ``block_bytes`` of a tensor, counted from the tensor's start, so that the same tensor has
the same blocks wherever it lies in a file. All other values but the configuration share one digest; a few counters are
kept by name. ``Structure``: offsets of a file's tensors and its other values, from headers and pickles; no tensor is
read. A pickle goes through the allow-list and the restricted unpickler, with storages on ``meta``: torch (2.13) records
the file offset of each, which ``torch.save`` stores uncompressed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
import xxhash
from pydantic import AfterValidator, Field, ValidationError, model_validator
from torch import Tensor

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.files import (
    MANIFEST_FILE,
    MARKER_FILE,
    SHARED_STATE_FILE,
    UNIVERSAL,
    UNIVERSAL_FILE,
    UNIVERSAL_STEP,
    explain_folder,
    is_universal,
    layer_of,
    list_steps,
    parameter_of,
    shards_of,
    step_folder,
)
from megasdc.checkpoint.records import Count, Inside, Record, Time, Xxh3, read_record, write_record
from megasdc.checkpoint.tensor_files import DTYPES, place_in_file, read_header
from megasdc.common.durable import parse_json, write_durably
from megasdc.common.errors import CheckpointError
from megasdc.config.model import ModelSection
from megasdc.data.position import num_passed
from megasdc.parallel.dims import ParallelDims
from megasdc.tensors.bits import dtype_name

BLOCK_BYTES = 4 << 20
DIGEST_DIGITS = 32
"""Hexadecimal digits of one XXH3-128."""
_TYPE = re.compile(r"(\w+)( ?)\[((?:\d+(?:, \d+)*)?)\]( strided)?")
_MASTER = re.compile(r"optimizer_state_dict/single_partition_of_fp32_groups/(\d+)")
_MOMENT = re.compile(r"optimizer_state_dict/base_optimizer_state/state/(\d+)/(exp_avg|exp_avg_sq)")


class TensorContent(Record):
    """One tensor in a file.

    Attributes:
        name: keys that lead to the tensor, joined by slashes; empty: a whole file whose tensors are not known.
        type: data type and shape, such as ``float32[64, 64]``; followed by ``strided`` if not contiguous.
        offset: position of the tensor's first byte in the file.
        size_bytes: bytes from its first to its last element.
        blocks: XXH3-128 of each block (the last may be shorter) in hexadecimal digits, concatenated.
    """

    name: str
    type: str
    offset: Count
    size_bytes: Count
    blocks: Annotated[str, Field(pattern=r"^([0-9a-f]{32})*$")]

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        parse_type(self.type)
        return self

    @property
    def dtype(self) -> torch.dtype | None:
        """Data type; None if the tensor is not contiguous, or of a type that training does not write."""
        return None if self.type.endswith(" strided") else parse_type(self.type)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return parse_type(self.type)[1]

    def block(self, number: int) -> str:
        """Digest of one block; ``number`` counts from 0."""
        return self.blocks[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]


class Content(Record):
    """Content of one file.

    Attributes:
        block_bytes: bytes of a block of a tensor.
        tensors: tensors of the file, in order of their offsets.
        values: counters and rates by name, as text.
        rest: XXH3-128 of all other values but the configuration and the global random generators; None: the file's
            format is not known, and its bytes are compared.
        fragments: for an optimizer's shard, one dict per parameter group: offset and size of each parameter in
            elements, such as ``128+64``; for other files empty.
    """

    block_bytes: int = Field(ge=1)
    tensors: list[TensorContent]
    values: dict[str, str]
    rest: str | None
    fragments: list[dict[str, Annotated[str, Field(pattern=r"^\d+\+\d+$")]]]

    @model_validator(mode="after")
    def _blocks_are_all_there(self) -> Self:
        for tensor in self.tensors:
            if len(tensor.blocks) != -(-tensor.size_bytes // self.block_bytes) * DIGEST_DIGITS:
                raise ValueError(f"{tensor.name} has {tensor.size_bytes} bytes and not the blocks of so many")
        return self


def parse_type(text: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """Data type and shape in a text of ``type_text``; ValueError if it is no such text.

    The data type is None for one that only the file's format names, such as ``I64 [2]``, with a space: a type of
    safetensors that training does not write.
    """
    match = _TYPE.fullmatch(text)
    dtype = getattr(torch, match[1], None) if match and not match[2] else None
    if match is None or not (match[2] or isinstance(dtype, torch.dtype)):
        raise ValueError(f"{text} is no type and shape of a tensor")
    return dtype, tuple(int(size) for size in match[3].split(",") if size)


def type_text(tensor: torch.Tensor) -> str:
    """Data type and shape, such as ``float32[64, 64]``."""
    order = "" if tensor.is_contiguous() else " strided"
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{order}"


def type_of_bytes(count: int) -> str:
    """Type text of a file that is only known as bytes, such as ``uint8[1024]``."""
    return f"uint8[{count}]"


def parts_of(file: str, tensor: TensorContent, content: Content) -> Iterator[tuple[str, str, int, int]]:
    """Yield the parameters in a tensor of a file: name, slot, first element in the tensor, number of elements.

    Where the parameter is not known, the name is that in the file, with slot ``weight``.
    """
    numel = prod(tensor.shape) if tensor.dtype is not None else 0
    if (layer := layer_of(file)) is not None:
        yield f"{layer}.{tensor.name}", "weight", 0, numel
    elif (named := parameter_of(file)) is not None:
        yield named[0], "master" if named[1] == "fp32" else named[1], 0, numel
    elif (match := _MASTER.fullmatch(tensor.name) or _MOMENT.fullmatch(tensor.name)) and int(match[1]) < len(
        content.fragments
    ):
        slot = "master" if match.re is _MASTER else match[2]
        for name, place in content.fragments[int(match[1])].items():
            first, count = map(int, place.split("+"))
            yield name, slot, first, count
    else:
        yield tensor.name, "weight", 0, numel


FORMAT_VERSION = 1
_PACKAGES = ("megasdc", "torch", "deepspeed", "megatron-core", "numpy")


def _is_type(text: str) -> str:
    parse_type(text)
    return text


class FileRecord(Record):
    """One file of a checkpoint.

    Attributes:
        name: path relative to the checkpoint's folder.
        xxh3_128: checksum of its bytes.
        rank: global rank that wrote it.
        tensors: for a layer's file, data type and shape of each tensor, such as ``float32[64, 64]``; else None.
        size_bytes: size of the file.
        node: name of the node of that rank.
        content: its tensors and their blocks; None: saved by a version that did not record them.
    """

    name: Inside
    size_bytes: Count
    xxh3_128: Xxh3
    rank: Count
    node: str
    tensors: dict[str, Annotated[str, AfterValidator(_is_type)]] | None = None
    content: Content | None = None

    @model_validator(mode="after")
    def _tensors_are_in_it(self) -> Self:
        for tensor in () if self.content is None else self.content.tensors:
            if tensor.offset + tensor.size_bytes > self.size_bytes:
                raise ValueError(f"{tensor.name} ends after the end of {self.name}, which has {self.size_bytes} bytes")
        return self


class Layout(Record):
    """Sizes of the parallel dimensions."""

    tensor: int = Field(ge=1)
    pipeline: int = Field(ge=1)
    data: int = Field(ge=1)

    @classmethod
    def of(cls, dims: ParallelDims) -> Layout:
        """The layout of a rank's position."""
        return cls(tensor=dims.tensor, pipeline=dims.pipeline, data=dims.data)

    @property
    def world_size(self) -> int:
        """Number of ranks of the layout."""
        return self.tensor * self.pipeline * self.data

    def dims(self, rank: int) -> ParallelDims:
        """Position of a rank in the layout."""
        return ParallelDims(self.tensor, self.pipeline, self.data, rank)

    def stages_for(self, dims: ParallelDims) -> list[list[int]]:
        """Numbers of the stage files of which a rank of any layout loads some, by stage: of its tensor rank, or all.

        They are its own alone where stages and tensor ranks are as many as in its layout.
        """
        if self.tensor != dims.tensor:
            return [[stage * self.tensor + rank for rank in range(self.tensor)] for stage in range(self.pipeline)]
        stages = [dims.pp_rank] if self.pipeline == dims.pipeline else range(self.pipeline)
        return [[stage * self.tensor + dims.tp_rank] for stage in stages]

    def shards_for(self, dims: ParallelDims, totals: Sequence[int]) -> set[int]:
        """Data ranks of whose optimizer shards, of each stage file of ``stages_for``, a rank of any layout loads some.

        At least one. ``totals``: number of elements of each of the rank's parameter groups, over all replicas.
        """
        if (self.tensor, self.pipeline) != (dims.tensor, dims.pipeline):
            return set(range(self.data))
        return shards_of(totals, self.data, dims.data, dims.dp_rank)

    def __str__(self) -> str:
        return f"TP{self.tensor} x PP{self.pipeline} x DP{self.data}"


class KnownState(Record):
    """Findings on the values of a checkpoint at its save, which need no opening of its files.

    Attributes:
        not_finite: names of the files, of all nodes, whose tensors (weights, masters, moments) held NaN or Inf when
            they were saved; empty: none did; None: saved by a version that did not check.
        finite_step: last step up to the checkpoint's with a finite loss and gradient norm; 0: none; None: saved by a
            version that did not record it.
        wrong_place: sentence on an error in the replicas' positions in the data; None: no error was known.
    """

    not_finite: list[Inside] | None = None
    finite_step: Count | None = None
    wrong_place: str | None = None

    @property
    def non_finite(self) -> str | None:
        """Sentence that names the files whose tensors hold NaN or Inf; None: no such file is known."""
        if not self.not_finite:
            return None
        more = f" and {len(self.not_finite) - 1} more files" if len(self.not_finite) > 1 else ""
        return f"its state is not finite: NaN or Inf in {self.not_finite[0]}{more} when it was saved"

    @property
    def problem(self) -> str | None:
        """Sentence on why no run should resume from it; None: no error is known."""
        return self.non_finite or self.wrong_place


class Manifest(KnownState):
    """Everything known about one checkpoint without opening its files.

    Attributes:
        format_version: version of the manifest's format.
        state: always ``complete``, because a manifest is written last.
        step: optimizer step, first is 1.
        save_id: identifier of the save, new for each save and common to the manifests of all nodes.
        time: time of writing, in seconds since the epoch.
        layout: layout of the run that saved.
        world_size: number of ranks of the run that saved.
        storage: ``shared``: the folder holds all files; ``node_local``: only those of this node.
        nodes: global ranks of each node, by node name.
        node: the node whose files these are; None with shared storage.
        engine: properties of the engine from ``describe_engine``, compared before loading.
        versions: versions of the packages whose formats are in the checkpoint, by package.
        files: one record a file, in order of name, without the manifest.
        quantized_moments_bits: bits of an element of the optimizer's moments if the archive quantized them, so that the
            checkpoint does not continue its run bit for bit; None: every bit is as it was saved.
    """

    format_version: int
    state: Literal["complete"]
    step: Count
    save_id: str
    time: Time
    layout: Layout
    world_size: int
    storage: Literal["shared", "node_local"]
    nodes: dict[str, list[int]]
    node: str | None
    engine: dict[str, Any]
    versions: dict[str, str]
    files: list[FileRecord]
    quantized_moments_bits: Literal[8] | None = None

    @model_validator(mode="after")
    def _ranks_are_of_one_world(self) -> Self:
        layout, ranks = self.layout, sorted(rank for ranks in self.nodes.values() for rank in ranks)
        if layout.world_size != self.world_size:
            raise ValueError(f"{layout} are not {self.world_size} ranks")
        if len(ranks) != self.world_size or ranks != list(range(self.world_size)):
            raise ValueError(f"the nodes do not have each of {self.world_size} ranks once")
        if (self.storage == "node_local") != (self.node in self.nodes):
            raise ValueError(f"of {self.storage} storage it cannot be of node {self.node}")
        if strange := [record.name for record in self.files if record.rank >= self.world_size]:
            raise ValueError(f"{strange[0]} was written by a rank that is none of {self.world_size}")
        check_once(self.files)
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(record.size_bytes for record in self.files)

    def by_name(self) -> dict[str, FileRecord]:
        """The files by name."""
        return {record.name: record for record in self.files}


def check_once(files: Iterable[FileRecord]) -> None:
    """Raise a ValueError if a file name is listed twice."""
    if twice := [name for name, count in Counter(record.name for record in files).items() if count > 1]:
        raise ValueError(f"{twice[0]} is there twice")


def describe_file(
    folder: Path, name: str, *, rank: int, node: str, tensors: dict[str, str] | None = None
) -> FileRecord:
    """Make the record of a file that this rank has written; the file is read once.

    Args:
        folder: the checkpoint's folder.
        name: path of the file relative to the folder.
        tensors: see ``FileRecord``.

    Raises:
        OSError: the file cannot be read back.
    """
    found = digest_file(folder / name)
    return FileRecord(
        name=name,
        size_bytes=found.size_bytes,
        xxh3_128=found.xxh3_128,
        rank=rank,
        node=node,
        tensors=tensors,
        content=found.content,
    )


def describe_engine(engine: Any) -> dict[str, Any]:
    """Properties that the saving and the loading engine must share, and the number of steps taken."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return {
        "optimizer": type(engine.optimizer).__name__,
        "inner_optimizer": type(inner).__name__,
        "num_param_groups": len(engine.optimizer.param_groups),
        "num_layers": len(engine.module._layer_specs),
        "global_steps": int(engine.global_steps),
    }


def installed_versions() -> dict[str, str]:
    """Versions of the packages whose formats are in a checkpoint."""
    return {package: _installed_version(package) for package in _PACKAGES}


@functools.cache  # looking through all installed packages takes tens of milliseconds
def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into its folder, with its own checksum.

    Raises:
        OSError: it cannot be written.
    """
    write_record(folder / MANIFEST_FILE, manifest)


def read_manifest(folder: Path, name: str = MANIFEST_FILE) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Args:
        folder: folder of the checkpoint.
        name: name of the manifest's file; another node's may lie beside this node's.

    Raises:
        CheckpointError: it is missing, unreadable, changed since it was written, or of another version.
    """
    return read_record(folder / name, Manifest, FORMAT_VERSION)


def read_other_nodes(folder: Path) -> list[Manifest]:
    """The manifests of other nodes, each copied into the folder as ``manifest.NODE.json`` with that node's files.

    Errors as in ``read_manifest``.
    """
    return [read_manifest(folder, path.name) for path in sorted(folder.glob("manifest.*.json"))]


def write_marker(folder: Path, manifest: Manifest) -> None:
    """Write the marker, on this node, that every node has committed the save."""
    write_durably(folder / MARKER_FILE, manifest.save_id + "\n")


def has_marker(folder: Path, manifest: Manifest) -> bool:
    """Whether the marker of this save exists; shared storage needs none."""
    if manifest.storage == "shared":
        return True
    try:
        return (folder / MARKER_FILE).read_text(encoding="utf-8").strip() == manifest.save_id
    except (OSError, UnicodeDecodeError):
        return False


def read_complete(folder: Path | str) -> dict[int, Manifest]:
    """Manifests of a folder's complete checkpoints, by step; only manifests and markers are read."""
    found = {}
    for step in list_steps(folder):
        path = Path(folder) / step_folder(step)
        with contextlib.suppress(CheckpointError):
            if has_marker(path, manifest := read_manifest(path)):
                found[step] = manifest
    return found


def list_sound(known: Mapping[int, KnownState]) -> list[int]:
    """Steps of the checkpoints that held no NaN, Inf or wrong place in the data when saved, in ascending order."""
    return sorted(step for step, one in known.items() if one.problem is None)


def list_continued(known: Mapping[int, KnownState]) -> list[int]:
    """Steps of the sound checkpoints from which a finite step was taken, in ascending order.

    A later finite checkpoint shows that the update of that step was finite too, since NaN stays in a state once it is
    there. Checkpoints saved after the last finite step may be finite because every step was skipped; a run that resumes
    from one would skip its steps again.
    """
    sound = list_sound(known)
    reached = max((one.finite_step or 0 for one in known.values() if one.non_finite is None), default=0)
    return [step for step in sound if step < reached]


def sorted_records(records: Iterable[FileRecord]) -> list[FileRecord]:
    """Records in order of name."""
    return sorted(records, key=lambda record: record.name)


UNIVERSAL_FORMAT_VERSION = 1


class UniversalManifest(Record):
    """Everything known about a universal checkpoint without opening its files.

    Attributes:
        step: optimizer step, first is 1.
        conversion_id: identifier of the conversion, new for each.
        time: time of writing, in seconds since the epoch.
        source: folder name of the checkpoint that it was made from.
        source_save_id: that checkpoint's ``save_id``.
        source_layout: that checkpoint's layout.
        precision: precision of the run that saved that checkpoint.
        engine: see ``Manifest``.
        parameters: unsharded shape of each parameter, by name; all tensors are fp32.
        files: one record a file, in order of name, without the manifest.
        quantized_moments_bits: see ``Manifest``.
    """

    format_version: int
    state: Literal["complete"]
    step: Count
    conversion_id: str
    time: Time
    source: str
    source_save_id: str
    source_layout: Layout
    precision: Literal["fp32", "bf16", "fp16"]
    engine: dict[str, Any]
    parameters: dict[str, list[Count]]
    versions: dict[str, str]
    files: list[FileRecord]
    quantized_moments_bits: Literal[8] | None = None

    @model_validator(mode="after")
    def _files_are_there_once(self) -> Self:
        check_once(self.files)
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, without the manifest."""
        return sum(record.size_bytes for record in self.files)


def universal_folder(step: int) -> str:
    """Folder name of a converted checkpoint, such as ``universal_step_00000123``."""
    return f"{UNIVERSAL_STEP}{step:08d}"


def write_universal_manifest(folder: Path, manifest: UniversalManifest) -> None:
    """Write the manifest into its folder.

    Raises:
        OSError: it cannot be written.
    """
    write_record(folder / UNIVERSAL_FILE, manifest)


def read_universal_manifest(folder: Path) -> UniversalManifest:
    """Read and check the manifest of a universal checkpoint; CheckpointError if it is missing or damaged."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; a universal checkpoint is made by megasdc convert-checkpoint")
    if not is_universal(folder):
        raise CheckpointError(
            explain_folder(folder, UNIVERSAL)
            or f"{folder} has no {UNIVERSAL_FILE}: it is no universal checkpoint, or its conversion did not finish; "
            "make one with megasdc convert-checkpoint DIR --to universal"
        )
    return read_record(folder / UNIVERSAL_FILE, UniversalManifest, UNIVERSAL_FORMAT_VERSION)


def find_unknown(folder: Path, manifest: UniversalManifest) -> list[str]:
    """Problems: files that are not in the manifest; DeepSpeed lists folders and opens every file in them."""
    known = {record.name for record in manifest.files} | {UNIVERSAL_FILE}
    found = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    return [f"{name} is not in {UNIVERSAL_FILE}: it does not belong here" for name in found if name not in known]


_COUNTERS = ("step", "tokens", "samples", "skipped_steps", "vocab_size", "tokenizer_checksum", "loader")


def read_shared_state(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's ``megasdc.json``.

    Raises:
        CheckpointError: it cannot be read, or is no JSON object.
    """
    file = folder / SHARED_STATE_FILE
    try:
        state = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} cannot be read: it is a {type(state).__name__}, needed is an object")
    return state


def counters_of(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a shared state that tells how far training has come; the rest is configuration and hooks."""
    return {key: state[key] for key in _COUNTERS if key in state}


def uncounted_samples(state: dict[str, Any]) -> int:
    """Number of samples that replicas have consumed beyond those that the steps of a shared state counted.

    Raises:
        CheckpointError: the state lacks the data positions of all replicas, or is malformed.
    """
    try:
        skip = [range(first, end) for first, end in state["config"]["megasdc"]["data"].get("skip", [])]
        return num_passed(state["loader"], skip) - int(state["samples"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{SHARED_STATE_FILE} does not hold the places in the data: {error!r}") from error


def find_wrong_place(state: dict[str, Any]) -> str | None:
    """Sentence on an error in the replicas' data positions in a shared state; None: no error is known.

    Steps count the samples that they use: whole batches, without dropped micro-batches, and a batch that replicas share
    only once. So their count and the samples given up (``uncounted_samples``) determine the sum of all replicas'
    positions in the stream. Errors that cancel out between replicas are not found here: checks of every step compare
    each replica before a save. A state without ``uncounted_samples``, saved by an earlier version, cannot be checked.
    """
    if state.get("uncounted_samples") is None:
        return None
    try:
        wrong = uncounted_samples(state) - state["uncounted_samples"]
    except CheckpointError as error:
        return str(error)
    if not wrong:
        return None
    right = state["samples"] + state["uncounted_samples"]
    return (
        f"{SHARED_STATE_FILE}: replicas have consumed {right + wrong} samples of the stream, {right} follow from its "
        "steps and decisions"
    )


def model_of(state: dict[str, Any], folder: Path) -> ModelSection:
    """The model section in a shared state; CheckpointError, with the file in ``folder``, if missing or invalid."""
    try:
        return ModelSection.model_validate(state["config"]["megasdc"]["model"])
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointError(f"{folder / SHARED_STATE_FILE} does not hold the model's section: {error!r}") from error


PICKLED = (".pt", ".pth", ".bin")
_NAMED = ("step", "lr", "global_steps", "global_samples", "skipped_steps", "last_batch_iteration", "tokens", "samples")
"""Keys of values that are kept by name, because a comparison should show them."""
_OF_A_RUN = ("ds_config", "ds_version", "rng")
"""Keys that differ between runs of equal content: paths, a version, global generators that training does not use."""
_unpickling = threading.Lock()
"""Lock around torch's list of allowed classes, which all threads share."""


@dataclass(frozen=True)
class TensorSpan:
    """Bytes of a file that hold a tensor; attributes as in ``TensorContent``."""

    name: str
    type: str
    offset: int
    size_bytes: int


@dataclass
class Structure:
    """``Content`` without the blocks; ``problem``: reason why the file cannot be parsed; None: it was."""

    spans: list[TensorSpan] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    rest: str | None = None
    fragments: list[dict[str, str]] = field(default_factory=list)
    problem: str | None = None


def read_structure(path: Path) -> Structure:
    """Find the tensors and values of a file of ``torch.save``, of safetensors, or ``megasdc.json``.

    Any other file is treated as bytes.
    """
    size = path.stat().st_size
    whole = [TensorSpan("", type_of_bytes(size), 0, size)] if size else []
    try:
        if path.suffix in PICKLED:
            return _read_pickled(path)
        if path.suffix == ".safetensors":
            return _read_safetensors(path, size)
        if path.name == SHARED_STATE_FILE:
            return _with_values(Structure(), counters_of(read_shared_state(path.parent)))
    except CheckpointError as error:
        return Structure(whole, problem=str(error))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Structure(whole, problem=f"{path} cannot be parsed: {error!r}")
    return Structure(whole)


def _read_pickled(path: Path) -> Structure:
    with _unpickling:
        state = load_checked(path, map_location="meta", members=True)
    found = Structure()
    if isinstance(state, dict):
        state = {key: value for key, value in state.items() if key not in _OF_A_RUN}
        optimizer = state.get("optimizer_state_dict")
        for mapping in optimizer.get("param_slice_mappings", []) if isinstance(optimizer, dict) else []:
            found.fragments.append({str(name): f"{place.start}+{place.numel}" for name, place in mapping.items()})
    return _with_values(found, state, path)


def _with_values(found: Structure, state: Any, path: Path | None = None) -> Structure:
    """Split the leaves of a state into tensors, named values, and the digest of the rest."""
    rest = xxhash.xxh3_128()
    for name, leaf in leaves("", state):
        value = leaf
        if isinstance(value, Tensor):
            span = _span(name, value)
            if value.dim() or path is None:
                found.spans.append(span)
                rest.update(f"{name}\0{span.type}\0".encode())
                continue
            value = _read_number(path, span, value.dtype)
        if name.rpartition("/")[2] in _NAMED and isinstance(value, int | float):
            found.values[name] = repr(value)
        else:
            rest.update(f"{name}\0{value!r}\0".encode())
    found.spans.sort(key=lambda span: (span.offset, span.name))
    found.rest = rest.hexdigest()
    return found


def _span(name: str, tensor: Tensor) -> TensorSpan:
    offset, reach = place_in_file(tensor)
    return TensorSpan(name, type_text(tensor), offset, reach * tensor.element_size())


def _read_number(path: Path, span: TensorSpan, dtype: torch.dtype) -> Any:
    """Read a zero-dimensional tensor, such as an optimizer's counter, as a number."""
    with open(path, "rb") as file:
        file.seek(span.offset)
        content = bytearray(file.read(span.size_bytes))
    if len(content) != span.size_bytes:
        raise ValueError(f"{span.name} ends after {len(content)} bytes of {span.size_bytes}")
    return torch.frombuffer(content, dtype=dtype)[0].item()


def _read_safetensors(path: Path, size: int) -> Structure:
    """Names and offsets from the header; a type that training does not write is kept as it is named there."""
    header, data = read_header(path)
    names = {short: dtype_name(dtype) for dtype, short in DTYPES.items()}
    found, rest = Structure(), xxhash.xxh3_128(json.dumps(header.pop("__metadata__", None), sort_keys=True).encode())
    for name, one in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        start, end = one["data_offsets"]
        if not 0 <= start <= end:
            raise ValueError(f"{name} lies from byte {start} to {end} of its data")
        if data + end > size:
            raise ValueError(f"{name} ends at byte {data + end}, the file has {size}")
        kind = f"{names[one['dtype']]}{one['shape']}" if one["dtype"] in names else f"{one['dtype']} {one['shape']}"
        found.spans.append(TensorSpan(name, kind, data + start, end - start))
    found.rest = rest.hexdigest()
    return found


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts, lists and objects of the allow-list, each with its path below ``name``.

    Their repr is equal in every process.
    """
    items: Any
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, io.BytesIO):
        yield name, value.getvalue()
        return
    elif isinstance(value, Tensor | str | bytes | int | float | None) or not hasattr(value, "__dict__"):
        yield name, value
        return
    else:
        items = vars(value).items()
    yield f"{name}/", type(value).__name__
    for key, item in items:
        yield from leaves(f"{name}/{key}" if name else str(key), item)


_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileDigest:
    """Digests of one file, its tensors and their blocks; ``problem``: reason why it cannot be parsed; None: it was."""

    size_bytes: int
    xxh3_128: str
    content: Content
    problem: str | None


def digest_file(
    path: Path, *, block_bytes: int = BLOCK_BYTES, progress: Callable[[int], None] | None = None
) -> FileDigest:
    """Compute the digests of a file in one pass; CheckpointError if it became shorter meanwhile.

    Args:
        block_bytes: bytes of a block of a tensor.
        progress: function called with the number of bytes of each piece read.
    """
    structure = read_structure(path)
    size = path.stat().st_size
    spans = sorted({(span.offset, span.offset + span.size_bytes) for span in structure.spans if span.size_bytes})
    blocks: dict[tuple[int, int], str] = dict.fromkeys(spans, "")
    states: dict[tuple[int, int], xxhash.xxh3_128] = {}
    whole = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        for place, end, inside in _segments(spans, size, block_bytes):
            wanting = [whole, *(states.setdefault(span, xxhash.xxh3_128()) for span in inside)]
            left = end - place
            while left:
                got = file.readinto(buffer[: min(left, _CHUNK_BYTES)])
                if not got:
                    raise CheckpointError(f"{path} got shorter while it was read, it had {size} bytes: read it again")
                for state in wanting:
                    state.update(buffer[:got])
                left -= got
                if progress is not None:
                    progress(got)
            for start, stop in inside:
                if (end - start) % block_bytes == 0 or end == stop:
                    blocks[start, stop] += states.pop((start, stop)).hexdigest()
    return FileDigest(size, whole.hexdigest(), _content(structure, blocks, block_bytes), structure.problem)


def _segments(
    spans: list[tuple[int, int]], size: int, block_bytes: int
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Cut a file where a tensor or block begins or ends; yields each segment's ends and the tensors that contain it."""
    cuts = {0, size}.union(*(range(start, stop, block_bytes) for start, stop in spans), (stop for _, stop in spans))
    waiting, inside = spans[::-1], list[tuple[int, int]]()
    for place, end in pairwise(sorted(cuts)):
        inside = [span for span in inside if span[1] > place]
        while waiting and waiting[-1][0] <= place:
            inside.append(waiting.pop())
        yield place, end, inside


def _content(structure: Structure, blocks: dict[tuple[int, int], str], block_bytes: int) -> Content:
    def tensor(span: TensorSpan) -> TensorContent:
        return TensorContent(**vars(span), blocks=blocks.get((span.offset, span.offset + span.size_bytes), ""))

    tensors = [tensor(span) for span in structure.spans]
    return Content(
        block_bytes=block_bytes,
        tensors=tensors,
        values=structure.values,
        rest=structure.rest,
        fragments=structure.fragments,
    )
