"""Golden traces of a guarded training: does its model, on seeded parameters, compute what trusted hardware computed?

It finds what the comparison of replicas cannot: a fault that all of them have in common, or of a single one.

A golden file holds a batch, the checksums of what a model with seeded parameters computes of it, and what they are
valid for: one file for all stages and tensor ranks; every replica is compared with the same part.

Seeded parameters depend on their name and a seed alone, and stand in the place of the model's own meanwhile. Each
element is a function of integers, rounded at most three times: its bits are the same on any device.
"""

from __future__ import annotations

import datetime
import io
import json
import logging
import pickle
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from megasdc.attached.batch_replayer import Batch, BatchReplayer, SentTensor
from megasdc.attached.engine import engine_precision
from megasdc.attached.record import ROOT, ResultRecorder, Watched
from megasdc.attached.settings import existing, recording_problems
from megasdc.attached.training import Protection, Training
from megasdc.checkpoint.allowlist import refuse_compressed
from megasdc.common.errors import CheckpointError, ConfigError, StorageError, TraceError
from megasdc.parallel.collectives import gather_objects, gather_objects_on
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.finding import Finding
from megasdc.sdc.golden import (
    GoldenRun,
    compare_ranks,
    compare_run,
    describe_differences,
    key_differences,
    machine_key,
    read_members,
    read_sealed_header,
    trace_from_bytes,
    trace_to_bytes,
    write_sealed,
)
from megasdc.sdc.host import on_all_ranks
from megasdc.sdc.nonfinite import FiniteRecorder
from megasdc.sdc.trace import Trace, trace_digest
from megasdc.tensors.nested import map_in

FORMAT, FIRST_FORMAT = "megasdc.guard_golden.v2", "megasdc.guard_golden.v1"
"""Format that is written, and the earlier one that is read, too, whose batches name classes as they were called."""
_FIRST_NAMES = "megasdc.guard.probe.Batch", "megasdc.guard.probe.Sent"
REMEDY = 'record one on trusted hardware, by this training with golden.record true (sdc.golden: "{path}")'
LARGEST_LIST = 20
"""Largest number of differences that a message names."""
_OF_MODEL = ("watched.", "submodule.", "parameter.")
"""Prefixes of names in a key, of which a model has many."""
_VOLATILE = ("transformers_version", "_name_or_path", "use_cache")
"""Fields of a Hugging Face configuration that change nothing in what training computes."""


@dataclass(frozen=True)
class GoldenPart:
    """Part of a golden file for one stage and tensor rank.

    Args:
        key: properties that the file holds for, from ``key_of``.
        evaluated: names of submodules that were not in training mode.
        trace: results of the batch, addressed as of step 1.
    """

    key: Mapping[str, Any]
    evaluated: tuple[str, ...]
    batch: Batch
    trace: Trace


def key_of(model: nn.Module, watched: Sequence[Watched], **settings: Any) -> dict[str, Any]:
    """Properties that may change a bit of what a model computes, in plain values by name.

    Args:
        settings: properties of the training.
    """
    cuda = torch.backends.cuda
    kernels = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
    configured: Any = getattr(model, "config", None)
    options = configured.to_dict() if hasattr(configured, "to_dict") else {}
    key: dict[str, Any] = {
        **machine_key(),
        "attention_kernels": kernels if torch.cuda.is_available() else None,
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
"""A part for a file: its fields in the header, and the bytes of its batch and of its trace."""


def pack(part: GoldenPart) -> Packed:
    """Pack a part for a file.

    Raises:
        ConfigError: the batch holds objects other than tensors and plain values.
    """

    def whole(sent: SentTensor) -> SentTensor:
        return replace(sent, value=sent.value.clone())  # of a slice not the tensor that it is cut from

    batch = replace(
        part.batch,
        args=map_in(SentTensor, part.batch.args, whole),
        options=map_in(SentTensor, part.batch.options, whole),
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

    def value_of(sent: SentTensor) -> Tensor:
        flags.append((sent.requires_grad, sent.on_host))
        return sent.value

    given = map_in(SentTensor, (batch.args, batch.options), value_of)
    return {"given": given, "flags": flags, "autocast": batch.autocast, "buffers": dict(batch.buffers)}


def _unpack(data: bytes) -> Batch:
    refuse_compressed("the batch", io.BytesIO(data))
    with torch.serialization.safe_globals(list(zip((Batch, SentTensor), _FIRST_NAMES, strict=True))):
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
    args, options = map_in(Tensor, found["given"], lambda value: SentTensor(value, *next(flags)))
    return Batch(args, options, found["autocast"], found["buffers"])


def save_parts(path: Path, algorithm: str, parts: Mapping[tuple[int, int], Packed]) -> None:
    """Write a file.

    Args:
        parts: packed parts, by (pp_rank, tp_rank).

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
        raise StorageError(f"sdc.golden: {path} cannot be written: {error.strerror}; choose another one") from error


def load_golden_part(path: Path, dims: ParallelDims, key: Mapping[str, Any]) -> GoldenPart:
    """Read the part of a golden file for this rank's stage and tensor rank.

    Raises:
        TraceError: the file is missing or damaged, or was recorded with another key, with every difference.
    """
    header = read_sealed_header(path, (FORMAT, FIRST_FORMAT), REMEDY.format(path=path))
    name = _name(dims.pp_rank, dims.tp_rank)
    parts = header["parts"]
    about = parts.get(name, next(iter(parts.values())))
    differences = key_differences(about["key"], key)  # of another layout the keys differ, too
    if differences:
        ordered = dict(sorted(differences.items(), key=lambda one: one[0].startswith(_OF_MODEL)))
        text = describe_differences(ordered, LARGEST_LIST)
        raise TraceError(
            f"sdc.golden: {path} does not hold for this training: {text}. Train as it was recorded, record another "
            "file by golden.record true, or set sdc.golden to null"
        )
    found = read_members(path, header, [f"{name}.batch", f"{name}.arrow"])
    try:
        batch = _unpack(found[f"{name}.batch"])
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, EOFError, CheckpointError) as error:
        raise TraceError(f"sdc.golden: the batch in {path} cannot be read: {error}; record it again") from error
    return GoldenPart(key, tuple(about["evaluated"]), batch, trace_from_bytes(found[f"{name}.arrow"]))


def _name(stage: int, tensor: int) -> str:
    return f"stage_{stage:03d}/tensor_{tensor:03d}"


NOISE = 0.02
"""Standard deviation of biases, and of other vectors around 1."""
ZERO_MEAN = ("bias", "beta")
"""Endings of names of vectors that are seeded around 0."""
_CHUNK = 1 << 22
_LOW = 0xFFFFFFFF


def seed_problems(model: nn.Module) -> list[str]:
    """Problems of parameters that cannot be seeded, a sentence each."""
    return [
        f"parameter {name} is of type {one.dtype}; needed: real floating point"
        for name, one in model.named_parameters()
        if not one.is_floating_point()
    ]


@contextmanager
def seeded_parameters(model: nn.Module, seed: int) -> Iterator[None]:
    """Context in which all parameters have seeded values; at its end each has its own bits again.

    Matrices have the variance 1 / inputs, so that results are neither tiny nor large whatever the sizes are.
    """
    kept = [(one, one.detach().clone()) for _, one in model.named_parameters()]
    try:
        for name, one in model.named_parameters():
            _fill(one.detach(), name, seed)
        torch.clear_autocast_cache()  # type: ignore[no-untyped-call]
        yield
    finally:
        for one, value in kept:
            one.detach().copy_(value)
        torch.clear_autocast_cache()  # type: ignore[no-untyped-call]


def _fill(target: Tensor, name: str, seed: int) -> None:
    salt = xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) & _LOW
    whole = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype, device=target.device)
    flat, matrix = whole.view(-1), target.dim() > 1
    deviation = (target.numel() / max(1, target.shape[0])) ** -0.5 if matrix and target.numel() else NOISE
    around_zero = matrix or name.endswith(ZERO_MEAN)
    for start in range(0, flat.numel(), _CHUNK):
        some = flat[start : start + _CHUNK]
        values = _spread(salt, start, start + some.numel(), target.device) * (3**0.5 * deviation)
        some.copy_(values if around_zero else values + 1.0)
    if whole is not target:
        target.copy_(whole)


def _spread(salt: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Numbers between -1 and 1, [stop - start] fp32, of mean 0 and variance 1 / 3.

    Source: the hash of 32 bits with the least bias known, https://github.com/skeeto/hash-prospector (lowbias32).
    """
    x = (torch.arange(start, stop, dtype=torch.int64, device=device) + salt) & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    x = x ^ (x >> 16)
    return (x >> 8).float() * 2.0**-23 - 1.0


logger = logging.getLogger(__name__)

STEP = 1
"""Step in the addresses of golden traces, whatever the step of training."""
GAPS = ("results of submodules that sum over tensor ranks",)
"""Results that a trace lacks, so that a tensor rank that differs may have received what differs."""


class GuardGolden(Protection):
    """Part of a guard that records a golden trace, or verifies this training's ranks with one, before optimizer steps.

    Raises:
        ConfigError: nothing can be recorded.
        TraceError: the file is missing, damaged, or of another training; on all ranks.

    Collective: all ranks of the world, ``before_step`` too.
    """

    what = "golden trace"
    name = "the golden trace"

    def __init__(self, training: Training) -> None:
        engine, dims, settings = training.engine, training.dims, training.settings
        self._training, self._engine, self._dims = training, engine, dims
        self._world, self._copies, self._emit = training.host_group, training.copies, training.events.emit_on_rank_0
        self._settings, self._repeats = settings.golden, settings.sdc.repeats
        assert settings.sdc.golden is not None, "else there is nothing to do"
        self._path, self._interval = Path(settings.sdc.golden), settings.sdc.golden_interval
        self._cells = ParallelDims(dims.tensor, 1, dims.data * dims.pipeline, dims.rank)
        """Layout without stages, each of which is judged by itself, since it takes its inputs from the file."""
        self._first = True
        self._finite = FiniteRecorder()
        recorder = ResultRecorder(engine.module, training.watched, training.algorithm)
        recorder.listener = self._finite if settings.golden.record else None
        off = f'sdc.golden: got "{self._path}"', "null"
        self._probe = BatchReplayer(engine.module, engine.device, recorder, settings.golden.seed, self._wanted, off)
        self._key: dict[str, Any] = {}
        self._part: GoldenPart | None = None
        try:
            self._part = on_all_ranks(self._training, self._begin)
        except BaseException:
            self._probe.close()
            raise

    def close(self) -> None:
        """Remove the hook on forward passes."""
        self._probe.close()

    def before_step(self, step: int) -> Iterable[Finding]:
        """Record or verify the golden trace, if it is due; returns findings.

        Raises:
            ConfigError: the model cannot be computed beside training; on all ranks.
            TraceError: the model computes other submodules than the file has; on all ranks.
            StorageError: the file cannot be written; on all ranks.
        """
        first, self._first = self._first, False
        if self._settings.record:
            if first:
                self._record(step)
        elif first or step % self._interval == 0:
            yield from self._verify(step)

    def _begin(self) -> GoldenPart | None:
        if problems := seed_problems(self._engine.module):
            raise ConfigError([f'sdc.golden: got "{self._path}", and {one}; set it to null.' for one in problems])
        self._key = key_of(
            self._engine.module,
            self._training.watched,
            precision=engine_precision(self._engine),
            layout=f"TP{self._dims.tensor} x PP{self._dims.pipeline}",
            algorithm=self._training.algorithm.name,
            seed=self._settings.seed,
        )
        if not self._settings.record:
            return load_golden_part(self._path, self._dims, self._key)
        if self._dims.rank == 0 and (problems := recording_problems(self._path)):
            raise ConfigError(problems)
        return None

    def _wanted(self) -> int | None:
        """Number of the running step, if this rank's batch is recorded in it; else None."""
        wanted = self._settings.record and self._first and self._dims.dp_rank == 0
        return self._training.step if wanted else None

    def _compute(self, batch: Batch) -> Trace:
        with seeded_parameters(self._engine.module, self._settings.seed):
            return self._probe.compute(batch, STEP)

    # --- recording ------------------------------------------------------------------------------------------------

    def _record(self, step: int) -> None:
        began = time.monotonic()
        own = on_all_ranks(self._training, lambda: self._own_part(step))
        digests = gather_objects(trace_digest(own.trace), self._world)
        others = [rank for rank, one in enumerate(digests) if one != digests[self._dims.at(rank).first_replica_rank]]
        if others:
            raise TraceError(
                f"golden.record: rank {others[0]} computes other than the first replica: this hardware cannot be "
                "trusted. Set sdc.golden to null; an audit says which rank is wrong"
            )
        packed = on_all_ranks(self._training, lambda: pack(own) if self._dims.dp_rank == 0 else None)
        parts = self._gather_parts(packed)
        name = self._training.algorithm.name
        on_all_ranks(self._training, lambda: save_parts(self._path, name, parts) if parts else None)
        seconds = round(time.monotonic() - began, 3)
        self._emit("golden", "recorded", step=step, path=str(self._path), results=len(own.trace), seconds=seconds)
        if self._dims.rank == 0:
            logger.info("step %d: recorded %s; verify with golden.record false", step, self._path)

    def _gather_parts(self, packed: Packed | None) -> dict[tuple[int, int], Packed]:
        """Parts of all stages and tensor ranks, by (pp_rank, tp_rank), on rank 0; empty on other ranks."""
        gathered = gather_objects_on(0, packed, self._world)
        places = [(self._dims.at(rank), one) for rank, one in enumerate(gathered or ())]
        return {(place.pp_rank, place.tp_rank): one for place, one in places if one is not None}

    def _own_part(self, step: int) -> GoldenPart:
        batch = self._probe.share(step, self._dims.first_replica_rank, self._copies)
        trace, again = (self._compute(batch) for _ in range(2))
        if bad := self._finite.pop_first(self._dims):
            raise ConfigError(
                f"golden.record: got true, and with seeded parameters {bad.address} is {bad.kind}, so that later "
                "results say nothing; choose another golden.seed, or set sdc.golden to null."
            )
        if wrong := compare_run(trace, again, self._cells).finding.first:
            raise ConfigError(
                f"golden.record: got true, and {wrong} is not the same when computed twice, so that it cannot be "
                "compared; take it out by audit.submodules, or set sdc.golden to null."
            )
        return GoldenPart(self._key, evaluated(self._engine.module), batch, trace)

    # --- verification ---------------------------------------------------------------------------------------------

    def _verify(self, step: int) -> Iterable[Finding]:
        gaps = GAPS if self._dims.tensor > 1 else ()
        answer = compare_ranks(self._training, lambda: [self._run()], self._cells, gaps, self._repeats)
        found = answer.finding(step, self._training.suspects.ranks)
        name, compared = ("differs" if found else "agreed"), answer.compared
        self._emit("golden", name, step=step, compared=compared, seconds=round(answer.seconds, 3))
        if found:
            yield found

    def _run(self) -> GoldenRun:
        assert self._part is not None, "it was read when the guard was attached"
        if other := set(evaluated(self._engine.module)) ^ set(self._part.evaluated):
            raise TraceError(
                f"sdc.golden: {min(other)} was in training mode when {self._path} was recorded and is not now, or the "
                "other way round; train as then, record it again, or set sdc.golden to null"
            )
        got, wanted = self._compute(self._part.batch), self._part.trace
        if got.addresses != wanted.addresses:
            pairs = set(got.addresses) ^ set(wanted.addresses)
            raise TraceError(
                f"sdc.golden: the model computes other results than {self._path} has, such as "
                f"{min(map(str, pairs), default='the same ones in another order')}; record it again, or set "
                "sdc.golden to null"
            )
        return compare_run(wanted, got, self._cells)
