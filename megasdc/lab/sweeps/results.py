"""Results of a sweep: tidy parquet tables beside the run folders, written and read here.

``sweep.json``: the sweep with its size applied, its cells, its nodes' profiles and versions. ``results.parquet``: one
row per cell, node and seed; cells that are equal on a node share a run, so a ``run_id`` may occur in several rows.
``series.parquet``: ``run_id, step, name, value``. ``runs/RUN_ID``: run folders.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megasdc.common.durable import replacing, write_durably
from megasdc.common.errors import StorageError
from megasdc.config.faults import load_profile
from megasdc.lab.sweeps.outcome import FAILED, RESULT_FILE, RunOutcome, read_outcome
from megasdc.lab.sweeps.plan import SweepPlan, measured_folder
from megasdc.lab.sweeps.sweep_file import SweepFile
from megasdc.metrics.writer import read_metrics

SWEEP_FILE, RESULTS_FILE, SERIES_FILE, RUNS_FOLDER = "sweep.json", "results.parquet", "series.parquet", "runs"
SERIES = ("train/loss", "train/grad_norm", "train/learning_rate", "train/skipped_steps", "eval/loss")
"""Metrics that are kept step by step, besides those of ``bounds/``; the rest stays in the run folders."""
PACKAGES = ("megasdc", "torch", "deepspeed", "megatron-core")
_PLACE = ("cell", "node", "profile", "control", "made_up", "seed", "start")
_PARTS = ("sweep", "size", "cells", "varied", "profiles", "places", "runs", "versions")
_SERIES_SCHEMA = pa.schema(
    [("run_id", pa.string()), ("step", pa.int64()), ("name", pa.string()), ("value", pa.float64())]
)
_FIXED = {
    "run_id": pa.string(),
    "cell": pa.string(),
    "node": pa.string(),
    "profile": pa.string(),
    "control": pa.bool_(),
    "made_up": pa.bool_(),
    "seed": pa.int64(),
    "start": pa.string(),
    "status": pa.string(),
    "reason": pa.string(),
    "final_loss": pa.float64(),
    "eval_loss": pa.float64(),
    "steps": pa.int64(),
    "skipped_steps": pa.int64(),
    "seconds": pa.float64(),
    "versions": pa.string(),
}


@dataclass(frozen=True)
class SweepResults:
    """Contents of a sweep's folder: ``sweep.json``, and ``results.parquet`` as rows.

    Rows are of finished runs only, in the order of the sweep.
    """

    folder: Path
    sweep: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def places(self) -> int:
        """Number of rows once every run has finished."""
        return len(self.sweep["places"])

    def run_folder(self, run_id: str) -> Path:
        """Folder of a run."""
        return self.folder / RUNS_FOLDER / run_id

    def series(self, run_ids: Iterable[str] | None = None, names: Iterable[str] | None = None) -> pa.Table:
        """Values step by step: a table with ``run_id, step, name, value``.

        Args:
            run_ids: of these runs; None: all.
            names: of these metrics; None: all.

        Returns:
            NaN where a run wrote NaN or Inf.
        """
        wanted = [("run_id", "in", list(run_ids))] if run_ids is not None else []
        wanted += [("name", "in", list(names))] if names is not None else []
        return pq.read_table(self.folder / SERIES_FILE, filters=wanted or None)


def read_sweep(folder: Path | str) -> SweepResults:
    """Reads the results of a sweep, also of one in progress.

    Raises:
        StorageError: the folder holds no sweep, is damaged, or has no tables yet.
    """
    root = Path(folder)
    try:
        sweep = json.loads((root / SWEEP_FILE).read_text(encoding="utf-8"))
        rows = pq.read_table(root / RESULTS_FILE).to_pylist()
    except FileNotFoundError as error:  # pyarrow's error has no filename
        missing_file = root / (RESULTS_FILE if (root / SWEEP_FILE).exists() else SWEEP_FILE)
        raise StorageError(
            f"{missing_file} is missing: {root} is no folder of `megasdc sweep`, or its tables are not "
            "written yet, as `megasdc sweep --table` does for an array job"
        ) from error
    except (OSError, ValueError) as error:
        raise StorageError(f"{root}: damaged ({error}); `megasdc sweep` with the same --out writes it anew") from error
    if missing := [name for name in _PARTS if name not in sweep]:
        raise StorageError(
            f"{root / SWEEP_FILE}: {missing[0]} is missing; `megasdc sweep` with the same --out writes it anew"
        )
    return SweepResults(root, sweep, rows)


def versions() -> dict[str, str]:
    """Versions of the packages that determine what a run computes."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


class ResultStore:
    """Outcomes and tables of a sweep."""

    def __init__(self, folder: Path, plan: SweepPlan) -> None:
        self.folder = folder
        self._plan = plan
        self._series: dict[str, pa.Table] = {}
        self.outcomes: dict[str, RunOutcome] = {}

    def run_folder(self, run_id: str) -> Path:
        """Folder of a run."""
        return self.folder / RUNS_FOLDER / run_id

    def load(self) -> None:
        """Reads the outcomes of finished runs."""
        for run_id in self._plan.runs:
            outcome = read_outcome(self.run_folder(run_id))
            if outcome is not None:
                self.outcomes[run_id] = outcome

    def forget_failed(self) -> None:
        """Removes the outcomes of failed runs, so that they run again."""
        for run_id, outcome in list(self.outcomes.items()):
            if outcome.status == FAILED:
                del self.outcomes[run_id]
                (self.run_folder(run_id) / RESULT_FILE).unlink()

    def write_plan(self, size: str | None) -> None:
        """Writes ``sweep.json``."""
        plan = self._plan
        content = {
            "sweep": plan.sweep.model_dump(mode="json"),
            "size": size,
            "cells": [cell.model_dump(mode="json") for cell in plan.cells],
            "varied": list(plan.varied),
            "profiles": {name: load_profile(name).model_dump(mode="json") for name in _profiles(plan.sweep)},
            "places": [asdict(place) for place in plan.places],
            "runs": {run.run_id: {"label": run.label, "last_step": run.last_step} for run in plan.runs.values()},
            "versions": versions(),
        }
        write_durably(self.folder / SWEEP_FILE, json.dumps(content, indent=2) + "\n")

    def write_tables(self) -> None:
        """Writes both tables, each atomically."""
        for run_id in self.outcomes:
            if run_id not in self._series:
                measured = measured_folder(self._plan.runs[run_id], self.run_folder(run_id))
                self._series[run_id] = _series_of(run_id, measured)
        results = self._results()
        series = pa.concat_tables([_SERIES_SCHEMA.empty_table(), *self._series.values()])
        for name, table in ((RESULTS_FILE, results), (SERIES_FILE, series)):
            with replacing(self.folder / name, "wb") as file:
                pq.write_table(table, file)

    def _results(self) -> pa.Table:
        plan, said = self._plan, json.dumps(versions())
        rows: list[dict[str, Any]] = []
        for place in plan.places:
            outcome = self.outcomes.get(place.run_id)
            if outcome is None:
                continue
            row = {name: getattr(place, name) for name in _PLACE}
            rows.append(
                {**row, **asdict(outcome), "versions": said, **{path: place.settings.get(path) for path in plan.varied}}
            )
        columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in _FIXED.items()}
        columns |= {path: _column([row[path] for row in rows]) for path in plan.varied}
        return pa.table(columns)


def _profiles(sweep: SweepFile) -> list[str]:
    """Names of the nodes' profiles, each once; their contents are stored, since the files may change."""
    return list(dict.fromkeys(node.profile for node in sweep.nodes if node.profile is not None))


def _column(values: Sequence[Any]) -> pa.Array:
    """Numbers as numbers, anything else as JSON; null where a cell does not set it."""
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else json.dumps(value) for value in values], pa.string())


def _series_of(run_id: str, folder: Path) -> pa.Table:
    found = [
        (row["step"], name, math.nan if value is None else float(value))
        for row in read_metrics(folder)
        for name, value in row.items()
        if name in SERIES or name.startswith("bounds/")
    ]
    steps, names, values = zip(*found, strict=True) if found else ((), (), ())
    return pa.table([[run_id] * len(steps), list(steps), list(names), list(values)], schema=_SERIES_SCHEMA)
