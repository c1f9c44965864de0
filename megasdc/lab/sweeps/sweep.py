"""``megasdc sweep``: checks everything, estimates, runs what is not finished, keeps the tables up to date."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megasdc.common.errors import ConfigError, StorageError
from megasdc.events import EventLog
from megasdc.lab.sweeps.estimate import estimate_s, measure_speeds, shape_of, speeds_from
from megasdc.lab.sweeps.plan import Plan, PlannedRun, build_plan, runs_of
from megasdc.lab.sweeps.prepared_data import find_missing_data, prepare_missing
from megasdc.lab.sweeps.results import SWEEP_FILE, ResultStore, read_sweep
from megasdc.lab.sweeps.runner import Runner, alone, judge_again
from megasdc.lab.sweeps.slurm import write_job
from megasdc.lab.sweeps.sweep_file import SweepFile, load_sweep
from megasdc.lab.sweeps.table import SweepTable, tabulate
from megasdc.parallel.local_ranks import count_accelerators

logger = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
OnEstimate = Callable[[float | None, int, int], None]
"""Takes seconds (None where the first steps of a run failed), number of remaining runs, number of concurrent runs."""
ARRAY_AT_ONCE = 32


@dataclass(frozen=True)
class Sweep:
    """A sweep that was read and checked, before any run is started.

    Args:
        chosen: runs to run, by id.
        size: the chosen size; None: the file has none.
        out: folder of the results.
    """

    plan: Plan
    chosen: dict[str, PlannedRun]
    size: str | None
    out: Path


def open_sweep(
    path: Path, size: str | None = None, out: Path | None = None, only: Sequence[str] = (), *, to_run: bool = True
) -> Sweep:
    """Reads a sweep file and checks every run of it; nothing is written.

    Args:
        size: one of its sizes; None: its first.
        out: folder of the results; None: ``runs/sweeps/NAME-SIZE``.
        only: names of the cells to run; empty: all.
        to_run: check also that data exist or can be prepared.

    Raises:
        ConfigError: with every problem; also if the folder holds another sweep.
    """
    sweep = load_sweep(path, size)
    size = next(iter(sweep.sizes), None)
    plan = build_plan(sweep)
    chosen = runs_of(plan, only)
    folder = out or Path("runs/sweeps") / (sweep.name if size is None else f"{sweep.name}-{size}")
    _check_folder(folder, sweep, size)
    if to_run:
        find_missing_data(plan.runs.values())
    return Sweep(plan, chosen, size, folder.absolute())


def _check_folder(folder: Path, sweep: SweepFile, size: str | None) -> None:
    """Refuses a folder of another sweep; a changed sweep of the same name and size keeps runs that are unchanged."""
    path = folder / SWEEP_FILE
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        name, its_size = found["sweep"]["name"], found["size"]
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged and is written anew: %s", path, error)
        return
    if (name, its_size) != (sweep.name, size):
        raise ConfigError(
            f"--out: {folder} holds the sweep {name!r} of size {its_size!r}, not "
            f"{sweep.name!r} of size {size!r}; choose another folder."
        )


def run_sweep(
    sweep: Sweep,
    workers: int | None = None,
    *,
    progress: bool = True,
    retry_failed: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
    on_estimate: OnEstimate = lambda seconds, left, workers: None,
) -> SweepTable:
    """Runs all runs that are not finished, and returns the table.

    Args:
        workers: number of concurrent runs; None: as cores and devices allow.
        progress: show the bar of data preparation.
        retry_failed: repeat failed runs.
        on_progress: called with (what, done, total).
        on_estimate: called before the first run, if more runs remain than ``workers``.

    Raises:
        ConfigError: there are too few devices.
        MegasdcError: data cannot be prepared, the first steps of a run fail, or the folder cannot be written.
    """
    workers = choose_workers(sweep.plan, workers)
    with alone(sweep.out):
        prepare_missing(find_missing_data(sweep.plan.runs.values()), progress)
        store = _open_store(sweep, retry_failed)
        left = [run for run in sweep.chosen.values() if run.run_id not in store.outcomes]
        store.write_tables()
        if len(left) > workers:
            _estimate(sweep, store, left, workers, on_estimate)
        total = len(sweep.chosen)
        on_progress("runs", total - len(left), total)
        events = EventLog(sweep.out, 0)
        try:
            for _ in Runner(store, events, workers, sweep.plan.sweep).run(sweep.chosen):
                store.write_tables()
                on_progress("runs", len(store.outcomes.keys() & sweep.chosen.keys()), total)
        finally:
            events.close()
        store.write_tables()
    return tabulate(read_sweep(sweep.out))


def run_task(sweep: Sweep, number: int) -> PlannedRun:
    """Runs one run of a sweep, as a task of an array job; ``gather`` writes the tables.

    Args:
        number: index of the run in the plan.

    Raises:
        ConfigError: there is no such run, or there are too few devices.
    """
    runs = list(sweep.plan.runs.values())
    if not 0 <= number < len(runs):
        raise ConfigError(f"--task: {number}; the sweep's runs are 0 to {len(runs) - 1}.")
    choose_workers(sweep.plan, 1)
    run = runs[number]
    store = ResultStore(sweep.out, sweep.plan)
    if run.awaited:
        store.load()
        if missing := [one for one in run.awaited if one not in store.outcomes]:
            raise ConfigError(f"--task: run {number} needs {' and '.join(missing)}, which has not finished.")
    with alone(store.run_folder(run.run_id)):
        store.load()  # under the lock: an earlier task may have finished the run
        with closing(EventLog(store.run_folder(run.run_id) / "task", 0)) as events:
            for _ in Runner(store, events, 1, sweep.plan.sweep).run({run.run_id: run}):
                pass
    return run


def gather(sweep: Sweep) -> SweepTable:
    """Writes the tables of the finished runs, and returns the scored table."""
    _open_store(sweep, retry_failed=False).write_tables()
    return tabulate(read_sweep(sweep.out))


def write_slurm(sweep: Sweep, arguments: list[str]) -> Path:
    """Writes the array job into the sweep's folder; see ``slurm.write_job``."""
    with alone(sweep.out):
        prepare_missing(find_missing_data(sweep.plan.runs.values()), progress=True)
        ResultStore(sweep.out, sweep.plan).write_plan(sweep.size)
        return write_job(sweep.plan, arguments, sweep.out, ARRAY_AT_ONCE)


def choose_workers(plan: Plan, asked: int | None = None) -> int:
    """Number of concurrent runs, as ``asked`` by the user; None: as many as cores and devices allow.

    That is as this process has cores for their ranks and threads, and devices for their ranks where it has any.

    Raises:
        ConfigError: there are too few devices for one run, or for ``asked`` runs.
    """
    ranks, devices = plan.sweep.ranks, count_accelerators()
    if devices and devices < ranks * (asked or 1):
        wanted = f"{asked} runs of {ranks} ranks side by side need" if asked else f"a run of {ranks} ranks needs"
        raise ConfigError(
            f"--workers: {wanted} a device for each rank, and there are {devices}; ask for fewer, give more in "
            'CUDA_VISIBLE_DEVICES, or set it to "" to compute on the processor.'
        )
    if asked:
        return asked
    threads = max(run.config["megasdc"]["parallel"]["threads"] or 1 for run in plan.runs.values())
    at_once = max(1, len(os.sched_getaffinity(0)) // (ranks * threads))
    return min(at_once, devices // ranks) if devices else at_once


def _open_store(sweep: Sweep, retry_failed: bool) -> ResultStore:
    store = ResultStore(sweep.out, sweep.plan)
    try:
        sweep.out.mkdir(parents=True, exist_ok=True)
        store.write_plan(sweep.size)
    except OSError as error:
        raise StorageError(f"{sweep.out} cannot be written ({error.strerror}); choose another --out") from error
    store.load()
    judge_again(store, sweep.plan)
    if retry_failed:
        store.forget_failed()
    return store


def _estimate(sweep: Sweep, store: ResultStore, left: list[PlannedRun], workers: int, tell: OnEstimate) -> None:
    """Estimates the remaining time, from finished runs where there are any, else from the first steps of a run."""
    speeds = speeds_from(sweep.plan.runs.values(), store.outcomes)
    unknown = [run for run in left if shape_of(run) not in speeds]
    if unknown:
        speeds |= measure_speeds(unknown, sweep.out, workers)
    tell(estimate_s(left, speeds, workers), len(left), workers)
