"""``megasdc sweep``: checks everything, estimates, runs what is not finished, keeps the tables up to date.

Estimated duration of a sweep, from a few steps of one run of each shape, as many at once as later.

A sweep as a SLURM array job, one run per task; runs that others await come first.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from typing import Any

from megasdc.common.errors import ConfigError, StorageError
from megasdc.data.manifest import digest_settings
from megasdc.events import EventLog
from megasdc.lab.sweeps.outcome import Outcome
from megasdc.lab.sweeps.plan import Plan, PlannedRun, build_plan, measured_folder, runs_of
from megasdc.lab.sweeps.prepared_data import find_missing_data, prepare_missing
from megasdc.lab.sweeps.results import SWEEP_FILE, ResultStore, read_sweep
from megasdc.lab.sweeps.run_process import start_ranks, warm_up
from megasdc.lab.sweeps.runner import Runner, alone, judge_again, write_config
from megasdc.lab.sweeps.sweep_file import SweepFile, load_sweep
from megasdc.lab.sweeps.table import SweepTable, tabulate
from megasdc.metrics.writer import read_metrics
from megasdc.parallel.local_ranks import count_accelerators
from megasdc.parallel.processes import fork_server

PROBE_FOLDER = ".probe"
PROBE_STEPS = 6
"""Steps of a probe; the first ones warm up and are not counted."""
WARM_STEPS = 2


@dataclass(frozen=True)
class Speed:
    """Duration of runs of one shape; ``step_s`` is with as many runs at once as later.

    ``overhead_s``: seconds of a run besides its steps: start, evaluation, save.
    """

    step_s: float
    overhead_s: float

    def seconds(self, run: PlannedRun) -> float:
        """Duration of one run."""
        return self.overhead_s + self.step_s * steps_of(run)


def steps_of(run: PlannedRun) -> int:
    """Steps that a run takes itself, after its start checkpoint."""
    return run.last_step - (0 if run.start is None else run.start.steps_done)


def shape_of(run: PlannedRun) -> str:
    """Digest of the settings that determine the cost of a step: model, batch, layout, study."""
    own, batch = (
        run.config["megasdc"],
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    )
    kept = {
        "model": own["model"],
        "parallel": own["parallel"],
        "study": own["study"],
        "length": own["data"]["sequence_length"],
        "ranks": run.ranks,
    }
    return digest_settings({**kept, **{key: run.config.get(key) for key in batch}})


def measure_speeds(runs: Iterable[PlannedRun], folder: Path, workers: int) -> dict[str, Speed]:
    """Runs the first steps of one run of each shape, an unhealthy one where there is one, ``workers`` copies at once.

    A folder in the sweep's is created and removed. Speeds are by shape; those whose first steps fail are omitted, since
    their runs will report the cause.
    """
    chosen: dict[str, PlannedRun] = {}
    for run in sorted(runs, key=lambda run: run.healthy):
        chosen.setdefault(shape_of(run), run)
    context = fork_server()
    warm_up(context)
    try:
        speeds = {shape: _probe(run, folder / PROBE_FOLDER, workers, context) for shape, run in chosen.items()}
        return {shape: speed for shape, speed in speeds.items() if speed is not None}
    finally:
        shutil.rmtree(folder / PROBE_FOLDER, ignore_errors=True)


def _probe(run: PlannedRun, scratch: Path, workers: int, context: Any) -> Speed | None:
    began = time.monotonic()
    ranks = []
    folders = [scratch / f"{run.run_id}_{slot}" for slot in range(workers)]
    try:
        for slot, folder in enumerate(folders):
            folder.mkdir(parents=True)
            steps = min(PROBE_STEPS, run.config["megasdc"]["training"]["steps"])
            config = write_config(run, folder, stop_step=steps)
            ranks.append(start_ranks(context, config, folder, run.ranks, slot))
        for one in ranks:
            while one.settle() is None:
                wait(one.sentinels)
    finally:
        for one in ranks:
            one.end()
    wall = time.monotonic() - began
    measured = [seconds for folder in folders if (seconds := _step_seconds(measured_folder(run, folder))) is not None]
    if not measured:
        return None
    step_s = median(measured)
    return Speed(step_s, max(0.0, wall - steps * step_s))


def _step_seconds(folder: Path) -> float | None:
    rows = [row for row in read_metrics(folder) if "speed/step_s" in row]
    if not rows:
        return None
    return median(row["speed/step_s"] for row in rows[min(WARM_STEPS, len(rows) - 1) :])


def speeds_from(runs: Iterable[PlannedRun], outcomes: dict[str, Outcome]) -> dict[str, Speed]:
    """Speeds from finished runs, by shape; their overhead is contained in the seconds of a step."""
    found: dict[str, list[float]] = {}
    for run in runs:
        outcome = outcomes.get(run.run_id)
        if outcome is not None and not any(outcome.exit_codes) and outcome.seconds:
            found.setdefault(shape_of(run), []).append(outcome.seconds / max(1, steps_of(run)))
    return {shape: Speed(median(seconds), 0.0) for shape, seconds in found.items()}


def estimate_s(runs: Sequence[PlannedRun], speeds: dict[str, Speed], workers: int) -> float | None:
    """Seconds until all runs are done; None where the speed of a shape is not known."""
    if any(shape_of(run) not in speeds for run in runs):
        return None
    seconds = [speeds[shape_of(run)].seconds(run) for run in runs]
    return max(sum(seconds) / workers, max(seconds, default=0.0))


SCRIPT, SUBMIT = "sweep.sbatch", "submit.sh"

_SCRIPT = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --output="{out}/slurm-%A_%a.log"
#
# One run of the sweep a task; submit.sh gives the range of tasks. Add what your cluster needs: partition, time, memory,
# --gpus-per-node={ranks} on hosts with GPUs, --cpus-per-task. A task that was cut off is submitted again as it is: it
# goes on from its checkpoint, and one that has finished does nothing. Paths count from the folder of submission.
set -euo pipefail
cd {folder}
exec {command} --task "$SLURM_ARRAY_TASK_ID"
"""

_SUBMIT = """#!/usr/bin/env bash
# Submits {count} runs: {donors} that others start from, then the rest, of which none awaits a later one,
# then the tables.
# Further options go to every sbatch: bash {submit} --partition=gpu --time=04:00:00
set -euo pipefail
cd {folder}
after=()
{stages}
sbatch --parsable "$@" --nodes=1 --ntasks=1 --dependency=afterany:"$job" --output={out}/slurm-tables.log \\
    --wrap {gather}
"""

_STAGE = """job=$(sbatch --parsable "$@" "${{after[@]}}" --array={first}-{last}%{at_once} {script})
job=${{job%%;*}}
after=(--dependency=afterany:"$job")"""


def write_job(plan: Plan, arguments: list[str], out: Path, at_once: int) -> Path:
    """Writes the array job and the script that submits it, to be run with bash; returns the script.

    A task's number is the index of its run. ``arguments``: of ``megasdc sweep``, without ``--slurm``; ``out``: the
    sweep's folder, shared by all hosts; ``at_once``: maximum of concurrent tasks.
    """
    command = shlex.join([sys.executable, "-m", "megasdc", "sweep", *arguments])
    runs = list(plan.runs.values())
    donors = sum(run.donor for run in runs)
    folder, quoted = shlex.quote(str(Path.cwd())), shlex.quote(str(out))
    script = _SCRIPT.format(name=plan.sweep.name, out=out, ranks=plan.sweep.ranks, folder=folder, command=command)
    (out / SCRIPT).write_text(script, encoding="utf-8")
    free = sum(run.condition is None for run in runs)
    parts = ((0, donors - 1), (donors, free - 1), (free, len(runs) - 1))
    ranges = [part for part in parts if part[0] <= part[1]]
    at = shlex.quote(str(out / SCRIPT))
    stages = "\n".join(_STAGE.format(first=first, last=last, at_once=at_once, script=at) for first, last in ranges)
    submit = out / SUBMIT
    text = _SUBMIT.format(
        count=len(runs),
        donors=donors,
        submit=submit,
        folder=folder,
        stages=stages,
        out=quoted,
        gather=shlex.quote(f"cd {folder} && {command} --table"),
    )
    submit.write_text(text, encoding="utf-8")
    return submit


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
