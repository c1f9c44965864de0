"""Figures of DropCompute's effect: scaling, thresholds, measured speed-up, loss against steps and time.

Similar to those of Giladi et al., NeurIPS 2023, arXiv 2306.10598: other models, delays drawn from their environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megasdc.lab.report.run_pages.drop_results import Scaling
from megasdc.output.figure import COLOURS, DASHES, Figure, layout, line_look, scatter

HEIGHT = 340
DRAWN_RATE = 0.3
"""Largest drop rate that is drawn; the CSV files have all."""


def scaling_figure(scaling: Sequence[Scaling]) -> Figure:
    """Throughput over linear scaling, simulated, by ascending number of replicas."""
    replicas = [one.replicas for one in scaling]
    lines: dict[str, Sequence[float | None]] = {
        "with the best threshold": [one.drops for one in scaling],
        "every micro-batch waited for": [one.waits for one in scaling],
        "every micro-batch, by eq. 4": [one.waits_formula for one in scaling],
    }
    shown = {name: values for name, values in lines.items() if any(value is not None for value in values)}
    traces = [
        _line(name, replicas, values, COLOURS[place], "%{x:,} replicas: %{y:.1%}", DASHES[place // 2])
        for place, (name, values) in enumerate(shown.items())
    ]
    placed = _by_replicas(replicas, "of linear scaling", tickformat=".0%", rangemode="tozero")
    columns: dict[str, Sequence[Any]] = {
        "replicas": replicas,
        **{name.replace(" ", "_").replace(",", "").replace(".", ""): values for name, values in shown.items()},
        "effective_speedup": [one.speedup for one in scaling],
        "drop_rate": [one.drop_rate for one in scaling],
    }
    caption = (
        "Simulated: micro-batches per second of all replicas, over as many replicas that never wait for each other. "
        "What is lost to waiting grows with the number of replicas; the best threshold gives a part of it back."
    )
    return Figure("drop_scaling", "Scaling", caption, traces, placed, columns)


def rate_figure(scaling: Sequence[Scaling]) -> Figure:
    """Effective speed-up against the drop rate, a line for each number of replicas."""
    traces = []
    columns: dict[str, list[Any]] = {"replicas": [], "drop_rate": [], "effective_speedup": []}
    for place, one in enumerate(scaling):
        rates, speedups = zip(*one.curve, strict=True)
        drawn = [point for point in one.curve if point[0] <= DRAWN_RATE]
        name = f"{one.replicas:,} replicas"
        colour, dash = line_look(place)
        x, y = zip(*drawn, strict=True)
        traces.append(scatter(name, x, y, colour, "%{x:.1%} dropped: %{y:.4f}", line={"dash": dash}))
        columns["replicas"] += [one.replicas] * len(rates)
        columns["drop_rate"] += rates
        columns["effective_speedup"] += speedups
    placed = _by_rate(".0%")
    caption = (
        "Simulated, thresholds that drop up to "
        f"{DRAWN_RATE:.0%}: completed micro-batches per second over those without a threshold (eq. 6)."
    )
    return Figure("drop_thresholds", "Effective speed-up by share dropped", caption, traces, placed, columns)


def speedup_figure(number: int, result: Mapping[str, Any]) -> Figure:
    """Measured against predicted effective speed-up; a result of ``bench drop-speedup`` and its number, from 0."""
    rows = sorted(result["thresholds"], key=lambda one: one["rate"])
    rates = [one["rate"] for one in rows]
    names = ["chosen by the run itself" if one["own"] else "given" for one in rows]
    bar, replicas = result["bar"], result["options"]["replicas"]
    predicted, measured = ([one[key] for one in rows] for key in ("predicted", "speedup"))
    around = [*(value * (1 + bar) for value in predicted), *(value * (1 - bar) for value in reversed(predicted))]
    fill: dict[str, Any] = {"fill": "toself", "fillcolor": "var(--equal)", "line": {"width": 1}, "hoverinfo": "skip"}
    band = scatter(f"predicted, ± {bar:.0%}", [*rates, *reversed(rates)], around, "var(--line)", **fill)
    hover = "%{x:.1%} dropped, threshold %{text}: %{y:.4f}"
    marker = {"size": 9, "symbol": ["diamond" if one["own"] else "circle" for one in rows]}
    points = scatter("measured", rates, measured, COLOURS[1], hover, mode="markers", text=names, marker=marker)
    columns = {"drop_rate": rates, "threshold": names, "predicted": predicted, "measured": measured}
    caption = (
        f"{replicas} real replicas whose micro-batches sleep as long as drawn ({result['sleep_share']:.0%} of their "
        "time). Predicted from other steps, in which nothing was dropped. Diamond: a threshold that the run chose."
    )
    return Figure(
        f"drop_measured_{number}", "Measured effective speed-up", caption, [band, points], _by_rate(".1%"), columns
    )


def measured_scaling_figure(results: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Measured effective speed-up by number of replicas, a line per threshold rule; None for a single number.

    The results are those of ``bench drop-speedup``.
    """
    rows = [
        (result["options"]["replicas"], _rule(result, place), one["speedup"], one["predicted"], one["rate"])
        for result in sorted(results, key=lambda one: one["options"]["replicas"])
        for place, one in enumerate(result["thresholds"])
    ]
    replicas = sorted({row[0] for row in rows})
    if len(replicas) < 2:
        return None
    traces = []
    for place, rule in enumerate(dict.fromkeys(row[1] for row in rows)):
        own = [row for row in rows if row[1] == rule]
        counts, measured, predicted = [row[0] for row in own], [row[2] for row in own], [row[3] for row in own]
        colour = COLOURS[place % len(COLOURS)]
        hover = "%{x} replicas: %{y:.4f}"
        traces.append(_line(rule, counts, measured, colour, hover))
        traces.append(scatter(f"{rule}, predicted", counts, predicted, colour, hover, line={"dash": "dot"}))
    names = ("replicas", "threshold", "measured", "predicted", "drop_rate")
    columns: dict[str, Sequence[Any]] = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    caption = "Real replicas whose micro-batches sleep as long as drawn; predicted from other steps."
    placed = _by_replicas(replicas, "effective speed-up")
    return Figure("drop_measured_scaling", "Measured speed-up by replicas", caption, traces, placed, columns)


def _rule(result: Mapping[str, Any], place: int) -> str:
    """How a threshold was chosen; thresholds for given drop rates come first, in the order of the options."""
    if result["thresholds"][place]["own"]:
        return "chosen by the run"
    return f"for {result['options']['drop_rates'][place]:.1%} dropped"


def loss_figures(number: int, result: Mapping[str, Any]) -> list[Figure]:
    """Validation loss against steps and simulated time; a result of ``bench drop-training`` and its number, from 0."""
    seeds = result["options"]["seeds"]
    said = f"Mean validation loss over {seeds} seeds. "
    return [
        _losses(f"drop_loss_steps_{number}", "Loss against steps", said, "step", 0, result),
        _losses(
            f"drop_loss_time_{number}",
            "Loss against time",
            said + f"Time of a simulated job of {result['options']['replicas']} replicas in the paper's environment.",
            "hours",
            1,
            result,
        ),
    ]


def _losses(name: str, title: str, caption: str, unit: str, place: int, result: Mapping[str, Any]) -> Figure:
    traces = []
    columns: dict[str, list[Any]] = {"setting": [], unit: [], "loss": []}
    divide = 3600.0 if unit == "hours" else 1.0
    for number, score in enumerate(result["scores"]):
        x = [point[place] / divide for point in score["curve"]]
        y = [point[2] for point in score["curve"]]
        colour, dash = line_look(number)
        traces.append(_line(score["name"], x, y, colour, "%{x:.4g}: %{y:.4f}", dash))
        columns["setting"] += [score["name"]] * len(x)
        columns[unit] += x
        columns["loss"] += y
    axes: dict[str, Any] = {"xaxis": {"rangemode": "tozero"}, "yaxis": {"nticks": 8}}
    placed = layout(HEIGHT + 60, unit, "nats per token", legend=True, **axes)
    return Figure(name, title, caption.strip(), traces, placed, columns)


def _by_rate(form: str) -> dict[str, Any]:
    """The layout of a figure over drop rates."""
    axes: dict[str, Any] = {"xaxis": {"tickformat": form}, "yaxis": {"nticks": 6}}
    return layout(HEIGHT, "micro-batches dropped", "effective speed-up", legend=True, **axes)


def _by_replicas(replicas: Sequence[int], title: str, **yaxis: Any) -> dict[str, Any]:
    """The layout of a figure over numbers of replicas."""
    ticks = {"tickvals": list(replicas), "ticktext": [*map(str, replicas)]}
    axes: dict[str, Any] = {"xaxis": {"type": "log", **ticks}, "yaxis": {"nticks": 6, **yaxis}}
    return layout(HEIGHT, "replicas", title, legend=True, **axes)


def _line(
    name: str, x: Sequence[Any], y: Sequence[Any], colour: str, hover: str, dash: str = "solid"
) -> dict[str, Any]:
    return scatter(name, x, y, colour, hover, mode="lines+markers", line={"dash": dash})
