"""Installation of injected delays in a run, and their report."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megasdc.config.sections.delay import DelaySpec
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run
from megasdc.faults.delay import InjectedDelays, check_delays
from megasdc.parallel.collectives import gather_objects

logger = logging.getLogger(__name__)

EVENT_KIND = "delay"


class DelayReport(Hook):
    """Injects delays into this run, warns of them at the start, and reports what each rank has slept.

    Args:
        specs: the entries of `delay`, at least one.
        interval: steps between two events of a rank.

    Attributes:
        delays: the hook that sleeps.

    Raises:
        ConfigError: a file of delays cannot be used.
    """

    def __init__(self, specs: Sequence[DelaySpec], interval: int, run: Run) -> None:
        check_delays(specs, run.engine.micro_batches, run.dims.pipeline)
        self._specs = specs
        self._interval = interval
        self.delays = InjectedDelays(specs, run.dims)
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
        """Report what this rank has slept since the last report."""
        if not self.delays.here or (run.step % self._interval and not run.is_last_step):
            return
        slept_s, cut_s = self.delays.take()
        run.events.emit(EVENT_KIND, "slept", step=run.step, first_step=self._first_step, slept_s=slept_s, cut_s=cut_s)
        self._first_step = run.step + 1
