"""Traces: one exact checksum for every observed result of a rank in execution order, their comparison, and their files.

No torch, so that traces can be read without it; ``megasdc.sdc.tracer`` records them.

Two sets of traces first diverge by execution order over all ranks. Results are recorded before collectives mix ranks,
so the rank that comes first in this order computed a different value, and others received it. Not so from
``reduced_grad`` on with several replicas, whose results come after a sum over them; ``megasdc.sdc.golden`` decides who
can be named. ``count_differing`` names no rank: its numbers are evidence for people.

Of two layouts only results whose bits do not depend on the layout are comparable: ``LAYOUT_FREE``, measured with the
GPT and Llama styles of ``tests/distributed/test_trace_layouts.py``, tied and untied, fp32 and bf16. It holds for one
step with equal weights. After it weights differ: the norm of the gradient and, between replicas or tensor ranks, the
gradient itself are sums in another order, so that in the next step results are equal only by chance.

A file is one Arrow stream for each rank, columns of addresses and checksums, cut into frames. A frame holds what one
step added to the stream, preceded by its length and checksums of both. So a file whose writer was killed is readable up
to the last complete step, and is told apart from a damaged one. Arrow itself reads damaged bytes into wrong values, or
aborts the process (26.0.1). A resumed run writes a new file, named after its first step; reading a folder drops the
rerun steps of earlier files.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megasdc.common.addresses import (
    ACCUMULATED_GRAD,
    BACKWARD,
    FORWARD,
    MICRO_BATCH_PHASES,
    PARAMETER,
    PHASES,
    RECOMPUTE,
    REDUCED_GRAD,
    UPDATE,
    WEIGHT_GRAD,
    Address,
)
from megasdc.common.durable import LineFile, parse_json, rename_durably
from megasdc.common.errors import LaunchError, TraceError
from megasdc.model.kinds import EMBEDDING, HEAD, KINDS, POSITIONS, submodule_kind
from megasdc.parallel.dims import ParallelDims

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass
class Trace:
    """Addresses and unsigned 64-bit checksums of results, in the order in which one rank computed them."""

    addresses: list[Address] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.addresses)

    def extend(self, other: Trace) -> None:
        """Append a later trace of the same rank."""
        self.addresses += other.addresses
        self.checksums += other.checksums


def trace_digest(trace: Trace) -> int:
    """One number for a trace, which changes with any address (except its step) or checksum."""
    state = xxhash.xxh3_64()
    for address, value in zip(trace.addresses, trace.checksums, strict=True):
        state.update(f"{address.micro_batch} {address.phase} {address.fqn} {address.slot} {value:x}\n".encode())
    return state.intdigest()


_STEP_PHASES = {ACCUMULATED_GRAD: 1, REDUCED_GRAD: 2, UPDATE: 3, PARAMETER: 4}


@dataclass(frozen=True)
class Divergence:
    """One result that differs from the expected one.

    Args:
        place: number of results that the rank recorded before it.
        expected: expected checksum; None where no result was expected.
        got: computed checksum; None where there is none.
        against: rank that computed the expected value, where the layouts differ; None: the same rank.
    """

    rank: int
    address: Address
    place: int
    expected: int | None
    got: int | None
    against: int | None = None


@dataclass(frozen=True)
class TraceComparison:
    """Result of comparing several ranks' traces.

    Args:
        compared: number of results that were compared, over all ranks.
        divergences: in execution order over all ranks.
        first: the earliest of ``divergences``; of several ranks only where several were wrong at the same place.
    """

    compared: int
    divergences: tuple[Divergence, ...]
    first: tuple[Divergence, ...]

    @property
    def counts(self) -> dict[int, int]:
        """Number of divergences by rank; ranks without any are absent."""
        counts: dict[int, int] = {}
        for divergence in self.divergences:
            counts[divergence.rank] = counts.get(divergence.rank, 0) + 1
        return counts


def execution_key(address: Address, place: int, dims: ParallelDims) -> tuple[int, ...]:
    """Sort key of a result in the order in which one replica computes a step.

    A micro-batch runs forward through the stages and backward through them in reverse; micro-batches do not influence
    each other before gradients are reduced. Ranks of one stage run the same program, so the number of earlier results
    orders them too.

    Args:
        place: number of results that its rank recorded before it.
    """
    if address.phase not in MICRO_BATCH_PHASES:
        return address.step, _STEP_PHASES[address.phase], 0, 0, 0, place
    assert address.micro_batch is not None, "every result of these phases belongs to a micro-batch"
    forward = address.phase == FORWARD
    stage = dims.pp_rank if forward else dims.pipeline - 1 - dims.pp_rank
    return address.step, 0, address.micro_batch, int(not forward), stage, place


def compare_traces(expected: Mapping[int, Trace], got: Mapping[int, Trace], layout: ParallelDims) -> TraceComparison:
    """Compare every rank's trace with the expected one.

    Args:
        expected: trace by global rank.
        got: trace by global rank; of the same layout.

    Raises:
        ValueError: the ranks are not the same.
    """
    if set(expected) != set(got):
        raise ValueError(f"traces of ranks {sorted(got)} are compared with those of ranks {sorted(expected)}")
    compared = 0
    found: list[Divergence] = []
    for rank in sorted(expected):
        found += compare_rank(rank, expected[rank], got[rank])
        compared += max(len(expected[rank]), len(got[rank]))
    return in_execution_order(compared, found, layout)


def in_execution_order(compared: int, found: Iterable[Divergence], layout: ParallelDims) -> TraceComparison:
    """Sort divergences of several ranks of one layout by execution order; ``compared`` is passed on."""
    places = {}
    keyed = []
    for one in found:
        if one.rank not in places:
            places[one.rank] = ParallelDims(layout.tensor, layout.pipeline, layout.data, one.rank)
        keyed.append((execution_key(one.address, one.place, places[one.rank]), one))
    keyed.sort(key=lambda pair: (pair[0], pair[1].rank))
    first = tuple(one for key, one in keyed if key == keyed[0][0])
    return TraceComparison(compared, tuple(one for _, one in keyed), first)


def compare_rank(rank: int, expected: Trace, got: Trace) -> list[Divergence]:
    """Every difference between two traces of one rank: in the order of ``got``, then what ``got`` lacks."""
    if expected.addresses == got.addresses:
        pairs = enumerate(zip(got.addresses, expected.checksums, got.checksums, strict=True))
        return [Divergence(rank, address, place, a, b) for place, (address, a, b) in pairs if a != b]
    wanted = {address: (place, value) for place, (address, value) in enumerate(_pairs(expected))}
    found = []
    for place, (address, value) in enumerate(_pairs(got)):
        known = wanted.pop(address, None)
        if known is None or known[1] != value:
            found.append(Divergence(rank, address, place, None if known is None else known[1], value))
    return found + [Divergence(rank, address, place, value, None) for address, (place, value) in wanted.items()]


def _pairs(trace: Trace) -> list[tuple[Address, int]]:
    return list(zip(trace.addresses, trace.checksums, strict=True))


Counts = dict[str, dict[str, dict[int, int]]]
"""Number of differing results by phase, submodule and rank."""


def count_by_submodule(phase: str, fqns: Iterable[str], rank: int) -> Counts:
    """Number of differing results of one rank, by phase and submodule; empty without any."""
    found = {fqn: {rank: count} for fqn, count in Counter(fqns).items()}
    return {phase: found} if found else {}


def merge_counts(counts: Iterable[Counts]) -> Counts:
    """Merge the counts of all ranks."""
    merged: Counts = {}
    for of_rank in counts:
        for phase, submodules in of_rank.items():
            for fqn, ranks in submodules.items():
                merged.setdefault(phase, {}).setdefault(fqn, {}).update(ranks)
    return merged


def count_differing(
    traces: Mapping[int, Trace], layout: ParallelDims, wrong: Collection[int] = ()
) -> tuple[int, Counts]:
    """Compare each rank with the most frequent value at its position, without the ranks known to be wrong.

    If two values are equally frequent, all ranks there count as differing.

    Args:
        traces: by global rank, of work that was the same on all replicas.
        wrong: ranks that were named; their replicas are not used as reference, unless there is no other.

    Returns:
        The number of results compared over all ranks, and the counts of those that differ, in execution order.
    """
    found: list[tuple[tuple[int, ...], int, str, str]] = []
    wrong_replicas = {rank // layout.tensor % layout.data for rank in wrong}
    trusted = set(range(layout.data)) - wrong_replicas or set(range(layout.data))
    for position in range(layout.tensor * layout.pipeline):
        stage, tensor = divmod(position, layout.tensor)
        ranks = [tensor + layout.tensor * (replica + layout.data * stage) for replica in range(layout.data)]
        values = {rank: dict(zip(traces[rank].addresses, traces[rank].checksums, strict=True)) for rank in ranks}
        for rank in ranks:
            dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)
            for place, address in enumerate(traces[rank].addresses):
                counts = Counter(values[ranks[replica]].get(address) for replica in trusted)
                ((usual, most), *rest) = counts.most_common(2)
                if values[rank][address] != usual or (rest and rest[0][1] == most):
                    found.append((execution_key(address, place, dims), rank, address.phase, address.fqn))
    table: Counts = {}
    for _, rank, phase, fqn in sorted(found):
        of_submodule = table.setdefault(phase, {}).setdefault(fqn, {})
        of_submodule[rank] = of_submodule.get(rank, 0) + 1
    return sum(map(len, traces.values())), table


_ALL = frozenset(KINDS)
LAYOUT_FREE: dict[str, dict[str, frozenset[str]]] = {
    # A tied embedding gets the output's gradient on its own stage where there is one stage, later where there are more.
    "pipeline": {
        FORWARD: _ALL,
        RECOMPUTE: _ALL,
        BACKWARD: _ALL,
        WEIGHT_GRAD: _ALL - {EMBEDDING},
        ACCUMULATED_GRAD: _ALL - {EMBEDDING, HEAD},
    },
    # The loss is divided by the micro-batches of a replica before the backward pass, and so are all gradients.
    "data": {FORWARD: _ALL, RECOMPUTE: _ALL},
    # Tensor ranks compute parts, whose sums round differently; a sum of one embedding and zeros does not.
    "tensor": {FORWARD: frozenset({POSITIONS})},
}
"""Kinds of submodules whose results are bit-equal, by the dimension in which two layouts differ and by phase."""


def free_kinds(expected: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Kinds of submodules, by phase, whose results are equal in the layouts of two trace headers; empty: none."""
    differ = {name for name in LAYOUT_FREE if expected["layout"][name] != got["layout"][name]}
    if expected["sequence_parallel"] != got["sequence_parallel"] or ("tensor" in differ and got["sequence_parallel"]):
        return {}
    phases = set.intersection(*(set(LAYOUT_FREE[name]) for name in differ)) if differ else set(LAYOUT_FREE["pipeline"])
    return {phase: _ALL.intersection(*(LAYOUT_FREE[name][phase] for name in differ)) for phase in phases}


def compare_across_layouts(
    expected: Mapping[int, Trace],
    got: Mapping[int, Trace],
    expected_header: Mapping[str, Any],
    got_header: Mapping[str, Any],
) -> tuple[TraceComparison, Counter[tuple[int, int, str]]]:
    """Compare traces of two layouts, each result with those of the same samples and submodule.

    A micro-batch is identified by its samples' indices in the global batch, so another replica may have computed the
    expected result. With different tensor sizes every tensor rank is compared with every other.

    Args:
        expected: trace by global rank, of one step.
        got: trace by global rank, of the same step.

    Returns:
        The comparison, and the number of compared results by (step, rank, submodule).

    Raises:
        TraceError: nothing can be compared; the message says why.
    """
    free = free_kinds(expected_header, got_header)
    wanted = _by_sample(expected, expected_header, free)
    layout, other = _layout(got_header), _layout(expected_header)
    compared: Counter[tuple[int, int, str]] = Counter()
    found = []
    for rank, trace in got.items():
        tp_rank = _dims(layout, rank).tp_rank
        for place, (address, value) in enumerate(zip(trace.addresses, trace.checksums, strict=True)):
            key = _key(address, got_header, _dims(layout, rank))
            for against, result in wanted.get(key, ()):
                if layout.tensor == other.tensor and _dims(other, against).tp_rank != tp_rank:
                    continue
                compared[address.step, rank, address.fqn] += 1
                if result != value:
                    found.append(Divergence(rank, address, place, result, value, against))
    if not compared:
        raise TraceError(
            f"traces of layouts {other} and {layout} have no result in common that is independent of the layout; "
            "record the same phases, micro-batches and layers of both, with the same global batch"
        )
    return in_execution_order(compared.total(), found, layout), compared


def _by_sample(
    traces: Mapping[int, Trace], header: Mapping[str, Any], free: Mapping[str, frozenset[str]]
) -> dict[Any, list[tuple[int, int]]]:
    """(rank, checksum) of all results that do not depend on the layout, by ``_key``."""
    found = defaultdict(list)
    layout = _layout(header)
    for rank, trace in traces.items():
        dims = _dims(layout, rank)
        for address, value in zip(trace.addresses, trace.checksums, strict=True):
            if submodule_kind(address.fqn) in free.get(address.phase, ()):
                found[_key(address, header, dims)].append((rank, value))
    return found


def _key(address: Any, header: Mapping[str, Any], dims: ParallelDims) -> Any:
    """Identity of a result in any layout: step, indices of its samples in the global batch, phase, name, slot."""
    samples = None
    if address.micro_batch is not None:
        first = address.micro_batch * header["micro_batch_size"]
        samples = tuple((first + i) * dims.data + dims.dp_rank for i in range(header["micro_batch_size"]))
    return address.step, samples, address.phase, address.fqn, address.slot


def _layout(header: Mapping[str, Any]) -> ParallelDims:
    return ParallelDims(**header["layout"])


def _dims(layout: ParallelDims, rank: int) -> ParallelDims:
    return ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)


FORMAT = "megasdc.trace.v1"
TRACE_FOLDER = "trace"
"""Name of the folder of traces, in the run folder."""
RECORDED_ALIKE = (
    "layout",
    "sequence_parallel",
    "micro_batch_size",
    "accumulation_steps",
    "precision",
    "algorithm",
    "granularity",
    "phases",
    "interval",
    "micro_batches",
    "layers",
)
"""Header fields that must be equal for two traces to hold the same addresses with comparable checksums."""
_NAME = re.compile(r"rank_(\d{5,})\.from_step_(\d{8,})\.trace")
_LENGTH, _SUM = struct.Struct("<Q"), struct.Struct("<QQ")
"""Head of a frame: bytes that follow; XXH3 of that number and of those bytes."""
_COLUMNS = ("step", "micro_batch", "phase", "fqn", "slot", "checksum")


def _arrow() -> Any:
    """PyArrow, imported where a trace is written or read, so that a rank without traces does not need it."""
    try:
        import pyarrow
    except ImportError as error:
        raise LaunchError(f"traces and golden traces need pyarrow: {error}; run `pip install pyarrow`") from error
    return pyarrow


def trace_path(folder: Path, rank: int, first_step: int) -> Path:
    """Path of the trace file that a rank writes from a step on."""
    return folder / f"rank_{rank:05d}.from_step_{first_step:08d}.trace"


def set_traces_aside(folder: Path, rank: int, world_size: int, first_step: int) -> list[Path]:
    """Rename the trace files that this start of the run replaces.

    Those are this rank's files of the first step and later ones, and files of ranks beyond the world size, which the
    ranks divide among them.

    Args:
        folder: the ``trace`` folder; it need not exist.
        first_step: the step that the new file begins with.

    Returns:
        The new names, with the time before ``.trace``; empty if nothing was renamed.
    """
    renamed = []
    for number, step, path in _files(folder):
        if number % world_size == rank and (number != rank or step >= first_step):
            kept = path.with_name(f"{path.stem}.until_{time.strftime('%Y%m%d-%H%M%S')}.trace")
            rename_durably(path, kept)
            renamed.append(kept)
    return renamed


class TraceWriter:
    """Writes one rank's trace, replacing the file, one batch for each call; data is flushed when ``append`` returns.

    The file appears under its name with the first batch in it. What has no room is written later
    (``megasdc.common.durable``).

    Args:
        header: facts about the rank and the run, plain values; includes the fields of ``RECORDED_ALIKE``.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        pa = _arrow()
        self._path = path
        self._temporary = path.with_name(f".{path.name}")
        self._file = LineFile(self._temporary, binary=True)
        text = pa.dictionary(pa.int32(), pa.string())
        types = (pa.int32(), pa.int32(), text, text, text, pa.uint64())
        columns = list(zip(_COLUMNS, types, strict=True))
        self._schema = pa.schema(columns, metadata={"format": FORMAT, "header": json.dumps(header)})
        self._grown = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, compression="zstd")
        self._stream = pa.ipc.new_stream(self._grown, self._schema, options=options)
        self._dictionaries: dict[str, dict[str, int]] = {"phase": {}, "fqn": {}, "slot": {}}

    def append(self, trace: Trace) -> None:
        """Write what a rank recorded since the last call."""
        pa = _arrow()
        columns = {
            "step": pa.array([address.step for address in trace.addresses], pa.int32()),
            "micro_batch": pa.array([address.micro_batch for address in trace.addresses], pa.int32()),
            "checksum": pa.array(trace.checksums, pa.uint64()),
        }
        for name, known in self._dictionaries.items():
            codes = [known.setdefault(getattr(address, name), len(known)) for address in trace.addresses]
            values = pa.array(list(known), pa.string())
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), values)
        self._stream.write_batch(pa.record_batch([columns[name] for name in _COLUMNS], schema=self._schema))
        self._file.add(_frame(self._grown.getvalue()), follows=True)
        self._file.flush()
        self._grown.seek(0)
        self._grown.truncate()
        if self._temporary.exists():
            os.replace(self._temporary, self._path)

    def close(self) -> None:
        """Close the file; a file to which nothing was appended is removed. Idempotent."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _frame(data: bytes) -> bytes:
    length = _LENGTH.pack(len(data))
    return length + _SUM.pack(xxhash.xxh3_64_intdigest(length), xxhash.xxh3_64_intdigest(data)) + data


def _whole_frames(path: Path) -> bytes:
    """The stream up to the last complete frame."""
    content, stream, start = path.read_bytes(), io.BytesIO(), 0
    while len(content) >= (begin := start + _LENGTH.size + _SUM.size):
        length = content[start : start + _LENGTH.size]
        of_length, of_data = _SUM.unpack_from(content, start + _LENGTH.size)
        if xxhash.xxh3_64_intdigest(length) != of_length:
            raise TraceError(f"{path}: damaged at byte {start}, or not a trace file")
        end = begin + _LENGTH.unpack(length)[0]
        if end > len(content):
            break
        data = memoryview(content)[begin:end]
        if xxhash.xxh3_64_intdigest(data) != of_data:
            raise TraceError(f"{path}: damaged between bytes {begin} and {end}")
        stream.write(data)
        start = end
    return stream.getvalue()


def read_trace(path: Path) -> tuple[dict[str, Any], Trace]:
    """Read one file; of one whose writer was killed, every complete batch.

    Returns:
        The header and the trace.

    Raises:
        TraceError: it is not a trace file, its beginning is missing, or it is damaged.
    """
    pa, trace = _arrow(), Trace()
    try:
        content = _whole_frames(path)
        if not content:
            raise TraceError(f"{path}: the beginning is missing, or this is not a trace file")
        stream = pa.ipc.open_stream(content)
        metadata = stream.schema.metadata or {}
        if metadata.get(b"format") != FORMAT.encode():
            raise TraceError(f"{path}: the format is {metadata.get(b'format')!r}, needed is {FORMAT!r}")
        for batch in stream:
            _append_batch(trace, batch)
        header = parse_json(metadata[b"header"])
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        return header, trace
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise TraceError(f"{path}: this is not a trace file: {error}") from error


def _append_batch(trace: Trace, batch: pa.RecordBatch) -> None:
    columns = [batch.column(name).to_pylist() for name in _COLUMNS]
    for step, micro_batch, phase, fqn, slot, checksum in zip(*columns, strict=True):
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is not one of {', '.join(PHASES)}")
        trace.addresses.append(Address(step, micro_batch, phase, fqn, slot))
        trace.checksums.append(checksum)


def read_folder(folder: Path) -> dict[int, tuple[dict[str, Any], Trace]]:
    """Read every rank's trace from the ``trace`` folder of a run.

    Returns:
        Header and trace by rank; of steps that were rerun after a resume, the later ones.

    Raises:
        TraceError: there is no trace in the folder, one cannot be read, a rank's is missing, or the header fields of
            ``RECORDED_ALIKE`` differ.
    """
    files = _files(folder)
    if not files:
        raise TraceError(
            f"{folder} holds no trace: rank_NNNNN.from_step_NNNNNNNN.trace is what a traced run writes there"
        )
    ranks: dict[int, tuple[dict[str, Any], Trace]] = {}
    first: dict[str, Any] | None = None
    for rank, first_step, path in files:
        header, trace = read_trace(path)
        first = header if first is None else first
        _check_alike(first, header, files[0][2], path)
        if rank in ranks:
            earlier = ranks[rank][1]
            kept = [i for i, address in enumerate(earlier.addresses) if address.step < first_step]
            joined = Trace([earlier.addresses[i] for i in kept], [earlier.checksums[i] for i in kept])
            joined.extend(trace)
            trace = joined
        ranks[rank] = header, trace
    assert first is not None, "there is a file"
    layout = first["layout"]
    world_size = layout["tensor"] * layout["pipeline"] * layout["data"]
    if set(ranks) != set(range(world_size)):
        raise TraceError(
            f"{folder} holds traces of ranks {', '.join(map(str, sorted(ranks)))}, but the run had {world_size} ranks; "
            "put the files of all nodes into one folder"
        )
    return ranks


def _check_alike(first: dict[str, Any], header: dict[str, Any], first_path: Path, path: Path) -> None:
    for key in RECORDED_ALIKE:
        if key not in header:
            raise TraceError(f"{path}: the header lacks {key}")
        if header[key] != first[key]:
            raise TraceError(
                f"{path} was recorded with {key} {header[key]}, {first_path.name} beside it with {first[key]}; "
                "compare folders whose files were recorded alike"
            )


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """(rank, first step, path) of every trace in a folder, sorted."""
    named = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*.trace"))
    return sorted((int(name[1]), int(name[2]), path) for name, path in named if name)
