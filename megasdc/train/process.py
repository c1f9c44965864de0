"""The process of a rank: time of its start by part, CPU threads and memory, garbage collection.

Heap: glibc returns blocks of more than 32 MiB to the system when they are freed, and the free top of the heap too.
Every step then makes the kernel map and clear the same gigabytes again, page by page, which takes as long as several
passes over them. So on a CPU rank freed memory stays with the process. Environment settings (``MALLOC_*``,
``GLIBC_TUNABLES``) and other allocators take precedence. Source: mallopt(3).

Garbage: Python collects after a number of allocations, which each rank reaches at a different moment: in a large job
some rank is always collecting, and all others wait for it. Managed collection lets all ranks collect at the end of the
same steps, and never scans the objects that were built at the start, which are most and live to the end. Source: Lin et
al., "Understanding stragglers in large model training using what-if analysis", OSDI 2025, arXiv 2505.05713, who found
collections among the causes of stragglers. The default of 50 steps is torchtitan's (`gc_freq`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from megasdc.common import host as process_state
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run


class StartClock:
    """Records when the parts of a rank's start end.

    Args:
        started_at: time at which training's own code began, on the clock of ``time.monotonic``.
        again: whether the process has trained before; the first part then begins now, not with the process.
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


KEPT_BYTES = 2**30
"""Size in bytes up to which freed blocks, and a free heap top, are kept."""
OLDER_KEPT_BYTES = 2**25
"""The largest block size that glibc before 2.36 accepts."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep freed memory; call it before large tensors are allocated.

    Returns whether the allocator took the settings; False with settings of the user's or without glibc.
    """
    if "GLIBC_TUNABLES" in environment or any(name.startswith("MALLOC_") for name in environment):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) != 1:
        return False
    return any(mallopt(M_MMAP_THRESHOLD, kept) == 1 for kept in (KEPT_BYTES, OLDER_KEPT_BYTES))


def prepare_cpu(threads: int) -> None:
    """On a machine without an accelerator, set this rank's CPU threads and keep freed memory in the process.

    Args:
        threads: number of threads; 0: PyTorch's choice.
    """
    if torch.cuda.is_available():
        return
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)


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

    def pop_spans(self) -> list[tuple[float, float]]:
        """Start and end of each collection since the last call, on ``time.perf_counter``."""
        spans, self._spans = self._spans, []
        return spans

    def pop_seconds(self) -> float:
        """Seconds of the collections since the last call."""
        return sum(end - start for start, end in self.pop_spans())

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
