"""``megasdc sweep``: checks everything, estimates, runs what is not finished, keeps the tables up to date.

Data of all runs are checked before the first run, and prepared where they are missing. The duration is estimated from a
few steps of one run of each shape, as many at once as later. Several runs go at once, or one per task of a SLURM array
job; runs that others await come first.

No finished run is repeated, whenever the sweep is killed: a run is finished if its result file exists. An interrupted
run resumes from its own checkpoint if it has one, else it starts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from statistics import median
from typing import Any

from megasdc.checkpoint.files import step_folder
from megasdc.common.durable import rename_durably, write_durably
from megasdc.common.errors import ConfigError, MegasdcError, PeerError, StorageError
from megasdc.common.run_lock import open_lock_file
from megasdc.common.words import number_of
from megasdc.config.data import DataSection
from megasdc.config.sections import MegasdcSection
from megasdc.data.manifest import MANIFEST_FILE, DataManifest, digest_settings, verify_prepared
from megasdc.data.prepare import describe_settings, prepare
from megasdc.events import EventLog
from megasdc.lab.sweeps.outcome import DIVERGED, DONE, FAILED, RunOutcome, Yardstick, judge_run, write_outcome
from megasdc.lab.sweeps.plan import PlannedRun, StartCheckpoint, SweepPlan, build_plan, measured_folder, runs_of
from megasdc.lab.sweeps.results import SWEEP_FILE, ResultStore, read_sweep
from megasdc.lab.sweeps.run_process import RunningRanks, start_ranks, warm_up
from megasdc.lab.sweeps.sweep_file import SweepFile, load_sweep
from megasdc.lab.sweeps.table import SweepTable, tabulate
from megasdc.metrics.writer import read_metrics
from megasdc.parallel.local_ranks import count_accelerators
from megasdc.parallel.processes import fork_server


def data_of(run: PlannedRun) -> DataSection:
    """The data section of a run."""
    return MegasdcSection.model_validate(run.config["megasdc"]).data


def find_missing_data(runs: Iterable[PlannedRun]) -> list[DataSection]:
    """Checks that data are complete, or that their sources exist; returns the sections to prepare, each once.

    A source on the Hugging Face hub is not checked.

    Raises:
        ConfigError: data are damaged, or sources are missing; all problems at once.
    """
    missing, problems = [], []
    for section in {(data := data_of(run)).model_dump_json(): data for run in runs}.values():
        try:
            if all((Path(folder) / MANIFEST_FILE).exists() for folder in section.folders):
                _verify(section)
            elif section.blend:
                problems.append(f"megasdc.data.blend: {section.folders} are not all prepared; prepare them first.")
            else:
                describe_settings(section)
                missing.append(section)
        except MegasdcError as error:
            problems.append(f"megasdc.data: {error}")
    if problems:
        raise ConfigError(problems)
    return missing


def _verify(section: DataSection) -> None:
    if not section.blend:
        verify_prepared(section.path)
        return
    from megasdc.data.dataset import verify_section_data  # imports torch and Megatron-core, which takes seconds

    verify_section_data(section)


def prepare_missing(missing: Iterable[DataSection], progress: bool) -> None:
    """Prepares data, on all cores of this process; raises as ``prepare``."""
    for section in missing:
        prepare(section, workers=len(os.sched_getaffinity(0)), progress=progress)


def frequency_entropy(section: DataSection) -> float:
    """Loss of a model that knows token frequencies alone, nats; of a blend, that of its first part."""
    return DataManifest.load(section.folders[0]).unigram_entropy_nats


CONFIG_FILE = "config.json"
CHECKPOINTS = "checkpoints"
MOST_ATTEMPTS = 3
"""Maximum of starts of a run whose processes are killed by a signal."""


@dataclass
class _Active:
    """A run in progress."""

    run: PlannedRun
    ranks: RunningRanks
    slot: int
    began: float


class Runner:
    """Runs all runs that are not finished, ``workers`` at once.

    ``store``: loaded; ``events``: receives the start and end of each run; ``sweep``: criteria for runs, and whether
    checkpoints are kept.
    """

    def __init__(
        self,
        store: ResultStore,
        events: EventLog,
        workers: int,
        sweep: SweepFile,
    ) -> None:
        self._store = store
        self._events = events
        self._workers = workers
        self._sweep = sweep
        self._context = fork_server()
        self._active: list[_Active] = []
        self._attempts: dict[str, int] = {}

    def run(self, runs: dict[str, PlannedRun]) -> Iterator[RunOutcome]:
        """Runs those that have no outcome yet; yields each outcome, once its result file exists.

        ``runs`` is by id, including those from which others start. Raises ``StorageError`` where a run folder cannot be
        written.
        """
        waiting = [run for run in runs.values() if run.run_id not in self._store.outcomes]
        try:
            while waiting or self._active:
                self._fill(waiting)
                outcomes = [self._not_run(run, why) for run in list(waiting) if (why := self._why_not(run))]
                waiting[:] = [run for run in waiting if run.run_id not in {one.run_id for one in outcomes}]
                if not outcomes:
                    wait([sentinel for active in self._active for sentinel in active.ranks.sentinels])
                for active in list(self._active):
                    if (codes := active.ranks.settle()) is not None:
                        self._active.remove(active)
                        if self._again(active, codes):
                            waiting.insert(0, active.run)
                        else:
                            outcomes.append(self._finish(active, codes))
                yield from outcomes
        finally:
            for active in self._active:
                active.ranks.end()

    def _fill(self, waiting: list[PlannedRun]) -> None:
        for run in list(waiting):
            free = sorted(set(range(self._workers)) - {active.slot for active in self._active})
            if not free:
                return
            if all(one in self._store.outcomes for one in run.awaited) and not self._why_not(run):
                waiting.remove(run)
                self._start(run, free[0])

    def _start(self, run: PlannedRun, slot: int) -> None:
        folder = self._store.run_folder(run.run_id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if run.start is not None and not run.start.weights:
                _link_checkpoint(self._checkpoint(run.start), folder)
            write_config(run, folder, self._checkpoint(run.start) if run.start and run.start.weights else None)
        except OSError as error:
            raise StorageError(f"{folder} cannot be written ({error.strerror}); choose another --out") from error
        self._attempts[run.run_id] = self._attempts.get(run.run_id, 0) + 1
        self._events.emit(
            "sweep", "run_started", run_id=run.run_id, label=run.label, attempt=self._attempts[run.run_id]
        )
        ranks = start_ranks(self._context, folder / CONFIG_FILE, folder, run.ranks, slot)
        self._active.append(_Active(run, ranks, slot, time.monotonic()))

    def _checkpoint(self, start: StartCheckpoint) -> Path:
        """The checkpoint from which a run starts."""
        return self._store.run_folder(start.run_id) / CHECKPOINTS / step_folder(start.step)

    def _again(self, active: _Active, codes: list[int]) -> bool:
        """Whether a run was killed by a signal and may be started again."""
        killed = any(code < 0 for code in codes) and not any(0 < code != PeerError.exit_code for code in codes)
        again = killed and self._attempts[active.run.run_id] < MOST_ATTEMPTS
        if again:
            self._events.emit("sweep", "run_killed", run_id=active.run.run_id, codes=codes)
            logger.warning("%s was killed (exit codes %s) and starts again", active.run.label, codes)
        return again

    def _finish(self, active: _Active, codes: list[int]) -> RunOutcome:
        run, folder = active.run, self._store.run_folder(active.run.run_id)
        active.ranks.end()
        by = yardstick(self._sweep, run)
        seconds, measured = time.monotonic() - active.began, measured_folder(run, folder)
        outcome = judge_run(run.run_id, folder, measured, codes, run.last_step, seconds, by)
        if not self._sweep.keep_checkpoints and not run.donor:
            for checkpoints in (folder / CHECKPOINTS, *folder.glob(f"replica_*/{CHECKPOINTS}")):
                shutil.rmtree(checkpoints, ignore_errors=True)
        return self._record_outcome(run, outcome)

    def _record_outcome(self, run: PlannedRun, outcome: RunOutcome) -> RunOutcome:
        write_outcome(self._store.run_folder(run.run_id), outcome)
        self._store.outcomes[run.run_id] = outcome
        self._events.emit("sweep", "run_finished", run_id=run.run_id, status=outcome.status, reason=outcome.reason)
        return outcome

    def _why_not(self, run: PlannedRun) -> str:
        """The reason why a run cannot or need not be started, as far as others have ended; empty: none is known."""
        outcomes = self._store.outcomes
        if run.start is not None and (saved := outcomes.get(run.start.run_id)):
            if saved.status not in (DONE, DIVERGED):
                return f"not run: the run {saved.run_id} that it starts from is {saved.status}: {saved.reason}"
            own = self._store.run_folder(run.run_id) / CHECKPOINTS
            if not own.exists() and not (checkpoint := self._checkpoint(run.start)).exists():
                again = self._store.run_folder(saved.run_id)
                return f"not run: {checkpoint}, from which it starts, is not there; remove {again} to run that anew"
        if run.condition is not None and (healthy := outcomes.get(run.condition)) and healthy.status != DONE:
            return f"not run: from its checkpoint the healthy run {healthy.run_id} is not stable: {healthy.reason}"
        return ""

    def _not_run(self, run: PlannedRun, why: str) -> RunOutcome:
        self._store.run_folder(run.run_id).mkdir(parents=True, exist_ok=True)
        return self._record_outcome(run, RunOutcome(run.run_id, FAILED, why, None, None, 0, 0, 0.0, (), ()))


def yardstick(sweep: SweepFile, run: PlannedRun) -> Yardstick:
    """The criteria for a run."""
    entropy = frequency_entropy(data_of(run)) if sweep.diverged_above_frequencies else None
    return Yardstick(sweep.final_steps, sweep.diverged_rise, entropy)


def judge_again(store: ResultStore, plan: SweepPlan) -> None:
    """Judges finished runs again where the criteria in the sweep's file have changed."""
    for run_id, outcome in list(store.outcomes.items()):
        run, folder = plan.runs[run_id], store.run_folder(run_id)
        by = yardstick(plan.sweep, run)
        if outcome.exit_codes and outcome.judged_by != by.values:
            measured = measured_folder(run, folder)
            judged = judge_run(run_id, folder, measured, outcome.exit_codes, run.last_step, outcome.seconds, by)
            write_outcome(folder, judged)
            store.outcomes[run_id] = judged


def write_config(run: PlannedRun, folder: Path, weights: Path | None = None, **training: Any) -> Path:
    """Writes the configuration file of a run into its folder, with changed values of ``megasdc.training``.

    ``weights``: the checkpoint with whose weights alone it starts; None: none.
    """
    own = run.config["megasdc"]
    changed = {
        "logging": {**own["logging"], "run_dir": str(folder), "progress_bar": False, "prometheus": None},
        "training": {**own["training"], **training},
    }
    if weights is not None:
        changed["model"] = {**own["model"], "initial_weights": str(weights)}
    config = {**run.config, "megasdc": {**own, **changed}}
    for key in ("tensorboard", "csv_monitor"):
        if isinstance(config.get(key), dict) and config[key].get("enabled"):
            config[key] = {**config[key], "output_path": str(folder / key)}
    path = folder / CONFIG_FILE
    write_durably(path, json.dumps(config, indent=2) + "\n")
    return path


def _link_checkpoint(checkpoint: Path, folder: Path) -> None:
    """Hard-links the checkpoint from which a run goes on, unless it has its own; the folder appears by one rename."""
    own = folder / CHECKPOINTS
    if own.exists():
        return
    making = folder / f".{CHECKPOINTS}"
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(checkpoint, making / checkpoint.name, copy_function=_link)
    rename_durably(making, own)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes of ``megasdc sweep``.

    Raises:
        StorageError: another process holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock_file(folder / ".lock")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written ({error.strerror}); choose another --out") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                f"another megasdc sweep works in {folder}; wait for it or choose another --out"
            ) from error
        yield


PROBE_FOLDER = ".probe"
PROBE_STEPS = 6
"""Steps of a probe; the first ones warm up and are not counted."""
WARM_STEPS = 2


@dataclass(frozen=True)
class RunSpeed:
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


def measure_speeds(runs: Iterable[PlannedRun], folder: Path, workers: int) -> dict[str, RunSpeed]:
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


def _probe(run: PlannedRun, scratch: Path, workers: int, context: Any) -> RunSpeed | None:
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
    return RunSpeed(step_s, max(0.0, wall - steps * step_s))


def _step_seconds(folder: Path) -> float | None:
    rows = [row for row in read_metrics(folder) if "speed/step_s" in row]
    if not rows:
        return None
    return median(row["speed/step_s"] for row in rows[min(WARM_STEPS, len(rows) - 1) :])


def speeds_from(runs: Iterable[PlannedRun], outcomes: dict[str, RunOutcome]) -> dict[str, RunSpeed]:
    """Speeds from finished runs, by shape; their overhead is contained in the seconds of a step."""
    found: dict[str, list[float]] = {}
    for run in runs:
        outcome = outcomes.get(run.run_id)
        if outcome is not None and not any(outcome.exit_codes) and outcome.seconds:
            found.setdefault(shape_of(run), []).append(outcome.seconds / max(1, steps_of(run)))
    return {shape: RunSpeed(median(seconds), 0.0) for shape, seconds in found.items()}


def estimate_s(runs: Sequence[PlannedRun], speeds: dict[str, RunSpeed], workers: int) -> float | None:
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


def write_job(plan: SweepPlan, arguments: list[str], out: Path, at_once: int) -> Path:
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

    plan: SweepPlan
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


def choose_workers(plan: SweepPlan, asked: int | None = None) -> int:
    """Number of concurrent runs, as ``asked`` by the user; None: as many as cores and devices allow.

    That is as this process has cores for their ranks and threads, and devices for their ranks where it has any.

    Raises:
        ConfigError: there are too few devices for one run, or for ``asked`` runs.
    """
    ranks, devices = plan.sweep.ranks, count_accelerators()
    if devices and devices < ranks * (asked or 1):
        wanted = (
            f"{asked} runs of {number_of(ranks, 'rank')} side by side need"
            if asked
            else f"a run of {number_of(ranks, 'rank')} needs"
        )
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
