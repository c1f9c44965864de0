"""Plan of audits as text for a terminal: detection latencies by rate and tier, and the cost of each tier."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from megasdc.sdc.plan import AUDIT, TIERS, Latency, PlanResult


def render_plan(result: PlanResult, console: Console) -> None:
    """Print a plan.

    Args:
        result: of the plan.
        console: to print on.
    """
    plan = result.plan
    console.print(
        f"{plan.replicas} replicas, {plan.micro_batches} micro-batches a step, audit every {plan.interval} steps; one "
        f"bad rank, each of whose micro-batches is wrong with the same probability"
    )
    console.print(_latencies(result))
    if result.trials:
        console.print(f"formula (simulation, {result.trials:,} bad ranks, with its 95 % interval)")
    console.print(_costs(result))
    console.print(
        f"checksums of a micro-batch take {plan.audit_share:.2%} of its time in an audit, {plan.forward_share:.2%} in "
        f"the check of every step, which sees {plan.visible:.0%} of the wrong micro-batches"
    )
    if plan.replicas == 1:
        console.print("one replica: audits have nothing to compare")
    elif plan.replicas == 2:
        console.print("two replicas: audits find a wrong rank; repeats or a golden trace must tell which of two it is")


def _latencies(result: PlanResult) -> Table:
    table = Table(title="steps until a bad rank is found, on average")
    for name in ("wrong micro-batches", "wrong steps", *TIERS):
        table.add_column(name, justify="right")
    found = {(one.rate, one.tier): one for one in result.latencies}
    for rate in dict.fromkeys(one.rate for one in result.latencies):
        steps = 1.0 if rate == 1 else -math.expm1(result.plan.micro_batches * math.log1p(-rate))
        table.add_row(f"{rate:.3g}", f"{steps:.3g}", *(_cell(found[rate, tier]) for tier in TIERS))
    return table


def _cell(latency: Latency) -> str:
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
    table = Table(title="what it costs")
    for name in ("tier", "time of all steps", "samples computed more than once", "together"):
        table.add_column(name)
    for tier in TIERS:
        overhead, lost = result.plan.overhead(tier), result.plan.samples_lost(tier)
        repeated = f"{lost:.4%}" if tier == AUDIT else "none"
        table.add_row(tier, f"{overhead:.4%}", repeated, f"{overhead + lost:.4%}")
    return table
