"""How is a trace kept? One Arrow stream a rank: columns of addresses and checksums.

A file whose writer was killed is readable up to the last whole step.

A resumed run writes a new file, named after the first step in it; reading a folder drops what an earlier file holds of
steps that were run again.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa

from megasdc.addresses import PHASES, Address
from megasdc.errors import TraceError
from megasdc.sdc.trace import Trace

FORMAT = "megasdc.trace.v1"
_NAME = re.compile(r"rank_(\d{5,})\.from_step_(\d{8,})\.arrow")
_TEXT = pa.dictionary(pa.int32(), pa.string())
_COLUMNS = {
    "step": pa.int32(),
    "micro_batch": pa.int32(),
    "phase": _TEXT,
    "fqn": _TEXT,
    "slot": _TEXT,
    "checksum": pa.uint64(),
}


def trace_path(folder: Path, rank: int, first_step: int) -> Path:
    """Name of the file that a rank writes from a step on."""
    return folder / f"rank_{rank:05d}.from_step_{first_step:08d}.arrow"


class TraceWriter:
    """Writes one rank's trace, a batch a call; what was appended is in the file when ``append`` returns.

    Args:
        path: replaced if it exists.
        header: about the rank and the run, plain values; ``algorithm`` among them.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"format": FORMAT, "header": json.dumps(header)}
        self._schema = pa.schema(list(_COLUMNS.items()), metadata=metadata)
        self._file = open(path, "wb")  # noqa: SIM115 - lives as long as the run
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, compression="zstd")
        self._stream = pa.ipc.new_stream(self._file, self._schema, options=options)
        self._dictionaries: dict[str, dict[str, int]] = {"phase": {}, "fqn": {}, "slot": {}}

    def append(self, trace: Trace) -> None:
        """Write what a rank computed since the last call."""
        columns = {
            "step": pa.array([address.step for address in trace.addresses], pa.int32()),
            "micro_batch": pa.array([address.micro_batch for address in trace.addresses], pa.int32()),
            "checksum": pa.array(trace.checksums, pa.uint64()),
        }
        for name, known in self._dictionaries.items():
            codes = [known.setdefault(getattr(address, name), len(known)) for address in trace.addresses]
            columns[name] = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(list(known)))
        self._stream.write_batch(pa.record_batch([columns[name] for name in _COLUMNS], schema=self._schema))
        self._file.flush()

    def close(self) -> None:
        """End the stream."""
        self._stream.close()
        self._file.close()


def read_trace(path: Path) -> tuple[dict[str, Any], Trace]:
    """Read one file.

    Args:
        path: the file; of one whose writer was killed, every whole batch is read.

    Returns:
        The header and the trace.

    Raises:
        TraceError: it is no trace file, or its beginning is missing.
    """
    trace = Trace()
    try:
        with pa.OSFile(str(path), "rb") as file:
            stream = pa.ipc.open_stream(file)
            metadata = stream.schema.metadata or {}
            if metadata.get(b"format") != FORMAT.encode():
                raise TraceError(f"{path}: the format is {metadata.get(b'format')!r}, needed is {FORMAT!r}")
            header = json.loads(metadata[b"header"])
            while True:
                try:
                    batch = stream.read_next_batch()
                except (StopIteration, pa.ArrowInvalid, OSError):
                    break  # the end, or where a killed writer left off
                _append_batch(trace, batch)
    except (pa.ArrowInvalid, OSError, ValueError, KeyError) as error:
        raise TraceError(f"{path}: this is not a trace file, or its beginning is missing: {error}") from error
    return header, trace


def _append_batch(trace: Trace, batch: pa.RecordBatch) -> None:
    columns = [batch.column(name).to_pylist() for name in _COLUMNS]
    for step, micro_batch, phase, fqn, slot, checksum in zip(*columns, strict=True):
        if phase not in PHASES:
            raise ValueError(f"phase {phase!r} is not one of {', '.join(PHASES)}")
        trace.addresses.append(Address(step, micro_batch, phase, fqn, slot))
        trace.checksums.append(checksum)


def read_folder(folder: Path) -> dict[int, tuple[dict[str, Any], Trace]]:
    """Read every rank's trace of a run.

    Args:
        folder: the ``trace`` folder of a run.

    Returns:
        Header and trace by rank; of steps that were run again after a resume, the later ones.

    Raises:
        TraceError: there is no trace in the folder, or one cannot be read.
    """
    named = ((_NAME.fullmatch(path.name), path) for path in folder.glob("*.arrow"))
    files = sorted((int(name[1]), int(name[2]), path) for name, path in named if name)
    if not files:
        raise TraceError(
            f"{folder} holds no trace: rank_NNNNN.from_step_NNNNNNNN.arrow is what a traced run writes there"
        )
    ranks: dict[int, tuple[dict[str, Any], Trace]] = {}
    for rank, first_step, path in files:
        header, trace = read_trace(path)
        if rank in ranks:
            earlier = ranks[rank][1]
            kept = [i for i, address in enumerate(earlier.addresses) if address.step < first_step]
            joined = Trace([earlier.addresses[i] for i in kept], [earlier.checksums[i] for i in kept])
            joined.extend(trace)
            trace = joined
        ranks[rank] = header, trace
    return ranks
