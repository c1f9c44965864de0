"""Kind of a path, from its contents: folder of a run, a study or a sweep, or a result of DropCompute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megasdc.common.errors import DataError
from megasdc.ops.run_folder.record import CONFIG_FILE, METRICS_FILE, is_run
from megasdc.ops.run_folder.study_log import STUDY_FOLDER

SWEEP_FILES = ("sweep.json", "results.parquet")
Kind = Literal["run", "runs", "study", "sweep", "drops"]


def is_sweep(path: Path) -> bool:
    """Whether a folder holds a sweep."""
    return (path / SWEEP_FILES[0]).exists()


def is_study(path: Path) -> bool:
    """Whether a folder holds a study: several runs in one launch."""
    return any((path / STUDY_FOLDER).glob("rank_*.jsonl"))


def kind_of(paths: Sequence[Path]) -> Kind:
    """The kind of the report on these paths, at least one.

    Raises:
        DataError: one is of no kind, or they are of different kinds.
    """
    files = [path for path in paths if path.suffix == ".json"]
    if files and len(files) < len(paths):
        raise DataError(f"{files[0]} is a result of DropCompute; folders have pages of their own, leave them out")
    if files:
        return "drops"
    for path in paths:
        if not any(test(path) for test in (is_sweep, is_study, is_run)):
            raise DataError(
                f"{path} {'' if path.is_dir() else 'is no folder, and '}holds no run ({CONFIG_FILE}, {METRICS_FILE} or "
                f"events/), no study (study/) and no sweep ({SWEEP_FILES[0]}); give a folder that "
                "megasdc.logging.run_dir or megasdc sweep --out names, or JSON results of DropCompute"
            )
    kinds: dict[Kind, list[Path]] = {"sweep": [*filter(is_sweep, paths)], "study": [*filter(is_study, paths)]}
    for kind, found in kinds.items():
        if found and len(paths) > 1:
            raise DataError(f"{found[0]} is a {kind}, and {len(paths)} paths were given; a {kind} has its own page")
        if found:
            return kind
    same = [path for place, path in enumerate(paths) if path.resolve() in [one.resolve() for one in paths[:place]]]
    if same:
        raise DataError(f"{same[0]} was given twice; give each run once")
    return "run" if len(paths) == 1 else "runs"
