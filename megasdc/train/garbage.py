"""When does Python collect garbage, and how long does a rank stand still for it?

Python collects when enough objects were made, which each rank reaches at another moment: at every moment some rank of
a large job stands still, and all others wait for it. Managed collection lets all ranks collect at the end of the same
steps, and what the build left, which is most and stays to the end, is never looked at again.

Source: Lin et al., "Understanding stragglers in large model training using what-if analysis", OSDI 2025, arXiv
2505.05713, who found collections among the causes of stragglers. The default of 50 steps is torchtitan's (`gc_freq`).
"""

from __future__ import annotations

import gc
import time
from typing import Any

from megasdc.engine.engine import StepResult
from megasdc.train.run import Run, StepHook


class CollectionTimer:
    """Adds up the seconds in which this process collected garbage, whoever asked for it; counts until closed."""

    def __init__(self) -> None:
        self._started_at = self._seconds = 0.0
        gc.callbacks.append(self._on_phase)

    def _on_phase(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._started_at = time.perf_counter()
        elif self._started_at:  # else this timer was made while a collection ran
            self._seconds += time.perf_counter() - self._started_at

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Count no more."""
        gc.callbacks.remove(self._on_phase)


class ManagedCollection(StepHook):
    """Collects garbage at the end of every so many steps and at no other time.

    Args:
        interval: steps between collections.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_start(self, run: Run) -> None:
        """Take everything that was built out of what is looked at, and stop Python's own collections."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Collect, on every rank at the same step."""
        if run.step % self.interval == 0:
            gc.collect()

    def close(self) -> None:
        """Let Python collect again as it does by itself."""
        gc.enable()
        gc.unfreeze()
