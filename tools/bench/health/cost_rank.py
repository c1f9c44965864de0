"""A rank of the benchmark of what health costs: trains as the entry script does, with a clock around health's calls.

Nothing in the product measures this. Every method of every hook that health adds is timed, those that do nothing
included; so are the numbers that they give to a step's agreement, the phases that other hooks enter, and all that is
done before an instruction of the schedule. The agreement itself is there without health, too. Where one timed call
makes another, the outer one counts. A run without health times as many calls that do nothing: the clock's own cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.engine.step_times import StepTimes
from megasdc.ops.health.hooks.links import LinkPings
from megasdc.ops.health.hooks.progress import PHASES, Health
from megasdc.ops.health.hooks.stragglers import StragglerWatch
from megasdc.parallel.collectives import gather_objects
from megasdc.train.build import Start
from tools.bench.health.cost_clocks import AgentClock, OutermostClock, StepCost
from tools.bench.rank import Messages
from tools.bench.small.drill import train_with

PARTS: dict[type[Hook], str] = {
    Health: "progress records, between passes",
    StepTimes: "times of passes",
    StragglerWatch: "stragglers",
    LinkPings: "links",
}
"""Hooks that health adds; ``StepTimes`` is DropCompute's where there is that."""
METHODS = [name for name, value in vars(Hook).items() if callable(value) and not name.startswith("_")]


@dataclass(frozen=True)
class RankCost:
    """What a rank measured.

    Args:
        thread_s: processor time of the thread that answers the agent, over the steps.
        losses: of all steps.
        attached: names of health's hooks, and whatever else of it was attached.
    """

    rank: int
    steps: list[StepCost]
    thread_s: float
    losses: list[float]
    attached: list[str]


class Recorder(Hook):
    """Records each step but the first; the last hook of all.

    Collective: all ranks of the run.
    """

    def __init__(self, messages: Messages, clock: OutermostClock, attached: list[str], settle_s: float) -> None:
        self._messages, self._clock, self._attached, self._settle_s = messages, clock, attached, settle_s
        self._steps: list[StepCost] = []
        self._losses: list[float] = []
        self._ended_at: float | None = None
        self._agent: AgentClock | None = None

    def on_start(self, run: Run) -> None:
        """Find the agent."""
        if self._attached and run.dims.rank == 0:
            self._agent = AgentClock(run.folder, self._settle_s)

    def after_step(self, run: Run, result: StepResult) -> None:
        """A step has ended; what is done here is none of its time."""
        now = time.perf_counter()
        cost = self._clock.step(0.0 if self._ended_at is None else now - self._ended_at)
        if self._ended_at is None:
            self._thread_began_s = _thread_s()
        else:
            self._steps.append(cost)
        self._losses.append(result.loss)
        if self._agent is not None:
            self._agent.read()
        watched = "on" if self._attached else "off"
        self._messages.progress(f"steps with health {watched}", result.step, run.steps)
        self._ended_at = time.perf_counter()

    def on_end(self, run: Run) -> None:
        """Send what all ranks have measured."""
        thread_s = _thread_s() - self._thread_began_s
        own = RankCost(run.dims.rank, self._steps, thread_s, self._losses, self._attached)
        found = gather_objects(own, run.host_group)
        self._messages.send(ranks=found, agent=None if self._agent is None else self._agent.cost)


def _thread_s() -> float:
    """Processor time of the thread that answers the agent; 0: there is none."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == "health"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


def measure_rank(messages: Messages, config: Path, settle_s: float) -> None:
    """Train, and send step by step how far it is, in the end what was measured."""
    clock = OutermostClock()

    def with_clock(build: Callable[[Start], list[Hook]], parts: Start) -> list[Hook]:
        attached = _clock_instructions(parts.run.engine, clock)
        hooks = build(parts)
        found = {PARTS[type(hook)]: hook for hook in hooks if type(hook) in PARTS}
        told = [*attached, *(type(hook).__name__ for hook in found.values())]
        if not told:  # what the clock itself counts: the same calls of hooks that do nothing
            parts.run.engine.watch_instructions(lambda kind: _nothing if kind in PHASES else None)
            found = {part: Hook() for part in PARTS.values()}
            hooks = [*found.values(), *hooks]
        for part, hook in found.items():
            _clock_hook(hook, part, clock)
        parts.run.enter = partial(clock.timed, PARTS[Health], parts.run.enter)
        return [*hooks, Recorder(messages, clock, told, settle_s)]

    train_with(config, with_clock)


def _clock_instructions(engine: TrainingEngine, clock: OutermostClock) -> list[str]:
    """Time what is put before instructions from now on; returns a list that gets the name of each such thing."""
    watch, attached = engine.watch_instructions, list[str]()

    def clocked(watcher_of: Callable[[type], Callable[[int], None] | None]) -> None:
        watchers = {kind: watcher_of(kind) for kind in engine._INSTRUCTION_MAP}
        for one in (clock.end, None, clock.begin):  # what is put there last is called first
            watch(lambda kind, one=one: watchers[kind] and (one or watchers[kind]))  # type: ignore[misc]
        attached.append("before instructions")

    engine.watch_instructions = clocked  # type: ignore[method-assign]
    return attached


def _clock_hook(hook: Hook, part: str, clock: OutermostClock) -> None:
    """Time all calls of a hook, and those of its fields in a step's agreement."""
    for name in METHODS:
        setattr(hook, name, partial(clock.timed, part, getattr(hook, name)))
    for field in hook.fields:
        for name in ("send", "receive"):
            setattr(field, name, partial(clock.timed, part, getattr(field, name)))


def _nothing(_micro_batch: int) -> None:
    """Stands for what health does before an instruction."""
