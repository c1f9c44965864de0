"""Figures of a sweep: final losses of each cell, effect of each node, losses and gradient norms over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megasdc.lab.sweeps.outcome import DIVERGED, DONE
from megasdc.lab.sweeps.pei_metrics import relative_increase
from megasdc.lab.sweeps.results import SweepResults
from megasdc.lab.sweeps.sweep_file import HEALTHY
from megasdc.lab.sweeps.table import SweepTable
from megasdc.output.figure import Figure, Series, clean, curve, layout, line_look, log_axis, map_axes, named_axis

HEIGHT, CELL_HEIGHT = 420, 300
CURVE_POINTS = 400
"""Maximum of points of one run's curve."""


@dataclass(frozen=True)
class Quantity:
    """What is drawn step by step.

    Args:
        metric: its name in the series.
        title: of a cell's figure.
        key: begins the figure's name.
        column: in the CSV.
        top: it is drawn up to so many times the largest first value, a run that diverged is cut off there; None: on a
            logarithmic scale, whole.
    """

    metric: str
    title: str
    key: str
    column: str
    top: float | None


LOSS = Quantity("train/loss", "Loss", "cell", "loss", 1.5)
NORM = Quantity("train/grad_norm", "Gradient norm before the clip", "norm", "grad_norm", None)


def sweep_figures(results: SweepResults, scored: SweepTable) -> list[Figure]:
    """Figures of a sweep and its table, also of one in progress."""
    cells = list(dict.fromkeys(row["cell"] for row in results.rows))
    nodes = [HEALTHY, *(node for node in dict.fromkeys(row["node"] for row in results.rows) if node != HEALTHY)]
    trained = [cell for cell in cells if cell in scored.trained_scores]
    rows = [row for row in results.rows if row["cell"] in trained]
    found = [_final_losses(rows, trained)] if any(map(_done, rows)) else []
    if len(nodes) > 1 and rows:
        found.append(_increases(rows, trained, nodes[1:]))
    for quantity in (LOSS, NORM):
        series = _series_of(results.series(names=[quantity.metric]).to_pydict())
        found += [
            _curves(quantity, number, cell, [row for row in results.rows if row["run_id"] in series], nodes, series)
            for number, cell in enumerate(cells)
            if any(row["cell"] == cell and row["run_id"] in series for row in results.rows)
        ]
    return found


def increases(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int], float]:
    """Increase over the healthy run of the same cell and seed, by (cell, node, seed), where both are done."""
    healthy = {(row["cell"], row["seed"]): row["final_loss"] for row in rows if row["node"] == HEALTHY and _done(row)}
    return {
        (row["cell"], row["node"], row["seed"]): relative_increase(row["final_loss"], healthy[row["cell"], row["seed"]])
        for row in rows
        if row["node"] != HEALTHY and _done(row) and (row["cell"], row["seed"]) in healthy
    }


def _done(row: Mapping[str, Any]) -> bool:
    return row["status"] == DONE and row["final_loss"] is not None


def _final_losses(rows: Sequence[Mapping[str, Any]], cells: Sequence[str]) -> Figure:
    """Per cell, points and a box of unhealthy nodes, of healthy runs and of controls."""
    done = [row for row in rows if _done(row)]
    groups: dict[str, list[Mapping[str, Any]]] = {"unhealthy nodes": [], "healthy": [], "controls": []}
    for row in done:
        name = "controls" if row["control"] else "healthy" if row["node"] == HEALTHY else "unhealthy nodes"
        groups[name].append(row)
    hover = "%{x}, %{text}: %{y:.5g}<extra></extra>"
    common = {
        "type": "box",
        "boxpoints": "all",
        "hovertemplate": hover,
        "hoveron": "points",
        "jitter": 0.5,
        "pointpos": 0,
    }
    traces: list[dict[str, Any]] = []
    looks = (("var(--c2)", "circle"), ("var(--c1)", "diamond"), ("var(--c3)", "square"))
    for (name, own), (colour, symbol) in zip(groups.items(), looks, strict=True):
        if not own:
            continue
        places = {"x": [row["cell"] for row in own], "y": clean([row["final_loss"] for row in own])}
        text = [f"{row['node']}, seed {row['seed']}" for row in own]
        marks: dict[str, Any] = {
            "marker": {"color": colour, "symbol": symbol, "size": 6},
            "line": {"color": colour, "width": 1},
        }
        traces.append({"name": name, **places, "text": text, **marks, **common})
    left = len(rows) - len(done)
    caption = "Each point is a run: a node and a seed. Boxes: quartiles and median."
    if left:
        caption += f" {left:,} of {len(rows):,} runs are not done (diverged, NaN or failed) and are not drawn."
    axes: dict[str, Any] = {"xaxis": named_axis(cells), "yaxis": {"nticks": 8}}
    drawn = layout(HEIGHT, y="nats per token", legend=True, boxmode="group", hovermode="closest", **axes)
    columns = {key: [row[key] for row in rows] for key in ("cell", "node", "seed", "status", "final_loss", "eval_loss")}
    return Figure("final_losses", "Final training loss of every run", caption, traces, drawn, columns)


def _increases(rows: Sequence[Mapping[str, Any]], cells: Sequence[str], nodes: Sequence[str]) -> Figure:
    """Mean increase over seeds, of each node in each cell; statuses in words where a run is not done."""
    found = increases(rows)
    z: list[list[float | None]] = []
    words: list[list[str]] = []
    for node in nodes:
        line, said = [], []
        for cell in cells:
            values = [value for (c, n, _), value in found.items() if (c, n) == (cell, node)]
            states = {row["status"] for row in rows if (row["cell"], row["node"]) == (cell, node)}
            lost = ", ".join(sorted(states - {DONE}))
            line.append(float(np.mean(values)) if values and not lost else None)
            said.append(lost or (f"{np.mean(values):+.2%}" if values else ""))
        z.append(line)
        words.append(said)
    largest = max((abs(value) for line in z for value in line if value is not None), default=0.0) or 0.005
    common = {"type": "heatmap", "x": list(cells), "y": list(nodes), "showscale": False, "xgap": 1, "ygap": 1}
    common |= {"text": words, "texttemplate": "%{text}", "textfont": {"color": "var(--text)"}}
    common["hovertemplate"] = "%{y} in %{x}: %{text}<extra></extra>"
    colours = [[0, "var(--c1)"], [0.5, "var(--page)"], [1, "var(--mid)"]]
    trace = common | {"z": z, "zmin": -largest, "zmax": largest, "colorscale": colours}
    lost_cells = [
        [1 if value is None and word else None for value, word in zip(*pair, strict=True)]
        for pair in zip(z, words, strict=True)
    ]
    words_of = common | {"z": lost_cells, "colorscale": [[0, "var(--equal)"], [1, "var(--equal)"]]}
    axes: dict[str, Any] = map_axes() | {"hovermode": "closest"}
    axes["xaxis"]["automargin"] = True
    columns: dict[str, Sequence[Any]] = {
        "cell": [cell for _ in nodes for cell in cells],
        "node": [node for node in nodes for _ in cells],
        "mean_increase": [math.nan if value is None else value for line in z for value in line],
        "shown": [word for said in words for word in said],
    }
    caption = (
        "(final loss / final loss of the healthy run with the same seed - 1), mean over seeds; a word: a run of that "
        "node is not done. Orange: worse than healthy."
    )
    drawn, title = layout(110 + 26 * len(nodes), **axes), "What each node did to the final loss"
    return Figure("increases", title, caption, [trace, words_of], drawn, columns)


def _series_of(columns: Mapping[str, Sequence[Any]]) -> dict[str, Series]:
    """Values of each run, by step."""
    points: dict[str, list[tuple[int, float]]] = {}
    for run, step, value in zip(columns["run_id"], columns["step"], columns["value"], strict=True):
        points.setdefault(run, []).append((step, value))
    return {run: Series.of(own) for run, own in points.items()}


def _curves(
    quantity: Quantity,
    number: int,
    cell: str,
    rows: Sequence[Mapping[str, Any]],
    nodes: Sequence[str],
    series: Mapping[str, Series],
) -> Figure:
    """One cell's runs: healthy runs wide and pale, nodes above them; seeds of a node look the same."""
    own = [row for row in rows if row["cell"] == cell]
    traces, steps, said = [], [], []
    for row in sorted(own, key=lambda one: nodes.index(one["node"])):
        one, place = series[row["run_id"]], nodes.index(row["node"])
        colour, dash = line_look(place)
        label = f"{row['node']}, {row['status']}" if row["status"] != DONE else row["node"]
        options: dict[str, Any] = {"opacity": 0.5} if place == 0 else {}
        line = {"dash": dash, "width": 5 if place == 0 else 1.2}
        options |= {"legendgroup": row["node"], "showlegend": row["node"] not in said}
        traces.append(curve(label, one, colour, limit=CURVE_POINTS, line=line, **options))
        said.append(row["node"])
        steps += [(row, int(step), float(value)) for step, value in zip(one.steps, one.values, strict=True)]
    first = max((float(series[row["run_id"]].values[0]) for row in own), default=math.nan)
    finite = [value for _, _, value in steps if math.isfinite(value)]
    axis: dict[str, Any] = {"nticks": 7} if quantity.top else log_axis(np.array(finite))
    caption = f"{len(own):,} runs; the healthy one wide and pale."
    if quantity.top and finite and math.isfinite(first) and max(finite) > quantity.top * first:
        axis["range"] = [min(finite) - 0.05 * (first - min(finite)), quantity.top * first]
        caption += f" Cut at {quantity.top:g} times the largest first value; the CSV has all."
    if diverged := sum(row["status"] == DIVERGED for row in own):
        caption += f" {diverged:,} diverged."
    columns = {
        "node": [row["node"] for row, _, _ in steps],
        "seed": [row["seed"] for row, _, _ in steps],
        "step": [step for _, step, _ in steps],
        quantity.column: [value for _, _, value in steps],
    }
    drawn = layout(CELL_HEIGHT, legend=True, yaxis=axis)
    name, title = f"{quantity.key}_{number:02d}", f"{quantity.title}, {cell}"
    return Figure(name, title, caption, traces, drawn, columns, on_steps=True)
