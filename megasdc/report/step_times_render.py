"""Step times of a run and its best threshold as text for a terminal and as pages of figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from megasdc.config.sections.drop_compute import ELAPSED
from megasdc.report.dropcompute_render import draw_thresholds, draw_times, write_page
from megasdc.report.imbalance import ReplicaTimes, TimesReport
from megasdc.report.run_threshold import RunThreshold
from megasdc.report.step_times import StepTimesOfRun

SHOWN = 16
"""Maximum of replicas in a table."""
DRAWN = 64
"""Maximum of replicas in a figure."""
_RATES = (0.2, 0.1, 0.05, 0.02, 0.01)
"""Drop rates near which thresholds are shown besides the best one."""


def render_threshold(result: RunThreshold, console: Console) -> None:
    """Print the best threshold and some others.

    Args:
        result: of the search.
        console: to print on.
    """
    console.print(describe(result.times), markup=False)
    kind = "measured" if result.measured else "given"
    curve = result.threshold.curve
    console.print(
        f"{curve.micro_batches} micro-batches; compute time of a replica {result.replica_times_s.mean():.4g} s, of the "
        f"slowest {curve.longest_s.mean():.4g} s; Tc {result.communication_s:.4g} s, {kind}"
    )
    table = Table(title=f"thresholds, best of those that drop at most {result.max_drop_rate:.0%} in bold")
    table.add_column("rule")
    for name in ("tau, s", "S_eff", "M~", "dropped", "compute of a step, s", "steps after tau"):
        table.add_column(name, justify="right")
    for rule in result.rules:
        _add_thresholds(table, result, rule)
    console.print(table)
    console.print(
        "started micro-batches are finished, so a step may last longer than tau; elapsed: started before tau; "
        f"predictive: expected to end by tau (mean and {result.sigmas:g} standard deviations)"
    )
    _print_notes(result.times, console)


def _add_thresholds(table: Table, result: RunThreshold, rule: str) -> None:
    curve, best = result.rules[rule].curve, result.best(rule)
    near = {int(np.abs(1 - curve.completed_share - rate).argmin()) for rate in _RATES}
    table.add_section()
    for place in sorted(near | {len(curve.thresholds_s) - 1, best}):
        row = result.at(rule, place)
        table.add_row(
            rule,
            "never drop" if row["tau_s"] is None else f"{row['tau_s']:.4g}",
            f"{row['speedup']:.3f}",
            f"{row['completed']:.2f}",
            f"{row['drop_rate']:.1%}",
            f"{row['time_s']:.4g}",
            f"{row['late_steps']:.0%}",
            style="bold" if place == best else None,
        )


def describe(times: StepTimesOfRun) -> str:
    """Run, steps, replicas and stages in one line."""
    replicas, stages, steps = times.compute_s.shape
    return (
        f"{times.run}: {steps:,} steps from {times.steps[0]} to {times.steps[-1]}, {replicas} replica(s) of {stages} "
        "stage(s)"
    )


def _print_notes(times: StepTimesOfRun, console: Console) -> None:
    for note in times.notes:
        console.print(f"note: {note}", markup=False)


def draw_threshold(result: RunThreshold, path: Path) -> None:
    """Draw compute times of replicas and the results of all thresholds as one HTML page.

    Args:
        result: of the search.
        path: the file; replaced.

    Raises:
        StorageError: it cannot be written.
    """
    from plotly.subplots import make_subplots

    titles = ("compute time of a replica", "against the threshold", "S_eff against the drop rate")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, specs=[[{}, {}], [{"colspan": 2}, None]])
    marks = {"mean of the slowest": float(result.threshold.curve.longest_s.mean())}
    draw_times(figure, result.replica_times_s, marks, result.at(ELAPSED, result.best(ELAPSED))["tau_s"])
    draw_thresholds(figure, result.threshold.curve, None)
    title = f"DropCompute, from recorded steps<br><sup>{describe(result.times)}</sup>"
    figure.update_layout(title_text=title, height=850, margin_t=120)
    write_page(figure, path)


def render_times(result: TimesReport, console: Console) -> None:
    """Print times of replicas, how often each was last, losses to waiting, and advice.

    Args:
        result: the report.
        console: to print on.
    """
    console.print(describe(result.times), markup=False)
    shown = slowest_first(result.replicas)[:SHOWN]
    left = f", the slowest {len(shown)} of {len(result.replicas)}" if len(shown) < len(result.replicas) else ""
    table = Table(title=f"compute time of a step, s{left}")
    for name in ("replica", "hosts", "mean", "std", "p50", "p99", "max", "last", "waits"):
        table.add_column(name, justify="left" if name == "hosts" else "right")
    steps = len(result.times.steps)
    for one in shown:
        numbers = [f"{value:.3g}" for value in (one.mean_s, one.std_s, one.p50_s, one.p99_s, one.max_s)]
        hosts = ", ".join(dict.fromkeys(one.hosts))
        table.add_row(str(one.replica), hosts, *numbers, f"{one.last_steps / steps:.0%}", f"{one.waiting_share:.1%}")
    console.print(table)
    console.print("last: share of steps in which the others waited for it; waits: share of time it waited for others")
    console.print(_stages(result))
    console.print(_parts(result))
    console.print(result.advice, markup=False)
    if result.steps_with_drops:
        console.print(
            f"note: in {result.steps_with_drops} of {steps} steps micro-batches were dropped: these times are shorter"
        )
    _print_notes(result.times, console)


def slowest_first(replicas: Sequence[ReplicaTimes]) -> list[ReplicaTimes]:
    """Replicas in descending order of mean compute time."""
    return sorted(replicas, key=lambda one: -one.mean_s)


def _stages(result: TimesReport) -> Table:
    slowest = result.replicas[result.loss.slowest]
    table = Table(title="forward and backward pass of a micro-batch, s")
    for name in ("stage", "mean of replicas", f"replica {slowest.replica}"):
        table.add_column(name, justify="right")
    means = np.mean([one.busy_s for one in result.replicas], axis=0)
    for stage, (mean, own) in enumerate(zip(means, slowest.busy_s, strict=True)):
        table.add_row(str(stage), f"{mean:.4g}", f"{own:.4g}")
    return table


def _parts(result: TimesReport) -> Table:
    loss = result.loss
    table = Table(title=f"lost to waiting, of a step of {result.step_s:.4g} s")
    table.add_column("because")
    table.add_column("s", justify="right")
    table.add_column("of a step", justify="right")
    for name, value in (
        (f"replica {loss.slowest} is slower on average, most on stage {loss.stage}", loss.deterministic_s),
        ("garbage is collected at different times", loss.garbage_s),
        ("latencies vary at random", loss.random_s),
        ("in all", loss.total_s),
    ):
        table.add_row(name, f"{value:.4g}", f"{value / result.step_s:.1%}")
    return table


def draw_report(result: TimesReport, path: Path) -> None:
    """Draw the report as one HTML page: compute times by replica and step, who was last, who waited, losses.

    Args:
        result: the report.
        path: the file; replaced.

    Raises:
        StorageError: it cannot be written.
    """
    from plotly.subplots import make_subplots

    titles = ("compute time of replicas", "steps in which a replica was last", "share of time waited for the slowest")
    figure = make_subplots(
        rows=3,
        cols=2,
        vertical_spacing=0.1,
        subplot_titles=(*titles, "lost to waiting", "compute time, step by step"),
        specs=[[{"colspan": 2}, None], [{}, {}], [{}, {}]],
    )
    shown = slowest_first(result.replicas)[:DRAWN]
    names = [f"replica {one.replica}" for one in shown]
    for one, name in zip(shown, names, strict=True):
        values = result.compute_s[one.replica]
        figure.add_box(y=values, name=name, marker_color="steelblue", showlegend=False, row=1, col=1)
    _draw_bars(figure, names, [one.last_steps for one in shown], 1)
    _draw_bars(figure, names, [one.waiting_share for one in shown], 2)
    figure.update_yaxes(tickformat=".0%", row=2, col=2)
    loss = result.loss
    parts = {"deterministic": loss.deterministic_s, "garbage": loss.garbage_s, "random": loss.random_s}
    figure.add_bar(x=list(parts), y=list(parts.values()), marker_color="firebrick", showlegend=False, row=3, col=1)
    lines = {"slowest": result.compute_s.max(axis=0), "mean": result.compute_s.mean(axis=0)}
    for (name, line), colour in zip(lines.items(), ("firebrick", "steelblue"), strict=True):
        figure.add_scatter(x=result.times.steps, y=line, name=name, line_color=colour, row=3, col=2)
    for row, column in ((1, 1), (3, 1), (3, 2)):
        figure.update_yaxes(title_text="s", row=row, col=column)
    figure.update_xaxes(title_text="step", row=3, col=2)
    left = f"; the slowest {DRAWN} of {len(result.replicas)} replicas" if len(result.replicas) > DRAWN else ""
    title = f"Step times<br><sup>{describe(result.times)}{left}</sup><br><sup>{result.advice}</sup>"
    figure.update_layout(title_text=title, height=1200, margin_t=140)
    write_page(figure, path)


def _draw_bars(figure: Any, names: list[str], values: Sequence[float], column: int) -> None:
    figure.add_bar(x=names, y=np.asarray(values), marker_color="steelblue", showlegend=False, row=2, col=column)
