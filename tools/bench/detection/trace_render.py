"""Cost of a trace as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.bench.detection.trace import TraceBenchResult
from tools.bench.statistics import Estimate


def render(result: TraceBenchResult, console: Console) -> None:
    """Print a result.

    Args:
        result: what was measured and predicted.
        console: where.
    """
    options, machine = result.options, result.machine
    console.print(f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']}")
    console.print(
        f"one rank x {options.threads} thread(s), {options.precision}; Llama-like H={options.hidden} "
        f"L={options.layers} S={options.sequence} vocabulary {options.vocab}; {options.accumulation} micro-batches of "
        f"{options.micro_batch}; step {result.step_s.median:.3f} s, {result.flop_per_s / 1e9:.1f} GFLOP/s; checksums "
        f"{result.bytes_per_s / 1e9:.1f} GB/s and {result.call_s * 1e6:.1f} us a call"
    )
    table = Table(title="cost of a trace of every step, % of the step without")
    for column in ("granularity", "checksums", "MB read", "inside our calls", "alternating steps", "predicted"):
        table.add_column(column, justify="left" if column == "granularity" else "right")
    for name, cost in result.costs.items():
        values = [f"{cost.checksums:,}", f"{cost.bytes / 1e6:,.1f}", _percent(cost.own), _percent(cost.slower)]
        table.add_row(name, *values, f"{100 * cost.predicted:.2f}")
    console.print(table)
    console.print(f"{options.blocks} steps each; medians with 95 % intervals")
    _render_extrapolated(result, console)


def _render_extrapolated(result: TraceBenchResult, console: Console) -> None:
    assumed = result.accelerator
    widths = list(next(iter(result.extrapolated.values())))
    table = Table(title="predicted for an accelerator, % of the step without; every step traced (every 50th: / 50)")
    table.add_column("granularity")
    for width in widths:
        table.add_column(f"H={width}", justify="right")
    for name, shares in result.extrapolated.items():
        table.add_row(name, *(f"{100 * shares[width]:.2f}" for width in widths))
    console.print(table)
    console.print(
        f"assumed: checksums {assumed.bytes_per_s / 1e12:.2f} TB/s and {assumed.call_s * 1e6:.0f} us a call; "
        f"training {assumed.flop_per_s / 1e12:.0f} TFLOP/s in bf16; TP{assumed.tensor} DP{assumed.data}, "
        f"{assumed.layers} layers with embedding and output, S={assumed.sequence}, "
        f"{assumed.accumulation} micro-batches of one sample"
    )


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.median:.2f} ({100 * estimate.low:.2f} to {100 * estimate.high:.2f})"
