"""What health costs, ``python -m tools.bench health-cost``: time in its calls, its agent, and a week of an agent.

Each layout trains twice through the training program, with health and without. With it, the time inside health's calls
is compared with the time of the steps, rank by rank, and the agent's processor time is read. Without it no hook of
health is there, and the losses must be the same bits. Then the parts of an agent live through a simulated week.

On one host there are no links to measure, and no front is asked: an agent's line to it is not in its time.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median

from tools.bench.health.cost_clocks import AgentCost
from tools.bench.health.cost_rank import RankCost, measure_rank
from tools.bench.health.options import HealthCostOptions
from tools.bench.health.week import Growth, simulate_weeks
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, Told, interval, listing, side_by_side, verdict
from tools.bench.small.gpt import prepare_library
from tools.bench.statistics import Estimate, estimate_median

BAR, AGENT_BAR = 0.0005, 0.01
"""Largest share of a step, and of one core."""
TEXT = "a*.py"


@dataclass(frozen=True)
class RankShares:
    """Shares of a rank's steps.

    Args:
        median: over the steps, of all parts.
        medians: of each part.
        parts: of all steps together, with what is done in some of them only.
    """

    also = ("total",)

    rank: int
    median: Estimate
    medians: dict[str, float]
    parts: dict[str, float]
    step_s: float
    calls: float
    thread: float

    @property
    def total(self) -> float:
        """Of all steps together, all parts."""
        return sum(self.parts.values())


def shares_of(cost: RankCost) -> RankShares:
    """Shares of what a rank has measured."""
    steps, wall_s = cost.steps, sum(step.wall_s for step in cost.steps)
    names = dict.fromkeys(name for step in steps for name in step.parts)
    return RankShares(
        cost.rank,
        estimate_median([sum(step.parts.values()) / step.wall_s for step in steps]),
        {name: median(step.parts.get(name, 0.0) / step.wall_s for step in steps) for name in names},
        {name: sum(step.parts.get(name, 0.0) for step in steps) / wall_s for name in names},
        median(step.wall_s for step in steps),
        median(step.calls for step in steps),
        cost.thread_s / wall_s,
    )


@dataclass(frozen=True)
class LayoutCost:
    """A run with health, and what one without it has.

    Args:
        clock: share that calls which do nothing would have, the mean of all steps and ranks.
        agent: None: training ended before its start had.
        differs: first step whose loss has other bits without health; None: none.
        left: what of health was attached although it is off.
    """

    also = ("passed", "agent_share")

    layout: tuple[int, int, int]
    ranks: Sequence[RankShares]
    clock: float
    agent: AgentCost | None
    differs: int | None
    left: list[str]

    @property
    def name(self) -> str:
        """As tables show it."""
        return "TP{} PP{} DP{}".format(*self.layout)

    @property
    def worst(self) -> RankShares:
        """The rank with the largest share of all steps."""
        return max(self.ranks, key=lambda one: one.total)

    @property
    def agent_share(self) -> float:
        """Of one core; not a number: not known."""
        return math.nan if self.agent is None else self.agent.cpu_s / self.agent.wall_s

    @property
    def is_cheap(self) -> bool:
        """Whether each rank's share, less the clock's own, is within the bar, in the usual step and in all together."""
        bar = BAR + self.clock
        return all(one.median.passes(bar, 0.0) and one.total <= bar for one in self.ranks)

    @property
    def passed(self) -> bool:
        """Whether all bars are met."""
        return self.is_cheap and self.agent_share <= AGENT_BAR and self.differs is None and not self.left


@dataclass(frozen=True)
class HealthCostResult(Result):
    """Costs by layout, and what grew in the simulated time."""

    judged = ("layouts", "growths")
    layouts: Sequence[LayoutCost]
    growths: Sequence[Growth] = field(default=())

    def report(self) -> Report:
        """Shares by part, the agent, bits, and the simulated time."""
        options = self.options
        yield f"{options.gpt}; {options.steps} steps"
        names = dict.fromkeys(name for one in self.layouts for name in one.worst.parts)
        rows: Told = {
            **{name: partial(_both, name) for name in names},
            "all, median step (interval)": lambda one: interval(one.worst.median, 4, 100),
            "all, of all steps": lambda one: _percent(one.worst.total),
            "of either the clock's own": lambda one: _percent(one.clock),
            "bar, for both without the clock's": lambda one: f"{100 * BAR:g} {verdict(one.is_cheap)}",
            "calls a step": lambda one: f"{one.worst.calls:g}",
            "seconds of a step": lambda one: f"{one.worst.step_s:.3f}",
            "thread that answers the agent, CPU": lambda one: _percent(one.worst.thread),
        }
        yield side_by_side("Health, % of a step inside its calls", "part", self.layouts, rows)
        yield "of the rank on which it is most: median step, all steps; the thread runs beside them and has no bar"
        for one in self.layouts:
            yield f"{one.name}: {_agent(one)}"
            yield f"{one.name}: {_bits(one)}"
        if self.growths:
            yield listing(f"An agent's parts over {options.weeks:g} weeks, simulated", _GROWTH, self.growths)


_GROWTH: Told = {
    "part": lambda one: one.part,
    "count": lambda one: f"{one.count:,}",
    "KiB at half": lambda one: f"{one.half_bytes / 1024:.0f}",
    "at the end": lambda one: f"{one.end_bytes / 1024:.0f}",
    "files, KiB": lambda one: (
        f"{one.file_bytes / 1024:.0f} of {one.file_limit_bytes / 1024:.0f}" if one.file_limit_bytes else "-"
    ),
    "verdict": lambda one: verdict(one.passed),
}


def _percent(share: float) -> str:
    return f"{100 * share:.4f}"


def _both(part: str, one: LayoutCost) -> str:
    shares = one.worst
    return f"{_percent(shares.medians.get(part, 0.0))}, {_percent(shares.parts.get(part, 0.0))}"


def _agent(one: LayoutCost) -> str:
    found = one.agent
    if found is None:
        return "the run ended before the start of its agent had; take more --steps"
    before, after = (f"{size / 2**20:.1f}" for size in found.memory_bytes)
    return (
        f"agent {100 * one.agent_share:.2f} % of one core over {found.wall_s:.0f} s, bar {100 * AGENT_BAR:g} "
        f"{verdict(one.agent_share <= AGENT_BAR)}; its start took {found.start_s:.2f} s of it; memory {before} to "
        f"{after} MiB"
    )


def _bits(one: LayoutCost) -> str:
    if one.left:
        return f"without health there still is: {', '.join(one.left)} FAIL"
    if one.differs is not None:
        return f"the loss of step {one.differs} has other bits without health FAIL"
    return "without health no hook of it is there, and all losses are the same bits pass"


def bench_health_cost(options: HealthCostOptions, on_progress: Progress = ignore_progress) -> HealthCostResult:
    """Measure, with all ranks on this machine.

    Raises:
        MegasdcError: a rank failed, or there was no agent.
    """
    machine = describe_machine()
    with scratch_folder() as folder:
        data = prepare_library(folder / "data", options.gpt.vocab, TEXT)
        layouts = [
            _measure(options, layout, data, folder / str(number), on_progress)
            for number, layout in enumerate(options.layouts)
        ]
        growths = simulate_weeks(options.weeks, folder, on_progress)
    return HealthCostResult(machine, options, layouts, growths)


def _measure(
    options: HealthCostOptions, layout: tuple[int, int, int], data: Path, folder: Path, on_progress: Progress
) -> LayoutCost:
    watched, agent = _train(options, layout, data, folder / "on", on_progress)
    plain, _ = _train(options, layout, data, folder / "off", on_progress)
    shares = [shares_of(rank) for rank in watched]
    clock = fmean(shares_of(rank).total for rank in plain)
    left = sorted({name for rank in plain for name in rank.attached})
    return LayoutCost(layout, shares, clock, agent, first_difference(watched, plain), left)


def first_difference(watched: Sequence[RankCost], plain: Sequence[RankCost]) -> int | None:
    """First step whose loss has other bits on some rank, or is in one of the two runs alone; None: none."""
    for rank, bare in zip(watched, plain, strict=True):
        pairs = zip_longest(rank.losses, bare.losses, fillvalue=math.nan)
        for step, (loss, other) in enumerate(pairs, 1):
            if struct.pack("d", loss) != struct.pack("d", other):
                return step
    return None


def _train(
    options: HealthCostOptions, layout: tuple[int, int, int], data: Path, folder: Path, on_progress: Progress
) -> tuple[list[RankCost], AgentCost | None]:
    """Train once, with health in the folder ``on``, and return what ranks and agent took."""
    folder.mkdir(parents=True)
    config = folder / "config.json"
    raw = options.config(layout, data, folder / "run", watched=folder.name == "on")
    config.write_text(json.dumps(raw), encoding="utf-8")
    arguments = {"config": config, "settle_s": options.settle_s}
    (found,) = run_in_ranks(measure_rank, arguments, math.prod(layout), folder, on_progress=on_progress)
    return found["ranks"], found["agent"]
