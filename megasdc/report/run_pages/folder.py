"""What is a path: a run folder, or a sweep folder? Found from what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megasdc.errors import DataError
from megasdc.report.run_pages.record import CONFIG_FILE, METRICS_FILE, is_run

SWEEP_FILES = ("sweep.json", "results.parquet")
Kind = Literal["run", "runs", "sweep"]


def is_sweep(path: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (path / SWEEP_FILES[0]).exists()


def kind_of(paths: Sequence[Path]) -> Kind:
    """What a report of these paths is about.

    Args:
        paths: at least one.

    Raises:
        DataError: one is neither run nor sweep, or they do not go together.
    """
    for path in paths:
        if not is_sweep(path) and not is_run(path):
            raise DataError(
                f"{path} {'holds' if path.is_dir() else 'is no folder that holds'} neither a run ({CONFIG_FILE}, "
                f"{METRICS_FILE} or events/) nor a sweep ({SWEEP_FILES[0]}); give a folder that "
                "megasdc.logging.run_dir or megasdc sweep --out names"
            )
    sweeps = [path for path in paths if is_sweep(path)]
    if sweeps and len(paths) > 1:
        raise DataError(f"{sweeps[0]} is a sweep, and {len(paths)} paths were given; a sweep has a page of its own")
    if sweeps:
        return "sweep"
    same = [path for place, path in enumerate(paths) if path.resolve() in [one.resolve() for one in paths[:place]]]
    if same:
        raise DataError(f"{same[0]} was given twice; give each run once")
    return "run" if len(paths) == 1 else "runs"
