"""Effect of dropped micro-batches on training, ``python -m tools.bench drop-training``: a campaign of small runs.

Each setting - shares dropped, ways to make up for them - trains the same small GPT with every seed. The result is
shown as Table 1 of Giladi et al., NeurIPS 2023, arXiv 2306.10598, where BERT-Large ends at F1 91.32 with nothing
dropped, 91.34, 91.44 and 91.19 with 2.5 to 3, 5.5 to 6 and 10 to 11 % dropped. With all replicas trained it is shown
as Figure 5 there: with 64 workers about 3 % more steps to equal loss, in 13 % less time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from megasdc.metrics.writer import read_metrics
from tools.bench.campaign import Campaign, CampaignLog
from tools.bench.drops.options import REPLICAS, DropTrainOptions, Setting
from tools.bench.drops.training_scores import (
    DropRun,
    EqualLoss,
    SettingScore,
    equal_loss_verdict,
    score,
    seed_changes,
    to_equal_loss,
    verdict,
)
from tools.bench.drops.training_setup import (
    COMMUNICATION_S,
    LATENCY_S,
    MEAN_DELAY_S,
    Drawn,
    ReplicaRows,
    draw,
    run_config,
)
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, ignore_progress, join_ranks, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, Told, listing, table
from tools.bench.small.gpt import prepare_library
from tools.bench.small.runs import build_run, train_in_turn

PATTERN = "[bcg]*.py"
"""Modules of the standard library that are trained on: few, so that discarded samples recur in a short run."""
MORE = "*.py"
"""Modules that many replicas are trained on, which use more samples."""


@dataclass(frozen=True)
class DropTrainResult(Result):
    """All runs of a campaign."""

    also = ("verdict", "scores", "equal_loss")

    runs: Sequence[DropRun] = field(repr=False)

    @property
    def scores(self) -> list[SettingScore]:
        """Scores of each setting."""
        return score(self.runs, self.options)

    @property
    def verdict(self) -> str:
        """The conclusion from these numbers, as one sentence."""
        return equal_loss_verdict(self.equal_loss, self.scores) if self.options.all_train else verdict(self.scores)

    @property
    def equal_loss(self) -> list[EqualLoss]:
        """Steps and time to equal loss, where all replicas train."""
        return to_equal_loss(self.runs, self.options) if self.options.all_train else []

    def report(self) -> Report:
        """Table 1 of Giladi et al., with spreads, and one sentence."""
        options, scores = self.options, self.scores
        yield (
            f"{options.gpt}, DP{options.trained}, fp32, {options.steps} steps, "
            f"learning rate {options.learning_rate:g}, {options.seeds} seeds, "
            f"epochs of {self.runs[0].epoch_samples} samples, "
            f"{fmean(run.seconds for run in self.runs):.1f} s a run; drops and times of {options.replicas} simulated "
            f"replicas: {LATENCY_S:g} s a micro-batch, bounded log-normal delays of mean {MEAN_DELAY_S:g} s, "
            f"{COMMUNICATION_S:g} s besides"
        )
        yield listing("final validation loss", COLUMNS, scores)
        if options.all_train:
            yield _equal_losses(self.equal_loss, scores)
        yield _curves(scores)
        yield (
            "over none: loss over that of the same seed with nothing dropped, mean and range over seeds; samples: "
            "used, of those of such a run, time likewise, simulated; extra steps are taken at the schedule's last "
            "learning rate"
        )
        yield self.verdict


def _over_none(one: SettingScore) -> str:
    low, high = 100 * min(one.increases), 100 * max(one.increases)
    return f"{100 * one.over_none:+.2f} ({low:+.2f} to {high:+.2f})" if one.setting.rate else "-"


COLUMNS: Told = {
    "left out": lambda one: f"{'at most ' if one.setting.chosen else ''}{100 * one.setting.rate:g} %",
    "these are": lambda one: one.setting.fate,
    "final loss": lambda one: f"{fmean(one.losses):.4f}",
    "(min-max)": lambda one: f"{min(one.losses):.4f}-{max(one.losses):.4f}",
    "over none, %": _over_none,
    "steps": lambda one: f"{one.steps:.0f}",
    "samples, %": lambda one: f"{100 * one.samples:.1f}",
    "time, %": lambda one: f"{100 * one.time:.1f}",
}


def _equal_losses(rows: list[EqualLoss], scores: list[SettingScore]) -> Table:
    """Steps and time to equal loss, a row for each chosen threshold."""
    shown = []
    for one in scores[1:]:
        if own := [row for row in rows if row.setting == one.setting]:
            dropped, levels = f"{100 * (1 - one.samples):.1f}", f"{own[0].step} to {own[-1].step}"
            changes = [seed_changes([row.steps for row in own]), seed_changes([row.time for row in own])]
            shown.append([f"{100 * one.setting.rate:g} %", dropped, levels, *changes])
    return table(
        "to the losses that runs with nothing dropped have after N steps: mean, and range over seeds",
        ("chosen within", "dropped, %", "N", "steps, %", "time, %"),
        shown,
    )


def _curves(scores: list[SettingScore]) -> Table:
    """Loss against steps and time."""
    points = scores[0].curve
    return table(
        "mean validation loss, and simulated seconds until then, by step",
        ("left out", *(f"{step:.0f}" for step, _, _ in points)),
        (
            [one.name, *(f"{loss:.3f}\n{seconds:.0f} s" for _, seconds, loss in one.curve[: len(points)])]
            for one in scores
        ),
    )


def bench_drop_training(
    options: DropTrainOptions, log: Path | None = None, on_progress: Progress = ignore_progress
) -> DropTrainResult:
    """Make the runs of a campaign that are not in its log yet, with both ranks on this machine.

    Args:
        log: file that keeps finished runs; None: none does.

    Raises:
        MegasdcError: the log cannot be used, or a rank failed.
    """
    machine, kept = describe_machine(), CampaignLog(log, options, DropRun)
    campaign = Campaign("runs", list(options.runs), partial(_train, options), kept)
    return DropTrainResult(machine, options, campaign.finish(on_progress))


def _train(
    options: DropTrainOptions, left: Sequence[tuple[int, tuple[Setting, int]]], keep: Callable[[DropRun], None]
) -> None:
    waiting = iter(left)

    def receive(message: dict[str, Any]) -> None:
        _, (setting, seed) = next(waiting)
        keep(DropRun(setting=setting, seed=seed, **message))

    with scratch_folder() as folder:
        pattern = MORE if options.trained > REPLICAS else PATTERN
        data = prepare_library(folder / "data", options.gpt.vocab, pattern)
        configs, rows = [], []
        for number, (setting, seed) in left:
            drawn, decisions = draw(options, setting, seed), None
            if not options.all_train:
                decisions = folder / f"decisions_{number}.jsonl"
                drawn.write(decisions, options.gpt.micro_batches)
            configs.append(run_config(options, data, folder / f"run_{number}", setting, seed, decisions))
            rows.append(drawn if options.all_train else None)
        run_in_ranks(
            train_all, {"configs": configs, "rows": rows}, 1 if options.all_train else REPLICAS, folder, receive
        )


def train_all(messages: Messages, configs: list[dict[str, Any]], rows: list[Drawn | None]) -> None:
    """Train one run after another, and report each as it ends.

    Args:
        rows: of each run, what all replicas complete as rows of one batch; None: its configuration says what is.
    """
    dims = join_ranks()
    for config, drawn in zip(configs, rows, strict=True):
        run, _ = build_run(config, dims)
        if drawn is not None:
            run.batches = ReplicaRows(run.loader, drawn.completed, drawn.planned)
        (walls,) = train_in_turn([run])
        metrics = read_metrics(run.folder) if dims.rank == 0 else []
        messages.send(
            steps=run.step,
            samples=run.progress.samples if drawn is None else int(drawn.completed[: run.step].sum()),
            epoch_samples=run.loader.samples_per_epoch,
            skipped=run.progress.skipped_steps,
            losses=[[row["step"], row["eval/loss"]] for row in metrics if "eval/loss" in row],
            seconds=sum(walls) - run.progress.paused_s,
        )
