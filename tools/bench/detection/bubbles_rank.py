"""One rank of the benchmark of replays in bubbles: steps whose audit replays in them, after them, or not at all."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from megasdc.config.checks import check_layout
from megasdc.config.detection import AuditSection
from megasdc.config.load import RunConfig
from megasdc.config.sections import DeterminismSection
from megasdc.data.loader import MemoryStream, MicroBatchLoader, StepBatches
from megasdc.determinism import set_deterministic
from megasdc.engine.engine import TrainingEngine
from megasdc.engine.hooks import Hook, Run, RunProgress
from megasdc.events import EventLog
from megasdc.parallel.collectives import StepAgreement, gather_objects
from megasdc.train.build_engine import build_training_engine
from megasdc.train.detection.budget import plan_checks
from megasdc.train.detection.observe import ObserverSwitch
from megasdc.train.detection.step_checker import StepChecker, build_detection, watches_of
from megasdc.train.process import StartClock
from megasdc.train.signals import StopSignals
from tools.bench.rank import Messages, join_ranks, take_turns
from tools.bench.training.loops import DISTINCT_STEPS
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
        layout = check_layout(config, shape.stages)
        set_deterministic(DeterminismSection.model_validate({"enabled": True}))
        self.dims = join_ranks(1, shape.stages, threads=options.threads, timeout_s=config.megasdc.parallel.timeout_s)
        self.engine = build_training_engine(config, layout, self.dims, options.vocab, StartClock(time.monotonic()))
        steps, batch = (options.blocks + 2) * len(KINDS), layout.train_batch_size
        stream = MemoryStream(options.vocab, options.sequence, DISTINCT_STEPS * batch, steps * batch)
        loader = MicroBatchLoader(stream, options.micro_batch, self.dims.dp_rank, self.dims.data)
        self._batches = StepBatches(loader, loader)
        self._signals, events = StopSignals(), EventLog(folder, self.dims.rank)
        self._run = Run(
            folder, self.dims, self.engine, loader, self._batches, events, dist.group.WORLD, RunProgress(steps)
        )
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
        replay_s = detection.budget.replays.take()
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
