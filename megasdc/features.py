"""The features of megasdc: the hooks of a run from all storeys, in the order in which they are called."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from megasdc.common.errors import StorageError
from megasdc.config import ffn_width
from megasdc.engine.hooks import Hook
from megasdc.engine.step_times import StepTimes
from megasdc.faults.stored import StateFaults
from megasdc.lab.studies.hook import Study, StudyLaunch
from megasdc.metrics.names import peak_tflops
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.sizes import ModelSizes, model_sizes
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.ops.archive.hook import Archiver, build_archiver
from megasdc.ops.health.hooks.links import LinkPings
from megasdc.ops.health.hooks.progress import Health
from megasdc.ops.health.hooks.stragglers import StragglerWatch
from megasdc.train.detection.build import build_detection, build_search, build_toleranced, watches_of
from megasdc.train.detection.coverage import coverage_table, measure_speed, plan_checks
from megasdc.train.detection.observe import ObserverSwitch, watch_for_faults, watch_for_trace
from megasdc.train.detection.step_checker import StepChecker
from megasdc.train.detection.toleranced import TolerancedChecks
from megasdc.train.drop_compute import DropCompute
from megasdc.train.faults import FaultDrill
from megasdc.train.gradient_bounds import GradientBounds
from megasdc.train.process.folder_locks import FolderWatch
from megasdc.train.process.garbage import CollectionTimer, ManagedCollection
from megasdc.train.process.isolation import IsolationLimit
from megasdc.train.process.startup import StartReport
from megasdc.train.report import Evaluator, Reporter
from megasdc.train.saving.memory import MemoryCheckpoints
from megasdc.train.saving.saver import OncePerStep, RunState, Saver, WaitForSnapshots, checkpoint_folder
from megasdc.train.sinks import build_writer
from megasdc.train.start import Features, Start
from megasdc.train.step_details import DetailsRecorder
from megasdc.train.stop import LastLines, RoomWatch, SkipWatch, StopWatch
from megasdc.train.trace import TraceRecorder, build_tracer, trace_header

logger = logging.getLogger(__name__)

UNCHECKED = (
    "silent data corruption: only NaN and Inf in loss and gradient norm are detected; `megasdc coverage` shows "
    "what `audit` and `sdc.always_on` would see"
)


@dataclass(frozen=True)
class Recording:
    """Hooks that observe the tensors of a step; each is None where nothing asks for it."""

    observation: ObserverSwitch | None
    detection: StepChecker | None
    toleranced: TolerancedChecks | None
    trace: TraceRecorder | None
    details: DetailsRecorder | None


def build_hooks(start: Start) -> list[Hook]:
    """Build a run's hooks, in the order in which they are called, in a step and between steps.

    Collective: all ranks of the world.
    """
    run, sections, drills = start.run, start.config.megasdc, start.injection
    study = _study(start)
    training, interval = sections.training, sections.logging.interval
    writer = build_writer(start.config, run)
    recording = _recording(start, writer, study)
    drop = DropCompute(sections.drop_compute, run, writer, interval) if sections.drop_compute.enabled else None
    times, slow = _times_and_stragglers(start, drop, writer)
    specs = sections.optimizer_hooks
    bounds = GradientBounds(specs, run, interval, writer) if specs else None
    managed = training.garbage_collection == "managed"
    slices = None if recording.detection is None else recording.detection.slices
    chain = None if recording.detection is None else recording.detection.chain
    memory, saver = _savers(start, writer, recording.detection)
    room = RoomWatch(sections.logging.wait_for_room_s)
    order: list[Hook | None] = [
        # What this rank does, told before everything else does it.
        _health(start),
        _link_pings(start, writer),
        # Before anything is written: whether the folder is still this launch's.
        FolderWatch(start.locks),
        StartReport(start.clock),
        # How much a step computes, and how long it takes. Times begin before injected delays, and so include them.
        times,
        slow,
        drills.delays and drills.delays.delays,
        start.split,
        drop,
        WaitForSnapshots([one.wait_for_copy for one in (memory, saver) if one is not None]),
        # What it computes. Local gradients are read before faults are injected into them, reduced ones after it.
        recording.detection,
        slices,
        recording.detection and recording.detection.rows,
        recording.detection and recording.detection.tokens,
        recording.toleranced,
        None if drills.injector is None else StateFaults(run.engine, drills.injector),
        drills.process_faults,
        recording.observation,
        slices and slices.found,
        chain,
        recording.toleranced and recording.toleranced.shards,
        recording.trace,
        recording.details,
        study and study.in_step,
        # The last that changes gradients: nothing that comes after it acts in a step.
        bounds,
        slices and slices.unclipped,  # reads alone
        chain and chain.sums,
        # Whether to stop: this run, then a study's replicas.
        SkipWatch(training.max_skipped_steps, checkpoint_folder(start.config)),
        room,
        StopWatch(start.signals, training.time_limit_s, start.clock.started_at, training.stop_step),
        _isolation_limit(start),
        study,
        # What is measured, then what is kept.
        _evaluator(start, writer),
        ManagedCollection(training.garbage_collection_interval) if managed else None,
        _reporter(start, writer),
        memory,
        saver,
        # What may damage a checkpoint that is complete.
        drills.delays,
        _fault_drill(start),
        LastLines(room),
        # What one rank waits for at the end, where no other rank waits for it any more.
        _archiver(start, writer),
    ]
    return [hook for hook in order if hook is not None]


def _study(start: Start) -> Study | None:
    if start.shared is None:
        return None
    assert isinstance(start.shared, StudyLaunch), "what share_launch has made"
    return Study(start.shared, start.run, start.eval_loader, start.config.megasdc.checkpoint.interval)


def _isolation_limit(start: Start) -> IsolationLimit | None:
    steps = start.config.megasdc.sdc.isolation.max_steps
    return None if start.remaining is None or steps is None else IsolationLimit(start.remaining, steps)


def _is_watched(start: Start) -> bool:
    launched = start.signals.leave_running is not None
    return start.config.megasdc.health.is_on(launched=launched, studied=start.shared is not None)


def _health(start: Start) -> Health | None:
    if not _is_watched(start):
        return None
    try:
        return Health(start.config.megasdc.health, start.run, start.signals.leave_running)
    except StorageError as error:
        if start.run.dims.rank == 0:
            logger.warning("health: nothing watches this run: %s", error)
            start.run.events.emit("health", "unwatched", step=start.run.step, problem=str(error))
        return None


def _times_and_stragglers(
    start: Start, drop: DropCompute | None, writer: MetricsWriter | None
) -> tuple[StepTimes | None, StragglerWatch | None]:
    """The hook that measures steps, one for all that read it, and the watch for stragglers; each where it is asked."""
    times = None if drop is None else drop.times
    if not _is_watched(start):
        return times, None
    times = times or StepTimes(start.run.engine.device)
    return times, StragglerWatch(start.config.megasdc.health.slow_ratio, start.run, times, writer)


def _build_detection(start: Start, writer: MetricsWriter | None) -> StepChecker | None:
    config, run = start.config, start.run
    if start.batches is None:
        if run.dims.rank == 0:
            logger.info(UNCHECKED)
        return None
    speed = measure_speed(config, run.engine)
    plan = plan_checks(config, run.engine, run.loader.dataset.vocab_size, speed, run.host_group)
    if run.dims.rank == 0:
        table = coverage_table(config, run.engine, plan, plan.cadence)
        logger.info("coverage of silent data corruption:\n%s", "\n".join(table))
        run.events.emit("start", "coverage", step=run.step, table=table)
    return build_detection(config, run, start.batches, start.signals, start.injection.injector, plan, writer)


def _recording(start: Start, writer: MetricsWriter | None, study: Study | None) -> Recording:
    """Hooks that observe the tensors of a step; all watches share one observation."""
    config, run, injector = start.config, start.run, start.injection.injector
    tracer = build_tracer(config.megasdc.trace, run.engine)
    watches = [] if injector is None else [watch_for_faults(injector, run.engine)]
    if study is not None:
        watches += study.watches()
    if tracer is not None:
        watches.append(watch_for_trace(tracer))
    details = DetailsRecorder(run) if config.megasdc.trace.details else None
    if details is not None:
        watches.append(details.watch)
    if (detection := _build_detection(start, writer)) is not None:
        watches += watches_of(detection)
    clock = None if detection is None else detection.budget.looks
    observation = ObserverSwitch(run.engine, watches, clock) if watches else None
    if detection is not None and observation is not None:
        detection.search = build_search(config.megasdc.sdc.always_on, detection, run, observation)
    return Recording(
        observation,
        detection,
        build_toleranced(config.megasdc, run, start.signals),
        None if tracer is None else TraceRecorder(tracer, trace_header(config, run.engine, tracer.algorithm)),
        details,
    )


def _link_pings(start: Start, writer: MetricsWriter | None) -> LinkPings | None:
    interval = start.config.megasdc.health.ping_interval
    return LinkPings(interval, start.run, writer) if _is_watched(start) and interval else None


def _evaluator(start: Start, writer: MetricsWriter | None) -> Evaluator | None:
    interval = start.config.megasdc.training.eval_interval
    return Evaluator(start.eval_loader, interval, writer) if start.eval_loader is not None and interval else None


def _reporter(start: Start, writer: MetricsWriter | None) -> Reporter:
    sections = start.config.megasdc
    vocab = padded_vocab_size(start.manifest.tokenizer.vocab_size, sections.model.vocab_multiple)
    sizes = model_sizes(sections.model, ffn_width(sections.model), vocab)
    _say_sizes(start, sizes)
    return Reporter(
        interval=sections.logging.interval,
        flops_per_token=sizes.flops_per_token(sections.data.sequence_length),
        split=start.split,
        collections=CollectionTimer() if writer is not None else None,
        writer=writer,
        peak=sections.logging.peak_tflops or _known_peak(start.config.precision),
        progress=sections.logging.progress_bar,
    )


def _run_state(start: Start) -> RunState:
    study = None if start.shared is None else start.shared.section
    return RunState(start.config, start.manifest.tokenizer.checksum, study)


def _savers(
    start: Start, writer: MetricsWriter | None, detection: StepChecker | None
) -> tuple[MemoryCheckpoints | None, Saver]:
    """What keeps checkpoints in memory, if anything does, and what writes them."""
    section, run, state = start.config.megasdc.checkpoint.memory, start.run, _run_state(start)
    before_save = OncePerStep(None if detection is None else detection.before_save)
    after_save = None if detection is None else detection.after_save
    memory = MemoryCheckpoints(section, run, state, writer, before_save) if section.interval else None
    return memory, Saver(start.config, run, writer, state, before_save, after_save, start.fence)


def _archiver(start: Start, writer: MetricsWriter | None) -> Archiver | None:
    sections = start.config.megasdc
    folder, audits = checkpoint_folder(start.config), sections.audit.enabled
    return build_archiver(sections.checkpoint, folder, start.run, verified_only=audits, writer=writer)


def _fault_drill(start: Start) -> FaultDrill | None:
    drills, sections = start.injection, start.config.megasdc
    if not (sections.faults or sections.process_faults):
        return None
    return FaultDrill(drills.injector, drills.process_faults, checkpoint_folder(start.config), start.run.host_group)


def _say_sizes(start: Start, sizes: ModelSizes) -> None:
    engine = start.run.engine
    if start.run.dims.rank == 0:
        logger.info(
            "%s parameters, %s, global batch %d samples of %d tokens, %s",
            f"{sizes.total:,}",
            start.run.dims,
            engine.samples_per_step,
            start.config.megasdc.data.sequence_length,
            start.config.precision,
        )


def _known_peak(precision: str) -> float | None:
    """Peak of this rank's device if it is in the table, which is for 16-bit arithmetic on GPUs."""
    if precision == "fp32" or not torch.cuda.is_available():
        return None
    return peak_tflops(torch.cuda.get_device_name())


FEATURES = Features(build_hooks=build_hooks, share_launch=StudyLaunch)
