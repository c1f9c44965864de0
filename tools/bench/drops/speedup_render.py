"""Speed-up of DropCompute as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.bench.drops.speedup import BAR, DropSpeedupResult

COLUMNS = (
    "threshold",
    "tau, s",
    "% out,\npredicted",
    "% out,\nmeasured",
    "speed-up,\npredicted",
    "of same\nsteps",
    "speed-up,\nmeasured",
    "off, %",
    "bar, %",
)


def render_drop_speedup(result: DropSpeedupResult, console: Console) -> None:
    """Print the result."""
    machine, options = result.machine, result.options
    console.print(
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before"
    )
    console.print(
        f"{options.replicas} gloo replicas, {options.gpt}; a micro-batch sleeps {options.constant_s:g} s and a bounded "
        f"log-normal delay of mean {options.mean_s:g} s, {100 * result.sleep_share:.0f} % of its time; {options.steps} "
        "steps of each"
    )
    rule = "elapsed" if options.sigmas is None else f"predictive, {options.sigmas:g} standard deviations"
    table = Table(title=f"DropCompute: micro-batches per second over those without a threshold; rule {rule}")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number else "left")
    for one in result.thresholds:
        table.add_row(
            "auto" if one.own else "given",
            "none" if one.tau_s is None else f"{one.tau_s:.3f}",
            f"{100 * one.predicted_rate:.2f}",
            f"{100 * one.rate:.2f}",
            f"{one.predicted:.3f}",
            f"{one.predicted_same:.3f}",
            f"{one.speedup:.3f}",
            f"{100 * one.difference:+.1f}",
            f"{100 * BAR:g} {'pass' if abs(one.difference) <= BAR else 'FAIL'}",
        )
    console.print(table)
    console.print(
        "predicted: from as many steps of other delays in which nothing was left out, their micro-batches dealt out "
        "anew; of same steps: from the run without a threshold, whose delays the measured run has again, so that no "
        "chance is in it",
        soft_wrap=True,
    )
