"""Simulations of DropCompute as text for a terminal and as a page of figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from megasdc.dropcompute.search import Curve
from megasdc.dropcompute.simulate import Formulas, SimulationResult, SimulationResults
from megasdc.errors import StorageError
from megasdc.program import write_whole


def render_simulations(result: SimulationResults, console: Console) -> None:
    """Print simulations: time of a step, and the gain of the best threshold.

    Args:
        result: of the simulations.
        console: to print on.
    """
    console.print(describe(result.results[0]))
    console.print(_times(result.results))
    console.print(_best(result.results))
    rate = result.results[0].simulation.max_drop_rate
    console.print(f"S_eff: samples per second over those without drops, of thresholds that drop at most {rate:.0%}")
    formulas = result.results[0].formulas
    if formulas is None:
        console.print("no formulas: they are for one stage, and for latencies that vary")
    else:
        shown = "E[T] alone" if formulas.speedup is None else "in brackets too"
        console.print(f"formulas, {shown}: they take latencies as independent and times of replicas as normal")
    if result.results[0].simulation.rule.finish:
        console.print("started micro-batches are finished, so a step may last longer than tau")


def describe(result: SimulationResult) -> str:
    """The simulated setting in one line."""
    one, moments = result.simulation, result.moments
    rule = "finished" if one.rule.finish else "lost"
    return (
        f"{one.micro_batches} micro-batches, {one.stages} stage(s), Tc {one.communication_s:g} s; latency of a "
        f"micro-batch on a stage {moments.mean_s:.4g} s, standard deviation {moments.std_s:.3g} s, largest "
        f"{moments.largest_s:.3g} s; in progress at the threshold: {rule}"
    )


def _times(results: tuple[SimulationResult, ...]) -> Table:
    table = Table(title="compute time of a step without drops, s")
    for name in ("replicas", "steps drawn", "E[T]", "eq. 4", "exact, normal"):
        table.add_column(name, justify="right")
    for result in results:
        error, formulas = result.longest_error_s, result.formulas
        simulated = f"{result.curve.longest_s.mean():.4g}" + ("" if error is None else f" ±{1.96 * error:.2g}")
        given = (formulas.longest_s, formulas.exact_longest_s) if formulas else (None, None)
        one = result.simulation
        table.add_row(f"{one.replicas:,}", f"{one.num_steps:,}", simulated, *(_number(value) for value in given))
    return table


def _best(results: tuple[SimulationResult, ...]) -> Table:
    table = Table(title="best threshold")
    for name in ("replicas", "tau, s", "S_eff", "M~", "dropped", "step, s", "extra steps"):
        table.add_column(name, justify="right")
    for result in results:
        best = result.at(result.best)
        table.add_row(
            f"{result.simulation.replicas:,}",
            "never drop" if best["tau_s"] is None else f"{best['tau_s']:.4g}",
            f"{best['speedup']:.3f}{_bracket(best['formula_speedup'])}",
            f"{best['completed']:.2f}{_bracket(best['formula_completed'])}",
            f"{best['drop_rate']:.1%}",
            f"{best['time_s']:.4g}",
            "-" if best["extra_steps"] is None else f"{best['extra_steps']:,} of {result.simulation.training_steps:,}",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _bracket(value: float | None) -> str:
    return "" if value is None else f" ({value:.3g})"


def write_figure(result: SimulationResults, path: Path) -> None:
    """Draw simulations as one HTML page that needs no network.

    For the last number of replicas: distribution of compute times, completed share, speed of steps and S_eff against
    the threshold, and S_eff against the drop rate; for all numbers: E[T] and the best S_eff. The paper's Figures 2 to
    4 show these quantities. Points are simulated, lines are formulas.

    Args:
        result: of the simulations.
        path: the file; replaced.

    Raises:
        StorageError: it cannot be written.
    """
    from plotly.subplots import make_subplots

    last = result.results[-1]
    title = f"{last.simulation.replicas:,} replicas"
    titles = (
        f"compute time of a replica, {title}",
        f"against the threshold, {title}",
        f"S_eff against the drop rate, {title}",
        "E[T] against replicas",
        "best S_eff against replicas",
    )
    figure = make_subplots(
        rows=3, cols=2, vertical_spacing=0.1, subplot_titles=titles, specs=[[{}, {}], [{"colspan": 2}, None], [{}, {}]]
    )
    marks = {"E[T]": float(last.curve.longest_s.mean())}
    if last.formulas and last.formulas.longest_s is not None:
        marks["eq. 4"] = last.formulas.longest_s
    draw_times(figure, last.replica_times_s, marks, last.at(last.best)["tau_s"])
    draw_thresholds(figure, last.curve, last.formulas)
    _draw_growth(figure, result.results)
    figure.update_layout(title_text=f"DropCompute, simulated<br><sup>{describe(last)}</sup>", height=1200, margin_t=120)
    write_page(figure, path)


def write_page(figure: Any, path: Path) -> None:
    """Write a plotly figure as one HTML page that needs no network.

    Args:
        figure: the figure.
        path: the file; replaced.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        write_whole(path, figure.to_html(include_plotlyjs=True, full_html=True))
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --figure") from error


def draw_times(figure: Any, times_s: NDArray[np.float64], marks: dict[str, float], tau_s: float | None) -> None:
    """Draw a histogram of the replicas' compute times in the first subplot.

    Args:
        figure: of subplots.
        times_s: of replicas and steps, any shape.
        marks: times to mark, by name.
        tau_s: threshold to mark; None: never drop.
    """
    counts, edges = np.histogram(times_s, bins=80)
    middle = (edges[:-1] + edges[1:]) / 2
    figure.add_bar(x=middle, y=counts / counts.sum(), name="replicas", row=1, col=1)
    for place, (name, value) in enumerate((marks if tau_s is None else {**marks, "tau": tau_s}).items()):
        figure.add_vline(x=value, line_dash="dash", annotation_text=name, annotation_yshift=-14 * place, row=1, col=1)
    figure.update_xaxes(title_text="s", row=1, col=1)
    figure.update_yaxes(title_text="share of replicas and steps", row=1, col=1)


def draw_thresholds(figure: Any, curve: Curve, formulas: Formulas | None) -> None:
    """Draw completed share, speed and S_eff against tau, and S_eff against the drop rate.

    Args:
        figure: of subplots; those at (1, 2) and (2, 1) are used.
        curve: of all thresholds.
        formulas: drawn as lines; None: none.
    """
    finite = slice(None, -1)
    tau, plain = curve.thresholds_s[finite], curve.times_s[:, -1:] + curve.communication_s
    faster = (plain / (curve.times_s + curve.communication_s)).mean(axis=0)
    simulated = {"M~ / M": curve.completed_share, "speed of steps": faster, "S_eff": curve.speedup}
    by_formula = {"M~ / M": formulas.completed_share, "S_eff": formulas.speedup} if formulas else {}
    for (name, values), colour in zip(simulated.items(), ("seagreen", "steelblue", "firebrick"), strict=True):
        marker = {"color": colour, "size": 4}
        figure.add_scatter(x=tau, y=values[finite], mode="markers", marker=marker, name=name, row=1, col=2)
        if (line := by_formula.get(name)) is not None:
            figure.add_scatter(x=tau, y=line[finite], line_color=colour, name=f"{name}, formula", row=1, col=2)
    marker = {"color": "firebrick", "size": 4}
    drops = 1 - curve.completed_share[finite]
    options = {"mode": "markers", "marker": marker, "name": "S_eff", "showlegend": False}
    figure.add_scatter(x=drops, y=curve.speedup[finite], row=2, col=1, **options)
    if formulas and formulas.completed_share is not None and formulas.speedup is not None:
        figure.add_scatter(
            x=1 - formulas.completed_share[finite],
            y=formulas.speedup[finite],
            line_color="firebrick",
            showlegend=False,
            row=2,
            col=1,
        )
    figure.update_xaxes(title_text="tau, s", row=1, col=2)
    figure.update_xaxes(title_text="drop rate", tickformat=".0%", row=2, col=1)


def _draw_growth(figure: Any, results: tuple[SimulationResult, ...]) -> None:
    numbers = [result.simulation.replicas for result in results]
    times: dict[str, list[float | None]] = {}
    times["E[T]"] = [float(result.curve.longest_s.mean()) for result in results]
    times["eq. 4"] = [result.formulas.longest_s if result.formulas else None for result in results]
    times["exact, normal"] = [result.formulas.exact_longest_s if result.formulas else None for result in results]
    for name, values in times.items():
        mode = "markers" if name == "E[T]" else "lines+markers"
        figure.add_scatter(x=numbers, y=values, mode=mode, name=name, row=3, col=1)
    best = [result.at(result.best) for result in results]
    for name, key in (("best S_eff", "speedup"), ("formula at the same tau", "formula_speedup")):
        figure.add_scatter(x=numbers, y=[one[key] for one in best], mode="lines+markers", name=name, row=3, col=2)
    for column, unit in ((1, "s"), (2, "")):
        figure.update_xaxes(title_text="replicas", type="log", row=3, col=column)
        figure.update_yaxes(title_text=unit, row=3, col=column)
