"""Figures of one run: its metrics, events and stragglers over one axis of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megasdc.ops.run_folder.marks import (
    DROPS,
    FAULT,
    FINDING,
    HANG,
    INCIDENT,
    LANES,
    LINED,
    NOT_FINITE,
    RESUME,
    SAVE,
    SKIP,
    START,
    WARNING,
    EventMark,
)
from megasdc.ops.run_folder.record import RunRecord
from megasdc.output.figure import COLOURS, Figure, Series, axis_of, curve, layout, named_axis, over_steps, rule, scatter

SLOWNESS_HEIGHT = 230
MAX_RANKS = len(COLOURS)
"""Maximum of curves; the ranks that were slowest at any time."""


def slowness_figure(ratios: dict[int, Series], lines: list[dict[str, Any]]) -> Figure | None:
    """Curves of the slowest ranks; ``lines``: through every figure. None where nothing was compared."""
    if not ratios:
        return None
    slowest = sorted(ratios, key=lambda rank: -float(ratios[rank].values.max()))[:MAX_RANKS]
    series = {f"rank {rank}": ratios[rank] for rank in sorted(slowest)}
    coloured = zip(series.items(), COLOURS, strict=False)
    traces = [curve(name, one, colour, mode="lines+markers") for (name, one), colour in coloured]
    few = f" The {len(series)} slowest of {len(ratios):,} are drawn." if len(series) < len(ratios) else ""
    caption = f"Of a micro-batch, without waiting, against the same stage of other replicas, last 40 steps.{few}"
    drawn = layout(SLOWNESS_HEIGHT, legend=True, shapes=lines)
    return over_steps("slowness", "Time of a rank over that of its peers", caption, traces, drawn, series)


HEIGHT, WIDE_HEIGHT = 210, 260
MAX_LINES = 100
"""A kind with more marks than this is not drawn as lines through every figure."""
MAX_MARKS = 1500
"""Maximum of marks of a kind in the figure of events."""
LOOKS = {
    INCIDENT: ("x", "var(--bad)"),
    HANG: ("hourglass", "var(--bad)"),
    FINDING: ("diamond", "var(--bad)"),
    NOT_FINITE: ("star", "var(--c4)"),
    SKIP: ("triangle-right", "var(--c4)"),
    FAULT: ("triangle-down", "var(--c2)"),
    WARNING: ("hexagon", "var(--unsure)"),
    DROPS: ("pentagon", "var(--c5)"),
    SAVE: ("square", "var(--good)"),
    RESUME: ("triangle-up", "var(--c1)"),
    START: ("circle", "var(--faint)"),
}
"""Symbol and colour of each kind of marks."""
_PARTS = ("forward", "backward", "optimizer", "data", "other")

_PANELS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "loss",
        "Loss, nats per token",
        "Training: mean over the steps since the point before. Evaluation: over the validation samples.",
        (("training", "train/loss"), ("evaluation", "eval/loss")),
    ),
    (
        "gradient_norm",
        "Gradient norm",
        "2-norm of the whole gradient before clipping, of the step at each point.",
        (("gradient norm", "train/grad_norm"),),
    ),
    ("learning_rate", "Learning rate", "", (("learning rate", "train/learning_rate"),)),
    (
        "bounds",
        "Bounded elements, share",
        "Share of gradient elements that bounds made smaller since the point before.",
        (("elements", "bounds/share"),),
    ),
    (
        "removed",
        "Gradient taken away by bounds, share",
        "Of the sum of gradient magnitudes since the point before.",
        (("magnitude", "bounds/removed_share"),),
    ),
    (
        "largest_ratio",
        "Largest g² / V",
        "Of all elements since the point before, before bounds; what spike-aware bounds compare with theta.",
        (("largest ratio", "bounds/largest_ratio"),),
    ),
    (
        "throughput",
        "Throughput, tokens per second",
        "All ranks, mean since the point before; evaluations and saves left out.",
        (("tokens per second", "speed/tokens_per_s"),),
    ),
)
"""Name, title, caption, and (label, metric) of each curve."""


def run_figures(run: RunRecord, marks: Sequence[EventMark]) -> list[Figure]:
    """Every figure for which the run has data, in the order of the page."""
    lines = mark_lines(marks)
    found = [_panel(run, lines, *panel) for panel in _PANELS if any(name in run.series for _, name in panel[3])]
    if (drops := _completed(run, lines)) is not None:
        found.insert(-1, drops)
    if (parts := _time_parts(run, lines)) is not None:
        found.append(parts)
    if (slow := slowness_figure(run.slowness, lines)) is not None:
        found.append(slow)
    if marks:
        found.insert(1, happened(marks))
    return found


def _panel(
    run: RunRecord,
    lines: list[dict[str, Any]],
    name: str,
    title: str,
    caption: str,
    curves: tuple[tuple[str, str], ...],
) -> Figure:
    series = {label: run.series[metric] for label, metric in curves if metric in run.series}
    traces = []
    for (label, one), colour in zip(series.items(), COLOURS, strict=False):
        options: dict[str, Any] = {"mode": "lines+markers", "line": {"dash": "dot"}} if label == "evaluation" else {}
        traces.append(curve(label, one, colour, **options))
    axis = axis_of(*series.values())
    if name in ("bounds", "removed"):
        axis |= {"exponentformat": "power", "rangemode": "tozero"}
    drawn = layout(WIDE_HEIGHT if name == "loss" else HEIGHT, legend=len(series) > 1, shapes=lines, yaxis=axis)
    return over_steps(name, title, caption, traces, drawn, series)


def completed_micro_batches(run: RunRecord) -> Series | None:
    """Share of the planned micro-batches that all replicas completed, by step; None without recorded drops.

    A step without an event dropped none; of an ended backward pass the share of layers that were computed counts.
    Without usable events, the share is that of the metric ``drops/rate``.
    """
    if "drops/rate" not in run.series and not run.of("drop", "micro_batches"):
        return None
    layouts = [one.fields.get("layout") for one in run.of("start", "run")]
    replicas = next((one["data"] for one in reversed(layouts) if isinstance(one, dict) and "data" in one), None)
    of_layers = run.setting("megasdc.model.num_layers") or 1
    told = {
        one.step: _lost(one.fields, of_layers) / (one.fields["planned"] * replicas)
        for one in run.of("drop", "micro_batches")
        if one.step and replicas and one.fields.get("planned") and isinstance(one.fields.get("dropped"), int)
    }
    if not told:
        rates = run.series.get("drops/rate")
        return None if rates is None else Series(rates.steps, 1 - rates.values)
    steps = np.arange(1, run.last_step + 1)
    return Series(steps, np.array([1 - told.get(step, 0.0) for step in steps.tolist()]))


def _lost(fields: dict[str, Any], of_layers: int) -> float:
    """Micro-batches that an event of dropped ones tells, with the layers that ended backward passes left out."""
    ended = fields.get("layers")
    done = ended.values() if isinstance(ended, dict) else ()
    return float(fields["dropped"] + sum(1 - min(layers, of_layers) / of_layers for layers in done))


def _completed(run: RunRecord, lines: list[dict[str, Any]]) -> Figure | None:
    series = completed_micro_batches(run)
    if series is None:
        return None
    curves = {"step": series}
    rates = run.series.get("drops/rate")
    if rates is not None and len(rates.steps) < len(series.steps):
        curves["mean since the point before"] = Series(rates.steps, 1 - rates.values)
    looks: tuple[dict[str, Any], ...] = ({"line": {"width": 1}, "opacity": 0.6}, {"line": {"width": 2.5}})
    traces = [curve(*one, colour, **look) for one, colour, look in zip(curves.items(), COLOURS, looks, strict=False)]
    axis = {"tickformat": ".0%", "nticks": 6}
    drawn = layout(HEIGHT, legend=len(curves) > 1, shapes=lines, yaxis=axis)
    caption = "Of the micro-batches planned in a step, all replicas. The rest was dropped by DropCompute."
    return over_steps("completed", "Completed micro-batches, share", caption, traces, drawn, curves)


def _time_parts(run: RunRecord, lines: list[dict[str, Any]]) -> Figure | None:
    """Parts of a step's time, stacked."""
    series = {part: run.series[f"time/{part}_s"] for part in _PARTS if f"time/{part}_s" in run.series}
    if not series:
        return None
    traces = [
        curve(part, one, colour, stackgroup="one", line={"width": 0.5})
        for (part, one), colour in zip(series.items(), COLOURS, strict=False)
    ]
    caption = "Rank 0, mean since the point before. Other: pipeline transfers, waiting for other ranks, reduction."
    axis = {"rangemode": "tozero", "nticks": 6}
    drawn = layout(WIDE_HEIGHT, legend=True, shapes=lines, yaxis=axis)
    return over_steps("step_time", "Time of a step, seconds", caption, traces, drawn, series)


def mark_lines(marks: Sequence[EventMark]) -> list[dict[str, Any]]:
    """Vertical lines for the marks of kinds in ``LINED``."""
    lines = []
    for lane in LINED:
        own = [mark for mark in marks if mark.lane == lane and mark.step]
        if len(own) <= MAX_LINES:
            lines += [rule(LOOKS[lane][1], x=mark.step, layer="below") for mark in own]
    return lines


def happened(marks: Sequence[EventMark]) -> Figure:
    """Events on the same axis of steps, a lane of marks for each kind."""
    lanes = [lane for lane in LANES if any(mark.lane == lane for mark in marks)]
    traces, left = [], []
    for lane in lanes:
        own = [mark for mark in marks if mark.lane == lane]
        shown = own if len(own) <= MAX_MARKS else [own[place] for place in _spread(len(own))]
        if len(shown) < len(own):
            left.append(f"{lane}: {len(shown):,} of {len(own):,} marks are drawn, evenly chosen")
        symbol, colour = LOOKS[lane]
        steps, marker = [mark.step for mark in shown], {"symbol": symbol, "size": 9}
        text = [_hover(mark) for mark in shown]
        options = {"mode": "markers", "marker": marker, "text": text, "cliponaxis": False}
        traces.append(scatter(lane, steps, [lane] * len(shown), colour, "step %{x:,}<br>%{text}", **options))
    through = [lane for lane in LINED if 0 < sum(mark.lane == lane for mark in marks) <= MAX_LINES]
    caption = f"Dotted lines through the figures: {', '.join(through)}." if through else ""
    caption += "".join(f" {one}." for one in left)
    axis = named_axis(lanes[::-1]) | {"range": [-0.6, len(lanes) - 0.4]}
    drawn = layout(90 + 24 * len(lanes), hovermode="closest", yaxis=axis)
    return Figure("happened", "What happened", caption.strip(), traces, drawn, _columns(marks), on_steps=True)


def _spread(count: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, MAX_MARKS).round().astype(int)).tolist()


def _hover(mark: EventMark) -> str:
    """Text of a mark, wrapped into lines; markup in it is escaped."""
    text = mark.text.replace("&", "&amp;").replace("<", "&lt;")
    lines = [text[place : place + 70] for place in range(0, min(len(text), 280), 70)]
    return "<br>".join(([f"{mark.count:,} times, the first:"] if mark.count > 1 else []) + lines)


def _columns(marks: Sequence[EventMark]) -> Mapping[str, Sequence[Any]]:
    return {
        "step": [mark.step for mark in marks],
        "kind": [mark.lane for mark in marks],
        "count": [mark.count for mark in marks],
        "first": [mark.text for mark in marks],
    }
