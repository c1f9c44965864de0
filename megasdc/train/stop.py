"""Reasons to stop a run before its last step: signals, a time limit, too many skipped steps; agreed by all ranks."""

from __future__ import annotations

import logging
import math
import signal
import time
from typing import Any

from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook
from megasdc.engine.run import Run
from megasdc.errors import NonFiniteError
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.step_agreement import MIN, Field
from megasdc.train.process.signals import StopSignals

logger = logging.getLogger(__name__)


class SkipWatch(Hook):
    """Reports every skipped step with its reason, and ends a run that skips too many in a row.

    Args:
        limit: skipped steps in a row that end the run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count, report, and fail past the limit."""
        if result.skipped is None:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        place = run.skip_place or "its origin is not known; sdc.always_on.finite locates it"
        run.events.emit(
            "skip",
            "optimizer_step",
            step=result.step,
            reason=result.skipped,
            place=place,
            loss_scale=result.loss_scale,
            stream_end=run.stream_end,
        )
        if run.dims.rank == 0:
            logger.warning("step %d was skipped: %s; %s", result.step, result.skipped, place)
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"the optimizer skipped {self.in_a_row} steps in a row, up to step {result.step}: {result.skipped}; "
                f"{place}; training.max_skipped_steps is {self.limit}. Resume from an earlier checkpoint with a lower "
                "learning rate, or look for the first non-finite result in the events of kind nonfinite"
            )

    def state_dict(self) -> dict[str, Any]:
        """Number of steps skipped in a row."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the count."""
        self.in_a_row = state["in_a_row"]


class StopWatch(Hook):
    """Stops a run at the next step boundary on SIGTERM, SIGUSR1 or SIGINT, at its time limit, or at a given step.

    Ranks may receive a signal at different moments, so they agree once a step on the largest; a signal that comes after
    the agreement has begun counts for the next step.

    Args:
        signals: received by this rank since it started.
        time_limit_s: seconds from ``started_at``; None: no limit.
        started_at: start of the time limit, on the clock of ``time.monotonic``.
        stop_step: last step of this part of the run; None: none.
    """

    def __init__(
        self, signals: StopSignals, time_limit_s: float | None, started_at: float, stop_step: int | None
    ) -> None:
        self.signals = signals
        self.stop_step = stop_step
        self.deadline = None if time_limit_s is None else started_at + time_limit_s
        self._signal = Field(lambda: self.signals.received)
        self._time_left_s = Field(self._own_time_left_s, MIN, default=math.inf)
        self.fields = (self._signal, self._time_left_s)

    def on_start(self, run: Run) -> None:
        """Stop before the first step if a signal came while the run was built; the time limit is not checked yet."""
        self._decide(run, max(gather_objects(self.signals.received, run.host_group)), time_is_up=False)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Stop if a rank has a reason."""
        self._decide(run, int(self._signal.value), time_is_up=self._time_left_s.value <= 0)

    def _own_time_left_s(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()

    def _decide(self, run: Run, number: int, *, time_is_up: bool) -> None:
        if number:
            run.stop_reason = f"signal {signal.Signals(number).name}"
        elif time_is_up:
            run.stop_reason = "time limit"
        elif run.step == self.stop_step:
            run.stop_reason = f"training.stop_step {self.stop_step}"
        run.is_hurried = bool(number) or time_is_up
        if run.stop_reason:
            run.events.emit("stop", "requested", step=run.step, reason=run.stop_reason)
