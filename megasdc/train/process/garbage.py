"""Python garbage collection: its time on a rank, and collection at the same steps on all ranks.

Python collects after a number of allocations, which each rank reaches at a different moment: in a large job some rank
is always collecting, and all others wait for it. Managed collection lets all ranks collect at the end of the same
steps, and never scans the objects that were built at the start, which are most and live to the end.

Source: Lin et al., "Understanding stragglers in large model training using what-if analysis", OSDI 2025, arXiv
2505.05713, who found collections among the causes of stragglers. The default of 50 steps is torchtitan's (`gc_freq`).
"""

from __future__ import annotations

import gc
import time
from typing import Any

from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run


class CollectionTimer:
    """Times at which this process collects garbage, whatever triggered it, until closed."""

    def __init__(self) -> None:
        self._started_at = 0.0
        self._spans: list[tuple[float, float]] = []
        gc.callbacks.append(self._on_phase)

    def _on_phase(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._started_at = time.perf_counter()
        elif self._started_at:  # 0 if this timer was created during a collection
            self._spans.append((self._started_at, time.perf_counter()))

    def take_spans(self) -> list[tuple[float, float]]:
        """Start and end of each collection since the last call, on ``time.perf_counter``."""
        spans, self._spans = self._spans, []
        return spans

    def take(self) -> float:
        """Their seconds."""
        return sum(end - start for start, end in self.take_spans())

    def close(self) -> None:
        """Stop counting."""
        gc.callbacks.remove(self._on_phase)


class ManagedCollection(Hook):
    """Collects garbage at an interval of steps and at no other time."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def on_start(self, run: Run) -> None:
        """Exclude everything built so far from collection, and stop Python's automatic collections."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Collect, on every rank at the same step."""
        if run.step % self.interval == 0:
            gc.collect()

    def close(self) -> None:
        """Restore Python's automatic collections."""
        gc.enable()
        gc.unfreeze()
