"""Stragglers of a run: times of each rank go into the agreement of a step; rank 0 reports and writes who is slow."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from statistics import median

from megasdc.dropcompute.gate import replica_ranks
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.step_times import StepTimes
from megasdc.metrics.writer import MetricsWriter
from megasdc.ops.health.limits import FIRST_STEPS
from megasdc.ops.health.slow.report import SlowReport, Where, metrics
from megasdc.ops.health.slow.stragglers import LONG, ReplicaStage, StragglerChange, Stragglers
from megasdc.parallel.collectives import Field, gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.train.process import CollectionTimer

logger = logging.getLogger(__name__)


class StragglerWatch(Hook):
    """Compares the ranks of each stage; comes after the hook that measures times, and reads nothing of the step itself.

    The times of a step are exchanged in the agreement of the next one, when they are known without waiting for the
    device. The first tensor rank of each stage of each replica gives them: the tensor ranks of a stage wait for each
    other within its passes, so that their times do not tell them apart.

    Args:
        slow_ratio: see the section `health`.
        times: the hook that measures a step; DropCompute's, where there is one.
        writer: where rank 0 writes metrics; None on other ranks.
    """

    def __init__(self, slow_ratio: float, run: Run, times: StepTimes, writer: MetricsWriter | None) -> None:
        dims = run.dims
        self._times, self._writer = times, writer
        self._stragglers = Stragglers(dims.data, dims.pipeline, slow_ratio)
        self._slow_ratio = slow_ratio
        self._first_step = run.step + 1
        self._report: SlowReport | None = None
        self._garbage = CollectionTimer()
        self._collections: list[tuple[float, float]] = []
        self._unread: tuple[Callable[[], list[float]], float, bool] | None = None
        self._own = (0.0, 0.0)
        places, place = dims.data * dims.pipeline, dims.dp_rank * dims.pipeline + dims.pp_rank
        gives = dims.tp_rank == 0
        self._busy = Field(lambda: self._measured()[0] if gives else None, places=places, place=place)
        self._collected = Field(lambda: self._own[1] if gives else None, places=places, place=place)
        self.fields = (self._busy, self._collected)

    def _measured(self) -> tuple[float, float]:
        """Of the step before, seconds of a micro-batch: median busy, and mean in garbage collection."""
        self._own = (0.0, 0.0)
        if self._unread is not None:
            (read, garbage_s, is_last_whole), self._unread = self._unread, None
            if busy_s := read():
                if len(busy_s) > 1 and not is_last_whole:
                    busy_s.pop()
                self._own = (median(busy_s), garbage_s / len(busy_s))
        return self._own

    # --- in a step: garbage collection among the passes -----------------------------------------------------------

    def before_micro_batches(self, engine: TrainingEngine) -> None:
        """Collections before are none of the step's."""
        self._garbage.pop_seconds()

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """Those within it are; micro-batches that are recomputed after this are not counted."""
        self._collections = self._garbage.pop_spans()

    # --- between steps ------------------------------------------------------------------------------------------

    def on_start(self, run: Run) -> None:
        """Gather on which host each rank is; rank 0 keeps it, and writes that nobody is slow yet."""
        dims = run.dims
        hosts = gather_objects(socket.gethostname(), run.host_group)
        if dims.rank == 0:
            where = _where_by_place(dims, hosts)
            self._report = SlowReport(run.folder, self._slow_ratio, where, LONG, run.events.origin)
            try:
                self._report.write_suspects(self._stragglers, run.step)
            except OSError as error:
                _report_unwritten(run, error)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Judge the step before, and hand over the times of this one."""
        if run.step >= self._first_step + FIRST_STEPS:
            collected_s = sum(end - start for start, end in self._collections)
            read = self._times.busy_later(without=self._collections)
            self._unread = read, collected_s, run.engine.ended_after is None
        if self._report is None or not self._stragglers.add(self._busy.values, self._collected.values):
            return
        change = self._stragglers.judge(run.step)
        for name, fields in self._report.events(change, self._stragglers):
            logger.warning("health: step %d: %s", run.step, fields["message"])
            run.events.emit("health", name, step=run.step, **fields)
        self._write(run, change)

    def _write(self, run: Run, change: StragglerChange) -> None:
        """Files and metrics of rank 0; a disk that takes no file does not end the run."""
        assert self._report is not None
        try:
            is_due = self._report.write(change, self._stragglers, run.step)
        except OSError as error:
            is_due = True
            _report_unwritten(run, error)
        if is_due and self._writer is not None:
            self._writer.write(run.step, metrics(self._stragglers))

    def close(self) -> None:
        """Stop timing garbage collection."""
        self._garbage.close()


def _report_unwritten(run: Run, error: OSError) -> None:
    logger.warning("health: who is slow cannot be written: %s", error)
    run.events.emit("health", "unwritten", step=run.step, problem=str(error))


def _where_by_place(dims: ParallelDims, hosts: list[str]) -> dict[ReplicaStage, Where]:
    """Ranks and host of each place."""
    found = {}
    for replica in range(dims.data):
        ranks = replica_ranks(dims, replica)
        for stage in range(dims.pipeline):
            own = tuple(ranks[stage * dims.tensor : (stage + 1) * dims.tensor])
            found[replica, stage] = Where(own, hosts[own[0]])
    return found
