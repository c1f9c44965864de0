"""Clocks of the benchmark of what health costs: one around calls in a rank, one of the agent's processor time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megasdc.common.errors import LaunchError
from tools.bench.clocks import Clock

INSTRUCTIONS = "progress records, instructions"


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step, from the end of the one before, and those inside health's calls, by part."""

    wall_s: float
    parts: dict[str, float]
    calls: int


@dataclass(frozen=True)
class AgentCost:
    """An agent's processor time: of its start, and from then on to the end of training; and its memory at both."""

    start_s: float
    cpu_s: float
    wall_s: float
    memory_bytes: tuple[int, int]


class OutermostClock(Clock):
    """Adds up the time of calls; of one within another, none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self._is_inside = False
        self._began = 0.0

    def timed(self, part: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call it, and count its time."""
        if self._is_inside:
            return call(*args, **options)
        self._is_inside = True
        self.calls += 1
        try:
            return super().timed(part, call, *args, **options)
        finally:
            self._is_inside = False

    def begin(self, *_: Any) -> None:
        """What counts as an instruction's begins."""
        self._began = time.perf_counter()

    def end(self, *_: Any) -> None:
        """It ends."""
        self.parts[INSTRUCTIONS] = self.parts.get(INSTRUCTIONS, 0.0) + time.perf_counter() - self._began
        self.calls += 1

    def step(self, wall_s: float) -> StepCost:
        """What was counted since the last call."""
        calls, self.calls = self.calls, 0
        return StepCost(wall_s, self.pop_parts(), calls)


class AgentClock:
    """Reads the processor time of this host's agent.

    Args:
        run_dir: of its run.
        settle_s: seconds of its start.

    Raises:
        LaunchError: there is no agent.
    """

    def __init__(self, run_dir: Path, settle_s: float) -> None:
        self._process, self._settle_s = _agent_of(run_dir), settle_s
        self._first: tuple[float, float, int] | None = None
        self._last = (0.0, 0.0, 0)

    def read(self) -> None:
        """Read it now; nothing before the end of its start counts."""
        if time.time() - self._process.create_time() < self._settle_s:
            return
        used = self._process.cpu_times()
        self._last = time.monotonic(), used.user + used.system, self._process.memory_info().rss
        self._first = self._first or self._last

    @property
    def cost(self) -> AgentCost | None:
        """What was read; None: training has ended before the start had."""
        first, last = self._first, self._last
        if first is None or first == last:
            return None
        return AgentCost(first[1], last[1] - first[1], last[0] - first[0], (first[2], last[2]))


def _agent_of(run_dir: Path) -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "megasdc.ops.health.agent" in words and str(run_dir.resolve()) in words[-1]:
            found: psutil.Process = process
            return found
    raise LaunchError(f"no agent watches {run_dir}; see {run_dir}/health/agent_00000.log")
