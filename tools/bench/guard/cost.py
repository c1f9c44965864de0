"""What a guard costs, ``python -m tools.bench guard-cost``: time of steps, with each protection and without.

A Llama of Hugging Face trains with ZeRO-1 in a plain loop, on two ranks of this machine with a thread each. Of what
acts in every step the time inside its calls is measured, waits for the other rank with it; of traces the time of steps
with and without, in turn. What acts every so many steps tells how long training stood still for it; that is divided by
so many steps.

With ``--protect`` the guard of a word is measured against none, by the time of blocks of steps in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megasdc.attached.protect import AUDIT_INTERVAL
from tools.bench.guard.cost_rank import CALLS, SOMETIMES, measure_costs, measure_word
from tools.bench.guard.options import GuardCostOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, run_in_ranks, scratch_folder
from tools.bench.result import Comparison, ComparisonResult, Report, Result, Told, listing, verdict
from tools.bench.statistics import Cost, Estimate, estimate_median, median_walls, ratios

RANKS = 2
BAR = 0.01
"""Largest share of what acts in every step; traces have none, they are for comparisons."""
SHARE_BAR = 0.005
"""Largest share of time of audits every 50 steps."""
WORD_BAR = 1.03
"""Largest ratio of the time with a word's guard to that without a guard."""
AUDIT = "audit"


@dataclass(frozen=True)
class Every:
    """What acts in every step; ``share`` of the time of a step that is spent in its calls."""

    name: str
    share: Estimate

    @property
    def passed(self) -> bool:
        """Whether it costs no more than it may."""
        return self.share.median <= BAR


@dataclass(frozen=True)
class Due:
    """What acts every ``interval`` steps; ``share`` of the time of those steps."""

    also = ("share",)

    name: str
    interval: int
    seconds: Estimate
    step_s: float

    @property
    def share(self) -> float:
        """Of time."""
        return self.seconds.median / (self.interval * self.step_s)

    @property
    def passed(self) -> bool:
        """Whether it costs no more than it may."""
        return self.name != AUDIT or self.share <= SHARE_BAR


@dataclass(frozen=True)
class GuardCostResult(Result):
    """All protections."""

    judged = ("always", "sometimes")
    always: Sequence[Every] = field(repr=False)
    trace: Estimate = field(repr=False)
    sometimes: Sequence[Due] = field(repr=False)

    def report(self) -> Report:
        """A table for each kind."""
        every: Told = {
            "protection": lambda one: one.name,
            "share of a step": lambda one: f"{one.share.median:.3%}",
            "interval": lambda one: f"{one.share.low:.3%} - {one.share.high:.3%}",
            "bar": lambda one: f"{BAR:.0%}",
            "verdict": lambda one: verdict(one.passed),
        }
        yield listing("in every step", every, self.always)
        low, high = self.trace.low, self.trace.high
        yield f"trace of every step: {self.trace.median:.3f} ({low:.3f} - {high:.3f}) of a step's time without a guard"
        due: Told = {
            "protection": lambda one: one.name,
            "ms": lambda one: f"{1000 * one.seconds.median:.0f}",
            "in steps": lambda one: f"{one.seconds.median / one.step_s:.2f}",
            "every": lambda one: one.interval,
            "share of time": lambda one: f"{one.share:.2%}",
            "bar": lambda one: f"{SHARE_BAR:.1%}" if one.name == AUDIT else "",
            "verdict": lambda one: verdict(one.passed),
        }
        yield listing("now and then: training stands still", due, self.sometimes)


@dataclass(frozen=True)
class WordComparison(Comparison):
    """A word's guard against none.

    Args:
        audit: seconds of an audit, which blocks are without; what it takes of ``interval`` steps is in the ratio.
        step_s: median seconds of a step of each.
    """

    audit: Estimate
    interval: int
    step_s: tuple[float, float]


@dataclass(frozen=True)
class GuardWordResult(ComparisonResult):
    """The comparison of one word."""

    comparisons: list[WordComparison]

    def report(self) -> Report:
        """The ratio, and what is in it."""
        options = self.options
        yield (
            f"{RANKS} ranks of one thread; blocks of {options.block_steps} steps of {options.micro_batches} "
            f"micro-batches, each after {options.warmup}"
        )
        for one in self.comparisons:
            yield one.ratio_table(f"protect {options.protect} against no guard")
            ours, other = (1e3 * seconds for seconds in one.step_s)
            share = one.audit.median / (one.interval * one.step_s[1])
            yield (
                f"a step {ours:.1f} : {other:.1f} ms (medians); in the ratio an audit of {1e3 * one.audit.median:.1f} "
                f"ms every {one.interval} steps, {share:.2%} of all"
            )


def bench_guard_cost(
    options: GuardCostOptions, on_progress: Progress = ignore_progress
) -> GuardCostResult | GuardWordResult:
    """Measure all protections, or a word, with all ranks on this machine.

    Raises:
        MegasdcError: a rank has failed.
    """
    machine = describe_machine()
    measure = measure_costs if options.protect is None else measure_word
    with scratch_folder() as folder:
        arguments = {"options": options, "folder": str(folder)}
        (found,) = run_in_ranks(measure, arguments, RANKS, folder, on_progress=on_progress)
    if options.protect is not None:
        return GuardWordResult(machine, options, [_compare(options, found["costs"], found["audits"])])
    costs, shares, stood = found["costs"], found["shares"], found["stood"]
    step_s = median_walls(costs)[1] / options.block_steps
    return GuardCostResult(
        *(machine, options),
        [Every(name, estimate_median(shares[name])) for name in CALLS],
        ratios(costs, ("wall",))["wall"],
        [Due(name, interval, estimate_median(stood[name]), step_s) for name, (interval, _) in SOMETIMES.items()],
    )


def _compare(options: GuardCostOptions, costs: Sequence[tuple[Cost, Cost]], audits: Sequence[float]) -> WordComparison:
    """The comparison, with the time of audits spread over all steps."""
    steps, audit = options.block_steps, estimate_median(audits)
    more = Cost(steps / AUDIT_INTERVAL * audit.median, 0.0)
    pairs = [(ours + more, other) for ours, other in costs]
    ours_s, other_s = median_walls(pairs)
    return WordComparison(
        *(WORD_BAR, ratios(pairs, ("wall",)), None, pairs),
        audit=audit,
        interval=AUDIT_INTERVAL,
        step_s=(ours_s / steps, other_s / steps),
    )
