"""Several small runs trained by the ranks of a benchmark in the same processes.

Groups are made once; each run builds its engine anew, with `drop_compute`, `delay`, `optimizer_hooks`, `faults`, the
stragglers of `health`, watching for skipped steps and evaluation as a run of the training program has them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megasdc.config.checks import check_layout
from megasdc.config.load import RunConfig, parse_config
from megasdc.data.dataset import TokenDataset, build_datasets
from megasdc.data.loader import EvalLoader, MemoryStream, MicroBatchLoader, StepBatches
from megasdc.data.manifest import DataManifest
from megasdc.engine.hooks import Hook, Run, RunProgress
from megasdc.engine.step_times import StepTimes
from megasdc.events import EventLog
from megasdc.faults.delay import DelayReport
from megasdc.faults.drill import build_injector
from megasdc.faults.injector import Injector
from megasdc.faults.stored import StateFaults
from megasdc.metrics.writer import MetricsWriter
from megasdc.ops.health.hooks.stragglers import StragglerWatch
from megasdc.parallel.dims import ParallelDims
from megasdc.train.build import prepare_run_folder
from megasdc.train.build_engine import build_training_engine
from megasdc.train.drop_compute import DropCompute
from megasdc.train.gradient_bounds import GradientBounds
from megasdc.train.main import train_step
from megasdc.train.process import StartClock
from megasdc.train.report import Evaluator
from megasdc.train.stop import SkipWatch
from tools.bench.training.loops import DISTINCT_STEPS


def build_run(raw: dict[str, Any], dims: ParallelDims, vocab: int | None = None) -> tuple[Run, Injector | None]:
    """Build one run, and its fault injection where it has some.

    Args:
        raw: from ``tools.bench.small.gpt.small_config``.
        vocab: entries of the vocabulary of random tokens in memory; None: the data are prepared.

    Collective: all ranks of the world.
    """
    config = parse_config(raw, source="the benchmark's options")
    sections = config.megasdc
    layout = check_layout(config, dims.world_size)
    folder = prepare_run_folder(Path(sections.logging.run_dir))
    steps, samples = sections.training.steps, sections.training.eval_samples if sections.training.eval_interval else 0
    size = steps * layout.train_batch_size
    training: Any
    validation = epoch = None
    if vocab is None:
        vocab = DataManifest.load(sections.data.path).tokenizer.vocab_size
        training, validation = build_datasets(sections.data, vocab, size, samples)
        epoch = training.samples_per_epoch if isinstance(training, TokenDataset) else None
    else:
        distinct = min(DISTINCT_STEPS, steps) * layout.train_batch_size
        training = MemoryStream(vocab, sections.data.sequence_length, distinct, size)
    engine = build_training_engine(config, layout, dims, vocab, StartClock(0.0))
    loader = MicroBatchLoader(training, layout.micro_batch_size, dims.dp_rank, dims.data, samples_per_epoch=epoch)
    run = Run(folder, dims, engine, loader, loader, EventLog(folder, dims.rank), dist.group.WORLD, RunProgress(steps))
    injector = build_injector(sections, run)  # of phase collective alone: nothing to observe
    writer = MetricsWriter(folder) if dims.rank == 0 else None
    interval = sections.logging.interval
    delays = [DelayReport(sections.delay, interval, run)] if sections.delay else []
    drops = [DropCompute(sections.drop_compute, run, writer, interval)] if sections.drop_compute.enabled else []
    bounds = [GradientBounds(sections.optimizer_hooks, run, interval, writer)] if sections.optimizer_hooks else []
    times = [drop.times for drop in drops]
    slow = []
    if sections.health.enabled:
        times = times or [StepTimes(engine.device)]
        slow.append(StragglerWatch(sections.health.slow_ratio, run, times[0], writer))
    run.hooks = [
        *times,
        *slow,
        *(one.delays for one in delays),
        *([] if injector is None else [StateFaults(engine, injector)]),
        *drops,
        *bounds,
        SkipWatch(sections.training.max_skipped_steps),
    ]
    if validation is not None:
        eval_loader = EvalLoader(validation, layout.micro_batch_size, dims.dp_rank, dims.data, samples)
        run.hooks.append(Evaluator(eval_loader, sections.training.eval_interval, writer))
    run.hooks += [*delays, _Files(writer)]
    return run, injector


def memory_run(config: RunConfig, dims: ParallelDims, vocab: int, steps: int, folder: Path) -> tuple[Run, StepBatches]:
    """A run on random tokens in memory, without hooks, and its micro-batches, which checks can read again.

    Args:
        vocab: entries of the vocabulary.
        steps: that it may take.
        folder: gets its events.

    Collective: all ranks of the world.
    """
    layout = check_layout(config, dims.world_size)
    engine = build_training_engine(config, layout, dims, vocab, StartClock(time.monotonic()))
    samples = [count * layout.train_batch_size for count in (min(DISTINCT_STEPS, steps), steps)]
    stream = MemoryStream(vocab, config.megasdc.data.sequence_length, *samples)
    loader = MicroBatchLoader(stream, layout.micro_batch_size, dims.dp_rank, dims.data)
    group = dist.new_group(backend="gloo") if engine.device.type == "cuda" else dist.group.WORLD
    events, batches = EventLog(folder, dims.rank), StepBatches(loader, loader)
    return Run(folder, dims, engine, loader, batches, events, group, RunProgress(steps)), batches


def drop_compute_of(run: Run) -> DropCompute:
    """The hook of a run that decides what is dropped."""
    return next(hook for hook in run.hooks if isinstance(hook, DropCompute))


class _Files(Hook):
    """Closes the writer with the run."""

    def __init__(self, writer: MetricsWriter | None) -> None:
        self._writer = writer

    def close(self) -> None:
        """Close it."""
        if self._writer is not None:
            self._writer.close()


def train_in_turn(runs: Sequence[Run], after_step: Callable[[], None] = lambda: None) -> list[list[float]]:
    """Train runs to their ends, one step of each in turn, so that a machine that changes meanwhile touches all alike.

    Args:
        after_step: called after each step of any.

    Returns:
        Seconds of each step of each run, with what its hooks do. The files of the runs are whole.

    Collective: all ranks of the world.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    try:
        for run in runs:
            for hook in run.hooks:
                hook.on_start(run)
        while not all(run.is_last_step for run in runs):
            for run, walls in zip(runs, seconds, strict=True):
                if run.is_last_step:
                    continue
                began = time.perf_counter()
                train_step(run)
                walls.append(time.perf_counter() - began)
                after_step()
    finally:
        for run in runs:
            for hook in run.hooks:
                hook.close()
            run.events.close()
    dist.barrier()
    gc.collect()  # an engine and its hooks hold each other
    return seconds
