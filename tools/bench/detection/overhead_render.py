"""Cost of checks as text and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megasdc.errors import StorageError
from tools.bench.detection.overhead import BARS, ModelCost, OverheadResult, TierCost
from tools.bench.detection.overhead_model import ALWAYS_ON, ALWAYS_ON_ALL, AMORTISED, AUDIT, BETWEEN, TOLERANCED
from tools.bench.statistics import Estimate

SHOWN = {ALWAYS_ON: "#1f77b4", ALWAYS_ON_ALL: "#7f7f7f", AMORTISED: "#d62728"}
"""What the figure shows, in which colour."""
BROKEN_DOWN = (ALWAYS_ON, AUDIT, BETWEEN, TOLERANCED)
"""Kinds of steps whose parts are printed."""
SMALLEST = 1e-5
"""Smallest share that is worth a row."""


def render_overhead(result: OverheadResult, console: Console) -> None:
    """Print a result.

    Args:
        result: what was measured and predicted.
        console: where.
    """
    machine = result.machine
    console.print(f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']}")
    console.print(
        f"{describe_work(result)}; {result.options.sizes.blocks} steps of each kind; medians with the interval of the "
        "median, of the rank that pays more"
    )
    for model in result.models:
        _render_model(model, console)
    _render_parts(result.models[0], console)
    sizes, interval = result.options.sizes, result.options.interval
    console.print(
        f"besides, audits take at most 1 / ({sizes.accumulation} micro-batches x {interval} steps) = "
        f"{1 / (sizes.accumulation * interval):.2%} of the independent samples"
    )
    _render_extrapolated(result, console)


def describe_work(result: OverheadResult) -> str:
    """What the ranks of this machine ran."""
    sizes = result.options.sizes
    return (
        f"{sizes.ranks} gloo ranks x {sizes.threads} thread(s), DP{sizes.ranks}, {sizes.precision}; Llama-like "
        f"L={sizes.layers} S={sizes.sequence} vocabulary {sizes.vocab}; {sizes.accumulation} micro-batches of "
        f"{sizes.micro_batch}; activations recomputed; audits every {result.options.interval} steps"
    )


def describe_accelerator(result: OverheadResult) -> str:
    """What the extrapolation assumes."""
    assumed = result.options.accelerator
    return (
        f"assumed: reads {assumed.bytes_per_s / 1e12:.2f} TB/s, {assumed.call_s * 1e6:g} us a call, "
        f"{result.options.exchange_s * 1e3:g} ms a reduction over hosts; training {assumed.flop_per_s / 1e12:.0f} "
        f"TFLOP/s in bf16, activations recomputed; TP{assumed.tensor} DP{assumed.data}, {assumed.layers} layers with "
        f"embedding and output, S={assumed.sequence}, {assumed.accumulation} micro-batches of one sample"
    )


def _render_model(model: ModelCost, console: Console) -> None:
    table = Table(title=f"H={model.hidden}: cost of checks, % of the step without ({model.step_s.median:.3f} s)")
    table.add_column("check")
    for column in ("inside our calls", "alternating steps", "predicted", "bar"):
        table.add_column(column, justify="right")
    for name, tier in model.tiers.items():
        predicted = "-" if tier.predicted is None else f"{100 * tier.predicted:.3f}"
        table.add_row(name, _percent(tier.own), _percent(tier.slower), predicted, _verdict(tier))
    console.print(table)
    rates = model.rates
    console.print(
        f"{model.flop_per_s / 1e9:.1f} GFLOP/s; checksums {rates.checksum_bytes_per_s / 1e9:.1f} GB/s and "
        f"{rates.checksum_s * 1e6:.1f} us each, look for NaN and Inf {rates.extremes_bytes_per_s / 1e9:.1f} GB/s and "
        f"{rates.extremes_s * 1e6:.1f} us each, reduction over ranks {rates.exchange_s * 1e6:.0f} us"
    )


def _render_parts(model: ModelCost, console: Console) -> None:
    """Where the time inside our calls goes, the largest part first."""
    tiers = {name: model.tiers[name].parts for name in BROKEN_DOWN}
    largest = {part: max(one.get(part, 0.0) for one in tiers.values()) for parts in tiers.values() for part in parts}
    table = Table(title=f"H={model.hidden}: parts of the time inside our calls, % of the rest of the step")
    table.add_column("part", no_wrap=True)
    for name in tiers:
        table.add_column(name, justify="right")
    for part in sorted(largest, key=lambda part: -largest[part]):
        if largest[part] >= SMALLEST:
            shares = (parts.get(part) for parts in tiers.values())
            table.add_row(part, *("" if share is None else f"{100 * share:.3f}" for share in shares))
    console.print(table)
    console.print(
        "forward, recompute, backward, weight_grad: listening to these results; observer: the rest of what calls the "
        "listeners; attach: hooks put on and taken off; before_step: parameters are read, replicas agree on the shared "
        "samples; after_micro_batches: what was seen is compared, over the ranks too; agreement, "
        "after_step: ranks learn whether an audit was asked for; of toleranced checks before_reduction: sums and "
        "features of gradients, before_optimizer_step: sums of the shards, update: a slice of it is computed again, "
        "after_step: all is judged"
    )


def _verdict(tier: TierCost) -> str:
    return "none" if tier.bar is None else f"{100 * tier.bar:g} {'pass' if tier.passed else 'FAIL'}"


def _render_extrapolated(result: OverheadResult, console: Console) -> None:
    table = Table(title="predicted for an accelerator, % of the step without")
    table.add_column("check")
    for width in next(iter(result.extrapolated.values())):
        table.add_column(f"H={width}", justify="right")
    for name, shares in result.extrapolated.items():
        table.add_row(name, *(f"{100 * share:.3f}" for share in shares.values()))
    console.print(table)
    console.print(
        f"{describe_accelerator(result)}; what overlaps with other work costs less: launches, and the reduction that "
        "tells of requests for an audit; the wait for the device before a comparison is not counted"
    )


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.median:.3f} ({100 * estimate.low:.3f} to {100 * estimate.high:.3f})"


def write_figure(result: OverheadResult, path: Path) -> None:
    """Write cost against width as one HTML page that needs no network: measured and predicted, and the accelerator's.

    Args:
        result: what was measured and predicted.
        path: the file; replaced.

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
    lines = (describe_work(result), describe_accelerator(result))
    title = "Cost of detection" + "".join(f"<br><sup>{line}</sup>" for line in lines)
    figure.update_layout(title_text=title, margin_t=130, height=620)
    try:
        path.write_text(figure.to_html(include_plotlyjs=True, full_html=True), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}; choose another --figure") from error


def _draw(figure: Any, name: str, colour: str, models: list[ModelCost], extrapolated: dict[int, float]) -> None:
    """What a check costs in the models on the left, in those of an accelerator on the right, and its bar."""
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
