"""A rank of the benchmark of what saves cost: trains as the entry script does, and saves in rounds.

All savers are the product's hooks: one that waits, one that writes beside training, one that keeps snapshots in memory.
A round is a sequence of steps with nothing beside them, at whose ends one of the savers is asked, and of the steps that
follow until all it has begun is done. So all kinds of steps alternate in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megasdc.config.load import RunConfig
from megasdc.engine.engine import StepResult, TrainingEngine
from megasdc.engine.hooks import Hook, Run
from megasdc.parallel.collectives import Field, gather_objects
from megasdc.train.build import Start
from megasdc.train.checkpointer import MemoryCheckpoints, Saver, WaitForSnapshots
from tools.bench.checkpoints.stall_clock import Moved, SaveClock
from tools.bench.rank import Messages
from tools.bench.small.drill import train_with

SYNC, ASYNC, MEMORY = "sync", "async", "memory"
"""Savers, and what is due at the end of a step."""
QUIET, OTHER = "quiet", "other"
"""Kinds of steps besides those in which a snapshot is kept in memory: nothing runs beside it, or something does."""
_NEVER = 1 << 40


@dataclass(frozen=True)
class StallStep:
    """A step.

    Args:
        due: saver that was asked at its end; empty: none.
        wall_s: from the end of the one before, savers included.
        parts: seconds inside savers, see ``SaveClock``.
    """

    kind: str
    due: str
    wall_s: float
    parts: dict[str, float]

    @property
    def stalled_s(self) -> float:
        """Inside all savers."""
        return sum(seconds for name, seconds in self.parts.items() if "/" not in name)


@dataclass(frozen=True)
class RankStall:
    """What a rank measured.

    Args:
        micro_batches: their number of the round, and the begin and end of forward and backward pass, on the clock of
            ``time.perf_counter``.
        skipped: snapshots for memory that were due and not taken.
    """

    rank: int
    steps: list[StallStep]
    micro_batches: list[tuple[int, float, float]]
    copies: list[Moved]
    stores: list[Moved]
    skipped: int


class Asked(Hook):
    """A saver that acts when it is asked, timed; ``is_due`` at the end of this step."""

    def __init__(self, name: str, inner: Saver | MemoryCheckpoints, clock: SaveClock) -> None:
        self._name, self._inner, self._clock = name, inner, clock
        self.is_due = True  # after the first step, in which memory is allocated

    @property
    def fields(self) -> Any:  # type: ignore[override]
        """Those of the saver."""
        return self._inner.fields

    def on_start(self, run: Run) -> None:
        """Not timed."""
        self._inner.on_start(run)

    def after_micro_batches(self, engine: TrainingEngine) -> None:
        """Wait as ``WaitForSnapshots`` does, timed."""
        self._clock.timed(self._name, self._inner.wait_for_copy)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Timed, where it is due or something is under way."""
        if isinstance(self._inner, Saver):
            interval = 1 if self.is_due else _NEVER
            self._inner.section = self._inner.section.model_copy(update={"interval": interval})
        if self.is_due or (isinstance(self._inner, Saver) and self._inner.under_way is not None):
            self._clock.timed(self._name, self._inner.after_step, run, result)

    def on_end(self, run: Run) -> None:
        """Not timed."""
        self._inner.on_end(run)

    def close(self) -> None:
        """Not timed."""
        self._inner.close()


class Rounds(Hook):
    """Asks the savers in turn, and records each step but the first, and its micro-batches; the last hook of all.

    Collective: all ranks of the run.
    """

    def __init__(
        self,
        messages: Messages,
        name: str,
        clock: SaveClock,
        savers: dict[str, Asked],
        beside: Saver,
        program: list[str],
    ) -> None:
        self._messages, self._name, self._clock, self._savers, self._beside = messages, name, clock, savers, beside
        self._program, self._done = program, 0
        self._busy = Field(lambda: float(clock.open > 0))
        self.fields = (self._busy,)
        self._steps: list[StallStep] = []
        self._before, self._was_busy = "", False
        self._micro_batches: list[tuple[int, float, float]] = []
        self._round, self._micro_batch_at = 0, 0.0
        self._next = self._plan()
        self._due: str | None = None
        self._ended_at: float | None = None

    def _plan(self) -> Iterator[str]:
        """What is due at the end of each step; it goes on to the next entry once all is done that was begun."""
        while self._is_busy:
            yield ""
        for self._done, due in enumerate(self._program):  # noqa: B020 - told as progress
            yield due
            follows = self._program[self._done + 1] if self._done + 1 < len(self._program) else ""
            while follows != due and self._is_busy:
                yield ""

    @property
    def _is_busy(self) -> bool:
        """Whether something that was begun is not done."""
        return self._beside.under_way is not None or bool(self._busy.value) or self._before == MEMORY

    def before_step(self, run: Run) -> None:
        """Ask for what is due at the end of this step."""
        for name, saver in self._savers.items():
            saver.is_due = self._ended_at is None or name == self._due

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """A micro-batch begins."""
        self._micro_batch_at = time.perf_counter()

    def after_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """It has ended."""
        if self._ended_at is not None:
            self._micro_batches.append((self._round, self._micro_batch_at, time.perf_counter()))

    def after_step(self, run: Run, result: StepResult) -> None:
        """A step has ended; what is done here is none of its time."""
        now = time.perf_counter()
        due = (self._due or "") if self._ended_at is not None else MEMORY
        if self._ended_at is not None:
            self._steps.append(StallStep(self._kind(due), due, now - self._ended_at, self._clock.pop_parts()))
        self._clock.pop_parts()
        self._before, self._was_busy = due, bool(self._busy.value) or self._beside.under_way is not None
        self._round += due == SYNC
        self._messages.progress(self._name, self._done, len(self._program))
        self._due = next(self._next, None)
        if self._due is None:
            run.end.reason = "all rounds are done"
        self._ended_at = time.perf_counter()

    def _kind(self, due: str) -> str:
        """Of the step that has just ended."""
        if self._before == MEMORY:
            return MEMORY if due == MEMORY else OTHER
        return OTHER if self._before or self._was_busy else QUIET

    def on_end(self, run: Run) -> None:
        """Send what all ranks have measured."""
        clock = self._clock
        asked = self._program.count(MEMORY) + 1
        skipped = asked - sum(one.saver == MEMORY for one in clock.copies)
        own = RankStall(run.dims.rank, self._steps, self._micro_batches, clock.copies, clock.stores, skipped)
        found = gather_objects(own, run.host_group)
        self._messages.send(ranks=found, finished=self._due is None)


def measure_rank(messages: Messages, name: str, config: Path, rounds: int, quiet: int, snapshots: int) -> None:
    """Train, and send step by step how far it is, in the end what was measured."""
    clock = SaveClock()
    clock.attach()
    program = [*[""] * quiet, *_round(quiet, snapshots) * rounds]

    def with_rounds(build: Callable[[Start], list[Hook]], parts: Start) -> list[Hook]:
        savers: dict[str, Asked] = {}
        found: list[Hook] = []
        for hook in build(parts):
            if isinstance(hook, Saver):
                beside = hook
                waiting = Saver(_waiting(parts.config), parts.run, None, hook.state, hook.before_save, None, None)
                savers[SYNC], savers[ASYNC] = Asked(SYNC, waiting, clock), Asked(ASYNC, hook, clock)
                found += [savers[SYNC], savers[ASYNC]]
            elif isinstance(hook, MemoryCheckpoints):
                savers[MEMORY] = Asked(MEMORY, hook, clock)
                found.append(savers[MEMORY])
            elif not isinstance(hook, WaitForSnapshots):  # each waits for itself, to be timed
                found.append(hook)
        return [*found, Rounds(messages, name, clock, savers, beside, program)]

    train_with(config, with_rounds)


def _round(quiet: int, snapshots: int) -> list[str]:
    calm = [""] * (quiet - 1)
    return [*calm, SYNC, "", *calm, ASYNC, *calm, *[MEMORY] * (snapshots + 1)]


def _waiting(config: RunConfig) -> RunConfig:
    """The same run, whose saver waits and writes into another folder."""
    sections = config.megasdc
    folder = Path(sections.logging.run_dir) / "waiting"
    checkpoint = sections.checkpoint.model_copy(update={"writing": "sync", "folder": str(folder)})
    return replace(config, megasdc=sections.model_copy(update={"checkpoint": checkpoint}))
