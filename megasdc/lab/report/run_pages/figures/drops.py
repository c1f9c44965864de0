"""Figures of DropCompute, as in the paper: from a run's own recording, or from a curve of thresholds.

Giladi et al., NeurIPS 2023, arXiv 2306.10598: Figures 2 to 4 show the spread of compute times, and completed
micro-batches, speed and effective speed-up against the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.config.drop_compute import ELAPSED
from megasdc.dropcompute.threshold import Curve
from megasdc.lab.planning.simulate import Formulas
from megasdc.lab.report.run_pages.drops import Drops
from megasdc.output.figure import COLOURS, Figure, Series, bars, caption_notes, columns_of, curve, layout, rule, scatter

HEIGHT = 280
SHARES = {"tickformat": ".0%", "nticks": 6}
"""A vertical axis of shares."""
FINISHED = "Micro-batches that were started are finished"
"""Why a replica may end after the threshold, where no backward pass was ended."""


def drop_figures(drops: Drops) -> list[Figure]:
    """Latencies, completed micro-batches, step times against the threshold, and results of other thresholds."""
    found = [_latencies(drops)] if len(drops.latencies_s) else []
    found += [_completed(drops), _times(drops)]
    return found if drops.search is None else [*found, _speedup(drops)]


def _latencies(drops: Drops) -> Figure:
    values, ended = drops.latencies_s, int(drops.times.ended.sum())
    left_out = f" (without {ended:,} whose backward passes were ended)" if ended else ""
    caption = (
        f"Forward and backward pass of {len(values):,} completed micro-batches{left_out}, on the slowest stage: mean "
        f"{values.mean():.4g} s, standard deviation {values.std():.3g} s, 99th percentile "
        f"{np.percentile(values, 99):.4g} s, largest {values.max():.4g} s."
    )
    return histogram("drop_latencies", "Latency of a micro-batch", caption, values, "micro_batches")


def histogram(
    name: str, title: str, caption: str, seconds: NDArray[np.float64], of: str, marks: Mapping[str, float] | None = None
) -> Figure:
    """Shares of times of any shape; ``of``: what has these times, in the CSV; ``marks``: marked times, by name."""
    counts, edges = np.histogram(seconds, bins=60)
    middle, width = (edges[:-1] + edges[1:]) / 2, float(edges[1] - edges[0])
    traces = [bars(of.replace("_", "-"), middle, counts / counts.sum(), COLOURS[0], "%{x:.4g}: %{y:.2%}", width=width)]
    label = {"textposition": "end", "textangle": 0, "xanchor": "left", "yanchor": "top"}
    shapes = [
        rule("var(--bad)", x=value, dash="dash", label={**label, "text": text}) for text, value in (marks or {}).items()
    ]
    if marks:
        caption += f" Dashed: {', '.join(f'{text} {value:.4g} s' for text, value in marks.items())}."
    columns = {"from_s": edges[:-1].tolist(), "to_s": edges[1:].tolist(), of: counts.tolist()}
    return Figure(name, title, caption, traces, layout(HEIGHT, "s", yaxis=SHARES, shapes=shapes), columns)


def _completed(drops: Drops) -> Figure:
    held = np.isfinite(drops.tau_s)
    done = drops.completed.round(6)
    most = int(drops.times.planned.max())
    numbers = np.unique([*np.arange(most + 1), *done.ravel()])  # parts of one where backward passes were ended
    shares: dict[str, NDArray[np.float64]] = {}
    for name, chosen in (("without a threshold", ~held), ("with a threshold", held)):
        if chosen.any():
            counts = np.bincount(np.searchsorted(numbers, done[:, chosen].ravel()), minlength=len(numbers))
            shares[name] = counts / counts.sum()
    traces = [
        bars(name, numbers, own, colour, "%{x:.4g}: %{y:.2%}")
        for (name, own), colour in zip(shares.items(), COLOURS, strict=False)
    ]
    left = int((drops.times.planned[None] - drops.times.completed).sum())
    caption = (
        f"Of the {most} planned for a replica in a step: share of replicas and steps. In all {left:,} of "
        f"{int(drops.times.planned.sum()) * len(done):,} micro-batches were dropped."
    )
    if ended := int(drops.times.ended.sum()):
        lost = (drops.times.planned[None] - done).sum()
        caption += (
            f" {ended:,} backward passes were ended: {lost:,.6g} micro-batches are lost, of such a pass the layers not "
            "done."
        )
    drawn = layout(
        HEIGHT,
        "micro-batches completed",
        legend=len(shares) > 1,
        barmode="group",
        xaxis={"dtick": max(1, most // 12)},
        yaxis=SHARES,
    )
    columns = {"completed": numbers.tolist(), **{name: own.tolist() for name, own in shares.items()}}
    return Figure("drop_completed", "Completed micro-batches", caption, traces, drawn, columns)


def _times(drops: Drops) -> Figure:
    steps, compute = drops.times.steps, drops.compute_s
    series = {
        "step": Series(steps, drops.step_s),
        "slowest replica": Series(steps, compute.max(axis=0)),
        "mean of replicas": Series(steps, compute.mean(axis=0)),
    }
    colours = ("var(--faint)", COLOURS[1], COLOURS[0])
    traces = [curve(name, one, colour) for (name, one), colour in zip(series.items(), colours, strict=True)]
    caption = "Compute time of replicas, and of the whole step." + caption_notes(series)
    if np.isfinite(drops.tau_s).any():
        series["threshold"] = Series(steps, np.where(np.isfinite(drops.tau_s), drops.tau_s, np.nan))
        traces.append(curve("threshold", series["threshold"], "var(--bad)", line={"dash": "dash", "shape": "hv"}))
        finished = "A backward pass ends between two layers" if drops.times.ended.any() else FINISHED
        caption += f" {finished}, so that a replica may end after the threshold."
    if (gain := drops.gain) is not None:
        caption += (
            f" Measured: {gain:.3f} times as many micro-batches per second in steps with a threshold as in those "
            "without one."
        )
    drawn = layout(HEIGHT, legend=True, yaxis={"rangemode": "tozero", "nticks": 6})
    title = "Step time against the threshold, seconds"
    return Figure("drop_times", title, caption, traces, drawn, columns_of(series), on_steps=True)


def _speedup(drops: Drops) -> Figure:
    assert drops.search is not None, "there are steps without drops"
    search, best = drops.search, drops.search.at(ELAPSED, drops.search.best(ELAPSED))
    found = "never drop" if best["tau_s"] is None else f"{best['tau_s']:.4g} s"
    caption = (
        f"Of the {len(search.times.steps):,} recorded steps in which nothing was dropped, for every threshold; the "
        f"best of those that drop at most {search.max_drop_rate:.0%}: {found}, effective speed-up "
        f"{best['speedup']:.3f}, {best['drop_rate']:.1%} dropped."
    )
    in_force = drops.tau_s[np.isfinite(drops.tau_s)]
    last = float(in_force[-1]) if len(in_force) else None
    if last is not None:
        caption += f" The dashed line is the threshold in force at last, {last:.4g} s."
    return threshold_figure(search.threshold.curve, caption, in_force_s=last)


def threshold_figure(
    found: Curve, caption: str, formulas: Formulas | None = None, in_force_s: float | None = None
) -> Figure:
    """Completed share, speed of steps and effective speed-up against the threshold.

    ``formulas``: of the same thresholds, drawn as lines, None: none; ``in_force_s``: a threshold that is marked.
    """
    finite = slice(None, -1)
    tau = found.thresholds_s[finite]
    lines = {
        "completed share": found.completed_share,
        "speed of steps": _faster(found),
        "effective speed-up": found.speedup,
    }
    by_formula = (
        {"completed share": formulas.completed_share, "effective speed-up": formulas.speedup} if formulas else {}
    )
    traces = []
    for (name, values), colour in zip(lines.items(), (COLOURS[2], COLOURS[0], COLOURS[1]), strict=True):
        formula = by_formula.get(name)
        marks: dict[str, Any] = {
            "mode": "lines" if formula is None else "markers",
            "line": {"width": 2},
            "marker": {"size": 4},
        }
        traces.append(scatter(name, tau, values[finite], colour, "%{x:.4g} s: %{y:.4f}", **marks))
        if formula is not None:
            traces.append(scatter(f"{name}, formula", tau, formula[finite], colour, "%{x:.4g} s: %{y:.4f}"))
    if formulas and formulas.published_speedup is not None:
        values, dashed = formulas.published_speedup[finite], {"dash": "dash"}
        name = "effective speed-up, with E[T] of eq. 4"
        traces.append(scatter(name, tau, values, "var(--faint)", "%{x:.4g} s: %{y:.4f}", line=dashed))
    shapes = [] if in_force_s is None else [rule("var(--bad)", x=in_force_s, dash="dash")]
    drawn = layout(HEIGHT, "threshold, s", legend=True, shapes=shapes, yaxis={"nticks": 6})
    shown = {name.replace(" ", "_"): one[finite].tolist() for name, one in lines.items()}
    columns: dict[str, Any] = {"threshold_s": tau.tolist(), **shown}
    return Figure("drop_speedup", "What thresholds come to", caption, traces, drawn, columns)


def drop_rate_figure(found: Curve, formulas: Formulas | None = None) -> Figure:
    """Effective speed-up against the drop rate; arguments as of ``threshold_figure``."""
    finite = slice(None, -1)
    drops, speedup = 1 - found.completed_share[finite], found.speedup[finite]
    hover = "%{x:.1%} dropped: %{y:.4f}"
    marks: dict[str, Any] = {"mode": "markers", "marker": {"size": 4}}
    traces = [scatter("effective speed-up", drops, speedup, COLOURS[1], hover, **marks)]
    if formulas and formulas.completed_share is not None and formulas.speedup is not None:
        x, y = 1 - formulas.completed_share[finite], formulas.speedup[finite]
        traces.append(scatter("formula", x, y, COLOURS[1], hover))
    drawn = layout(HEIGHT, "drop rate", legend=len(traces) > 1, xaxis={"tickformat": ".0%"}, yaxis={"nticks": 6})
    columns = {"drop_rate": drops.tolist(), "effective_speedup": speedup.tolist()}
    return Figure("drop_rates", "S_eff, the effective speed-up, against the drop rate", "", traces, drawn, columns)


def _faster(found: Curve) -> NDArray[np.float64]:
    """Time of a step without a threshold over that with it, mean over steps, [threshold]."""
    whole = found.times_s[:, -1:] + found.communication_s
    return (whole / (found.times_s + found.communication_s)).mean(axis=0)
