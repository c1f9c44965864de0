"""Clocks of our own calls: time inside hooks, gates and observers, by part; and of blocks until a GPU has done them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.observer import Observer
from megasdc.parallel.collectives import Field, StepAgreement
from tools.bench.statistics import Block, Cost


class Clock:
    """Adds up the time of calls, by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    def timed(self, part: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call it, and count its time."""
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - began

    def wrap(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, whose time is counted; as a method it takes its object first."""

        @wraps(call)
        def timed(*args: Any, **options: Any) -> Any:
            return self.timed(part, call, *args, **options)

        return timed

    def pop_parts(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        found = dict(self.parts)
        self.parts.clear()
        return found

    @property
    def total_s(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())


class Timed:
    """Stands for a hook, and adds up the time inside its methods."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return partial(self._clock.timed, name, found) if callable(found) else found


class TimedObserver(Observer):
    """An observer that adds up the time inside its own calls, its listeners' included, but for those in replays.

    Not in it are the identity nodes that it puts into the graph, which alternating steps see.
    """

    own_s = 0.0

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._engine.is_replaying:
            return call(*args)
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.own_s += time.perf_counter() - began

    def before_reduction(self, engine: TrainingEngine) -> None:
        """Time it."""
        self._timed(super().before_reduction, engine)

    def before_optimizer_step(self, engine: TrainingEngine) -> None:
        """Time it."""
        self._timed(super().before_optimizer_step, engine)

    def after_optimizer_step(self, engine: TrainingEngine) -> None:
        """Time it."""
        self._timed(super().after_optimizer_step, engine)

    def _emit_update(self, engine: TrainingEngine) -> None:
        self._timed(super()._emit_update, engine)

    def _emit_local(self, phase: str, fqn: str, slot: str, result: torch.Tensor) -> torch.Tensor | None:
        return self._timed(super()._emit_local, phase, fqn, slot, result)


class TimedAgreement(StepAgreement):
    """Adds up the time inside the agreement of a step, as the clock's part ``agreement``."""

    def __init__(self, clock: Clock, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group or dist.group.WORLD)
        self._clock = clock

    def start(self, fields: Iterable[Field]) -> None:
        """Start the reduction."""
        self._clock.timed("agreement", super().start, fields)

    def finish(self) -> None:
        """Wait for the reduction."""
        self._clock.timed("agreement", super().finish)


def time_block(run: Block, cpu_s: Callable[[], float] = time.process_time) -> Cost:
    """Time a block until a GPU, if there is one, has done it; ``cpu_s``: clock of processor time."""
    wait_for_device()
    wall, cpu = time.perf_counter(), cpu_s()
    run()
    wait_for_device()
    return Cost(time.perf_counter() - wall, cpu_s() - cpu)


def devices_here(machine: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Devices to measure on, and what cannot be measured here, and why; a GPU's name is put into ``machine``."""
    if not torch.cuda.is_available():
        return ["cpu"], ["speed of the kernel on a GPU: there is no CUDA device"]
    machine["gpu"] = torch.cuda.get_device_name()
    return ["cpu", "cuda"], []


def wait_for_device() -> None:
    """Wait until a GPU, if there is one, has done everything."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
