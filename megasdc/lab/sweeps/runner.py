"""Runner of a sweep: several runs at once, until all are finished.

No finished run is repeated, whenever the sweep is killed: a run is finished if its result file exists. An interrupted
run resumes from its own checkpoint if it has one, else it starts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import step_folder
from megasdc.common.durable import rename_durably, write_durably
from megasdc.common.errors import PeerError, StorageError
from megasdc.common.run_lock import open_lock_file
from megasdc.events import EventLog
from megasdc.lab.sweeps.outcome import DIVERGED, DONE, FAILED, Outcome, Yardstick, judge, write_outcome
from megasdc.lab.sweeps.plan import Plan, PlannedRun, Start, measured_folder
from megasdc.lab.sweeps.prepared_data import data_of, frequency_entropy
from megasdc.lab.sweeps.results import ResultStore
from megasdc.lab.sweeps.run_process import RunningRanks, start_ranks
from megasdc.lab.sweeps.sweep_file import SweepFile
from megasdc.parallel.processes import fork_server

logger = logging.getLogger(__name__)

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

    def run(self, runs: dict[str, PlannedRun]) -> Iterator[Outcome]:
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
                _take_checkpoint(self._checkpoint(run.start), folder)
            write_config(run, folder, self._checkpoint(run.start) if run.start and run.start.weights else None)
        except OSError as error:
            raise StorageError(f"{folder} cannot be written ({error.strerror}); choose another --out") from error
        self._attempts[run.run_id] = self._attempts.get(run.run_id, 0) + 1
        self._events.emit(
            "sweep", "run_started", run_id=run.run_id, label=run.label, attempt=self._attempts[run.run_id]
        )
        ranks = start_ranks(self._context, folder / CONFIG_FILE, folder, run.ranks, slot)
        self._active.append(_Active(run, ranks, slot, time.monotonic()))

    def _checkpoint(self, start: Start) -> Path:
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

    def _finish(self, active: _Active, codes: list[int]) -> Outcome:
        run, folder = active.run, self._store.run_folder(active.run.run_id)
        active.ranks.end()
        by = yardstick(self._sweep, run)
        seconds, measured = time.monotonic() - active.began, measured_folder(run, folder)
        outcome = judge(run.run_id, folder, measured, codes, run.last_step, seconds, by)
        if not self._sweep.keep_checkpoints and not run.donor:
            for checkpoints in (folder / CHECKPOINTS, *folder.glob(f"replica_*/{CHECKPOINTS}")):
                shutil.rmtree(checkpoints, ignore_errors=True)
        return self._keep_outcome(run, outcome)

    def _keep_outcome(self, run: PlannedRun, outcome: Outcome) -> Outcome:
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

    def _not_run(self, run: PlannedRun, why: str) -> Outcome:
        self._store.run_folder(run.run_id).mkdir(parents=True, exist_ok=True)
        return self._keep_outcome(run, Outcome(run.run_id, FAILED, why, None, None, 0, 0, 0.0, (), ()))


def yardstick(sweep: SweepFile, run: PlannedRun) -> Yardstick:
    """The criteria for a run."""
    entropy = frequency_entropy(data_of(run)) if sweep.diverged_above_frequencies else None
    return Yardstick(sweep.final_steps, sweep.diverged_rise, entropy)


def judge_again(store: ResultStore, plan: Plan) -> None:
    """Judges finished runs again where the criteria in the sweep's file have changed."""
    for run_id, outcome in list(store.outcomes.items()):
        run, folder = plan.runs[run_id], store.run_folder(run_id)
        by = yardstick(plan.sweep, run)
        if outcome.exit_codes and outcome.judged_by != by.values:
            measured = measured_folder(run, folder)
            judged = judge(run_id, folder, measured, outcome.exit_codes, run.last_step, outcome.seconds, by)
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


def _take_checkpoint(checkpoint: Path, folder: Path) -> None:
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
