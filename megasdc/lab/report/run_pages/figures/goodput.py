"""Figures of a supervised run: its time by part, and attempt by attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megasdc.ops.supervise.goodput import PARTS, Goodput
from megasdc.output.figure import Figure, bars, layout, named_axis

COLOURS = {
    "productive": "var(--good)",
    "recomputed": "var(--c4)",
    "evaluating": "var(--high)",
    "saving": "var(--c1)",
    "stalled": "var(--bad)",
    "starting": "var(--c2)",
    "loading": "var(--low)",
    "detecting": "var(--c6)",
    "ending": "var(--faint)",
    "deciding": "var(--c5)",
    "idle": "var(--equal)",
}
"""Of each part."""
ORDER = ("starting", "loading", *PARTS[:5], "detecting", "ending", "deciding", "idle")
"""Parts of an attempt as they follow each other, those of its steps put together."""
MAX_ATTEMPTS = 40
"""Maximum of attempts that are drawn, the last ones; the file of the figure has all."""
_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))


def goodput_figures(goodput: Goodput) -> list[Figure]:
    """The bar of parts, and the timeline of attempts."""
    return [_parts(goodput), _timeline(goodput)]


def _parts(goodput: Goodput) -> Figure:
    shares = {part: seconds / goodput.wall_s for part, seconds in goodput.parts.items()}
    traces, at = [], 0.0
    for part, share in shares.items():
        if share:
            hover = f"%{{customdata:.1%}}, {goodput.parts[part]:,.1f} s"
            traces.append(_spans(part, [at], [share], ["run"], hover))
        at += share
    axes: dict[str, Any] = {"xaxis": {"tickformat": ".0%", "range": [0, 1]}, "yaxis": {"showticklabels": False}}
    drawn = layout(130, legend=True, barmode="overlay", hovermode="closest", **axes)
    columns: dict[str, Sequence[Any]] = {
        "part": list(shares),
        "seconds": list(goodput.parts.values()),
        "share": list(shares.values()),
    }
    caption = f"Shares of {goodput.wall_s:,.0f} s, from the plan of the first attempt on."
    return Figure("goodput_parts", "Time of the run by part", caption, traces, drawn, columns)


def _timeline(goodput: Goodput) -> Figure:
    shown = goodput.attempts[-MAX_ATTEMPTS:]
    unit_s, unit = next(((size, name) for least, size, name in _UNITS if goodput.wall_s >= least), (1.0, "seconds"))
    began = goodput.attempts[0].planned_at
    names = [f"attempt {one.number}" for one in shown]
    at = [(one.planned_at - began) / unit_s for one in shown]
    traces = []
    for part in ORDER:
        lengths = [one.parts[part] / unit_s for one in shown]
        if any(lengths):
            traces.append(_spans(part, at, lengths, names, f"%{{y}}: %{{customdata:.4g}} {unit}"))
        at = [start + length for start, length in zip(at, lengths, strict=True)]
    caption = (
        "Each attempt up to the plan of the next. In its steps the records say how long what took, not in which order: "
        "these parts are drawn one after the other."
    )
    if len(shown) < len(goodput.attempts):
        caption += f" The last {len(shown):,} of {len(goodput.attempts):,} attempts are drawn."
    drawn = layout(
        110 + 24 * len(shown),
        f"{unit} from the first plan",
        legend=True,
        barmode="overlay",
        hovermode="closest",
        yaxis=named_axis(names[::-1]),
    )
    return Figure("goodput_attempts", "Attempts", caption, traces, drawn, _columns(goodput, began))


def _spans(part: str, start: list[float], length: list[float], rows: list[str], hover: str) -> dict[str, Any]:
    """A trace of level bars from a start on; under the pointer is their length, not their end."""
    return bars(part, length, rows, COLOURS[part], hover, orientation="h", base=start, customdata=length)


def _columns(goodput: Goodput, began: float) -> dict[str, Sequence[Any]]:
    attempts = goodput.attempts
    return {
        "attempt": [one.number for one in attempts],
        "began_s": [one.planned_at - began for one in attempts],
        **{f"{part}_s": [one.parts[part] for one in attempts] for part in PARTS},
    }
