"""The campaign on gradient bounds as the table of Pei et al., with prices and spreads, and one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Table

from tools.bench.bounds.training import BoundTrainResult
from tools.bench.bounds.training_scores import EPSILON, SettingScore
from tools.bench.bounds.training_setup import FALL, HARMED_ELEMENTS, REPLICAS, SHARES
from tools.bench.bounds.training_verdict import percent

COLUMNS = (
    "setting",
    "healthy\n(min-max)",
    "price",
    "with faults\n(min-max)",
    "worst",
    "over no\nbound",
    "worse\ncases",
    "diverged\n/ NaN",
    "skipped",
    "bounded",
)


def render_bound_training(result: BoundTrainResult, console: Console) -> None:
    """Print the result."""
    options, machine = result.options, result.machine
    console.print(
        f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before; "
        f"{fmean(run.seconds for run in result.runs):.1f} s a run"
    )
    console.print(
        f"GPT H={options.hidden} L={options.layers} S={options.sequence}, DP{REPLICAS}, {options.precision}, "
        f"{options.steps} steps of {REPLICAS * options.micro_batch} samples, learning rate "
        f"{options.learning_rate:g}, clipped at norm 1, {options.seeds} seeds; a model that knows only token "
        f"frequencies has a loss of {result.entropy:.3f}"
    )
    console.print(
        f"faults: on one replica's gradient of each parameter and step, +-10 on {HARMED_ELEMENTS} elements with "
        f"probability {options.fault_probability:g} for each sign, each decade up to 10^12 {FALL:g} times as often; "
        f"{fmean(run.faults for run in result.runs if run.faulty):.0f} a run"
    )
    table = Table(title="final validation loss")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right")
    for one in result.scores:
        table.add_row(*_row(one, options.seeds))
    console.print(table)
    chosen = ", ".join(f"{name} {share:g}" for name, share in SHARES.items())
    console.print(
        "price: healthy with the bound over healthy without, mean; worst: over the healthy run of the same seed and "
        f"bound; over no bound: over the one without; worse: increase above {100 * EPSILON:g} %; diverged: final loss "
        "above that of token frequencies; NaN: no finite loss, or only skipped steps; both are left out of the losses; "
        "skipped steps and share of elements bounded: healthy, with faults. Thresholds, where not given: this share of "
        f"the elements of the healthy gradients without a bound, all seeds, exceeds them: {chosen}",
        soft_wrap=True,
    )
    console.print(result.verdict, soft_wrap=True)


def _row(one: SettingScore, seeds: int) -> list[str]:
    healthy, faulty = (_spread(losses) for losses in (one.healthy, one.faulty))
    if one.failed_healthy:
        healthy += f"\n{one.failed_healthy} failed"
    worst = "-" if one.worst is None or one.increase is None else f"{one.worst:.4f}\n({percent(one.increase)})"
    shares = [f"{100 * share:.2g} %" for share in (one.share_healthy, one.share) if share is not None]
    return [
        one.setting.name.replace(" ", "\n", 1),
        healthy,
        "-" if one.price is None else percent(one.price),
        faulty,
        worst,
        "-" if one.over_unbounded is None else percent(one.over_unbounded),
        f"{one.worse} of {seeds}",
        f"{one.diverged} / {one.not_finite}",
        f"{one.skipped_healthy}\n{one.skipped}",
        "\n".join(shares) or "-",
    ]


def _spread(losses: Sequence[float]) -> str:
    return f"{fmean(losses):.4f}\n({min(losses):.4f}-{max(losses):.4f})" if losses else "-"
