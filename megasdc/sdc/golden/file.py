"""Golden traces: checksums of a seeded workload on trusted hardware, and the key of the environments they hold for.

The file is an archive of ``megasdc.sdc.golden.sealed``: a header and one trace for each case and rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import StorageError
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.golden.sealed import read_members, read_sealed_header, trace_from_bytes, trace_to_bytes, write_sealed
from megasdc.sdc.trace import Trace

FORMAT = "megasdc.golden.v1"


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
    }
    try:
        traces = sorted(golden.traces.items())
        write_sealed(path, header, {_member(*place): trace_to_bytes(trace) for place, trace in traces})
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --out") from error


def load_header(path: Path) -> dict[str, Any]:
    """Read the header of a golden file and check its digest.

    Raises:
        TraceError: the file is missing, truncated, edited or of another format.
    """
    return read_sealed_header(path, (FORMAT,), f"`megasdc golden record --config F --out {path}` makes it")


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
    places = {_member(case, one): (case, one) for case in range(len(cases)) for one in ranks}
    found = read_members(path, header, places)
    return Golden(
        header["key"],
        header["config"],
        layout,
        header["algorithm"],
        cases,
        header["repeats"],
        header["recorded"],
        {place: trace_from_bytes(found[name]) for name, place in places.items()},
    )


def _member(case: int, rank: int) -> str:
    return f"case_{case:03d}/rank_{rank:05d}.arrow"
