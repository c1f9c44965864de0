"""Keeps the time of a run's checks within its budget, from what they take on the slowest rank.

Time is that inside our own calls, summed over the last steps on each rank; the slowest rank counts. What all ranks wait
for together - a reduction, an exchange of slices - counts in each step as on the rank that waited least: the others
waited for it, which the sum of gradients would have had them do as well.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import asdict
from functools import partial
from statistics import median
from types import TracebackType
from typing import NamedTuple

from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Run
from megasdc.metrics.writer import MetricsWriter
from megasdc.parallel.collectives import MAX, MIN, Field
from megasdc.sdc.cost import MOST_EVERY, Cadence, TimeShares, choose_cadence
from megasdc.train.detection.coverage import CheckPlan

logger = logging.getLogger(__name__)

WINDOW = 100
"""Steps over which time is measured."""
ADJUST = 10
"""Steps from one look at that time to the next."""
FIRST = 4
"""Measured steps after which the first look at it comes: what is expected at the start does not know all checks."""
USUAL = 20
"""Steps whose median is what a step usually takes."""
TIMES = ("looks", "audits", "fixed", "slices", "waits", "steps")
SHARED = ("slices", "waits", "steps")
"""Times in which ranks wait for each other."""
ROOM = 0.9
"""Checks look more often only where that takes no more than this share of the budget, so that noise changes nothing."""


class Stopwatch:
    """Adds up the time inside ``with`` blocks.

    Args:
        running: of stopwatches that share it only the innermost runs.
    """

    def __init__(self, running: list[Stopwatch]) -> None:
        self._seconds = self._began = 0.0
        self._running = running

    def __enter__(self) -> None:
        now = time.perf_counter()
        if self._running:
            self._running[-1]._pause(now)
        self._running.append(self)
        self._began = now

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        now = time.perf_counter()
        self._pause(now)
        self._running.pop()
        if self._running:
            self._running[-1]._began = now

    def _pause(self, now: float) -> None:
        self._seconds += now - self._began

    def take(self) -> float:
        """Seconds since the last call."""
        found, self._seconds = self._seconds, 0.0
        return found


class CheckBudget:
    """Decides which steps look, and at how much, from what looking takes.

    Args:
        plan: its cadence is that of the first steps; without a budget of all, unless each step looks at all that it
            has, and nothing is measured.
        engine: of this rank. Where a device computes beside the host, whose clock does not see that, what was expected
            counts at least.
        writer: where rank 0 writes what checks took; None: nowhere.

    Attributes:
        looks, audits, fixed: time of this rank's checks.
        slices, waits: the same, of what ranks wait for together.
        whole: whether each step looks at all that it has, as the plan says.
        replays: the same, of what a stage computes where it would wait; of it counts, with the audits, what made the
            step longer than the last ones without.
        lines: of the plan.
        fields: what the ranks agree on in each step: the time of the step before.
    """

    def __init__(self, plan: CheckPlan, engine: TrainingEngine, writer: MetricsWriter | None = None) -> None:
        self._writer, self._engine, self.lines, self.whole = writer, engine, plan.lines, plan.whole
        nothing = TimeShares(0.0, 0.0, 0.0, 0.0)
        self._cadence, self._share = plan.cadence, plan.budget
        self._shares = plan.expected or nothing
        self._least = nothing if engine.device.type == "cpu" else self._shares
        inside: list[Stopwatch] = []
        self.looks, self.audits, self.fixed, self.slices, self.waits = (Stopwatch(inside) for _ in range(5))
        self.replays = Stopwatch(inside)
        self._usual: deque[float] = deque(maxlen=USUAL)
        """Seconds of the last steps without a replay."""
        self._step = Stopwatch([])
        self._own: deque[_Times] = deque(maxlen=WINDOW)
        """Of this rank; of each step."""
        self._agreed: deque[_Times] = deque(maxlen=WINDOW)
        """Of the rank that waited least; of each step."""
        self._fields = {name: Field(partial(self._give, name), MIN if name in SHARED else MAX) for name in TIMES}
        self.fields = () if plan.budget is None else tuple(self._fields.values())
        self._due = (0, 0)
        self._sent = False
        self._void = True  # the first step also makes what later ones use
        self._warned = False

    def _give(self, name: str) -> float | None:
        """This rank's number: the last step's, or the sum over steps."""
        if not self._sent:
            return None
        return float(getattr(self._own[-1] if name in SHARED else _total(self._own), name))

    @property
    def micro_batches(self) -> int:
        """Of a step, as planned now, on the replica that takes most."""
        return self._engine.most_micro_batches

    @property
    def cadence(self) -> Cadence:
        """Which steps look, and at how many micro-batches."""
        return Cadence(self.micro_batches) if self.whole else self._cadence

    @property
    def turns(self) -> int:
        """Looks in which each of a step's micro-batches is looked at."""
        return math.ceil(self.micro_batches / self.cadence.micro_batches)

    def looked_at(self, step: int) -> Collection[int]:
        """The micro-batches that a step looks at."""
        return self.cadence.looked_at(step, self.micro_batches)

    def begin(self, step: int) -> None:
        """A step begins."""
        self._step.__enter__()
        self._due = len(self.looked_at(step)), int(self.cadence.slices(step))

    def ignore_step(self) -> None:
        """Something was found in this step: what that takes is no cost of looking."""
        self._void = True

    def end(self, run: Run) -> None:
        """A step has ended, and the ranks have agreed on the time of the one before; the same on all ranks."""
        self._step.__exit__(None, None, None)
        step_s = self._step.take()
        late_s = self._not_hidden(run, step_s)
        if self._share is None:
            self._void = False
            return
        taken = [clock.take() for clock in (self.looks, self.audits, self.fixed, self.slices, self.waits)]
        taken = [taken[0], taken[1] + late_s, *taken[2:], step_s]
        if has_agreed := self._sent:  # on the step before
            self._agreed.append(_Times(**{name: field.value for name, field in self._fields.items()}))
        self._sent, self._void = not self._void, False
        is_due = has_agreed and (len(self._agreed) == FIRST or run.step % ADJUST == 0)
        if is_due:
            self._learn(run)
        if self._sent:
            self._own.append(_Times._make((*taken, *self._due)))
        if is_due:
            self._adjust(run, self._share)

    def _not_hidden(self, run: Run, step_s: float) -> float:
        """Seconds of this step's replay for which it lasted longer than usual; all where that is not known."""
        replay_s = self.replays.take()
        if not replay_s:
            if not self._void:
                self._usual.append(step_s)
            return 0.0
        if self._void or not self._usual:
            return replay_s
        late_s = min(max(step_s - median(self._usual), 0.0), replay_s)
        if self._writer is not None:
            self._writer.write(run.step, {"sdc/replay_hidden_share": 1 - late_s / replay_s})
        return late_s

    def _learn(self, run: Run) -> None:
        """Take the shares of the last steps; where none of them looked, those of before stay."""
        sums, own = _total(self._agreed), _total(self._own)
        known, least, step_s = self._shares, self._least, sums.steps / len(self._agreed)
        looks, audits, fixed = (self._fields[name].value for name in ("looks", "audits", "fixed"))
        self._shares = TimeShares(
            max((fixed + sums.waits) / sums.steps, least.fixed),
            max(audits / sums.steps, least.audits),
            max(looks / own.looked / step_s, least.look) if own.looked else known.look,
            sums.slices / own.sliced / step_s if own.sliced else known.slice,
        )
        if self._writer is not None:
            spent = looks + audits + fixed + sums.slices + sums.waits
            self._writer.write(run.step, {"sdc/cost_share": spent / sums.steps})

    def _adjust(self, run: Run, budget: float) -> None:
        now = self.cadence.share(self._shares)
        chosen = choose_cadence(self._shares, budget if now > budget else ROOM * budget, self.micro_batches)
        if (chosen.rate < self.cadence.rate) if now > budget else (chosen.rate > self.cadence.rate):
            self._cadence, before = chosen, now
            now = chosen.share(self._shares)
            if run.dims.rank == 0:
                run.events.emit(
                    "sdc", "cadence", step=run.step, **asdict(chosen), budget=budget, was=before, parts=self._shares
                )
                logger.info(
                    "checks look at %d of %d micro-batches in every %d. step from now on: %.2g%% of a step, was %.2g%%",
                    *(chosen.micro_batches, self.micro_batches, chosen.every, 100 * now, 100 * before),
                )
        if now > budget and self.cadence.every == MOST_EVERY and not self._warned:
            self._warned = True
            if run.dims.rank == 0:
                logger.warning("%s", beyond(self._shares, budget))


class _Times(NamedTuple):
    """Seconds of steps, and how many micro-batches and slices were looked at in them."""

    looks: float = 0.0
    audits: float = 0.0
    fixed: float = 0.0
    slices: float = 0.0
    waits: float = 0.0
    steps: float = 0.0
    looked: float = 0.0
    sliced: float = 0.0


def _total(steps: Iterable[_Times]) -> _Times:
    return _Times._make(sum(column) for column in zip(_Times(), *steps, strict=True))


def beyond(shares: TimeShares, budget: float) -> str:
    """Why checks cannot be kept within a budget, and what to do."""
    return (
        f"checks take more than sdc.budget ({budget:.2%} of a step), though only one step in {MOST_EVERY} looks: "
        f"{shares.fixed:.2%} is of what every step needs, {shares.audits:.2%} of audits, "
        f"{(shares.look + shares.slice) / MOST_EVERY:.2%} of looks. A longer audit.interval or larger micro-batches "
        "cost less"
    )
