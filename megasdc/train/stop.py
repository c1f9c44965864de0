"""Reasons to stop a run before its last step: signals, a time limit, too many skipped steps; agreed by all ranks."""

from __future__ import annotations

import logging
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import EngineHook
from megasdc.errors import NonFiniteError
from megasdc.train.process.signals import StopSignals
from megasdc.train.run import Run, StepHook

logger = logging.getLogger(__name__)


class SkipWatch(StepHook):
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


class StopWatch(StepHook, EngineHook):
    """Stops a run at the next step boundary on SIGTERM or SIGUSR1, at its time limit, or at a given step.

    Ranks may receive a signal at different moments, so they agree once a step on the largest reason. The exchange runs
    during the optimizer step, so that no rank waits for it; a later signal counts for the next step.

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
        self._seen = torch.zeros(2, dtype=torch.int64)
        self._exchange: Any = None
        self._host_group: Any = None

    def on_start(self, run: Run) -> None:
        """Stop before the first step if a signal came while the run was built; the time limit is not checked yet."""
        self._host_group = run.host_group
        self._offer(late=False)
        self._agree(run)
        run.engine.hooks.append(self)

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Start the exchange of this rank's reasons."""
        self._offer(late=self.deadline is not None and time.monotonic() >= self.deadline)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Agree whether to stop."""
        self._agree(run)

    def _offer(self, late: bool) -> None:
        self._seen = torch.tensor([self.signals.received, int(late)])
        self._exchange = dist.all_reduce(self._seen, op=dist.ReduceOp.MAX, group=self._host_group, async_op=True)

    def _agree(self, run: Run) -> None:
        self._exchange.wait()
        number, time_is_up = self._seen.tolist()
        if number:
            run.stop_reason = f"signal {signal.Signals(number).name}"
        elif time_is_up:
            run.stop_reason = "time limit"
        elif run.step == self.stop_step:
            run.stop_reason = f"training.stop_step {self.stop_step}"
        if run.stop_reason:
            run.events.emit("stop", "requested", step=run.step, reason=run.stop_reason)
