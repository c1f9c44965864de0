"""Plan of checkpoints as a page: intervals by formula, what they and others cost, and where each figure comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from megasdc.common.words import duration
from megasdc.lab.planning.checkpoints.formulas import Intervals, elapsed_per_training
from megasdc.lab.planning.checkpoints.plan import DISK_TIER, MEMORY_TIER, CheckpointPlan, Estimate, Tier
from megasdc.output.figure import COLOURS, Figure, layout, log_axis, rule, scatter
from megasdc.output.page import Cell, Page, PageSection, Table, number_cell

_NAMES = {MEMORY_TIER: "host memory", DISK_TIER: "disk"}
_CURVE_POINTS, _CURVE_FACTOR = 200, 32
_HEIGHT = 320
_Z95 = 1.96
_NO_FAILURES = "the job never fails: no save is worth its time but the one at the end"


def checkpoint_plan_page(plan: CheckpointPlan) -> Page:
    """The page of a plan of checkpoints."""
    job, best = plan.job, plan.best
    fails = "no failures" if not job.rate else f"a failure every {duration(job.mtbf_s, 1)} on average"
    saves = "; ".join(f"{_NAMES[tier.name]}: {_every(tier, job.costs.step_s)}" for tier in plan.tiers)
    notes = plan.notes if job.rate else (*plan.notes, _NO_FAILURES)
    tables = [_tiers(plan)] if job.rate else []
    return Page(
        title="Plan of checkpoints",
        verdict=f"{fails}; {saves}; {best.expected:.2%} of the time is training",
        notes=notes,
        sections=[
            PageSection(tables=tables, sentences=[_lost(plan)] if job.rate else []),
            PageSection(tables=[_estimates(plan)], figures=list(_figures(plan))),
            PageSection(tables=[_inputs(plan)]),
        ],
    )


def _every(tier: Tier, step_s: float) -> str:
    if tier.steps is None:
        return "only at the end"
    return f"every {tier.steps:,} steps ({duration(tier.steps * step_s, 1)})" if tier.steps > 1 else "every step"


def _lost(plan: CheckpointPlan) -> str:
    lost = plan.lost
    return (
        f"lost: {lost.saves:.2%} to saves, {lost.redone:.2%} to steps that are done again, {lost.outages:.2%} to "
        "detection and restarts"
    )


def _tiers(plan: CheckpointPlan) -> Table:
    step_s = plan.job.costs.step_s
    rows = []
    for tier in plan.tiers:
        formulas = (tier.young_s, tier.daly_s, tier.exact_s)
        cells = [number_cell(seconds / step_s if math.isfinite(seconds) else None, ",.1f") for seconds in formulas]
        best = number_cell(tier.steps, ",d", look="best", missing="never")
        every = "only at the end" if tier.steps is None else duration(tier.steps * step_s, 1)
        needed = number_cell(tier.share, ".1%"), duration(tier.mtbf_s, 1)
        rows.append((_NAMES[tier.name], *needed, *cells, best, every))
    headings = ("save", "failures", "every", "Young", "Daly", "exact", "best", "best, time")
    note = (
        "Failures: that need this save, and how often these come. Young's sqrt(2 C M), Daly's series and the exact "
        "minimum of his model: steps, for each kind of save alone. Best: least expected loss of both together, in "
        "whole steps, the disk's a multiple of the memory's."
    )
    return Table("tiers", headings, rows, searched=False, title="how often to save", note=note)


def _estimates(plan: CheckpointPlan) -> Table:
    has_memory = plan.job.costs.has_memory
    rows = []
    for label, estimate, look in _labelled(plan):
        steps = [estimate.intervals.memory] if has_memory else []
        cells = [
            number_cell(one, ",.0f" if one is None or float(one).is_integer() else ",.1f", look, missing="never")
            for one in (*steps, estimate.intervals.disk)
        ]
        less = estimate.expected - plan.best.expected
        rows.append((Cell(label, look=look), *cells, *_shares(estimate, look), number_cell(100 * less, "+.3f", look)))
    simulated = (f"simulated, {plan.trials:,} jobs",) if plan.trials else ()
    headings = ("", *(["memory, steps"] if has_memory else []), "disk, steps", "training", *simulated, "points")
    note = "points: percentage points of training time against the best intervals, by formula"
    if plan.trials:
        note += "; simulated with its 95 % interval"
    return Table("estimates", headings, rows, searched=False, title="share of time that is training", note=note)


def _labelled(plan: CheckpointPlan) -> Iterator[tuple[str, Estimate, str]]:
    yield "best", plan.best, "best"
    if plan.own is not None:
        yield "configured", plan.own, ""
    for tier, estimates in plan.around.items():
        for estimate in estimates:
            yield _NAMES[tier], estimate, ""


def _shares(estimate: Estimate, look: str) -> tuple[Cell, ...]:
    expected = number_cell(estimate.expected, ".3%", look)
    if estimate.simulated is None or estimate.error is None:
        return (expected,)
    return expected, number_cell(estimate.simulated, ".3%", look, more=f" ±{100 * _Z95 * estimate.error:.3f}")


def _inputs(plan: CheckpointPlan) -> Table:
    job = plan.job
    values: dict[str, float | bool | None] = {
        "mtbf_s": job.mtbf_s,
        "host_share": job.shares.host,
        "older_share": job.shares.older,
        **vars(job.costs),
    }
    rows = [(name, _input(name, value), plan.origins.get(name, "")) for name, value in values.items()]
    return Table(
        "inputs", ("figure", "value", "from"), rows, searched=False, title="what was counted with", note=plan.published
    )


def _input(name: str, value: float | bool | None) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "none"
    return f"{value:.1%}" if name.endswith("_share") else duration(value, 1)


def _figures(plan: CheckpointPlan) -> Iterator[Figure]:
    for tier in plan.tiers:
        if tier.steps is not None:
            yield _figure(plan, tier, tier.steps)


def _figure(plan: CheckpointPlan, tier: Tier, best: int) -> Figure:
    """Share of training against the interval of one kind of save, the other's as it is best."""
    job, of_memory = plan.job, tier.name == MEMORY_TIER
    steps = np.geomspace(max(1.0, best / _CURVE_FACTOR), best * _CURVE_FACTOR, _CURVE_POINTS)
    memory, disk = plan.best.intervals.memory, plan.best.intervals.disk
    if of_memory and disk is not None:
        steps = steps[steps <= disk]
    elif memory is not None:
        steps = steps[steps >= memory]
    shares = [
        1 / elapsed_per_training(job, Intervals(one, disk) if of_memory else Intervals(memory, one))
        for one in steps.tolist()
    ]
    traces = [scatter("formula", steps, shares, COLOURS[0], "%{x:,.0f} steps: %{y:.3%}")]
    columns = {"steps": steps.tolist(), "training": shares}
    simulated = [one for one in (plan.best, *plan.around[tier.name]) if one.simulated is not None]
    if simulated:
        x = [one.intervals.memory if of_memory else one.intervals.disk for one in simulated]
        errors = {"type": "data", "array": [_Z95 * (one.error or 0.0) for one in simulated]}
        y = [one.simulated for one in simulated]
        traces.append(
            scatter("simulated", x, y, COLOURS[1], "%{x:,.0f} steps: %{y:.3%}", mode="markers", error_y=errors)
        )
    label = {"textposition": "end", "textangle": 0, "xanchor": "left", "yanchor": "top", "text": "best"}
    drawn = layout(
        _HEIGHT,
        "steps between saves",
        legend=bool(simulated),
        xaxis=log_axis(steps),
        yaxis={"tickformat": ".2%", "nticks": 6},
        shapes=[rule("var(--bad)", x=float(best), dash="dash", label=label)],
    )
    said = ["The other kind of save as it is best."] if len(plan.tiers) > 1 else []
    said += ["Points are simulated, with their 95 % interval."] if simulated else []
    title = f"Training time by the interval of saves {'in host memory' if of_memory else 'on the disk'}"
    return Figure(f"{tier.name}_interval", title, " ".join(said), traces, drawn, columns)
