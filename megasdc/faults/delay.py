"""Injected delays, reproducible from the configuration, and their report.

A delay is a function of its entry in `delay` and of (step, replica, micro-batch, stage), the function that simulations
use too (``megasdc.distributions``): a run repeats its delays, also after a resume, and no global random generator is
used. The host sleeps after a device synchronization, so that pending device work does not hide the delay.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray

from megasdc.common.errors import ConfigError, DataError
from megasdc.config.faults import DelaySpec
from megasdc.distributions import BLOCK_REPLICAS, KINDS, Delay, DelayPlace
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.faults.injector import in_steps, is_here
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims


def build_delay(spec: DelaySpec) -> Delay:
    """The distribution of an entry; ``rank``, ``steps`` and ``micro_batch_latency_s`` are applied elsewhere."""
    values = {field.name: getattr(spec, field.name) for field in fields(KINDS[spec.kind])}
    if spec.kind == "slow_rank":
        values["stage"] = -1 if spec.stage is None else spec.stage
    return KINDS[spec.kind](**values)


def draw_delays(
    spec: DelaySpec, index: int, step: int, replica: int, micro_batches: int, stages: int
) -> NDArray[np.float64]:
    """Delays of one entry in one step of one replica, whichever ranks the entry applies to.

    Args:
        index: index of the entry in its list.
        step: optimizer step, first is 1.
        replica: number of the replica, over all launches.
        micro_batches: number of micro-batches of a step.
        stages: number of stages of the pipeline.

    Returns:
        Seconds, [micro-batch, stage], the same as ``Environment.draw`` for the delay at this index of its list.

    Raises:
        DataError: the entry's file cannot be read, or does not fit.
    """
    place = DelayPlace(spec.seed, index, step, replica // BLOCK_REPLICAS, micro_batches, stages)
    drawn = np.broadcast_to(build_delay(spec).draw(place), place.shape)[replica % BLOCK_REPLICAS]
    return drawn * (1.0 if spec.micro_batch_latency_s is None else spec.micro_batch_latency_s)


def check_delays(specs: Sequence[DelaySpec], micro_batches: int, stages: int) -> None:
    """Check that the files of delays can be read and fit.

    Args:
        specs: entries that passed the configuration's checks.
        micro_batches: number of micro-batches of a step.
        stages: number of stages of the pipeline.

    Raises:
        ConfigError: a file cannot be read, or does not fit; the message lists all such entries.
    """
    problems = []
    for index, spec in enumerate(specs):
        try:
            draw_delays(spec, index, 1, 0, micro_batches, stages)
        except DataError as error:
            problems.append(f"megasdc.delay.{index}.path: {error}.")
    if problems:
        raise ConfigError(problems)


class InjectedDelays(Hook):
    """Sleeps before micro-batches as the entries specify.

    Args:
        specs: all entries of the run.
        host: name of this rank's host; None: the system's host name.
        first: number of the first replica of this launch, where it is one of several.
    """

    def __init__(self, specs: Sequence[DelaySpec], dims: ParallelDims, host: str | None = None, first: int = 0) -> None:
        host = socket.gethostname() if host is None else host
        self._dims, self._replica = dims, first + dims.dp_rank
        self._here = {
            index: spec
            for index, spec in enumerate(specs)
            if is_here(spec, dims, host, first) and (dims.tp_rank == 0 or (spec.rank, spec.tensor_rank) != (None, None))
        }
        self._decides = dims.is_first_stage and dims.tp_rank == 0
        self._drawn_for = (0, 0)
        self._drawn: dict[int, NDArray[np.float64]] = {}
        self._slept_s = self._cut_s = 0.0

    @property
    def here(self) -> list[int]:
        """Indices of the entries that apply to this rank."""
        return sorted(self._here)

    def before_start(self, engine: TrainingEngine, micro_batch: int, time_left_s: float) -> None:
        """Sleep for preemptible delays, at most until the replica's deadline."""
        self._sleep(self._planned_s(engine, micro_batch, cut=True), time_left_s)

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Sleep for all other delays, in full."""
        self._sleep(self._planned_s(engine, micro_batch, cut=False), math.inf)

    def pop_seconds(self) -> tuple[float, float]:
        """Seconds slept, and seconds cut off by the deadline, since the last call."""
        taken = self._slept_s, self._cut_s
        self._slept_s = self._cut_s = 0.0
        return taken

    def _planned_s(self, engine: TrainingEngine, micro_batch: int, *, cut: bool) -> float:
        step, micro_batches = engine.step_number, engine.micro_batches
        if self._drawn_for != (step, micro_batches):
            self._drawn_for = (step, micro_batches)
            sizes = (self._replica, micro_batches, self._dims.pipeline)
            self._drawn = {index: draw_delays(spec, index, step, *sizes) for index, spec in self._here.items()}
        return math.fsum(
            self._drawn[index][micro_batch, self._dims.pp_rank]
            for index, spec in self._here.items()
            if (spec.preemptible and self._decides) == cut and in_steps(spec, step, micro_batch)
        )

    def _sleep(self, delay_s: float, time_left_s: float) -> None:
        if not delay_s:
            return
        deadline = time.monotonic() + time_left_s
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # pending device work would otherwise hide the delay
        lasting_s = min(delay_s, max(0.0, deadline - time.monotonic()))
        time.sleep(lasting_s)
        self._slept_s += lasting_s
        self._cut_s += delay_s - lasting_s


logger = logging.getLogger(__name__)

EVENT_KIND = "delay"


class DelayReport(Hook):
    """Injects delays into this run, warns of them at the start, and reports how long each rank has slept.

    Args:
        specs: the entries of `delay`, at least one.
        interval: number of steps between two events of a rank.
        first: see ``InjectedDelays``.

    Attributes:
        delays: the hook that sleeps.

    Raises:
        ConfigError: a file of delays cannot be used.
    """

    def __init__(self, specs: Sequence[DelaySpec], interval: int, run: Run, first: int = 0) -> None:
        check_delays(specs, run.engine.micro_batches, run.dims.pipeline)
        self._specs = specs
        self._interval = interval
        self.delays = InjectedDelays(specs, run.dims, first=first)
        self._first_step = run.step + 1

    def on_start(self, run: Run) -> None:
        """Warn that this run has injected delays."""
        self._first_step = run.step + 1
        gathered = gather_objects(self.delays.here, run.host_group)
        if run.dims.rank != 0:
            return
        for index, spec in enumerate(self._specs):
            ranks = [rank for rank, here in enumerate(gathered) if index in here]
            said = spec.model_dump(mode="json", exclude_defaults=True)
            logger.warning("injected delays: %s; on %d of %d ranks", said, len(ranks), run.dims.world_size)
            run.events.emit(EVENT_KIND, "armed", step=run.step, spec=index, delay=said, ranks=ranks)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Report how long this rank has slept since the last report."""
        if not self.delays.here or (run.step % self._interval and not run.is_last_step):
            return
        slept_s, cut_s = self.delays.pop_seconds()
        run.events.emit(EVENT_KIND, "slept", step=run.step, first_step=self._first_step, slept_s=slept_s, cut_s=cut_s)
        self._first_step = run.step + 1
