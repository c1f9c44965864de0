"""A figure: traces and layout of plotly, a caption, and all of its numbers as columns.

Thinning of a long series for a picture: the smallest and largest value of every stretch, and both ends.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 2000
"""Maximum of points of one curve in a picture."""


def thin(values: NDArray[np.float64], limit: int = MAX_POINTS) -> NDArray[np.int64]:
    """The ascending indices of at most ``limit`` (>= 5) points so that no peak is lost; all where there are no more.

    The series is cut into stretches of equal length; each keeps its smallest and largest value, and one that is NaN or
    infinite, so that gaps remain.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(count), (limit - 2) // 3):
        finite = np.isfinite(values[stretch])
        if not finite.all():
            kept.add(int(stretch[np.argmin(finite)]))
        if finite.any():
            whole = stretch[finite]
            kept.update((int(whole[values[whole].argmin()]), int(whole[values[whole].argmax()])))
    return np.array(sorted(kept), dtype=np.int64)


COLOURS = tuple(f"var(--c{place})" for place in range(1, 7))
"""Colours of curves, in order; variables of the page's style sheet, which defines them for light and dark."""
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
FEW = 100.0
LOG_SPAN = 1000.0
"""Positive values that span more than this factor are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Series:
    """Values over steps: ``steps`` ascending, [point]; ``values`` NaN where there is no finite one, [point]."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def at(self, step: int) -> float | None:
        """The value of a step; None where there is none."""
        place = int(np.searchsorted(self.steps, step))
        return float(self.values[place]) if place < len(self.steps) and self.steps[place] == step else None

    @classmethod
    def of(cls, points: Sequence[tuple[int, float]]) -> Series:
        """Series of (step, value) pairs in any order."""
        ordered = sorted(points, key=lambda point: point[0])
        values = np.array([value for _, value in ordered], dtype=np.float64)
        return cls(np.array([step for step, _ in ordered], dtype=np.int64), values)

    @property
    def positive(self) -> Series:
        """The series with NaN in place of values that are not above 0, for a logarithmic axis."""
        return Series(self.steps, np.where(self.values > 0, self.values, np.nan))


@dataclass(frozen=True)
class Version:
    """Traces and layout of a figure for one choice of its reader.

    ``chosen``: a value of each of the figure's choices; empty ``traces`` hide the figure.
    """

    chosen: tuple[str, ...]
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A figure: traces and layout of plotly, with names of colours, and all numbers by heading in equally long columns.

    ``name`` is that of its files and its anchor; with ``on_steps``, x is the step axis that figures of a page share;
    figures with the same label in ``choices`` follow one choice; ``versions``: of every choice, the first one first;
    ``text``: for a terminal, empty: it needs a page.
    """

    name: str
    title: str
    caption: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    on_steps: bool = False
    choices: tuple[str, ...] = ()
    versions: Sequence[Version] = ()
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The figure as input of the page's script."""
        found: dict[str, Any] = {"name": self.name, "traces": self.traces, "layout": self.layout}
        found |= {"on_steps": self.on_steps, "choices": self.choices}
        return found | {"versions": [vars(one) for one in self.versions]}

    @property
    def options(self) -> dict[str, list[str]]:
        """The values of each choice."""
        return {
            label: list(dict.fromkeys(one.chosen[place] for one in self.versions))
            for place, label in enumerate(self.choices)
        }

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


def scatter(name: str, x: Any, y: Any, colour: str, hover: str = "", **options: Any) -> dict[str, Any]:
    """A trace of lines, or of other marks by ``mode``; x and y are [point].

    ``hover``: template of what is shown under the pointer, empty: both values; ``line`` and ``marker`` in ``options``
    are merged with the defaults.
    """
    line = {"color": colour, "width": 1.5} | options.pop("line", {})
    marker = {"color": colour, "size": 6} | options.pop("marker", {})
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": clean(x),
        "y": clean(y),
        "line": line,
        "marker": marker,
        "hovertemplate": f"{hover or '%{x:.4g}: %{y:.4g}'}<extra>{name}</extra>",
    } | options


def curve(name: str, series: Series, colour: str, limit: int = MAX_POINTS, **options: Any) -> dict[str, Any]:
    """One curve over steps, thinned to ``limit`` points where it is long; ``options`` as of ``scatter``."""
    kept = thin(series.values, limit)
    few = len(kept) == 1 or "markers" in options.get("mode", "")
    line = {"simplify": False} | options.pop("line", {})
    options = {"mode": "lines+markers" if few else "lines"} | options
    return scatter(name, series.steps[kept], series.values[kept], colour, "step %{x:,}: %{y:.5g}", line=line, **options)


def bars(name: str, x: Any, y: Any, colour: str, hover: str, **options: Any) -> dict[str, Any]:
    """A trace of bars; arguments as of ``scatter``."""
    trace = {"type": "bar", "name": name, "x": clean(x), "y": clean(y), "marker": {"color": colour}}
    return trace | {"hovertemplate": f"{hover}<extra>{name}</extra>"} | options


def layer_map(
    cells: Mapping[tuple[str, str], tuple[float, str]], rows: Sequence[str], top: int | None = None
) -> list[dict[str, Any]]:
    """Traces of a map of shares by (layer, row), logarithmic; a cell is grey for zero, and empty where there is none.

    A cell is its share and what is shown under the pointer; ``rows`` from the top; ``top``: log10 of the darkest shade,
    None: of the largest share.
    """
    columns = sorted({layer for layer, _ in cells}, key=lambda layer: (not layer.isdigit(), layer.zfill(9)))
    lines = [[cells.get((layer, row)) for layer in columns] for row in rows]
    shades = [[math.log10(one[0]) if one and one[0] else None for one in line] for line in lines]
    equal = [[0 if one and not one[0] else None for one in line] for line in lines]
    known = [value for line in shades for value in line if value is not None]
    low, high = (math.floor(min(known)), math.ceil(max(known))) if known else (-1, 0)
    if top is not None:
        low, high = min(low, top - 1), top
    ticks = list(range(low, max(high, low + 1) + 1, max(1, (high - low) // 12 + 1)))
    text = [[one[1] if one else "" for one in line] for line in lines]
    common: dict[str, Any] = {"type": "heatmap", "x": columns, "y": list(rows), "text": text}
    common |= {"xgap": 1, "ygap": 1, "hovertemplate": "%{y}<br>layer %{x}<br>%{text}<extra></extra>"}
    grey = {"z": equal, "showscale": False, "colorscale": [[0, "var(--equal)"], [1, "var(--equal)"]]}
    differs = {
        "z": shades,
        "zmin": low,
        "zmax": max(high, low + 1),
        "colorscale": [[0, "var(--low)"], [0.5, "var(--mid)"], [1, "var(--high)"]],
        "colorbar": {"thickness": 10, "tickvals": ticks, "ticktext": [f"1e{tick}" for tick in ticks]},
    }
    return [common | grey, *([common | differs] if known else [])]


def line_look(place: int) -> tuple[str, str]:
    """Colour and dash of the curve at a place: colours in order, then the same with the next dash."""
    return COLOURS[place % len(COLOURS)], DASHES[place // len(COLOURS) % len(DASHES)]


def layout(height: int, x: str = "", y: str = "", legend: bool = False, **options: Any) -> dict[str, Any]:
    """A figure's own settings: height in pixels, titles of the axes, and more of plotly's, merged with the titles."""
    found: dict[str, Any] = {"height": height, "showlegend": legend}
    for axis, title in (("xaxis", x), ("yaxis", y)):
        own = ({"title": {"text": title}} if title else {}) | options.pop(axis, {})
        if own:
            found[axis] = own
    return found | options


def over_steps(
    name: str,
    title: str,
    caption: str,
    traces: list[dict[str, Any]],
    drawn: dict[str, Any],
    series: Mapping[str, Series],
    told: bool = True,
) -> Figure:
    """A figure over the steps that figures of a page share.

    ``drawn``: its layout; ``series``: the numbers of its curves; ``told``: whether the caption ends with what is
    thinned out or not finite.
    """
    caption = (caption + (caption_notes(series) if told else "")).strip()
    return Figure(name, title, caption, traces, drawn, columns_of(series), on_steps=True)


def named_axis(names: Sequence[str]) -> dict[str, Any]:
    """Settings of an axis of names, in their order."""
    return {"type": "category", "categoryarray": list(names), "categoryorder": "array", "automargin": True}


def map_axes(size: int = 11) -> dict[str, Any]:
    """Settings of the axes of a map: names of columns above it, rows from the top."""
    names = {"type": "category", "showgrid": False}
    rows = {"autorange": "reversed", "tickfont": {"size": size}}
    return {"xaxis": {**names, "side": "top"}, "yaxis": {**names, **rows}}


def rule(colour: str, x: float | None = None, y: float | None = None, dash: str = "dot", **more: Any) -> dict[str, Any]:
    """A straight line through a whole figure, upright at ``x`` or level at ``y``; ``more``: of plotly's shape."""
    ends = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
    if x is None:
        ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    return {"type": "line", **ends, "line": {"color": colour, "width": 1, "dash": dash}, **more}


def caption_notes(series: Mapping[str, Series]) -> str:
    """Sentence for a caption on points that are thinned out or not finite; empty where there are none."""
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
