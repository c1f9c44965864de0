"""Plan of audits as a page: detection latencies by rate and tier, and the cost of each tier."""

from __future__ import annotations

import math

from megasdc.lab.planning.audits import TIERS, DetectionLatency, PlanResult
from megasdc.output.page import Page, PageSection, Table, number_cell


def plan_page(result: PlanResult) -> Page:
    """The page of a plan of audits."""
    plan = result.plan
    said = [
        f"checksums of a micro-batch take {plan.audit_share:.2%} of its time in an audit, {plan.forward_share:.2%} in "
        f"the check of every step, which sees {plan.visible:.0%} of the wrong micro-batches"
    ]
    cadence = plan.cadence
    said.append(
        "one, all, auto: coverage of always_on; auto, rows, slices: the budget leaves room for "
        f"{cadence.micro_batches} of {plan.micro_batches} micro-batches in every {cadence.every}. step; rows: one of "
        f"{plan.products} products each time, and one of them is wrong in a wrong micro-batch; slices: one of "
        f"{plan.slices:,}, and a rate is that of a wrong element in a step's update"
    )
    if plan.replicas == 1:
        said.append("one replica: audits have nothing to compare")
    elif plan.replicas == 2:
        said.append("two replicas: audits find a wrong rank; repeats or a golden trace must tell which of two it is")
    return Page(
        title="Plan of audits",
        verdict=f"{plan.replicas} replicas, {plan.micro_batches} micro-batches a step, audit every {plan.interval} "
        "steps; one bad rank, each of whose micro-batches is wrong with the same probability",
        sections=[PageSection(tables=[_latencies(result), _costs(result)]), PageSection(sentences=said)],
    )


def _latencies(result: PlanResult) -> Table:
    found = {(one.rate, one.tier): one for one in result.latencies}
    rows = []
    for rate in dict.fromkeys(one.rate for one in result.latencies):
        steps = 1.0 if rate == 1 else -math.expm1(result.plan.micro_batches * math.log1p(-rate))
        rows.append(
            (number_cell(rate, ".3g"), number_cell(steps, ".3g"), *(_cell(found[rate, tier]) for tier in TIERS))
        )
    trials = f"formula (simulation, {result.trials:,} bad ranks, with its 95 % interval)" if result.trials else ""
    title = "steps until a bad rank is found, on average"
    tiers = (tier.removeprefix("always_on ") for tier in TIERS)
    return Table("latencies", ("wrong micro-batches", "wrong steps", *tiers), rows, title=title, note=trials)


def _cell(latency: DetectionLatency) -> str:
    if math.isinf(latency.expected):
        return "never"
    text = _short(latency.expected)
    if latency.simulated is None:
        return text
    margin = "" if latency.error is None else f" ±{1.96 * latency.error / latency.simulated:.0%}"
    return f"{text} ({_short(latency.simulated)}{margin})"


def _short(steps: float) -> str:
    if steps < 100:
        return f"{steps:.1f}"
    return f"{steps:,.0f}" if steps < 1e5 else f"{steps:.3g}"


def _costs(result: PlanResult) -> Table:
    rows = []
    for tier in TIERS:
        overhead, lost = result.plan.overhead(tier), result.plan.samples_lost(tier)
        repeated = f"{lost:.4%}" if lost else "none"
        rows.append((tier, f"{overhead:.4%}", repeated, f"{overhead + lost:.4%}"))
    headings = ("tier", "time of all steps", "samples computed more than once", "together")
    return Table("costs", headings, rows, title="what it costs")
