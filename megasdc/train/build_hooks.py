"""The hooks of a run, from the configuration's sections, and the order in which they are called."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megasdc.config import RunConfig, ffn_width
from megasdc.data.loader import EvalLoader
from megasdc.data.manifest import Manifest
from megasdc.data.step_batches import StepBatches
from megasdc.engine.time_split import TimeSplit
from megasdc.faults.injector import Injector
from megasdc.faults.process import ProcessFaults
from megasdc.metrics.names import peak_tflops
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.sizes import ModelSizes, model_sizes
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.run_lock import RunLock
from megasdc.train.delays import DelayReport
from megasdc.train.detection.build import build_detection, build_search, build_toleranced, watches_of
from megasdc.train.detection.checks import Detection
from megasdc.train.detection.coverage import coverage_table, measure_speed, plan_checks
from megasdc.train.detection.observe import Observation, watch_for_faults, watch_for_trace
from megasdc.train.drop_compute import DropCompute
from megasdc.train.evaluate import Evaluator
from megasdc.train.faults import FaultDrill
from megasdc.train.gradient_bounds import GradientBounds
from megasdc.train.process.garbage import CollectionTimer, ManagedCollection
from megasdc.train.process.hold_folder import FolderWatch
from megasdc.train.process.signals import StopSignals
from megasdc.train.process.startup import StartClock, StartReport
from megasdc.train.report import Reporter
from megasdc.train.run import Run, StepHook
from megasdc.train.saving import Saver, checkpoint_folder
from megasdc.train.stop import SkipWatch, StopWatch
from megasdc.train.study import Study
from megasdc.train.trace import TraceRecorder, build_tracer, trace_header

logger = logging.getLogger(__name__)

UNCHECKED = (
    "silent data corruption: only NaN and Inf in loss and gradient norm are detected; `megasdc coverage` shows "
    "what `audit` and `sdc.always_on` would see"
)


@dataclass(frozen=True)
class Drills:
    """Fault injection of a run.

    Args:
        injector: of faults in tensors; None without.
        process_faults: of this rank; None without.
        delays: report of the injected delays; at most one.
    """

    injector: Injector | None
    process_faults: ProcessFaults | None
    delays: list[DelayReport]


@dataclass(frozen=True)
class HookParts:
    """Inputs for building hooks: a run at the step from which it continues, and objects built for it.

    Args:
        config: of the run.
        run: still without hooks.
        manifest: of the training data.
        eval_loader: None without evaluation.
        kept: keeps the batches of a step, where a check may read them again; else None.
        split: of the time of a step; on rank 0 only.
        clock: of the start.
        signals: received by this rank.
        study: of this replica; None without.
        drills: fault injection.
        locks: that this rank holds on the launch's folders.
    """

    config: RunConfig
    run: Run
    manifest: Manifest
    eval_loader: EvalLoader | None
    kept: StepBatches | None
    split: TimeSplit | None
    clock: StartClock
    signals: StopSignals
    study: Study | None
    drills: Drills
    locks: Sequence[RunLock]


def build_hooks(parts: HookParts) -> list[StepHook]:
    """Build a run's hooks, in the order they are called.

    Folder locks and the start report come first; then DropCompute, recording and detection, gradient bounds, decisions
    to stop (of this run, then of a study's replicas), evaluation, garbage collection, reports and checkpoints; last the
    report of delays and the faults that damage a complete checkpoint.

    Args:
        parts: inputs.

    Collective: all ranks of the world.
    """
    run, sections = parts.run, parts.config.megasdc
    training, interval = sections.training, sections.logging.interval
    recording, detection = _recording(parts)
    writer = MetricsWriter(run.folder, run.engine.monitor) if run.dims.rank == 0 else None
    vocab = padded_vocab_size(parts.manifest.tokenizer.vocab_size, sections.model.vocab_multiple)
    sizes = model_sizes(sections.model, ffn_width(sections.model), vocab)
    _say_sizes(parts, sizes)
    hooks: list[StepHook] = [FolderWatch(parts.locks), StartReport(parts.clock)]
    if sections.drop_compute.enabled:
        hooks.append(DropCompute(sections.drop_compute, run, writer, interval))
    hooks += recording
    if sections.optimizer_hooks:
        hooks.append(GradientBounds(sections.optimizer_hooks, run, interval, writer))
    hooks.append(SkipWatch(training.max_skipped_steps))
    hooks.append(StopWatch(parts.signals, training.time_limit_s, parts.clock.started_at, training.stop_step))
    if parts.study is not None:
        hooks.append(parts.study)
    if parts.eval_loader is not None and training.eval_interval:
        hooks.append(Evaluator(parts.eval_loader, training.eval_interval, writer))
    if training.garbage_collection == "managed":
        hooks.append(ManagedCollection(training.garbage_collection_interval))
    hooks.append(_reporter(parts, sizes, writer))
    before_save = None if detection is None else detection.before_save
    study = None if parts.study is None else parts.study.section
    hooks.append(Saver(parts.config, writer, parts.manifest.tokenizer.checksum, before_save, study))
    return hooks + _drilling(parts)


def _build_detection(parts: HookParts) -> Detection | None:
    config, run = parts.config, parts.run
    if parts.kept is None:
        if run.dims.rank == 0:
            logger.info(UNCHECKED)
        return None
    speed = measure_speed(config, run.engine)
    plan = plan_checks(config, run.engine, run.loader.dataset.vocab_size, speed, run.host_group)
    if run.dims.rank == 0:
        table = coverage_table(config, run.engine, plan)
        logger.info("coverage of silent data corruption:\n%s", "\n".join(table))
        run.events.emit("start", "coverage", step=run.step, table=table)
    return build_detection(config, run, parts.kept, parts.signals, parts.drills.injector, plan)


def _recording(parts: HookParts) -> tuple[list[StepHook], Detection | None]:
    """Hooks that observe the tensors of a step, and the detection among them; all watches share one observation."""
    config, run, injector = parts.config, parts.run, parts.drills.injector
    tracer = build_tracer(config.megasdc.trace, run.engine)
    watches = [] if injector is None else [watch_for_faults(injector, run.engine)]
    if parts.study is not None:
        watches += parts.study.watches()
    if tracer is not None:
        watches.append(watch_for_trace(tracer))
    if (detection := _build_detection(parts)) is not None:
        watches += watches_of(detection)
    hooks: list[StepHook] = []
    if watches:
        observation = Observation(run.engine, watches)
        hooks.append(observation)
        if detection is not None:
            detection.search = build_search(config.megasdc.sdc.always_on, detection, run, observation)
    if detection is not None:
        hooks.append(detection)
    if (toleranced := build_toleranced(config.megasdc, run, parts.signals)) is not None:
        hooks.append(toleranced)
    if tracer is not None:
        hooks.append(TraceRecorder(tracer, trace_header(config, run.engine, tracer.algorithm)))
    return hooks, detection


def _reporter(parts: HookParts, sizes: ModelSizes, writer: MetricsWriter | None) -> Reporter:
    sections = parts.config.megasdc
    return Reporter(
        interval=sections.logging.interval,
        flops_per_token=sizes.flops_per_token(sections.data.sequence_length),
        split=parts.split,
        collections=CollectionTimer() if writer is not None else None,
        writer=writer,
        peak=sections.logging.peak_tflops or _known_peak(parts.config.precision),
        progress=sections.logging.progress_bar,
    )


def _drilling(parts: HookParts) -> list[StepHook]:
    drills, sections = parts.drills, parts.config.megasdc
    hooks: list[StepHook] = [*drills.delays]
    if sections.faults or sections.process_faults:
        folder = checkpoint_folder(parts.config)
        hooks.append(FaultDrill(drills.injector, drills.process_faults, folder, parts.run.host_group))
    return hooks


def _say_sizes(parts: HookParts, sizes: ModelSizes) -> None:
    engine = parts.run.engine
    if parts.run.dims.rank == 0:
        logger.info(
            "%s parameters, %s, global batch %d samples of %d tokens, %s",
            f"{sizes.total:,}",
            parts.run.dims,
            engine.train_batch_size(),
            parts.config.megasdc.data.sequence_length,
            parts.config.precision,
        )


def _known_peak(precision: str) -> float | None:
    """Peak of this rank's device if it is in the table, which is for 16-bit arithmetic on GPUs."""
    if precision == "fp32" or not torch.cuda.is_available():
        return None
    return peak_tflops(torch.cuda.get_device_name())
