"""Figures of studies of nodes: frequency and severity of mismatches by node, and divergence of parameters.

Ma, Pei, Lausen, Karypis 2025 (arXiv 2502.12340) show mismatch frequency and severity of each node's submodules, the
noise-to-signal ratio of its gradients, and parameter difference over steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megasdc.config.sections import COMPUTATION_SYNC, FREE_RUN, PARAMETER_SYNC
from megasdc.lab.sweeps.ma_tables import NOISE, PLACES, StudiedNode
from megasdc.lab.sweeps.results import SweepResults
from megasdc.ops.run_folder.study_log import WHOLE, read_study
from megasdc.output.figure import (
    COLOURS,
    Figure,
    Series,
    curve,
    layout,
    line_look,
    log_axis,
    named_axis,
    over_steps,
    scatter,
)

HEIGHT = 400
SYMBOLS = ("circle", "square", "diamond", "triangle-up")

Points = Mapping[str, Sequence[float]]
"""By name in the legend: a value per node, NaN where there is none."""


def node_figures(results: SweepResults, nodes: Sequence[StudiedNode]) -> list[Figure]:
    """Figures of the modes that were run, in the order of the research questions; none where nothing differs."""
    of_mode = {
        mode: [one for one in nodes if one.mode == mode] for mode in (COMPUTATION_SYNC, PARAMETER_SYNC, FREE_RUN)
    }
    found = [
        *_submodules(of_mode[COMPUTATION_SYNC]),
        _gradients(of_mode[PARAMETER_SYNC]),
        _distances(results, of_mode[FREE_RUN]),
    ]
    return [one for one in found if one is not None]


def _submodules(nodes: Sequence[StudiedNode]) -> list[Figure | None]:
    rows = {f"{part}, {phase}": [one.mismatches.get((part, phase)) for one in nodes] for part, phase in PLACES}
    frequency = {name: [0.0 if row is None else row.frequency for row in own] for name, own in rows.items()}
    severity = {
        name: [math.nan if row is None or row.severity_mean is None else row.severity_mean for row in own]
        for name, own in rows.items()
    }
    published = {
        f"{part}, {phase}": [one.published.get(name, math.nan) for one in nodes]
        for (part, phase), name in PLACES.items()
    }
    return [
        _by_node(
            "rq1_frequency",
            "RQ1: mismatch frequency",
            "Share of compared elements whose bits differ from the trusted replica's.",
            nodes,
            frequency,
            published,
        ),
        _by_node(
            "rq1_severity",
            "RQ1: mean mismatch severity",
            "|u - h| / |h|, mean over the elements that differ, where it is finite.",
            nodes,
            severity,
        ),
    ]


def _gradients(nodes: Sequence[StudiedNode]) -> Figure | None:
    noise = [math.nan if one.noise is None else one.noise for one in nodes]
    return _by_node(
        "rq2_noise",
        "RQ2: noise-to-signal ratio of gradients",
        "||g_u - g_h|| / ||g_h|| of the worst step.",
        nodes,
        {"worst of all steps": noise},
        {"worst of all steps": [one.published.get(NOISE, math.nan) for one in nodes]},
    )


def _by_node(
    name: str, title: str, caption: str, nodes: Sequence[StudiedNode], measured: Points, published: Points | None = None
) -> Figure | None:
    """A point for each node and name, hollow for published values; None where nothing is above zero."""
    labels = [one.label for one in nodes]
    published = {name: own for name, own in (published or {}).items() if any(map(math.isfinite, own))}
    drawn = [
        *((name, own, place, "") for place, (name, own) in enumerate(measured.items())),
        *(
            (f"{name}, published", published[name], place, "-open")
            for place, name in enumerate(measured)
            if name in published
        ),
    ]
    values = np.array([value for _, own, _, _ in drawn for value in own], dtype=np.float64)
    if not (values > 0).any():
        return None
    traces = []
    for told, own, place, hollow in drawn:
        marker = {"symbol": SYMBOLS[place] + hollow, "size": 13 if hollow else 8, "line": {"width": 1.5}}
        above = [value if value > 0 else math.nan for value in own]
        traces.append(scatter(told, above, labels, COLOURS[place], "%{y}: %{x:.4g}", mode="markers", marker=marker))
    if published:
        caption += " Hollow: what was published of the node that is imitated."
    axes: dict[str, Any] = {"xaxis": log_axis(values), "yaxis": named_axis(labels[::-1])}
    placed = layout(110 + 26 * len(labels), legend=True, hovermode="closest", **axes)
    columns: dict[str, Sequence[Any]] = {"node": labels, **{told: list(own) for told, own, _, _ in drawn}}
    return Figure(name, title, caption + " Zero has no place on the axis.", traces, placed, columns)


def _distances(results: SweepResults, nodes: Sequence[StudiedNode]) -> Figure | None:
    """Parameter difference over steps, a curve per node; None where all stay equal."""
    series = {}
    for one in nodes:
        lines = [line for line in read_study(results.run_folder(one.run_id), "parameters") if line["fqn"] == WHOLE]
        ratios = [math.nan if line["ratio"] is None else float(line["ratio"]) for line in lines]
        series[one.label] = Series(np.array([line["step"] for line in lines]), np.array(ratios, dtype=np.float64))
    apart = {name: own for name, own in series.items() if (own.values > 0).any()}
    if not apart:
        return None
    traces = []
    for place, (name, own) in enumerate(apart.items()):
        colour, dash = line_look(place)
        traces.append(curve(name, own.positive, colour, line={"dash": dash}))
    caption = "||p_u - p_h|| / ||p_h|| of the fp32 weights. Zero has no place on the axis."
    if equal := [name for name in series if name not in apart]:
        caption += f" Equal in every bit: {', '.join(equal)}."
    values = np.concatenate([own.values for own in apart.values()])
    drawn = layout(HEIGHT, legend=True, yaxis=log_axis(values))
    return over_steps("rq3_parameters", "RQ3: parameter difference", caption, traces, drawn, series, told=False)
