"""Time of the checks of each step, and what keeps it within a budget.

``CheckBudget`` goes by what checks take on the slowest rank. Time is that inside our own calls, summed over the last
steps on each rank; the slowest rank counts. What all ranks wait for together - a reduction, an exchange of slices -
counts in each step as on the rank that waited least: the others waited for it, which the sum of gradients would have
had them do as well.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from types import TracebackType
from typing import NamedTuple, Protocol

import torch

from megasdc.metrics.writer import MetricsWriter
from megasdc.parallel.collectives import MAX, MIN, Field
from megasdc.sdc.cost import APART, MOST_EVERY, Cadence, TimeShares, choose_cadence
from megasdc.sdc.host import Host


class BudgetedEngine(Protocol):
    """What a budget needs of an engine: its device, and the largest number of micro-batches of a step on a replica."""

    @property
    def device(self) -> torch.device: ...  # noqa: D102

    @property
    def most_micro_batches(self) -> int: ...  # noqa: D102


AUDITS_OF_BUDGET = 0.5
"""Largest share of the budget that audits take where their interval may grow."""


@dataclass(frozen=True)
class AuditPace:
    """How often audits come, where their interval grows with what they cost.

    Args:
        interval: least number of steps from one to the next, ``longest`` the largest.
        after_saves: number of steps between saves after which there is one, too; 0: none.
        least: what an audit costs at least, as a share of a step.
    """

    interval: int
    longest: int
    after_saves: int
    least: float = 0.0

    def factor(self, cost: float, share: float) -> int:
        """Least power of two by which the interval is multiplied, so that audits take ``share`` of all steps at most.

        Args:
            cost: time of an audit, as a share of a step.
        """
        factor = 1
        while cost > share * self.interval * factor and self.interval * factor * 2 <= self.longest:
            factor *= 2
        return factor

    def share(self, cost: float, factor: int) -> float:
        """Share of all steps that audits take."""
        return cost / (self.interval * factor) + self.share_after_saves(cost)

    def share_after_saves(self, cost: float) -> float:
        """Share of all steps that audits after saves take, which no budget makes rarer."""
        return cost / self.after_saves if self.after_saves else 0.0


@dataclass(frozen=True)
class CheckPlan:
    """Plan of a run's checks: what they cover, and when.

    Args:
        cadence: cadence of looks at results; that of the first steps, where it follows a budget.
        lines: descriptions of the checks, one for each tier.
        budget: largest share of a step's time; None: the cadence is given.
        expected: expected time of checks, as shares of a step; None: nothing was measured.
        slices: number of slices of the optimizer, on the rank that has most; None: not checked, or not measured.
        products: number of products of linear layers, on the rank that has most; None: likewise.
        sets: number of sets of blocks of the gradient, on the rank that has most; None: likewise.
        whole: whether each step looks at all its micro-batches, also where their number changes.
        pace: how often audits come; None: their interval is given.
        thins: whether ranks compare only in some steps what each step has, where the budget has no room for more.
    """

    cadence: Cadence
    lines: tuple[str, ...]
    budget: float | None = None
    expected: TimeShares | None = None
    slices: int | None = None
    products: int | None = None
    sets: int | None = None
    whole: bool = False
    pace: AuditPace | None = None
    thins: bool = False


logger = logging.getLogger(__name__)

WINDOW = 100
"""Number of steps over which time is measured."""
ADJUST = 10
"""Number of steps from one evaluation of that time to the next."""
FIRST = 4
"""Number of measured steps before the first evaluation: what is expected at the start does not know all checks."""
USUAL = 20
"""Number of steps whose median is the usual time of a step, and that are measured before comparisons become rarer."""
TIMES = ("looks", "audits", "fixed", "slices", "waits", "steps")
SHARED = ("slices", "waits", "steps")
"""Names of times in which ranks wait for each other."""
WATCHED = 20
"""Number of steps after a finding that look at everything, however small the budget: a fault may come again."""
ROOM = 0.9
"""Share of the budget within which checks must stay to look more often, so that noise changes nothing."""


class Stopwatch:
    """Adds up the time inside ``with`` blocks.

    Args:
        running: stack of stopwatches, of which only the innermost counts time.
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

    def pop_seconds(self) -> float:
        """Seconds since the last call."""
        found, self._seconds = self._seconds, 0.0
        return found


class CheckBudget:
    """Decides which steps look, and at how many micro-batches, from the time that looks take.

    Args:
        plan: plan whose cadence is that of the first steps. Without a budget it is that of all steps, unless each step
            looks at all that it has, and nothing is measured.
        engine: this rank's engine. On a GPU the expected shares are lower bounds, since the host's clock does not see
            the time of the device.
        writer: writer of metrics on rank 0, for the time of checks; None: it is not written.

    Attributes:
        looks, audits, fixed: stopwatches of this rank's checks.
        slices, waits: stopwatches of checks in which ranks wait for each other.
        whole: whether each step looks at all that it has, as the plan says.
        audit_factor: number by which the interval of audits is multiplied now; the same on all ranks.
        replays: stopwatch of replays in a stage's waiting time; what they add to a usual step counts as an audit's.
        fields: times of the step before, which are reduced over all ranks in each step.
    """

    def __init__(self, plan: CheckPlan, engine: BudgetedEngine, writer: MetricsWriter | None = None) -> None:
        self._writer, self._engine, self.whole = writer, engine, plan.whole
        nothing = TimeShares(0.0, 0.0, 0.0, 0.0)
        self._cadence, self._share, self._thins = plan.cadence, plan.budget, plan.thins
        self._shares = plan.expected or nothing
        self._least = nothing if engine.device.type == "cpu" else self._shares
        inside: list[Stopwatch] = []
        self.looks, self.audits, self.fixed, self.slices, self.waits = (Stopwatch(inside) for _ in range(5))
        self.replays = Stopwatch(inside)
        self._usual: deque[float] = deque(maxlen=USUAL)
        """Seconds of the last steps without a replay."""
        self._step = Stopwatch([])
        self._own: deque[_Times] = deque(maxlen=WINDOW)
        """Times of this rank in the last steps."""
        self._agreed: deque[_Times] = deque(maxlen=WINDOW)
        """Times that all ranks have agreed on in the last steps."""
        self._fields = {name: Field(partial(self._own_value, name), MIN if name in SHARED else MAX) for name in TIMES}
        self.fields = () if plan.budget is None else tuple(self._fields.values())
        self._pace, self._audit_cost = plan.pace, 0.0
        """Pace of audits, and the time of one as a share of a step, as it was measured last."""
        self.audit_factor = 1
        if plan.pace is not None and plan.budget is not None:
            self._audit_cost = plan.pace.least
            self.audit_factor = plan.pace.factor(plan.pace.least, AUDITS_OF_BUDGET * plan.budget)
        self._due = (0, 0, 0, 1)
        self._is_evaluated = True
        """Whether times are evaluated at the end of the running step; the same on all ranks."""
        self._sent = False
        self._void = True  # the first step also makes what later ones use
        self._found, self._watched = False, 0
        """Whether something was found in the running step, and how many steps from it on look at everything."""
        self._warned = False

    def _own_value(self, name: str) -> float | None:
        """This rank's value of a time: of the last step for shared times, else the sum over steps; None: not due."""
        if not self._sent or not (name in SHARED or self._is_evaluated):
            return None
        if name in SHARED:
            return float(getattr(self._own[-1], name))
        return float(sum(getattr(one, name) for one in self._own))

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step, as planned now, on the replica that takes most."""
        return self._engine.most_micro_batches

    @property
    def cadence(self) -> Cadence:
        """Present cadence: which steps look, and at how many micro-batches."""
        return Cadence(self.micro_batches) if self.whole or self._watched else self._cadence

    @property
    def turns(self) -> int:
        """Number of looks in which each of a step's micro-batches is looked at."""
        return math.ceil(self.micro_batches / self.cadence.micro_batches)

    @property
    def share(self) -> float | None:
        """Largest share of a step's time; None: the cadence is given."""
        return self._share

    @property
    def shares(self) -> TimeShares:
        """Shares of a step that the checks take, as they were measured last."""
        return self._shares

    def looked_at(self, step: int) -> Collection[int]:
        """Numbers of the micro-batches that a step looks at."""
        return self.cadence.looked_at(step, self.micro_batches)

    def begin(self, step: int, *, audits: bool = False, compares: bool = True) -> None:
        """Start the time of a step, and find out what it looks at.

        Args:
            audits: whether it is audited.
            compares: whether ranks compare in it what each step has.
        """
        if self._thins:  # what was compared before a save is no part of a step
            for clock in self._clocks:
                clock.pop_seconds()
        self._step.__enter__()
        self._due = len(self.looked_at(step)), int(self.cadence.slices(step)), int(audits), int(compares)
        self._is_evaluated = self._sent and self._is_due(step, len(self._agreed) + 1)

    @property
    def _clocks(self) -> tuple[Stopwatch, ...]:
        return self.looks, self.audits, self.fixed, self.slices, self.waits

    @staticmethod
    def _is_due(step: int, agreed: int) -> bool:
        """Whether times are evaluated at the end of a step; ``agreed``: number of steps whose times are known then."""
        return agreed == FIRST or step % ADJUST == 0

    def ignore_step(self) -> None:
        """Leave this step out of the measurement, since it spends time on a finding."""
        self._void = True

    def watch(self) -> None:
        """Have the next ``WATCHED`` steps look at everything where a budget allows less; on all ranks in the same step.

        Something was found that does not end the training, and what is put right once may go wrong in each step.
        """
        self._found = self._share is not None

    def end(self, host: Host, step: int) -> None:
        """End a step: add its times, and adjust the cadence when due; the same on all ranks."""
        self._found, self._watched = False, WATCHED if self._found else max(self._watched - 1, 0)
        self._step.__exit__(None, None, None)
        step_s = self._step.pop_seconds()
        late_s = self._not_hidden(step, step_s)
        if self._share is None:
            self._void = False
            return
        taken = [clock.pop_seconds() for clock in self._clocks]
        taken = [taken[0], taken[1] + late_s, *taken[2:], step_s]
        if has_agreed := self._sent:  # on the step before
            self._agreed.append(_Times(**{name: field.value for name, field in self._fields.items()}))
        self._sent, self._void = not self._void, False
        is_due = has_agreed and self._is_evaluated
        if is_due:
            self._update_shares(step)
        if self._sent:
            self._own.append(_Times._make((*taken, *self._due)))
        if is_due and not self._watched:
            self._adjust_audits(host, step, self._share)
            self._adjust(host, step, self._share)

    def _not_hidden(self, step: int, step_s: float) -> float:
        """Seconds by which the replay made this step longer than usual; all of the replay where that is not known."""
        replay_s = self.replays.pop_seconds()
        if not replay_s:
            if not self._void:
                self._usual.append(step_s)
            return 0.0
        if self._void or not self._usual:
            return replay_s
        late_s = min(max(step_s - median(self._usual), 0.0), replay_s)
        if self._writer is not None:
            self._writer.write(step, {"sdc/replay_hidden_share": 1 - late_s / replay_s})
        return late_s

    def _update_shares(self, step: int) -> None:
        """Compute the shares of the last steps; a share of which these have no sample stays as it was."""
        sums, own = _total(self._agreed), _total(self._own)
        known, least, step_s = self._shares, self._least, sums.steps / len(self._agreed)
        looks, audits, fixed = (self._fields[name].value for name in ("looks", "audits", "fixed"))
        compared = (fixed + sums.waits) / own.compared / step_s if own.compared else known.fixed
        of_audits = audits / sums.steps
        if self._pace is not None:
            self._audit_cost = audits / own.audited / step_s if own.audited else self._audit_cost
            of_audits = self._pace.share(self._audit_cost, self.audit_factor)
        self._shares = TimeShares(
            max(compared, least.fixed),
            max(of_audits, least.audits),
            max(looks / own.looked / step_s, least.look) if own.looked else known.look,
            sums.slices / own.sliced / step_s if own.sliced else known.slice,
        )
        if self._writer is not None:
            spent = looks + audits + fixed + sums.slices + sums.waits
            self._writer.write(step, {"sdc/cost_share": spent / sums.steps})

    def _adjust_audits(self, host: Host, step: int, budget: float) -> None:
        """Choose the interval of audits by what one takes."""
        if self._pace is None:
            return
        pace, cost, share = self._pace, self._audit_cost, AUDITS_OF_BUDGET * budget
        longer, shorter = pace.factor(cost, share), pace.factor(cost, ROOM * share)
        if self.audit_factor in range(longer, shorter + 1):
            return
        self.audit_factor = longer if longer > self.audit_factor else shorter
        self._shares = replace(self._shares, audits=pace.share(cost, self.audit_factor))
        if host.dims.rank == 0:
            interval = pace.interval * self.audit_factor
            host.events.emit("sdc", "audit_interval", step=step, interval=interval, cost=cost, budget=budget)
            logger.info("audits every %d steps from now on: one takes %.3g steps", interval, cost)

    def _adjust(self, host: Host, step: int, budget: float) -> None:
        now = self.cadence.share(self._shares)
        limit, thins = budget if now > budget else ROOM * budget, self._thins and len(self._agreed) >= USUAL
        chosen = choose_cadence(self._shares, limit, self.micro_batches, thins=thins)
        rates, before_rates = ((one.compare_rate, one.rate) for one in (chosen, self.cadence))
        if rates < before_rates if now > budget else rates > before_rates:
            self._cadence, before = chosen, now
            now = chosen.share(self._shares)
            if host.dims.rank == 0:
                host.events.emit(
                    "sdc", "cadence", step=step, **asdict(chosen), budget=budget, was=before, parts=self._shares
                )
                logger.info(
                    "checks look at %d of %d micro-batches once in %d steps from now on%s: %.2g%% of the time, before "
                    "%.2g%%",
                    *(chosen.micro_batches, self.micro_batches, chosen.every),
                    "" if chosen.apart == 1 else f", ranks compare parameters and settings once in {chosen.apart}",
                    *(100 * now, 100 * before),
                )
        is_least = self.cadence.every == MOST_EVERY and self.cadence.apart == (APART[-1] if self._thins else 1)
        if now > budget and is_least and not self._warned:
            self._warned = True
            if host.dims.rank == 0:
                after_saves = self._pace.share_after_saves(self._audit_cost) if self._pace else 0.0
                logger.warning("%s", beyond(self._shares, budget, self.cadence, after_saves))


class _Times(NamedTuple):
    """Seconds of steps by part, and numbers of micro-batches and slices that were looked at in them."""

    looks: float = 0.0
    audits: float = 0.0
    fixed: float = 0.0
    slices: float = 0.0
    waits: float = 0.0
    steps: float = 0.0
    looked: float = 0.0
    sliced: float = 0.0
    audited: float = 0.0
    compared: float = 0.0


def _total(steps: Iterable[_Times]) -> _Times:
    return _Times._make(sum(column) for column in zip(_Times(), *steps, strict=True))


def beyond(
    shares: TimeShares, budget: float, cadence: Cadence = Cadence(1, MOST_EVERY), after_saves: float = 0.0
) -> str:
    """Message that checks cannot be kept within a budget, with the reason and what to do.

    Args:
        cadence: the rarest that may be chosen.
        after_saves: share of audits after saves, which is a part of that of audits.
    """
    needs = "every step needs" if cadence.apart == 1 else f"ranks compare in one step in {cadence.apart}"
    looks = (shares.look + shares.slice) / MOST_EVERY
    parts = {
        f"of what {needs}": shares.fixed * cadence.compare_rate,
        "of audits": max(shares.audits - after_saves, 0.0),
        "of audits after checkpoints": after_saves,
        "of looks": looks,
    }
    told = ", ".join(f"{share:.2%} is {what}" for what, share in parts.items() if round(share, 4) or what == "of looks")
    small = parts[f"of what {needs}"] + looks  # of both most is what a step has whatever its size
    advised = {
        "Larger micro-batches": small,
        "A longer audit.interval": parts["of audits"],
        "A longer checkpoint.interval": after_saves,
    }
    advice = max(advised, key=lambda one: advised[one])
    return (
        f"checks take more than sdc.budget ({budget:.2%} of a step), though only one step in {MOST_EVERY} looks: "
        f"{told}. {advice} cost{'s' * advice.startswith('A ')} less"
    )
