"""Figures of DropCompute in a run, as in the paper, from the run's own recording.

Giladi et al., NeurIPS 2023, arXiv 2306.10598: Figures 2 to 4 show the spread of compute times, and completed
micro-batches, speed and effective speed-up against the threshold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.config.sections.drop_compute import ELAPSED
from megasdc.report.result.figure import COLOURS, Figure, Series, clean, columns_of, curve, told_of
from megasdc.report.run_pages.drops import Drops

HEIGHT = 280
BINS = 60


def drop_figures(drops: Drops) -> list[Figure]:
    """Latencies, completed micro-batches, step times against the threshold, and results of other thresholds.

    Args:
        drops: of a run.
    """
    found = [_latencies(drops), _completed(drops), _times(drops)]
    return found if drops.search is None else [*found, _speedup(drops)]


def _latencies(drops: Drops) -> Figure:
    values = drops.latencies_s
    counts, edges = np.histogram(values, bins=BINS)
    middle, width = (edges[:-1] + edges[1:]) / 2, float(edges[1] - edges[0])
    caption = (
        f"Forward and backward pass of {len(values):,} completed micro-batches, on the slowest stage: mean "
        f"{values.mean():.4g} s, standard deviation {values.std():.3g} s, 99th percentile "
        f"{np.percentile(values, 99):.4g} s, largest {values.max():.4g} s."
    )
    traces = [_bars("micro-batches", middle, counts / counts.sum(), COLOURS[0], width)]
    layout = {"height": HEIGHT, "xaxis": {"title": {"text": "s"}}, "yaxis": {"tickformat": ".0%", "nticks": 6}}
    columns = {"from_s": edges[:-1].tolist(), "to_s": edges[1:].tolist(), "micro_batches": counts.tolist()}
    return Figure("drop_latencies", "Latency of a micro-batch", caption, traces, layout, columns)


def _completed(drops: Drops) -> Figure:
    held = np.isfinite(drops.tau_s)
    done = drops.times.completed
    most = int(drops.times.planned.max())
    numbers = np.arange(most + 1)
    shares: dict[str, NDArray[np.float64]] = {}
    for name, chosen in (("without a threshold", ~held), ("with a threshold", held)):
        if chosen.any():
            counts = np.bincount(done[:, chosen].ravel(), minlength=most + 1)
            shares[name] = counts / counts.sum()
    traces = [_bars(name, numbers, own, colour) for (name, own), colour in zip(shares.items(), COLOURS, strict=False)]
    left = int((drops.times.planned[None] - done).sum())
    caption = (
        f"Of the {most} planned for a replica in a step: share of replicas and steps. In all {left:,} of "
        f"{int(drops.times.planned.sum()) * len(done):,} micro-batches were left out."
    )
    layout = {
        "height": HEIGHT,
        "barmode": "group",
        "showlegend": len(shares) > 1,
        "xaxis": {"dtick": max(1, most // 12), "title": {"text": "micro-batches completed"}},
        "yaxis": {"tickformat": ".0%", "nticks": 6},
    }
    columns = {"completed": numbers.tolist(), **{name: own.tolist() for name, own in shares.items()}}
    return Figure("drop_completed", "Completed micro-batches", caption, traces, layout, columns)


def _times(drops: Drops) -> Figure:
    steps, compute = drops.times.steps, drops.compute_s
    series = {
        "step": Series(steps, drops.step_s),
        "slowest replica": Series(steps, compute.max(axis=0)),
        "mean of replicas": Series(steps, compute.mean(axis=0)),
    }
    colours = ("var(--faint)", COLOURS[1], COLOURS[0])
    traces = [curve(name, one, colour) for (name, one), colour in zip(series.items(), colours, strict=True)]
    caption = "Compute time of replicas, and of the whole step." + told_of(series)
    if np.isfinite(drops.tau_s).any():
        series["threshold"] = Series(steps, np.where(np.isfinite(drops.tau_s), drops.tau_s, np.nan))
        traces.append(curve("threshold", series["threshold"], "var(--bad)", line={"dash": "dash", "shape": "hv"}))
        caption += " Micro-batches that were started are finished, so that a replica may end after the threshold."
    if (gain := drops.gain) is not None:
        caption += (
            f" Measured: {gain:.3f} times as many micro-batches per second in steps with a threshold as in those "
            "without one."
        )
    layout = {"height": HEIGHT, "showlegend": True, "yaxis": {"rangemode": "tozero", "nticks": 6}}
    columns = columns_of(series)
    return Figure(
        "drop_times", "Step time against the threshold, seconds", caption, traces, layout, columns, on_steps=True
    )


def _speedup(drops: Drops) -> Figure:
    assert drops.search is not None, "there are steps without drops"
    search, best = drops.search, drops.search.at(ELAPSED, drops.search.best(ELAPSED))
    curve_of = search.threshold.curve
    tau, finite = curve_of.thresholds_s[:-1], slice(None, -1)
    lines = {
        "completed share": curve_of.completed_share[finite],
        "speed of steps": _faster(drops)[finite],
        "effective speed-up": curve_of.speedup[finite],
    }
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": clean(tau),
            "y": clean(values),
            "line": {"color": colour, "width": 2},
            "hovertemplate": "%{x:.4g} s: %{y:.4f}<extra>" + name + "</extra>",
        }
        for (name, values), colour in zip(lines.items(), (COLOURS[2], COLOURS[0], COLOURS[1]), strict=True)
    ]
    in_force = drops.tau_s[np.isfinite(drops.tau_s)]
    shapes, notes = [], []
    if len(in_force):
        last = float(in_force[-1])
        shapes.append(
            {
                "type": "line",
                "x0": last,
                "x1": last,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "line": {"color": "var(--bad)", "dash": "dash", "width": 1},
            }
        )
        notes.append(f"The dashed line is the threshold in force at last, {last:.4g} s.")
    found = "never drop" if best["tau_s"] is None else f"{best['tau_s']:.4g} s"
    caption = (
        f"Of the {len(search.times.steps):,} recorded steps in which nothing was left out, for every threshold; the "
        f"best of those that drop at most {search.max_drop_rate:.0%}: {found}, effective speed-up "
        f"{best['speedup']:.3f}, {best['drop_rate']:.1%} dropped. {' '.join(notes)}"
    )
    layout = {
        "height": HEIGHT,
        "showlegend": True,
        "shapes": shapes,
        "xaxis": {"title": {"text": "threshold, s"}},
        "yaxis": {"nticks": 6},
    }
    columns = {"threshold_s": tau.tolist(), **{name.replace(" ", "_"): one.tolist() for name, one in lines.items()}}
    return Figure("drop_speedup", "What thresholds come to", caption.strip(), traces, layout, columns)


def _faster(drops: Drops) -> NDArray[np.float64]:
    """Time of a step without a threshold over that with it, mean over steps, [threshold]."""
    assert drops.search is not None, "there are steps without drops"
    found = drops.search.threshold.curve
    return ((found.times_s[:, -1:] + found.communication_s) / (found.times_s + found.communication_s)).mean(axis=0)


def _bars(name: str, x: Any, y: Any, colour: str, width: float | None = None) -> dict[str, Any]:
    trace = {"type": "bar", "name": name, "x": clean(x), "y": clean(y), "marker": {"color": colour}}
    return (
        trace
        | ({} if width is None else {"width": width})
        | {"hovertemplate": "%{x:.4g}: %{y:.2%}<extra>" + name + "</extra>"}
    )
