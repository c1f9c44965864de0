"""Who is named as a straggler, ``python -m tools.bench stragglers``: gloo replicas that sleep, one of them longer.

Each trial is a run of the real engine with the hook that a run has. Micro-batches sleep for what was drawn, and compute
little beside it, so that many ranks fit few cores and the truth is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasdc.events import read_events
from tools.bench.campaign import Campaign, CampaignLog
from tools.bench.health.options import CLEAN, Case, StragglerOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, ignore_progress, join_ranks, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, Told, listing, verdict
from tools.bench.small.runs import build_run, train_in_turn

LITTLE, ENOUGH = 1.3, 0.95
"""From this ratio on every trial must name the slow one; below it, this share of the trials."""
AT_ONCE = 5
"""Runs of the same processes: the groups of each stay until its process ends, with threads that wake often."""
SLEPT = 0.9
"""Share of a micro-batch's time that must be sleep, so that the cores do not decide."""


@dataclass(frozen=True)
class Trial:
    """A run: replicas named in their order, the step of the first, and the share of sleep in micro-batches.

    ``imbalance``: the stage that was told to be slow by design, -1: none.
    """

    case: Case
    named: list[int]
    step: int | None
    slept: float
    imbalance: int


@dataclass(frozen=True)
class Row:
    """All trials of one noise and ratio; ``right``: those that named the slow replica, in time and no other."""

    also = ("passed",)

    noise: float
    ratio: float
    runs: int
    right: int
    wrong: int
    median_step: float
    slept: float
    imbalance: int

    @property
    def passed(self) -> bool:
        """Whether enough were named, nobody wrongly, and sleep decided."""
        least = 0.0 if self.ratio == CLEAN else 1.0 if self.ratio >= LITTLE else ENOUGH
        return self.right >= least * self.runs and not self.wrong and self.slept >= SLEPT


@dataclass(frozen=True)
class StragglerResult(Result):
    """A row for each noise and ratio, and all trials."""

    judged = ("rows",)
    rows: Sequence[Row]
    trials: Sequence[Trial]

    def report(self) -> Report:
        """The table."""
        options = self.options
        peers = options.replicas - 1
        yield (
            f"{options.replicas} replicas of {options.stages} stage(s), so {peers} peer(s) each; {options.gpt}; a "
            f"micro-batch sleeps {options.sleep_s:g} s with log-normal noise of its own"
        )
        yield listing("Stragglers named", _columns(options), self.rows, tight=True)


def _columns(options: StragglerOptions) -> Told:
    return {
        "noise": lambda row: f"{row.noise:.0%}",
        "slower": lambda row: f"{row.ratio - 1:.0%}",
        "runs": lambda row: row.runs,
        "steps": lambda row: options.clean_steps if row.ratio == CLEAN else options.steps,
        "named": lambda row: row.right,
        "wrong": lambda row: row.wrong,
        "median step": lambda row: f"{row.median_step:g}",
        "slept": lambda row: f"{row.slept:.1%}",
        "imbalance": lambda row: row.imbalance if options.stages > 1 else "-",
        "bar": lambda row: "none" if row.ratio == CLEAN else "all" if row.ratio >= LITTLE else f">= {ENOUGH:.0%}",
        "verdict": lambda row: verdict(row.passed),
    }


def score(trials: Sequence[Trial], options: StragglerOptions) -> list[Row]:
    """Rows in the order of the trials."""
    found = []
    for noise, ratio in dict.fromkeys((one.case.noise, one.case.ratio) for one in trials):
        own = [one for one in trials if (one.case.noise, one.case.ratio) == (noise, ratio)]
        truth = [set() if ratio == CLEAN else {options.slow_replica(one.case)} for one in own]
        right = sum(bool(one.named) and set(one.named) == true for one, true in zip(own, truth, strict=True))
        wrong = sum(bool(set(one.named) - true) for one, true in zip(own, truth, strict=True))
        steps = [one.step for one in own if one.step is not None]
        told = sum(one.imbalance == options.stages - 1 for one in own)
        slept = float(np.median([one.slept for one in own]))
        found.append(
            Row(noise, ratio, len(own), right, wrong, float(np.median(steps)) if steps else math.nan, slept, told)
        )
    return found


def bench_stragglers(
    options: StragglerOptions, log: Path | None = None, on_progress: Progress = ignore_progress
) -> StragglerResult:
    """Make the trials that are not in the log yet, with all ranks on this machine.

    Args:
        log: file that keeps finished trials; None: none does.

    Raises:
        MegasdcError: the log cannot be used, or a rank failed.
    """
    machine, kept = describe_machine(), CampaignLog(log, options, Trial)

    def run(left: Sequence[tuple[int, Case]], keep: Callable[[Trial], None]) -> None:
        cases = [case for _, case in left]
        for start in range(0, len(cases), AT_ONCE):
            with scratch_folder() as folder:
                arguments = {"options": options, "cases": cases[start : start + AT_ONCE], "folder": folder}
                ranks = options.replicas * options.stages
                run_in_ranks(measure_rank, arguments, ranks, folder, lambda message: keep(message["trial"]))

    trials = Campaign("trials", list(options.cases()), run, kept).finish(on_progress)
    return StragglerResult(machine, options, score(trials, options), trials)


def measure_rank(messages: Messages, options: StragglerOptions, cases: Sequence[Case], folder: Path) -> None:
    """Make the trials one after the other, and report each."""
    dims = join_ranks(pipeline=options.stages)
    for number, case in enumerate(cases):
        sleeps = folder / f"sleeps_{number}_{dims.rank}.npy"
        np.save(sleeps, options.sleeps(case))
        run = build_run(options.config(case, folder / str(number), sleeps), dims, options.gpt.vocab)[0]
        train_in_turn([run])
        if dims.rank == 0:
            messages.send(trial=_trial(case, options, run.folder))


def _trial(case: Case, options: StragglerOptions, run: Path) -> Trial:
    """What rank 0 of a run told."""
    named = list(read_events(run, kind="health", name="straggler", rank=0))
    imbalance = list(read_events(run, kind="health", name="imbalance", rank=0))
    lines = (run / "health" / "slowness.jsonl").read_text(encoding="utf-8").splitlines()
    busy_s = json.loads(lines[-1])["stage_s"][0]
    slept_s = float(np.median(np.median(options.sleeps(case)[..., 0], axis=2)))
    replicas = [int(one.fields["replica"]) for one in named]
    stage = int(imbalance[0].fields["slowest_stage"]) if imbalance else -1
    return Trial(case, replicas, named[0].step if named else None, slept_s / busy_s, stage)
