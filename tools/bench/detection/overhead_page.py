"""Page on the cost of checks against width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megasdc.output.figure import COLOURS, Figure, layout, scatter
from megasdc.output.page import Page, PageSection
from tools.bench.detection.overhead import BARS, OverheadResult
from tools.bench.detection.overhead_model import ALWAYS_ON, ALWAYS_ON_ALL, AMORTISED

_CURVES = {ALWAYS_ON: COLOURS[0], ALWAYS_ON_ALL: COLOURS[2], AMORTISED: COLOURS[1]}
_HOVER = "H=%{x}: %{y:.3g} %"
_UNIT = "% of the step without checks"


def overhead_page(result: OverheadResult) -> Page:
    """Cost against width: measured and predicted on this machine, and predicted for the accelerator."""
    here, predicted = list(_measured(result)), list(_predicted(result))
    owns = [model.tiers[name].own for model in result.models for name in _CURVES]
    values = [value for trace in (*here, *predicted) for value in trace["y"]]
    values = [value for value in (*values, *(100 * end for own in owns for end in (own.low, own.high))) if value]
    heights = [math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))]
    titles = f"This machine: {result.machine['cpu']}", "An accelerator, predicted"
    figures = (_figure("here", titles[0], here, heights), _figure("accelerator", titles[1], predicted, heights))
    return Page(
        title="Cost of detection",
        verdict="Cost of detection",
        sentences=(result.work, result.assumptions),
        sections=(PageSection(figures=figures),),
    )


def _figure(name: str, title: str, traces: list[dict[str, Any]], heights: list[int]) -> Figure:
    """A figure whose axis of costs spans ``heights``, powers of ten, so that both can be compared."""
    widths = {"type": "log", "tickvals": traces[0]["x"], "tickformat": "d"}
    costs = {"type": "log", "range": heights}
    return Figure(name, title, "", traces, layout(480, "hidden size", _UNIT, legend=True, xaxis=widths, yaxis=costs))


def _measured(result: OverheadResult) -> Iterator[dict[str, Any]]:
    models = sorted(result.models, key=lambda model: model.hidden)
    widths = [model.hidden for model in models]
    for name, colour in _CURVES.items():
        costs = [model.tiers[name] for model in models]
        spread = {
            "array": [100 * (cost.own.high - cost.own.median) for cost in costs],
            "arrayminus": [100 * (cost.own.median - cost.own.low) for cost in costs],
        }
        middle = [100 * cost.own.median for cost in costs]
        expected = [None if cost.predicted is None else 100 * cost.predicted for cost in costs]
        yield scatter(f"{name}, measured", widths, middle, colour, _HOVER, mode="markers", error_y=spread)
        yield scatter(f"{name}, predicted", widths, expected, colour, _HOVER)
        yield from _bar(name, widths, colour)


def _predicted(result: OverheadResult) -> Iterator[dict[str, Any]]:
    for name, colour in _CURVES.items():
        shares = result.extrapolated[name]
        costs = [100 * share for share in shares.values()]
        yield scatter(f"{name}, predicted", list(shares), costs, colour, _HOVER, mode="lines+markers")
        yield from _bar(name, list(shares), colour)


def _bar(name: str, widths: Sequence[int], colour: str) -> Iterator[dict[str, Any]]:
    if name in BARS:
        yield scatter(f"{name}, bar", widths, [100 * BARS[name]] * len(widths), colour, _HOVER, line={"dash": "dot"})
