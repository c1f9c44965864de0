"""Stragglers of a run: times of each rank go into the agreement of a step; rank 0 reports and writes who is slow."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from statistics import fmean, median

import numpy as np

from megasdc.dropcompute.gate import replica_ranks
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.engine.step_times import StepTimes
from megasdc.health.limits import FIRST_STEPS
from megasdc.health.slow.report import SlowReport, Where, metrics
from megasdc.health.slow.stragglers import LONG, Change, Place, Stragglers
from megasdc.metrics.writer import MetricsWriter
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.step_agreement import Field
from megasdc.train.process.garbage import CollectionTimer

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
        self._shape = (dims.data, dims.pipeline)
        self._stragglers = Stragglers(*self._shape, slow_ratio)
        self._slow_ratio = slow_ratio
        self._first_step = run.step + 1
        self._on_device = run.engine.device.type == "cuda"
        self._report: SlowReport | None = None
        self._garbage = CollectionTimer()
        self._collecting = False
        self._garbage_s: list[float] = []
        self._unread: tuple[Callable[[], list[float]], list[float]] | None = None
        self._own = (0.0, 0.0)
        places, place = dims.data * dims.pipeline, dims.dp_rank * dims.pipeline + dims.pp_rank
        gives = dims.tp_rank == 0
        self._busy = Field(lambda: self._measured()[0] if gives else None, places=places, place=place)
        self._collected = Field(lambda: self._own[1] if gives else None, places=places, place=place)
        self.fields = (self._busy, self._collected)

    def _measured(self) -> tuple[float, float]:
        """Of the step before: median busy seconds of its micro-batches, and mean seconds in garbage collection."""
        self._own = (0.0, 0.0)
        if self._unread is not None:
            read, garbage_s = self._unread
            busy_s, self._unread = read(), None
            if not self._on_device:  # where the host computes, a collection is part of the measured time
                busy_s = [busy - collected for busy, collected in zip(busy_s, garbage_s, strict=True)]
            self._own = (median(busy_s), fmean(garbage_s))
        return self._own

    # --- in a step: garbage collection within the passes ----------------------------------------------------------

    def before_micro_batches(self, engine: TrainingEngine) -> None:
        """A step begins."""
        self._collecting, self._garbage_s = True, []

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Collections before a pass are none of its time."""
        self._garbage.take()

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Those within it are."""
        if self._collecting:
            self._garbage_s.append(self._garbage.take())

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """As before a forward pass."""
        self._garbage.take()

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """As after a forward pass."""
        if self._collecting:
            self._garbage_s[micro_batch] += self._garbage.take()

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """Micro-batches that are recomputed after this are not counted."""
        self._collecting = False

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
                _tell_unwritten(run, error)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Judge the step before, and hand over the times of this one."""
        if self._garbage_s and run.step >= self._first_step + FIRST_STEPS:
            self._unread = self._times.busy_later(), self._garbage_s
        busy_s, garbage_s = (np.array(one.values).reshape(self._shape) for one in (self._busy, self._collected))
        if self._report is None or not self._stragglers.add(busy_s, garbage_s):
            return
        change = self._stragglers.judge(run.step)
        for name, fields in self._report.events(change, self._stragglers):
            logger.warning("health: step %d: %s", run.step, fields["message"])
            run.events.emit("health", name, step=run.step, **fields)
        self._write(run, change)

    def _write(self, run: Run, change: Change) -> None:
        """Files and metrics of rank 0; a disk that takes no file does not end the run."""
        assert self._report is not None
        try:
            is_due = self._report.write(change, self._stragglers, run.step)
        except OSError as error:
            is_due = True
            _tell_unwritten(run, error)
        if is_due and self._writer is not None:
            self._writer.write(run.step, metrics(self._stragglers))

    def close(self) -> None:
        """Stop timing garbage collection."""
        self._garbage.close()


def _tell_unwritten(run: Run, error: OSError) -> None:
    logger.warning("health: who is slow cannot be written: %s", error)
    run.events.emit("health", "unwritten", step=run.step, problem=str(error))


def _where_by_place(dims: ParallelDims, hosts: list[str]) -> dict[Place, Where]:
    """Ranks and host of each place."""
    found = {}
    for replica in range(dims.data):
        ranks = replica_ranks(dims, replica)
        for stage in range(dims.pipeline):
            own = tuple(ranks[stage * dims.tensor : (stage + 1) * dims.tensor])
            found[replica, stage] = Where(own, hosts[own[0]])
    return found
