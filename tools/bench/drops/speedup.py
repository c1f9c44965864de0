"""Predicted and measured speed-up of DropCompute, ``python -m tools.bench drop-speedup``: gloo replicas that sleep.

Runs of the same delays take steps in turn: one without a threshold, one for each of several thresholds, one that
chooses its own, and one that chooses a larger batch. Each micro-batch is a constant delay and one from the paper's
environment, which no threshold cuts; computation is little beside them, so that many replicas fit few cores. What is
predicted for steps comes from steps of other delays, in which nothing was dropped, by the search that runs use.

Source: Giladi et al., NeurIPS 2023, arXiv 2306.10598, eq. 6 and section 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megasdc.dropcompute.tuning import TOLERANCE
from megasdc.engine.hooks import Run
from megasdc.parallel.collectives import gather_objects
from tools.bench.drops.options import AUTO, NEVER, DropSpeedupOptions
from tools.bench.drops.speedup_scores import (
    Comparison,
    LargerBatchRun,
    choose_thresholds,
    compare,
    recorded_steps,
    score_larger_batch,
    sleep_share,
)
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, ignore_progress, join_ranks, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, Told, listing, verdict
from tools.bench.small.runs import build_run, drop_compute_of, train_in_turn

BAR = 0.05
"""Largest difference of a measured speed-up from the predicted one, over the latter."""
COLUMNS: Told = {
    "threshold": lambda one: "auto" if one.own else "given",
    "tau, s": lambda one: "none" if one.tau_s is None else f"{one.tau_s:.3f}",
    "% out,\npredicted": lambda one: f"{100 * one.predicted_rate:.2f}",
    "% out,\nmeasured": lambda one: f"{100 * one.rate:.2f}",
    "speed-up,\npredicted": lambda one: f"{one.predicted:.3f}",
    "of same\nsteps": lambda one: f"{one.predicted_same:.3f}",
    "speed-up,\nmeasured": lambda one: f"{one.speedup:.3f}",
    "off, %": lambda one: f"{100 * one.difference:+.1f}",
    "bar, %": lambda one: f"{100 * BAR:g} {verdict(abs(one.difference) <= BAR)}",
}


@dataclass(frozen=True)
class DropSpeedupResult(Result):
    """Comparisons, one a threshold, the last one the run's own; and a run with a larger batch.

    ``sleep_share`` is the share of sleep in the time of micro-batches without a threshold.
    """

    also = ("passed", "bar")
    bar: ClassVar[float] = BAR

    thresholds: Sequence[Comparison]
    larger_batch: LargerBatchRun
    sleep_share: float

    @property
    def passed(self) -> bool:
        """Whether every speed-up is as predicted, within the bar, and a larger batch completes what was planned."""
        return all(abs(one.difference) <= BAR for one in self.thresholds) and self.larger_batch.passed

    def report(self) -> Report:
        """A row for each threshold."""
        options = self.options
        yield (
            f"{options.replicas} gloo replicas, {options.gpt}; a micro-batch sleeps {options.constant_s:g} s and a "
            f"bounded log-normal delay of mean {options.mean_s:g} s, {100 * self.sleep_share:.0f} % of its time; "
            f"{options.steps} steps of each"
        )
        rule = "elapsed" if options.sigmas is None else f"predictive, {options.sigmas:g} standard deviations"
        title = f"DropCompute: micro-batches per second over those without a threshold; rule {rule}"
        yield listing(title, COLUMNS, self.thresholds)
        yield (
            "predicted: from as many steps of other delays in which nothing was dropped, their micro-batches dealt "
            "out anew; of same steps: from the run without a threshold, whose delays the measured run has again, so "
            "that no chance is in it"
        )
        larger = self.larger_batch
        yield (
            f"larger batch: {larger.micro_batches} micro-batches planned for {options.gpt.micro_batches}; completed "
            f"{100 * larger.completed:.2f} % of what is planned without drops (bar: within {100 * TOLERANCE:g} %, "
            f"{verdict(larger.passed)}), {larger.speedup:.3f} times as many a second, "
            f"{larger.predicted:.3f} predicted"
        )


def bench_drop_speedup(options: DropSpeedupOptions, on_progress: Progress = ignore_progress) -> DropSpeedupResult:
    """Measure, with all ranks on this machine.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    with scratch_folder() as folder:
        arguments = {"options": options, "folder": folder}
        runs = run_in_ranks(measure_rank, arguments, options.replicas, folder, on_progress=on_progress)
        taus: list[float | None] = [one["tau_s"] for one in runs]
        (plain, *dropping, own, larger), first, second = (one["run"] for one in runs), options.first, options.second
        before, sigmas = folder / "before", options.sigmas
        found = [
            compare(tau, plain, run, first, before, first, sigmas)
            for tau, run in zip(taus[1:-2], dropping, strict=True)
        ]
        found.append(compare(taus[-2], plain, own, second, own[0], first, sigmas))
        compensated = score_larger_batch(plain, larger, second)
        slept = sleep_share(recorded_steps(plain[0], first), first, options.delay(options.seed))
    return DropSpeedupResult(machine, options, found, compensated, slept)


def measure_rank(messages: Messages, options: DropSpeedupOptions, folder: Path) -> None:
    """Make all runs, and report folder, threshold and seconds of steps of each.

    The first run has no threshold; from its steps come the thresholds of others. Those, one without a threshold, one
    that chooses its own and one with a larger batch then take steps in turn.
    """
    dims = join_ranks()
    steps_done = itertools.count(1)

    def count() -> None:
        messages.progress("steps", next(steps_done), options.num_steps)

    def build(name: str, threshold: float | str, **changes: Any) -> Run:
        return build_run(options.config(folder / name, threshold, **changes), dims, options.gpt.vocab)[0]

    before = build("before", NEVER, steps=options.first.stop, seed=options.seed + 1)
    train_in_turn([before], count)
    steps = recorded_steps(before.folder, options.first) if dims.rank == 0 else None
    taus = gather_objects(None if steps is None else choose_thresholds(steps, options.drop_rates, options.sigmas))[0]
    assert taus is not None, "rank 0 chose them"
    runs = [build(NEVER, NEVER), *(build(f"tau_{number}", tau) for number, tau in enumerate(taus)), build(AUTO, AUTO)]
    runs.append(build("larger_batch", AUTO, larger_batch=True))
    for run, walls_s in zip(runs, train_in_turn(runs, count), strict=True):
        tau_s = drop_compute_of(run).state_dict()["tau_s"]
        messages.send(run=(run.folder, walls_s), tau_s=tau_s)
