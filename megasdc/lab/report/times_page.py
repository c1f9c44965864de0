"""Step times of a run as a page: compute times of replicas, who was last, what was lost to waiting and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megasdc.dropcompute.threshold import longest_density
from megasdc.lab.report.imbalance import ReplicaTimes, SlowestReplica, TimesReport, mean_of_known
from megasdc.output.figure import (
    COLOURS,
    Figure,
    Series,
    bars,
    clean,
    columns_of,
    curve,
    layout,
    number_or_none,
    scatter,
)
from megasdc.output.page import Page, PageSection, Table, number_cell

SHOWN = 16
"""Maximum of replicas in a table."""
DRAWN = 64
"""Maximum of replicas in a figure."""
HEIGHT = 300


def times_page(result: TimesReport) -> Page:
    """The page of times of a run's steps and their loss to waiting."""
    slowest = sorted(result.replicas, key=lambda one: -one.mean_s)
    notes = list(result.times.notes)
    if result.steps_with_drops:
        notes.insert(
            0,
            f"in {result.steps_with_drops} of {len(result.times.steps)} steps micro-batches were dropped"
            f"{result.times.ended_too}: these times are shorter; eq. 3 is of the others, the faster ones",
        )
    return Page(
        title="Step times",
        verdict=f"Step times: {result.times.described}",
        notes=notes,
        sections=[
            PageSection(tables=[_replicas(result, slowest), _stages(result), _parts(result)]),
            PageSection(sentences=[result.advice, _prediction(result)]),
            PageSection("Figures", figures=_figures(result, slowest[:DRAWN])),
        ],
    )


def _prediction(result: TimesReport) -> str:
    slowest = result.slowest
    if slowest is None:
        return "Eq. 3 of the DropCompute paper is of steps without drops, of which none is recorded."
    off = slowest.expected_s / slowest.mean_s - 1
    whole = f" without drops, {slowest.steps:,} in all" if result.steps_with_drops else ""
    return (
        f"The slowest replica takes {slowest.mean_s:.4g} s of a step{whole}; eq. 3 of the DropCompute paper, for "
        f"replicas that are alike and normal, says {slowest.expected_s:.4g} s ({off:+.1%})."
    )


def _replicas(result: TimesReport, slowest: Sequence[ReplicaTimes]) -> Table:
    steps, shown = len(result.times.steps), slowest[:SHOWN]
    rows = [
        (
            one.replica,
            ", ".join(dict.fromkeys(one.hosts)),
            *(number_cell(value, ".3g") for value in (one.mean_s, one.std_s, one.p50_s, one.p99_s, one.max_s)),
            number_cell(one.last_steps / steps, ".0%"),
            number_cell(one.waiting_share, ".1%"),
        )
        for one in shown
    ]
    left = f", the slowest {len(shown)} of {len(slowest)}" if len(shown) < len(slowest) else ""
    headings = ("replica", "hosts", "mean", "std", "p50", "p99", "max", "last", "waits")
    note = "last: share of steps in which the others waited for it; waits: share of time it waited for others"
    title = f"compute time of a step, s{left}"
    return Table("replicas", headings, rows, searched=False, title=title, note=note)


def _stages(result: TimesReport) -> Table:
    slowest = result.replicas[result.loss.slowest]
    means = mean_of_known(np.array([one.busy_s for one in result.replicas]), 0).tolist()
    rows = [
        (stage, *(number_cell(number_or_none(one)) for one in both))
        for stage, both in enumerate(zip(means, slowest.busy_s, strict=True))
    ]
    headings = ("stage", "mean of replicas", f"replica {slowest.replica}")
    title = "forward and backward pass of a micro-batch, s"
    return Table("stages", headings, rows, searched=False, title=title)


def _parts(result: TimesReport) -> Table:
    loss = result.loss
    causes = {
        f"replica {loss.slowest} is slower on average, most on stage {loss.stage}": loss.deterministic_s,
        "garbage is collected at different times": loss.garbage_s,
        "latencies vary at random": loss.random_s,
        "in all": loss.total_s,
    }
    rows = [(cause, value, number_cell(value / result.step_s, ".1%")) for cause, value in causes.items()]
    title = f"lost to waiting, of a step of {result.step_s:.4g} s"
    return Table("lost", ("because", "s", "of a step"), rows, searched=False, title=title)


def _figures(result: TimesReport, shown: Sequence[ReplicaTimes]) -> list[Figure]:
    names = [f"replica {one.replica}" for one in shown]
    left = f"The slowest {len(shown)} of {len(result.replicas)} replicas. " if len(result.replicas) > DRAWN else ""
    compute = {name: result.compute_s[one.replica] for name, one in zip(names, shown, strict=True)}
    boxes = [
        {"type": "box", "y": clean(values), "name": name, "marker": {"color": COLOURS[0]}}
        for name, values in compute.items()
    ]
    steps = result.times.steps.tolist()
    columns = {"step": steps, **{name: values.tolist() for name, values in compute.items()}}
    title = "Compute time of replicas, seconds"
    found = [Figure("compute_times", title, f"{left}Boxes: quartiles and median.", boxes, layout(HEIGHT), columns)]
    for name, title, values, form in (
        ("last", "Steps in which a replica was last", [one.last_steps for one in shown], ",d"),
        ("waits", "Share of time waited for the slowest", [one.waiting_share for one in shown], ".0%"),
    ):
        trace = bars("", names, values, COLOURS[0], f"%{{x}}: %{{y:{form}}}")
        own = {"replica": names, name: values}
        found.append(Figure(name, title, left, [trace], layout(HEIGHT, yaxis={"tickformat": form}), own))
    if result.slowest is not None:
        found.append(_histogram(result.slowest, len(result.replicas)))
    loss = result.loss
    parts = {"deterministic": loss.deterministic_s, "garbage": loss.garbage_s, "random": loss.random_s}
    trace = bars("", list(parts), list(parts.values()), COLOURS[1], "%{x}: %{y:.4g} s")
    own = {"because": list(parts), "seconds": list(parts.values())}
    found.append(Figure("parts", "Lost to waiting, seconds of a step", "", [trace], layout(HEIGHT), own))
    lines = {"slowest": result.compute_s.max(axis=0), "mean": result.compute_s.mean(axis=0)}
    series = {name: Series(result.times.steps, values) for name, values in lines.items()}
    traces = [curve(name, one, colour) for (name, one), colour in zip(series.items(), COLOURS[1::-1], strict=True)]
    title = "Compute time, step by step, seconds"
    over = layout(HEIGHT, legend=True)
    return [*found, Figure("over_steps", title, "", traces, over, columns_of(series), on_steps=True)]


def _histogram(slowest: SlowestReplica, num_replicas: int) -> Figure:
    """Measured histogram of the slowest replica's time, and eq. 3's density."""
    edges = np.array(slowest.edges_s)
    middles = (edges[1:] + edges[:-1]) / 2
    traces = [
        bars("measured", middles, slowest.measured, COLOURS[0], "%{x:.4g} s: %{y:.4g}", width=np.diff(edges).tolist())
    ]
    columns = {"seconds": middles.tolist(), "measured": list(slowest.measured)}
    if slowest.predicted:
        mean, std = slowest.replica_mean_s, slowest.replica_std_s
        x = np.linspace(min(edges[0], slowest.expected_s - 3 * std), max(edges[-1], slowest.expected_s + 3 * std), 200)
        traces.append(scatter("eq. 3", x, longest_density(x, num_replicas, mean, std), COLOURS[1]))
        columns["predicted"] = list(slowest.predicted)
    title, caption = "Time of the slowest replica, density", "Eq. 3 takes replicas as alike and their times as normal."
    return Figure("slowest", title, caption, traces, layout(HEIGHT, "seconds", legend=True), columns)
