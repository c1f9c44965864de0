"""How much of a permuted replay is hidden where a stage of a pipeline would wait: steps with it and without."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tools.bench.detection.bubbles_rank import AFTER, INSIDE, WITHOUT, Shape, TimedStep, measure_rank
from tools.bench.detection.options import BubblesOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, by_kind, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, interval, table
from tools.bench.statistics import Estimate, estimate_median

BARS = {2: 0.6, 4: 0.8}
"""Smallest hidden share by stages, where a replay's passes take as long as those that it repeats."""


@dataclass(frozen=True)
class Hidden:
    """A pipeline, and how much of a replay its steps do not show.

    Args:
        step_s: without a replay.
        replay_s: of one stage, in the mean over stages.
        longer_s: how much longer steps last that replay in bubbles, or after all micro-batches, by kind.
        share: of a replay by which the step is not longer, in bubbles.
        bar: smallest share; None: none.
    """

    also = ("passed",)

    shape: Shape
    step_s: Estimate
    replay_s: Estimate
    longer_s: dict[str, Estimate]
    share: Estimate
    bar: float | None

    @property
    def passed(self) -> bool:
        """Whether the bar is met."""
        return self.bar is None or self.share.median >= self.bar

    @property
    def verdict(self) -> str:
        """As tables show it."""
        return "none" if self.bar is None else f"{self.bar:.0%} {'pass' if self.passed else 'FAIL'}"


@dataclass(frozen=True)
class BubblesResult(Result):
    """All pipelines."""

    judged = ("hidden",)
    hidden: list[Hidden]

    def report(self) -> Report:
        """A row for each pipeline."""
        sizes, slept = self.options.sizes, self.options.slept
        yield (
            f"gloo, {sizes.threads} thread a rank, {sizes.precision}; Llama-like H={sizes.hidden} L={sizes.layers} "
            f"S={sizes.sequence} vocabulary {sizes.vocab}, micro-batches of {sizes.micro_batch}; {sizes.blocks} steps "
            f"of each kind; where passes are slept, H={slept.hidden} S={slept.sequence}"
        )
        rows = [
            [
                str(one.shape),
                *(interval(estimate, 3) for estimate in (one.step_s, one.replay_s)),
                *(interval(one.longer_s[kind], 3) for kind in (AFTER, INSIDE)),
                interval(one.share, 1, 100),
                one.verdict,
            ]
            for one in self.hidden
        ]
        columns = ("pipeline", "step", "replay of a stage", "longer, after", "longer, in bubbles", "hidden %", "bar")
        yield table("seconds of audited steps", columns, rows)


def bench_bubbles(options: BubblesOptions, on_progress: Progress) -> BubblesResult:
    """Measure each pipeline.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    shapes = [Shape(2, 4), Shape(2, 4, options.pass_s), Shape(4, 8, options.pass_s)]
    cores = len(os.sched_getaffinity(0))
    kept = [one for one in shapes if one.slept_s or one.stages <= cores]
    return BubblesResult(machine, options, [_measure(one, options, on_progress) for one in kept])


def _measure(shape: Shape, options: BubblesOptions, on_progress: Progress) -> Hidden:
    sizes = options.slept if shape.slept_s else options.sizes
    with scratch_folder() as folder:
        arguments = {"options": sizes, "shape": shape, "folder": folder}
        threads = sizes.threads
        found = run_in_ranks(measure_rank, arguments, shape.stages, folder, on_progress=on_progress, threads=threads)
    return judge(shape, by_kind(found))


def judge(shape: Shape, steps: dict[str, list[TimedStep]]) -> Hidden:
    """What is hidden, from the steps of each kind, one a block."""
    longer = {
        kind: [one.step_s - without.step_s for one, without in zip(steps[kind], steps[WITHOUT], strict=True)]
        for kind in (AFTER, INSIDE)
    }
    replay_s = [sum(one.replay_s) / shape.stages for one in steps[INSIDE]]
    return Hidden(
        shape,
        estimate_median([one.step_s for one in steps[WITHOUT]]),
        estimate_median(replay_s),
        {kind: estimate_median(values) for kind, values in longer.items()},
        estimate_median([1 - more / took for more, took in zip(longer[INSIDE], replay_s, strict=True)]),
        BARS.get(shape.stages) if shape.slept_s else None,
    )
