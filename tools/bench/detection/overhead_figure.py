"""Cost of checks against width, as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasdc.errors import StorageError
from tools.bench.detection.overhead import BARS, ModelCost, OverheadResult
from tools.bench.detection.overhead_model import ALWAYS_ON, ALWAYS_ON_ALL, AMORTISED

SHOWN = {ALWAYS_ON: "#1f77b4", ALWAYS_ON_ALL: "#7f7f7f", AMORTISED: "#d62728"}
"""Curves of the figure, with their colours."""


def write_figure(result: OverheadResult, path: Path) -> None:
    """Write cost against width as one HTML page that needs no network: measured and predicted, and the accelerator's.

    Raises:
        StorageError: it cannot be written.
    """
    from plotly.subplots import make_subplots

    titles = (f"this machine: {result.machine['cpu']}", "an accelerator, predicted")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, shared_yaxes=True)
    models = sorted(result.models, key=lambda model: model.hidden)
    for name, colour in SHOWN.items():
        _draw(figure, name, colour, models, result.extrapolated[name])
    widths = [model.hidden for model in models]
    for column, ticks in ((1, widths), (2, list(result.extrapolated[ALWAYS_ON]))):
        figure.update_xaxes(title_text="hidden size", type="log", tickvals=ticks, row=1, col=column)
    figure.update_yaxes(title_text="% of the step without checks", type="log", row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=2)
    lines = (result.work, result.assumptions)
    title = "Cost of detection" + "".join(f"<br><sup>{line}</sup>" for line in lines)
    figure.update_layout(title_text=title, margin_t=130, height=620)
    try:
        path.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --figure") from error


def _draw(figure: Any, name: str, colour: str, models: list[ModelCost], extrapolated: dict[int, float]) -> None:
    """Draws the cost of a check in the models on the left, in those of an accelerator on the right, and its bar."""
    widths, costs = [model.hidden for model in models], [model.tiers[name] for model in models]
    middle = [100 * cost.own.median for cost in costs]
    spread = {
        "array": [100 * (cost.own.high - cost.own.median) for cost in costs],
        "arrayminus": [100 * (cost.own.median - cost.own.low) for cost in costs],
    }
    expected = [100 * cost.predicted for cost in costs if cost.predicted is not None]
    left: dict[str, Any] = {"x": widths, "row": 1, "col": 1, "legendgroup": name}
    right: dict[str, Any] = {"x": list(extrapolated), "row": 1, "col": 2, "legendgroup": name, "showlegend": False}
    solid, dotted = {"color": colour}, {"color": colour, "dash": "dot"}
    figure.add_scatter(y=middle, error_y=spread, mode="markers", marker=solid, name=f"{name}, measured", **left)
    figure.add_scatter(y=expected, mode="lines", line=solid, name=f"{name}, predicted", **left)
    predicted = [100 * share for share in extrapolated.values()]
    figure.add_scatter(y=predicted, mode="lines+markers", line=solid, name=f"{name}, predicted", **right)
    for place in (left, right) if name in BARS else ():
        bar = [100 * BARS[name]] * len(place["x"])
        figure.add_scatter(y=bar, mode="lines", line=dotted, name=f"{name}, bar", **place)
