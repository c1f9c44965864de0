"""Time from a rank's start to the end of its first step, by part."""

from __future__ import annotations

import os
import time

from megasdc.common import host as process_state
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run


class StartClock:
    """Records when the parts of a rank's start end.

    Args:
        started_at: when training's own code began, on the clock of ``time.monotonic``.
        again: the process has trained before; the first part begins now, not with the process.
    """

    def __init__(self, started_at: float, *, again: bool = False) -> None:
        self.started_at = started_at
        self.process_started_boot_s = process_state.started_at(os.getpid())
        self.phases: dict[str, float] = {}
        self._last_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) if again else self.process_started_boot_s

    def mark(self, phase: str) -> None:
        """Record the end of a part; it began at the end of the part before, the first one with the process."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.phases[phase] = now - self._last_boot_s
        self._last_boot_s = now


class StartReport(Hook):
    """Writes the event ``start/phases`` after the first step of this process, on every rank.

    Its fields are ``process_started_boot_s``, seconds from the machine's boot to the process's start, ``phases``,
    seconds by part in their order, and ``step_s``, seconds of that step. Every part must be marked, except the first
    step.
    """

    def __init__(self, clock: StartClock) -> None:
        self.clock: StartClock | None = clock
        self._step_began = 0.0

    def before_step(self, run: Run) -> None:
        """Note when the first step begins."""
        if self.clock is not None:
            self._step_began = time.monotonic()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Write the event once."""
        if self.clock is None:
            return
        self.clock.mark("first_step")
        run.events.emit(
            "start",
            "phases",
            step=result.step,
            process_started_boot_s=self.clock.process_started_boot_s,
            phases=self.clock.phases,
            step_s=time.monotonic() - self._step_began,
        )
        self.clock = None
