"""Times of a step on this rank: start, end and busy time of each micro-batch, and seconds by part of the step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megasdc.engine.hooks import Hook

if TYPE_CHECKING:
    from megasdc.engine.engine import TrainingEngine


@dataclass(frozen=True)
class StepRecord:
    """Times of one step on one rank, in seconds since the step began there.

    Args:
        start_s: start time of each completed micro-batch, [completed]; on the rank that decides,
            when the decision began.
        end_s: end time of each micro-batch's backward pass, [completed].
        busy_s: seconds in its forward and backward pass, without waiting for other stages, [completed].
        compute_s: time at which all micro-batches had ended.
        step_s: time at which the optimizer was done.
        forward_end_s: end time of each micro-batch's forward pass, [completed].
    """

    start_s: list[float]
    end_s: list[float]
    busy_s: list[float]
    compute_s: float
    step_s: float
    forward_end_s: list[float] = field(default_factory=list)


class StepTimes(Hook):
    """Measures times between the engine's hook calls; must come before hooks that take time.

    On CPU a mark is a reading of the clock. On CUDA it is an event on the current stream, read only in ``pop_record``,
    and decisions are made on the host's clock, which ``wait_for`` keeps close to the device.

    Args:
        now: returns seconds on a monotonic clock.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._on_device = device.type == "cuda"
        self._now = now
        self._host_origin = now()
        self._reset()

    def _reset(self) -> None:
        self._recording = True
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._spans: list[list[tuple[Any, Any]]] = []
        self._open: Any = None
        self._layer: Any = None
        self._compute: Any = None
        self._stepped: Any = None

    def _mark(self) -> Any:
        if not self._on_device:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began, on the host's clock."""
        return self._now() - self._host_origin

    def wait_for(self, micro_batch: int) -> None:
        """Wait until the backward pass of a micro-batch has ended on the device; returns at once where there is none.

        Args:
            micro_batch: number of a micro-batch of this step; negative: none.

        Sync: waits for the device.
        """
        if self._on_device and 0 <= micro_batch < len(self._ends):
            self._ends[micro_batch].synchronize()

    def wait_for_layer(self) -> None:
        """Wait until the device has come to where this was last called in the step; the host is one layer ahead.

        Sync: waits for the device.
        """
        if self._on_device:
            before, self._layer = self._layer, self._mark()
            if before is not None:
                before.synchronize()

    def before_micro_batches(self, engine: TrainingEngine) -> None:
        """The step begins."""
        self._reset()
        self._origin = self._mark()
        self._host_origin = self._now() if self._on_device else self._origin

    def before_start(self, engine: TrainingEngine, micro_batch: int, time_left_s: float) -> None:
        """Start of a micro-batch on the rank that decides."""
        if self._recording:
            self._starts.append(self._mark())

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Start of a forward pass; on other ranks also the start of the micro-batch."""
        if not self._recording:
            return
        self._open = self._mark()
        if len(self._starts) == micro_batch:
            self._starts.append(self._open)

    def after_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """End of a forward pass."""
        if self._recording:
            self._spans.append([(self._open, self._mark())])

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Start of a backward pass."""
        if self._recording:
            self._open = self._mark()

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """End of a backward pass, and of the micro-batch."""
        if self._recording:
            self._ends.append(self._mark())
            self._spans[micro_batch].append((self._open, self._ends[-1]))

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """Stop recording: micro-batches recomputed after this are not counted."""
        if self._recording:
            self._recording = False
            self._compute = self._mark()

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """The step ends."""
        self._stepped = self._mark()

    def pop_record(self) -> StepRecord:
        """The times of the finished step.

        Sync: waits for the device.
        """
        if self._on_device:
            self._stepped.synchronize()
        return StepRecord(
            [self._between(self._origin, mark) for mark in self._starts[: len(self._ends)]],
            [self._between(self._origin, mark) for mark in self._ends],
            [sum(self._between(*span) for span in spans) for spans in self._spans],
            self._between(self._origin, self._compute),
            self._between(self._origin, self._stepped),
            [self._between(self._origin, spans[0][1]) for spans in self._spans],
        )

    def busy_later(self, without: Sequence[tuple[float, float]] = ()) -> Callable[[], list[float]]:
        """Reader of the busy seconds of the finished step's micro-batches, [completed], also while the next step runs.

        Args:
            without: starts and ends, on the clock ``now``, of spans that do not count; not used on CUDA, where the
                host's clock is not that of the passes.

        Returns:
            A function. On CUDA it waits for the end of that step's last micro-batch, and for nothing when the next
            step's work has been issued and the device has come to it.
        """
        spans = self._spans

        def read() -> list[float]:
            if self._on_device and spans:
                spans[-1][-1][1].synchronize()
            busy_s = [sum(self._between(*span) for span in one) for one in spans]
            for start, end in () if self._on_device else without:
                for index, one in enumerate(spans):
                    busy_s[index] -= sum(max(0.0, min(end, ended) - max(start, began)) for began, ended in one)
            return busy_s

        return read

    def _between(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1000.0 if self._on_device else float(second - first)


def mark(on_device: bool) -> Any:
    """Mark of the present time: the host's clock in seconds, or an event on the device's stream, without a wait."""
    if not on_device:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TimeSplit(Hook):
    """Sums the time between the engine's hook calls.

    On CPU a mark is a reading of the clock. On CUDA it is an event on the current stream, read only in ``pop_seconds``,
    so that the host does not wait while steps run.
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

    def pop_seconds(self) -> dict[str, float]:
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
