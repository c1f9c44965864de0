"""A figure: traces and layout of plotly, a caption, and all of its numbers as columns."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasdc.report.run_pages.figures.thin import MAX_POINTS, thin
from megasdc.report.run_pages.record import Series

COLOURS = tuple(f"var(--c{place})" for place in range(1, 7))
"""Colours of curves, in order; variables of the page's style sheet, which defines them for light and dark."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
FEW = 100.0
LOG_SPAN = 1000.0
"""Positive values that span more than this factor are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Figure:
    """A figure.

    Args:
        name: of its files, and its anchor in the page.
        title: what it shows, with the unit.
        caption: how to read it.
        traces: plotly's, with names of colours.
        layout: plotly's, only this figure's own settings.
        columns: all numbers by heading, of equal length.
        on_steps: x is the step axis that figures of a page share.
    """

    name: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    on_steps: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Input of the page's script."""
        return {"name": self.name, "traces": self.traces, "layout": self.layout, "on_steps": self.on_steps}

    def as_csv(self) -> str:
        """All numbers; an empty cell is NaN, Inf or missing."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        for row in zip(*self.columns.values(), strict=True):
            writer.writerow(["" if number_or_none(value) is None else value for value in row])
        return out.getvalue()


def number_or_none(value: Any) -> Any:
    """A value for JSON: NaN and infinities become None."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def clean(values: Sequence[Any] | NDArray[Any]) -> list[Any]:
    """Values for JSON: NaN and infinities become None."""
    return [number_or_none(value) for value in values]


def curve(name: str, series: Series, colour: str, limit: int = MAX_POINTS, **options: Any) -> dict[str, Any]:
    """One curve over steps, thinned where it is long.

    Args:
        name: in the legend.
        series: its points.
        colour: name of a colour.
        limit: maximum of points.
        **options: of the trace; ``line`` and ``marker`` are merged with the defaults.
    """
    kept = thin(series.values, limit)
    few = len(kept) == 1 or "markers" in options.get("mode", "")
    line = {"color": colour, "width": 1.5, "simplify": False} | options.pop("line", {})
    marker = {"color": colour, "size": 6} | options.pop("marker", {})
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": name,
        "x": clean(series.steps[kept]),
        "y": clean(series.values[kept]),
        "line": line,
        "marker": marker,
        "hovertemplate": "step %{x:,}: %{y:.5g}<extra>" + name + "</extra>",
    } | options


def told_of(series: Mapping[str, Series]) -> str:
    """Addition to a caption on points that are thinned out or not finite; empty where there are none."""
    parts = []
    for name, one in series.items():
        kept = len(thin(one.values))
        if kept < len(one.values):
            parts.append(
                f"{name}: {kept:,} of {len(one.values):,} points are drawn, the smallest and largest of each stretch"
            )
        if broken := int((~np.isfinite(one.values)).sum()):
            parts.append(f"{name}: {broken:,} values are NaN or infinite and leave gaps")
    return f" {'; '.join(parts)}." if parts else ""


def columns_of(series: Mapping[str, Series]) -> dict[str, list[Any]]:
    """Series side by side over the steps that any of them has."""
    steps = sorted({step for one in series.values() for step in one.steps.tolist()})
    found: dict[str, list[Any]] = {"step": steps}
    for name, one in series.items():
        values = dict(zip(one.steps.tolist(), one.values.tolist(), strict=True))
        found[name] = [values.get(step, math.nan) for step in steps]
    return found


def axis_of(*series: Series) -> dict[str, Any]:
    """Settings of a y axis: logarithmic where values are positive and span orders of magnitude."""
    values = np.concatenate([one.values[np.isfinite(one.values)] for one in series]) if series else np.array([])
    if len(values) and values.min() > 0 and values.max() / values.min() > LOG_SPAN:
        return log_axis(values)
    return {"nticks": 6}


def log_axis(values: NDArray[np.float64]) -> dict[str, Any]:
    """Settings of a logarithmic axis, with ticks at 2 and 5 where values span less than ``FEW``."""
    positive = values[np.isfinite(values) & (values > 0)]
    few = len(positive) > 0 and positive.max() / positive.min() < FEW
    return {"type": "log", "exponentformat": "power", **({"dtick": "D2"} if few else {"nticks": 6})}
