"""The best threshold for a run's recorded steps, as a page."""

from __future__ import annotations

import numpy as np

from megasdc.config.drop_compute import ELAPSED
from megasdc.lab.report.run_pages.figures.drops import drop_rate_figure, histogram, threshold_figure
from megasdc.lab.report.run_threshold import RunThreshold
from megasdc.output.page import Cell, Page, PageSection, Table, number_cell

_RATES = (0.2, 0.1, 0.05, 0.02, 0.01)
"""Drop rates near which thresholds are shown besides the best one."""


def threshold_page(result: RunThreshold) -> Page:
    """The page of the best threshold and some others, compute times, and the results of all thresholds."""
    curve, kind = result.threshold.curve, "measured" if result.measured else "given"
    tau_s = result.at(ELAPSED, result.best(ELAPSED))["tau_s"]
    ends = f"; backward passes end between {result.layers} transformer layers" if result.layers else ""
    marks = {"mean of the slowest": float(curve.longest_s.mean())} | ({} if tau_s is None else {"tau": tau_s})
    caption = "Share of replicas and steps."
    return Page(
        title="DropCompute, from recorded steps",
        verdict=f"DropCompute, from recorded steps: {result.times.described}",
        sentences=[
            f"{curve.micro_batches} micro-batches; compute time of a replica {result.replica_times_s.mean():.4g} s, of "
            f"the slowest {curve.longest_s.mean():.4g} s; Tc {result.communication_s:.4g} s, {kind}{ends}"
        ],
        notes=result.times.notes,
        sections=[
            PageSection(
                tables=[_thresholds(result)],
                figures=[
                    histogram("times", "Compute time of a replica", caption, result.replica_times_s, "replicas", marks),
                    threshold_figure(curve, "Of every threshold of rule elapsed."),
                    drop_rate_figure(curve),
                ],
            )
        ],
    )


def _thresholds(result: RunThreshold) -> Table:
    rows = []
    for rule, found in result.rules.items():
        completed, best = found.curve.completed_share, result.best(rule)
        near = {int(np.abs(1 - completed - rate).argmin()) for rate in _RATES}
        rows += [_row(result, rule, place, place == best) for place in sorted(near | {len(completed) - 1, best})]
    headings = ("rule", "tau, s", "S_eff", "M~", "dropped", "compute of a step, s", "steps after tau")
    title = f"thresholds, best of those that drop at most {result.max_drop_rate:.0%} in bold"
    finished = "backward passes end between two layers" if result.layers else "micro-batches are finished"
    note = (
        f"S_eff: samples per second over those without drops. Started {finished}, so a step may last "
        "longer than tau; elapsed: started before tau; predictive: expected to end by tau (mean and "
        f"{result.sigmas:g} standard deviations)"
    )
    return Table("thresholds", headings, rows, searched=False, title=title, note=note)


def _row(result: RunThreshold, rule: str, place: int, best: bool) -> tuple[Cell, ...]:
    row, look = result.at(rule, place), "best" if best else ""
    forms = {"speedup": ".3f", "completed": ".2f", "drop_rate": ".1%", "time_s": ".4g", "late_steps": ".0%"}
    tau = number_cell(row["tau_s"], ".4g", look, missing="never drop")
    return Cell(rule, look=look), tau, *(number_cell(row[name], form, look) for name, form in forms.items())
