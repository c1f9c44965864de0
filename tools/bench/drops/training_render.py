"""The campaign on dropped micro-batches as Table 1 of Giladi et al., with spreads, and one sentence."""

from __future__ import annotations

from statistics import fmean

from rich.console import Console
from rich.table import Table

from tools.bench.drops.training import DropTrainResult
from tools.bench.drops.training_scores import SettingScore
from tools.bench.drops.training_setup import COMMUNICATION_S, LATENCY_S, MEAN_DELAY_S, REPLICAS

COLUMNS = ("left out", "these are", "final loss", "(min-max)", "over none, %", "steps", "samples, %", "time, %")


def render_drop_training(result: DropTrainResult, console: Console) -> None:
    """Print the result."""
    machine, options = result.machine, result.options
    console.print(
        f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before; "
        f"{fmean(run.seconds for run in result.runs):.1f} s a run"
    )
    console.print(
        f"{options.gpt}, DP{REPLICAS}, fp32, {options.steps} steps, learning rate {options.learning_rate:g}, "
        f"{options.seeds} seeds, epochs of {result.runs[0].epoch_samples} samples; drops and times of "
        f"{options.replicas} simulated replicas: {LATENCY_S:g} s a micro-batch, bounded log-normal delays of mean "
        f"{MEAN_DELAY_S:g} s, {COMMUNICATION_S:g} s besides"
    )
    table = Table(title="final validation loss")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if number > 1 else "left")
    for one in result.scores:
        table.add_row(*_row(one))
    console.print(table)
    console.print(_curves(result.scores))
    console.print(
        "over none: loss over that of the same seed with nothing left out, mean and range over seeds; samples: used, "
        "of those of such a run, time likewise, simulated; extra steps are taken at the schedule's last learning rate",
        soft_wrap=True,
    )
    console.print(result.verdict, soft_wrap=True)


def _row(one: SettingScore) -> list[str]:
    return [
        f"{100 * one.setting.rate:g} %",
        one.setting.fate,
        f"{fmean(one.losses):.4f}",
        f"{min(one.losses):.4f}-{max(one.losses):.4f}",
        "-" if not one.setting.rate else _percents(one),
        f"{one.steps:.0f}",
        f"{100 * one.samples:.1f}",
        f"{100 * one.time:.1f}",
    ]


def _percents(one: SettingScore) -> str:
    low, high = 100 * min(one.increases), 100 * max(one.increases)
    return f"{100 * one.over_none:+.2f} ({low:+.2f} to {high:+.2f})"


def _curves(scores: list[SettingScore]) -> Table:
    """Loss against steps and time."""
    table = Table(title="mean validation loss, and simulated seconds until then, by step")
    table.add_column("left out")
    points = scores[0].curve
    for step, _, _ in points:
        table.add_column(f"{step:.0f}", justify="right")
    for one in scores:
        cells = [f"{loss:.3f}\n{seconds:.0f} s" for _, seconds, loss in one.curve[: len(points)]]
        table.add_row(one.setting.name, *cells)
    return table
