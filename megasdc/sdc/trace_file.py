"""Trace files: one Arrow stream for each rank, columns of addresses and checksums, cut into frames.

A frame holds what one step added to the stream, preceded by its length and checksums of both. So a file whose writer
was killed is readable up to the last complete step, and is told apart from a damaged one. Arrow itself reads damaged
bytes into wrong values, or aborts the process (26.0.1).

A resumed run writes a new file, named after its first step; reading a folder drops the rerun steps of earlier files.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from megasdc.common.addresses import PHASES, Address
from megasdc.common.durable import LineFile, parse_json, rename_durably
from megasdc.common.errors import LaunchError, TraceError
from megasdc.sdc.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "megasdc.trace.v1"
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
        header: about the rank and the run, plain values; includes the fields of ``RECORDED_ALIKE``.
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
