"""Figures of a study: where, when, how far and in which bits results differ; divergence of parameters and losses.

Ma, Pei, Lausen, Karypis 2025 (arXiv 2502.12340) show mismatch frequency and severity of submodules, and parameter
difference over steps; here each submodule of each layer has its own cell.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from megasdc.common.addresses import BACKWARD, FORWARD, PARAMETER, RECOMPUTE, REDUCED_GRAD, UPDATE, WEIGHT_GRAD
from megasdc.lab.studies.tables import MismatchRow, part_of
from megasdc.ops.run_folder.study_log import WHOLE, Line
from megasdc.output.figure import (
    COLOURS,
    Figure,
    Series,
    axis_of,
    bars,
    curve,
    layer_map,
    layout,
    line_look,
    log_axis,
    map_axes,
    over_steps,
)

HEIGHT = 300
TALLEST = 820
"""Maximum height of a map's rows in pixels, to fit a sheet of paper."""
PHASES = (FORWARD, RECOMPUTE, BACKWARD, WEIGHT_GRAD, REDUCED_GRAD, UPDATE, PARAMETER)
"""In execution order."""
DRAWN = 6
"""Number of submodules with a curve, those with the largest maximum."""
_SAID = {
    "gradient": ("Gradient difference (noise-to-signal)", "reduced gradients, before they are bounded or clipped"),
    "parameters": ("Parameter difference", "fp32 weights"),
}


def mismatch_map(replica: int, rows: Sequence[MismatchRow]) -> Figure | None:
    """Mismatch frequency of a replica by layer, submodule and phase; None where nothing was compared.

    The rows are of all replicas.
    """
    own = [row for row in rows if row.replica == replica and row.elements]
    if not own:
        return None
    cells = {_place(row): (row.frequency, _label(row)) for row in own}
    names = sorted({name for _, name in cells}, key=lambda name: (PHASES.index(name.split()[0]), name))
    traces = layer_map(cells, names)
    drawn = layout(100 + min(22 * len(names), TALLEST), "layer", hovermode="closest", **map_axes(10))
    fields = {"submodule": "name", "phase": "phase", "elements": "elements", "mismatches": "mismatches"}
    fields |= {name: name for name in ("frequency", "severity_mean", "severity_max")}
    columns = {heading: [getattr(row, field) for row in own] for heading, field in fields.items()}
    caption = "Share of compared elements whose bits differ, logarithmic; grey: none does; empty: not compared."
    title = f"Mismatch frequency, replica {replica}"
    return Figure(f"mismatches_{replica}", title, caption, traces, drawn, columns)


def _place(row: MismatchRow) -> tuple[str, str]:
    """(layer, phase and name in the layer): the number at the start of a submodule's name, and the rest."""
    head, _, rest = row.name.partition(".")
    in_layer = head.isdigit() and bool(rest)
    return (head, f"{row.phase} {rest.removeprefix('layer.')}") if in_layer else ("-", f"{row.phase} {row.name}")


def _label(row: MismatchRow) -> str:
    if not row.mismatches:
        return f"none of {row.elements:,} elements differs"
    severity = "" if row.severity_mean is None else f", mean severity {row.severity_mean:.3g}"
    return f"{row.mismatches:,} of {row.elements:,} differ ({row.frequency:.3g}){severity}"


def burst_figure(replica: int, lines: Sequence[Line]) -> Figure:
    """Mismatches of each step, by part of the model; of a replica with at least one."""
    counts: dict[str, Counter[int]] = {}
    for line in lines:
        counts.setdefault(part_of(line["fqn"]), Counter())[line["step"]] += line["mismatches"]
    series = {
        part: Series.of([(step, float(count)) for step, count in own.items()]) for part, own in sorted(counts.items())
    }
    traces = [
        curve(part, one, COLOURS[place % len(COLOURS)], mode="markers", marker={"symbol": place % 8, "size": 5})
        for place, (part, one) in enumerate(series.items())
    ]
    drawn = layout(HEIGHT, legend=True, hovermode="closest", yaxis=axis_of(*series.values()))
    caption = "Elements that differ in a step; no mark: none does."
    return over_steps(f"bursts_{replica}", f"Mismatches over time, replica {replica}", caption, traces, drawn, series)


def severity_figure(replica: int, lines: Sequence[Line]) -> Figure:
    """Mismatch severity: histogram of relative differences by power of ten; of a replica with at least one mismatch."""
    decades = _sum(line["decades"] for line in lines)
    places = list(range(min(decades), max(decades) + 1)) if decades else []
    x, y = [f"1e{place}" for place in places], [decades[place] for place in places]
    trace = bars("", x, y, COLOURS[1], "%{x} to ten times that: %{y:,}")
    apart = sum(line["from_zero"] for line in lines), sum(line["non_finite"] for line in lines)
    caption = (
        "|u - h| / |h| of elements that differ, from each power of ten to the next, logarithmic. Counted apart: "
        f"{apart[0]:,} whose trusted value is 0, {apart[1]:,} with NaN or infinities."
    )
    axes: dict[str, Any] = {"xaxis": {"type": "category", "automargin": True}, "yaxis": {"type": "log", "nticks": 6}}
    columns: dict[str, Sequence[Any]] = {"from": x, "mismatches": y}
    title = f"Mismatch severity, replica {replica}"
    return Figure(f"severity_{replica}", title, caption, [trace], layout(HEIGHT, **axes), columns)


def bits_figure(replica: int, lines: Sequence[Line]) -> Figure:
    """Number of elements in which each bit differs; of a replica with at least one mismatch."""
    by_type = {
        dtype: _sum(one["flips"] for one in lines if one["dtype"] == dtype)
        for dtype in sorted({one["dtype"] for one in lines})
    }
    widest = max((bit for counts in by_type.values() for bit in counts), default=0)
    bits = list(range(widest + 1))
    own = {dtype: [counts[bit] for bit in bits] for dtype, counts in by_type.items()}
    traces = [
        bars(dtype, bits, counts, colour, "bit %{x}: %{y:,}")
        for (dtype, counts), colour in zip(own.items(), COLOURS, strict=False)
    ]
    drawn = layout(HEIGHT, "bit", legend=len(traces) > 1, barmode="group", xaxis={"autorange": "reversed"})
    caption = "Elements in which a bit differs, the sign on the left, bit 0 the lowest of the mantissa."
    columns = {"bit": bits, **own}
    return Figure(f"bits_{replica}", f"Bits that differ, replica {replica}", caption, traces, drawn, columns)


def _sum(counts: Any) -> Counter[int]:
    total: Counter[int] = Counter()
    for one in counts:
        total.update({int(key): count for key, count in one.items()})
    return total


def distance_figure(quantity: str, lines: Sequence[Line]) -> Figure:
    """Relative difference of gradients or parameters by step: whole model, and submodules with the largest maximum.

    ``quantity`` is gradient or parameters; the lines, at least one, are of that kind and of all replicas.
    """
    points: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for line in lines:
        ratio = math.nan if line["ratio"] is None else float(line["ratio"])
        points.setdefault((line["replica"], line["fqn"]), []).append((line["step"], ratio))
    wholes = [key for key in points if key[1] == WHOLE]
    worst = {key: max((ratio for _, ratio in own if ratio > 0), default=0.0) for key, own in points.items()}
    others = sorted((key for key in points if key[1] != WHOLE and worst[key]), key=lambda key: -worst[key])
    series = {
        f"replica {replica}, {'whole' if fqn == WHOLE else fqn}": Series.of(own)
        for (replica, fqn), own in points.items()
    }
    shown = [f"replica {replica}, {'whole' if fqn == WHOLE else fqn}" for replica, fqn in (*wholes, *others[:DRAWN])]
    traces = []
    for place, name in enumerate(shown):
        colour, dash = line_look(place)
        line = {"dash": dash, "width": 3 if place < len(wholes) else 1.2}
        traces.append(curve(name, series[name].positive, colour, line=line))
    title, what = _SAID[quantity]
    caption = f"||u - h|| / ||h|| of {what}. Zero has no place on the axis: it is a gap."
    if left := len(points) - len(shown):
        caption += f" {left:,} submodules that are never as far apart are in the CSV alone."
    values = np.concatenate([one.values for one in series.values()])
    drawn = layout(HEIGHT + 60, legend=True, yaxis=log_axis(values))
    return over_steps(f"{quantity}_apart", title, caption, traces, drawn, series, told=False)


def study_loss_figures(lines: Sequence[Line]) -> list[Figure]:
    """Losses of all replicas, and their differences to the trusted one's, from at least one line of kind loss."""
    losses: dict[str, list[tuple[int, float]]] = {}
    apart: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        own, trusted = (math.nan if line[key] is None else float(line[key]) for key in ("loss", "trusted_loss"))
        losses.setdefault(f"replica {line['replica']}", []).append((line["step"], own))
        apart.setdefault(f"replica {line['replica']}", []).append((line["step"], own - trusted))
    found = []
    for name, title, points in (
        ("study_losses", "Training loss, nats per token", losses),
        ("study_loss_difference", "Training loss minus the trusted one's", apart),
    ):
        series = {label: Series.of(own) for label, own in sorted(points.items())}
        traces = [curve(label, one, line_look(place)[0]) for place, (label, one) in enumerate(series.items())]
        drawn = layout(HEIGHT, legend=True, yaxis={"nticks": 7})
        found.append(over_steps(name, title, "", traces, drawn, series))
    return found
