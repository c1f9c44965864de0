"""How much of a permuted replay is hidden where a stage of a pipeline would wait: steps with it and without."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megasdc.config.detection import AuditSection
from megasdc.config.load import RunConfig
from megasdc.config.sections import DeterminismSection
from megasdc.determinism import set_deterministic
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook
from megasdc.engine.observer import ObserverSwitch
from megasdc.parallel.collectives import StepAgreement, gather_objects
from megasdc.train.detection.budget import plan_checks
from megasdc.train.detection.step_checker import StepChecker, build_detection, watches_of
from megasdc.train.signals import StopSignals
from tools.bench.detection.options import BubblesOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, by_kind, join_ranks, run_in_ranks, scratch_folder, take_turns
from tools.bench.result import Report, Result, Told, interval, listing, verdict
from tools.bench.small.runs import memory_run
from tools.bench.statistics import Estimate, estimate_median
from tools.bench.training.options import TrainBenchOptions, run_config

WITHOUT, AFTER, INSIDE = "without a replay", "replayed after them", "replayed in bubbles"
KINDS = (WITHOUT, AFTER, INSIDE)
"""Kinds of steps; each is audited."""


@dataclass(frozen=True)
class Shape:
    """A pipeline.

    Args:
        stages: one rank each.
        micro_batches: of a step.
        slept_s: seconds that a forward pass takes, which a stage sleeps beside computing; a backward pass takes twice
            as many. 0: it only computes.
    """

    stages: int
    micro_batches: int
    slept_s: float = 0.0

    def __str__(self) -> str:
        slept = f", passes of {self.slept_s:g} and {2 * self.slept_s:g} s slept" if self.slept_s else ", computed"
        return f"{self.stages} stages, {self.micro_batches} micro-batches{slept}"


@dataclass(frozen=True)
class TimedStep:
    """A step.

    Args:
        step_s: seconds of the slowest rank.
        replay_s: seconds of the replay on each stage, [stages]; zeros where it was not made in bubbles.
    """

    step_s: float
    replay_s: list[float]


class Sleeper(Hook):
    """Has passes take longer, and replays of them; a replay by ``replay_s``."""

    in_replays = True

    def __init__(self, forward_s: float) -> None:
        self._forward_s = forward_s
        self.replay_s = 3 * forward_s

    def before_forward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Sleep."""
        time.sleep(self._forward_s)

    def before_backward(self, engine: TrainingEngine, micro_batch: int) -> None:
        """Sleep."""
        time.sleep(2 * self._forward_s)


class BubblesRank:
    """The engine of a stage, and its audits.

    Collective: all ranks of the world.
    """

    def __init__(self, options: TrainBenchOptions, shape: Shape, folder: Path) -> None:
        plain = run_config(replace(options, accumulation=shape.micro_batches), folder)
        parallel = plain.megasdc.parallel.model_copy(update={"pipeline": shape.stages})
        config = replace(plain, megasdc=plain.megasdc.model_copy(update={"parallel": parallel}))
        set_deterministic(DeterminismSection.model_validate({"enabled": True}))
        self.dims = join_ranks(1, shape.stages, threads=options.threads, timeout_s=config.megasdc.parallel.timeout_s)
        steps = (options.blocks + 2) * len(KINDS)
        self._run, self._batches = memory_run(config, self.dims, options.vocab, steps, folder)
        self.engine = self._run.engine
        self._signals = StopSignals()
        self._sleeper = Sleeper(shape.slept_s)
        self._audits = {moves: self._build(config, moves) for moves in (False, True)}

    def _build(self, config: RunConfig, permuted: bool) -> StepChecker:
        audit = AuditSection.model_validate({"enabled": True, "interval": 1, "permuted": permuted})
        config = replace(config, megasdc=config.megasdc.model_copy(update={"audit": audit}))
        plan = plan_checks(config, self.engine, self._run.loader.dataset.vocab_size)
        detection = build_detection(config, self._run, self._batches, self._signals, None, plan)
        detection.on_start(self._run)
        return detection

    def step(self, kind: str) -> TimedStep:
        """Take one step of a kind.

        Collective: all ranks of the world.
        """
        detection = self._audits[kind != WITHOUT]
        observation = ObserverSwitch(self.engine, watches_of(detection))
        self.engine.hooks = [self._sleeper, detection, observation]
        self.engine.agreement = StepAgreement(self._run.host_group)
        detection.before_step(self._run)
        observation.before_step(self._run)
        if kind == AFTER:
            self.engine.replay = None
        dist.barrier()
        began = time.perf_counter()
        result = self.engine.train_step(self._batches)
        took = time.perf_counter() - began
        self._run.progress.step = result.step
        replay_s = detection.budget.replays.pop_seconds()
        if replay_s:
            replay_s += self._sleeper.replay_s
        detection.after_step(self._run, result)
        observation.close()
        found = gather_objects((took, replay_s))
        return TimedStep(max(one for one, _ in found), [one for _, one in found])

    def close(self) -> None:
        """Give back signal handlers and files."""
        self._signals.close()
        self._run.events.close()


def measure_rank(messages: Messages, options: TrainBenchOptions, shape: Shape, folder: Path) -> None:
    """Report each step, in blocks of one of each kind."""
    rank = BubblesRank(options, shape, folder)
    for kind in KINDS:  # the first audit tries what can be moved, and replays after the micro-batches
        rank.step(kind)
    take_turns(messages, str(shape), KINDS, options.blocks, rank.step)
    rank.close()


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
        return "none" if self.bar is None else f"{self.bar:.0%} {verdict(self.passed)}"


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
        columns: Told = {
            "pipeline": lambda one: one.shape,
            "step": lambda one: interval(one.step_s, 3),
            "replay of a stage": lambda one: interval(one.replay_s, 3),
            "longer, after": lambda one: interval(one.longer_s[AFTER], 3),
            "longer, in bubbles": lambda one: interval(one.longer_s[INSIDE], 3),
            "hidden %": lambda one: interval(one.share, 1, 100),
            "bar": lambda one: one.verdict,
        }
        yield listing("seconds of audited steps", columns, self.hidden)


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
