"""Golden traces: checksums of a seeded workload on trusted hardware, and the key of the environments they hold for.

The file is a zip archive: ``header.json`` and one trace for each case and rank. The header holds the SHA-256 of every
member and of itself, so that a truncated or edited file is refused.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.errors import StorageError, TraceError
from megasdc.parallel.dims import ParallelDims
from megasdc.program import write_whole
from megasdc.sdc.trace import Trace
from megasdc.sdc.trace_file import TraceWriter, read_trace
from megasdc.tensors.checksum import ALGORITHMS

FORMAT = "megasdc.golden.v1"
_HEADER = "header.json"
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError, ValueError, OSError)
"""Exceptions that reading a damaged zip file may raise."""


@dataclass(frozen=True)
class Case:
    """One set of inputs of the workload.

    Args:
        sequence_length: tokens s of a sample.
    """

    seed: int
    sequence_length: int


@dataclass(frozen=True)
class Golden:
    """The contents of a golden file.

    Args:
        key: properties, by name, that must be equal for results to be comparable.
        layout: sizes of the parallel dimensions; every rank has a trace in each case.
        repeats: how often the workload was repeated, with equal results, when it was recorded.
        recorded: when and where, for people.
        traces: by (case, rank).
    """

    key: dict[str, Any]
    config: dict[str, Any]
    layout: ParallelDims
    algorithm: str
    cases: tuple[Case, ...]
    repeats: int
    recorded: dict[str, Any]
    traces: Mapping[tuple[int, int], Trace]


def key_differences(expected: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Differing parts of two keys, as (expected, got); a missing part is None."""
    names = sorted(set(expected) | set(got))
    return {name: (expected.get(name), got.get(name)) for name in names if expected.get(name) != got.get(name)}


def save_golden(path: Path, golden: Golden) -> None:
    """Write a golden file atomically.

    Args:
        path: replaced if it exists; of a link the target is replaced; a device or pipe is written to.

    Raises:
        StorageError: it cannot be written.
    """
    header: dict[str, Any] = {
        "format": FORMAT,
        "key": golden.key,
        "config": golden.config,
        "layout": golden.layout.layout,
        "algorithm": golden.algorithm,
        "cases": [asdict(case) for case in golden.cases],
        "repeats": golden.repeats,
        "recorded": golden.recorded,
        "sha256": {},
    }
    content = io.BytesIO()
    try:
        with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
            for (case, rank), trace in sorted(golden.traces.items()):
                data = _trace_bytes(trace, Path(scratch) / "trace")
                header["sha256"][_member(case, rank)] = hashlib.sha256(data).hexdigest()
                archive.writestr(_member(case, rank), data)
            header["digest"] = header_digest(header)
            archive.writestr(_HEADER, json.dumps(header, indent=1))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --out") from error


def load_header(path: Path) -> dict[str, Any]:
    """Read the header of a golden file and check its digest.

    Raises:
        TraceError: the file is missing, truncated, edited or of another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            header = json.loads(archive.read(_HEADER))
        if header.get("format") != FORMAT:
            raise TraceError(f"{path}: the format is {header.get('format')!r}, needed is {FORMAT!r}")
        if header.pop("digest", None) != header_digest(header):
            raise TraceError(f"{path}: the header is not the one that was written; record the golden trace again")
    except FileNotFoundError as error:
        raise TraceError(f"{path} does not exist; `megasdc golden record --config F --out {path}` makes it") from error
    except (*_DAMAGED, AttributeError) as error:
        raise TraceError(f"{path} is damaged or not a golden trace: {error}; copy or record it again") from error
    if header["algorithm"] not in ALGORITHMS:
        raise TraceError(
            f"{path}: checksum algorithm {header['algorithm']!r} is unknown here; known are {', '.join(ALGORITHMS)}"
        )
    return header


def load_golden(path: Path, rank: int | None = None) -> Golden:
    """Read a golden file and check the digest of every trace that is read.

    Args:
        rank: only the traces of this rank; None: of all.

    Raises:
        TraceError: the file is missing, truncated, edited, of another format, or names an unknown algorithm.
    """
    header = load_header(path)
    layout = ParallelDims(**header["layout"])
    cases = tuple(Case(**case) for case in header["cases"])
    ranks = range(layout.world_size) if rank is None else [rank]
    traces = {}
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as scratch:
            for case in range(len(cases)):
                for one in ranks:
                    data = archive.read(_member(case, one))
                    if hashlib.sha256(data).hexdigest() != header["sha256"].get(_member(case, one)):
                        raise TraceError(f"{path}: {_member(case, one)} is not the trace that was written")
                    file = Path(scratch) / "trace"
                    file.write_bytes(data)
                    traces[case, one] = read_trace(file)[1]
    except _DAMAGED as error:
        raise TraceError(f"{path} is damaged: {error}; copy or record it again") from error
    return Golden(
        header["key"],
        header["config"],
        layout,
        header["algorithm"],
        cases,
        header["repeats"],
        header["recorded"],
        traces,
    )


def _member(case: int, rank: int) -> str:
    return f"case_{case:03d}/rank_{rank:05d}.arrow"


def _trace_bytes(trace: Trace, scratch: Path) -> bytes:
    writer = TraceWriter(scratch, {})
    writer.append(trace)
    writer.close()
    return scratch.read_bytes()


def header_digest(header: Mapping[str, Any]) -> str:
    """SHA-256 of a header, and so of the whole file, since the header holds the digests of all members."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
