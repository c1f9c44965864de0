"""Golden files of guards: a batch, what a model with seeded parameters computes of it, and what it holds for.

One file for all stages and tensor ranks; every replica is compared with the same part.
"""

from __future__ import annotations

import datetime
import io
import json
import pickle
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megasdc.attached.probe import Batch, Sent
from megasdc.attached.record import ROOT, Watched
from megasdc.attached.settings import existing
from megasdc.checkpoint.formats.allowlist import refuse_compressed
from megasdc.common.errors import CheckpointError, ConfigError, StorageError, TraceError
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden.file import key_differences
from megasdc.sdc.golden.machine import machine_key
from megasdc.sdc.golden.sealed import read_header, read_members, trace_from_bytes, trace_to_bytes, write_sealed
from megasdc.sdc.trace import Trace
from megasdc.tensors.nested import map_in

FORMAT, FIRST_FORMAT = "megasdc.guard_golden.v2", "megasdc.guard_golden.v1"
"""What is written, and what is read as well: its batches are objects of these classes, by the names they had."""
_FIRST_NAMES = "megasdc.guard.probe.Batch", "megasdc.guard.probe.Sent"
REMEDY = 'record one on trusted hardware, by this training with golden.record true (golden.path: "{path}")'
LARGEST_LIST = 20
"""Differences that a message names."""
_OF_MODEL = ("watched.", "submodule.", "parameter.")
"""How names of a key begin of which there are many."""
_VOLATILE = ("transformers_version", "_name_or_path", "use_cache")
"""Of a configuration of Hugging Face: has no part in what training computes."""


@dataclass(frozen=True)
class Part:
    """What a file holds of a stage and tensor rank.

    Args:
        key: of ``key_of``.
        evaluated: submodules that were not in training mode.
        trace: as of step 1.
    """

    key: Mapping[str, Any]
    evaluated: tuple[str, ...]
    batch: Batch
    trace: Trace


def key_of(model: nn.Module, watched: Sequence[Watched], **settings: Any) -> dict[str, Any]:
    """All that may change a bit of what a model computes, in plain values by name.

    Args:
        settings: of the training.
    """
    kernels: dict[str, Any] = {"threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        found = torch.backends.cuda
        attention = found.flash_sdp_enabled(), found.mem_efficient_sdp_enabled(), found.cudnn_sdp_enabled()
        kernels = {"attention_kernels": attention}
    configured: Any = getattr(model, "config", None)
    options = configured.to_dict() if hasattr(configured, "to_dict") else {}
    key: dict[str, Any] = {
        **machine_key(),
        **kernels,
        **settings,
        "transformers": metadata.version("transformers") if "transformers" in sys.modules else None,
        "attention": getattr(configured, "_attn_implementation", None),
        **{f"config.{name}": value for name, value in options.items() if name not in _VOLATILE},
        **{f"watched.{one.fqn}": True for one in watched},
        **{f"submodule.{fqn or ROOT}": _kind(module) for fqn, module in model.named_modules()},
        **{f"parameter.{name}": _size(one) for name, one in model.named_parameters()},
    }
    plain: dict[str, Any] = json.loads(json.dumps(key, default=str))
    return {name: value for name, value in plain.items() if value is not None}


def _kind(module: nn.Module) -> str:
    text = f"{type(module).__name__}({module.extra_repr()})"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def evaluated(model: nn.Module) -> tuple[str, ...]:
    """Names of submodules that are not in training mode, such as frozen normalisation."""
    return tuple(fqn or ROOT for fqn, module in model.named_modules() if not module.training)


def _size(parameter: nn.Parameter) -> str:
    return f"{list(parameter.shape)} {parameter.dtype}" + ("" if parameter.requires_grad else " frozen")


Packed = tuple[dict[str, Any], bytes, bytes]
"""A part as what the header has of it, its batch and its trace."""


def pack(part: Part) -> Packed:
    """A part for a file.

    Raises:
        ConfigError: the batch holds other than tensors and plain values.
    """

    def whole(sent: Sent) -> Sent:
        return replace(sent, value=sent.value.clone())  # of a slice not the tensor that it is cut from

    batch = replace(
        part.batch, args=map_in(Sent, part.batch.args, whole), options=map_in(Sent, part.batch.options, whole)
    )
    file = io.BytesIO()
    torch.save(_as_plain(batch), file)
    data = file.getvalue()
    try:
        _unpack(data)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            "golden.record: got true, and what the model is given holds other than tensors and plain values, which a "
            f"file of another machine is not trusted to make; set it to false: {str(error).splitlines()[0]}"
        ) from error
    return {"key": part.key, "evaluated": part.evaluated}, data, trace_to_bytes(part.trace)


def _as_plain(batch: Batch) -> dict[str, Any]:
    """A batch as tensors and plain values, whose flags stand beside them in the order of the tensors."""
    flags: list[tuple[bool, bool]] = []

    def value_of(sent: Sent) -> Tensor:
        flags.append((sent.requires_grad, sent.on_host))
        return sent.value

    given = map_in(Sent, (batch.args, batch.options), value_of)
    return {"given": given, "flags": flags, "autocast": batch.autocast, "buffers": dict(batch.buffers)}


def _unpack(data: bytes) -> Batch:
    refuse_compressed("the batch", io.BytesIO(data))
    with torch.serialization.safe_globals(list(zip((Batch, Sent), _FIRST_NAMES, strict=True))):
        found = torch.load(io.BytesIO(data), weights_only=True)
    if isinstance(found, Batch):
        return found
    if not isinstance(found, dict) or found.keys() != {"given", "flags", "autocast", "buffers"}:
        raise ValueError(f"got {type(found).__name__}, needed a batch")
    tensors: list[Tensor] = []
    map_in(Tensor, found["given"], tensors.append)
    if len(tensors) != len(found["flags"]):
        raise ValueError(f"the batch has {len(tensors)} tensors and flags of {len(found['flags'])}")
    flags = iter(found["flags"])
    args, options = map_in(Tensor, found["given"], lambda value: Sent(value, *next(flags)))
    return Batch(args, options, found["autocast"], found["buffers"])


def save_parts(path: Path, algorithm: str, parts: Mapping[tuple[int, int], Packed]) -> None:
    """Write a file.

    Args:
        parts: of ``pack``, by stage and tensor rank.

    Raises:
        ConfigError: it exists.
        StorageError: it cannot be written.
    """
    header = {
        "format": FORMAT,
        "algorithm": algorithm,
        "recorded": {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "script": shlex.join(sys.argv),
        },
        "parts": {_name(*place): about for place, (about, _, _) in parts.items()},
    }
    members: dict[str, bytes] = {}
    for place, (_, batch, trace) in parts.items():
        members |= {f"{_name(*place)}.batch": batch, f"{_name(*place)}.arrow": trace}
    try:
        if path.exists():
            raise ConfigError(existing(path))
        write_sealed(path, header, members)
    except OSError as error:
        raise StorageError(f"golden.path: {path} cannot be written: {error.strerror}; choose another one") from error


def load_part(path: Path, dims: ParallelDims, key: Mapping[str, Any]) -> Part:
    """Read what a file holds of this rank's stage and tensor rank.

    Raises:
        TraceError: the file is missing or damaged, or holds for something else, with every difference.
    """
    header = read_header(path, (FORMAT, FIRST_FORMAT), REMEDY.format(path=path))
    name = _name(dims.pp_rank, dims.tp_rank)
    parts = header["parts"]
    about = parts.get(name, next(iter(parts.values())))
    differences = key_differences(about["key"], key)  # of another layout the keys differ, too
    if differences:
        first = sorted(differences, key=lambda one: one.startswith(_OF_MODEL))
        said = [f"{one}: golden {differences[one][0]!r}, here {differences[one][1]!r}" for one in first]
        more = f"; and {len(said) - LARGEST_LIST} more" if len(said) > LARGEST_LIST else ""
        raise TraceError(
            f"golden.path: {path} does not hold for this training: {'; '.join(said[:LARGEST_LIST])}{more}. Train as it "
            "was recorded, record another file by golden.record true, or set golden.path to null"
        )
    found = read_members(path, header, [f"{name}.batch", f"{name}.arrow"])
    try:
        batch = _unpack(found[f"{name}.batch"])
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, EOFError, CheckpointError) as error:
        raise TraceError(f"golden.path: the batch in {path} cannot be read: {error}; record it again") from error
    return Part(key, tuple(about["evaluated"]), batch, trace_from_bytes(found[f"{name}.arrow"]))


def _name(stage: int, tensor: int) -> str:
    return f"stage_{stage:03d}/tensor_{tensor:03d}"
