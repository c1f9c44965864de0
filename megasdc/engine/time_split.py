"""Time of a step by part: seconds in forward, backward, optimizer and data, without device syncs while steps run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from megasdc.engine.hooks import Hook

if TYPE_CHECKING:
    from megasdc.engine.engine import TrainingEngine


def mark(on_device: bool) -> Any:
    """Now: a reading of the host's clock in seconds, or an event on the device's current stream, without a wait."""
    if not on_device:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TimeSplit(Hook):
    """Sums the time between the engine's hook calls.

    On CPU a mark is a reading of the clock. On CUDA it is an event on the current stream, read only in ``take``, so
    that the host does not wait while steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._open: Any = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._host_seconds: defaultdict[str, float] = defaultdict(float)

    def _mark(self) -> Any:
        return mark(self._on_device)

    def _close(self, name: str) -> None:
        if self._on_device:
            self._spans.append((name, self._open, self._mark()))
        else:
            self._host_seconds[name] += self._mark() - self._open

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Start of a forward pass."""
        self._open = self._mark()

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """End of a forward pass."""
        self._close("forward")

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Start of a backward pass."""
        self._open = self._mark()

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """End of a backward pass."""
        self._close("backward")

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Gradients are reduced."""
        self._open = self._mark()

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Parameters are gathered."""
        self._close("optimizer")

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and count the host's time in the data iterator."""
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._host_seconds["data"] += time.perf_counter() - start
            yield batch

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call; resets the sums.

        Sync: waits for the device.
        """
        seconds = defaultdict(float, self._host_seconds)
        if self._spans:
            torch.cuda.synchronize()
            for name, start, end in self._spans:
                seconds[name] += start.elapsed_time(end) / 1000.0
        self._spans.clear()
        self._host_seconds.clear()
        return dict(seconds)
