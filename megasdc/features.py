"""The features of megasdc: the hooks of a run from all storeys, in the order in which they are called."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megasdc.common.errors import StorageError
from megasdc.config.model import ffn_width
from megasdc.config.protect import start_lines
from megasdc.config.sections import OFF, StudySection
from megasdc.engine.hooks import Hook, Slot
from megasdc.engine.step_times import StepTimes
from megasdc.metrics.names import peak_tflops
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.sizes import ModelSizes, model_sizes, padded_vocab_size
from megasdc.parallel.dims import ReplicaWorld
from megasdc.train.build import Features, SharedLaunch, Start
from megasdc.train.checkpointer import (
    MemoryCheckpoints,
    OncePerStep,
    RunState,
    Saver,
    WaitForSnapshots,
    checkpoint_folder,
)
from megasdc.train.process import CollectionTimer, ManagedCollection
from megasdc.train.report import Evaluator, Reporter, StartReport, build_writer
from megasdc.train.stop import FolderWatch, LastLines, RoomWatch, SkipWatch, StopWatch

if TYPE_CHECKING:
    from megasdc.engine.observer import ObserverSwitch
    from megasdc.faults.drill import FaultDrill
    from megasdc.faults.stored import StateFaults
    from megasdc.lab.studies.hook import Study
    from megasdc.ops.archive.hook import Archiver
    from megasdc.ops.health.hooks.links import LinkPings
    from megasdc.ops.health.hooks.progress import Health
    from megasdc.ops.health.hooks.stragglers import StragglerWatch
    from megasdc.sdc.slice_checks import SliceChecks
    from megasdc.train.detection.chain import Chain
    from megasdc.train.detection.step_checker import StepChecker
    from megasdc.train.drop_compute import DropCompute
    from megasdc.train.gradient_bounds import GradientBounds
    from megasdc.train.isolation import IsolationLimit
    from megasdc.train.local_sgd import LocalSgd
    from megasdc.train.trace import DetailsRecorder, TraceRecorder

logger = logging.getLogger(__name__)

UNCHECKED = (
    "silent data corruption: only NaN and Inf in loss and gradient norm are detected; `megasdc coverage` shows "
    "what `audit` and `sdc.always_on` would see"
)


@dataclass(frozen=True)
class Recording:
    """Hooks that observe the tensors of a step; each is None where the configuration does not ask for it."""

    observation: ObserverSwitch | None
    detection: StepChecker | None
    trace: TraceRecorder | None
    details: DetailsRecorder | None


@dataclass(frozen=True)
class Built:
    """The features of one run; None: the configuration does not ask for it.

    What each does is said in ``ORDER``. A feature that acts at two places of the order is two hooks.
    """

    start: Start
    recording: Recording
    times: StepTimes | None
    stragglers: StragglerWatch | None
    drop: DropCompute | None
    bounds: GradientBounds | None
    study: Study | None
    local_sgd: LocalSgd | None
    memory: MemoryCheckpoints | None
    saver: Saver
    room: RoomWatch
    health: Health | None
    links: LinkPings | None
    isolation: IsolationLimit | None
    evaluator: Evaluator | None
    reporter: Reporter
    archiver: Archiver | None

    @property
    def detection(self) -> StepChecker | None:
        """The checker of steps."""
        return self.recording.detection

    @property
    def slices(self) -> SliceChecks | None:
        """The checks of slices of the optimizer."""
        return None if self.detection is None else self.detection.slices

    @property
    def chain(self) -> Chain | None:
        """The checks of norm, clipping, state between steps and the copy of the master weights."""
        return None if self.detection is None else self.detection.chain


@dataclass(frozen=True)
class Line:
    """One place in the order of hooks.

    Attributes:
        hook: name of the hook's class.
        what: what it does, for the table of the documentation.
        of: the hook of a run's features; None where the configuration does not ask for it.
        always: whether every run has it.
    """

    slot: Slot
    hook: str
    what: str
    of: Callable[[Built], Hook | None]
    always: bool = False


def _state_faults(built: Built) -> StateFaults | None:
    injector = built.start.injection.injector
    if injector is None:
        return None
    from megasdc.faults.stored import StateFaults

    return StateFaults(built.start.run.engine, injector)


ORDER = (
    # What this rank does, told before everything else does it; then, before anything is written, whether it may be.
    Line(Slot.PRESENCE, "Health", "what this rank is doing, in its progress record", lambda run: run.health),
    Line(Slot.PRESENCE, "LinkPings", "measures links between hosts at an interval of steps", lambda run: run.links),
    Line(
        Slot.PRESENCE,
        "FolderWatch",
        "ends a run whose folder another launch has taken",
        lambda run: FolderWatch(run.start.locks),
        always=True,
    ),
    Line(
        Slot.PRESENCE,
        "StartReport",
        "event `start/phases` after the first step",
        lambda run: StartReport(run.start.clock),
        always=True,
    ),
    # Times begin before injected delays, and so include them.
    Line(Slot.TIMES, "StepTimes", "times of micro-batches, for DropCompute and stragglers", lambda run: run.times),
    Line(Slot.TIMES, "StragglerWatch", "compares times of ranks", lambda run: run.stragglers),
    Line(
        Slot.TIMES,
        "InjectedDelays",
        "sleeps before micro-batches",
        lambda run: run.start.injection.delays and run.start.injection.delays.delays,
    ),
    Line(Slot.TIMES, "TimeSplit", "seconds in forward, backward and optimizer; on rank 0", lambda run: run.start.split),
    Line(Slot.TIMES, "DropCompute", "decisions, times, threshold", lambda run: run.drop),
    Line(
        Slot.TIMES,
        "WaitForSnapshots",
        "waits until snapshots under way are whole, before any hook after it changes what they copy",
        lambda run: WaitForSnapshots([one.wait_for_copy for one in (run.memory, run.saver) if one is not None]),
        always=True,
    ),
    # Local gradients are read before faults are injected into them.
    Line(Slot.CHECKS, "StepChecker", "audits and checks of every step", lambda run: run.detection),
    Line(
        Slot.CHECKS,
        "SliceChecks",
        "sum, state, settings and update of a slice of each shard; copies local gradients",
        lambda run: run.slices,
    ),
    Line(
        Slot.CHECKS,
        "RowChecks",
        "calls of the layer whose rows are summed",
        lambda run: run.detection and run.detection.rows,
    ),
    Line(
        Slot.CHECKS,
        "TokenCheck",
        "tokens of the micro-batches that ranks compare",
        lambda run: run.detection and run.detection.tokens,
    ),
    Line(Slot.FAULTS, "StateFaults", "injects faults into gradients and optimizer states", _state_faults),
    Line(
        Slot.FAULTS,
        "ProcessFaults",
        "ends, stops or slows ranks",
        lambda run: run.start.injection.process_faults,
    ),
    # Reduced gradients are read after faults are injected into them.
    Line(
        Slot.RESULTS,
        "ObserverSwitch",
        "attaches the `Observer` in steps in which somebody listens; it is called at this place",
        lambda run: run.recording.observation,
    ),
    Line(
        Slot.RESULTS,
        "ReducedGradientCheck",
        "what the slices' checks find in the reduced gradient and in the state",
        lambda run: run.slices and run.slices.found,
    ),
    Line(
        Slot.RESULTS,
        "Chain",
        "state between steps before hooks change it; what the step used, after it",
        lambda run: run.chain,
    ),
    Line(Slot.RESULTS, "TraceRecorder", "writes the trace", lambda run: run.recording.trace),
    Line(Slot.RESULTS, "DetailsRecorder", "writes what a step was made of", lambda run: run.recording.details),
    Line(
        Slot.GRADIENTS,
        "ParameterSync",
        "a study's exchange of gradients and states",
        lambda run: run.study and run.study.in_step,
    ),
    # The last that changes gradients: nothing that comes after it acts in a step.
    Line(Slot.BOUNDS, "GradientBounds", "entries of `optimizer_hooks`", lambda run: run.bounds),
    Line(
        Slot.BOUNDS,
        "Unclipped",
        "copies a slice of the bounded gradients for the slices' checks",
        lambda run: run.slices and run.slices.unclipped,
    ),
    Line(
        Slot.BOUNDS,
        "Sums",
        "adds up blocks of what the norm is taken of",
        lambda run: run.chain and run.chain.sums,
    ),
    # Before anything that looks at what a step has left, and saves it.
    Line(Slot.STOP, "LocalSgd", "ends rounds of Local-SGD: weights of all replicas", lambda run: run.local_sgd),
    # This run, then a study's replicas.
    Line(
        Slot.STOP,
        "SkipWatch",
        "counts skipped steps; ends with 74 past `training.max_skipped_steps`, or if the last 10 had NaN or Inf",
        lambda run: SkipWatch(run.start.sections.training.max_skipped_steps, checkpoint_folder(run.start.config)),
        always=True,
    ),
    Line(Slot.STOP, "RoomWatch", "stops a run that has no room for what it writes", lambda run: run.room, always=True),
    Line(
        Slot.STOP,
        "StopWatch",
        "signals, time limit, `training.stop_step`, agreed by all ranks",
        lambda run: _stop_watch(run.start),
        always=True,
    ),
    Line(
        Slot.STOP,
        "IsolationLimit",
        "`sdc.isolation.max_steps`, where replicas were left out",
        lambda run: run.isolation,
    ),
    Line(
        Slot.STOP,
        "Study",
        "comparison with the trusted replica; all replicas stop together",
        lambda run: run.study,
    ),
    Line(Slot.MEASURE, "Evaluator", "validation loss", lambda run: run.evaluator),
    Line(
        Slot.MEASURE,
        "ManagedCollection",
        "garbage collection at the same steps on all ranks",
        lambda run: _managed_collection(run.start),
    ),
    Line(Slot.MEASURE, "Reporter", "line, metrics, progress bar", lambda run: run.reporter, always=True),
    Line(Slot.KEEP, "MemoryCheckpoints", "snapshots in the memory of hosts", lambda run: run.memory),
    Line(Slot.KEEP, "Saver", "checkpoints; compares parameters before", lambda run: run.saver, always=True),
    # What may damage a checkpoint that is whole.
    Line(Slot.END, "DelayReport", "what injected delays slept", lambda run: run.start.injection.delays),
    Line(
        Slot.END,
        "FaultDrill",
        "faults in files of a finished checkpoint; what never fired",
        lambda run: _fault_drill(run.start),
    ),
    Line(Slot.END, "LastLines", "waits for room for the last lines", lambda run: LastLines(run.room), always=True),
    # What one rank waits for at the end, where no other rank waits for it any more.
    Line(
        Slot.END,
        "Archiver",
        "starts pushes of checkpoints into the archive; at the end waits for the last",
        lambda run: run.archiver,
    ),
)
"""The hooks of a run, in the order in which they are called, in a step and between steps."""


def build_hooks(start: Start) -> list[Hook]:
    """Build a run's hooks, in the order of ``ORDER``; those of the user's own come last in their slots.

    Raises:
        ConfigError: a hook of the user's own cannot be made, or has no place, or the name of another's state.

    Collective: all ranks of the world.
    """
    built = _build(start)
    _say_protection(start, built.memory)
    hooks = [(line.slot, hook) for line in ORDER if (hook := line.of(built)) is not None]
    own = _user_hooks(start, [hook for _, hook in hooks])
    hooks += [(Slot(hook.slot), hook) for hook in own]
    return [hook for slot in Slot for at, hook in hooks if at is slot]


def _user_hooks(start: Start, hooks: list[Hook]) -> list[Hook]:
    if not start.sections.hooks:
        return []
    from megasdc.train.user_hooks import build_user_hooks, refuse_shared_names

    own = build_user_hooks(start.sections.hooks, start.run)
    refuse_shared_names([*hooks, *own], own)
    return own


def _build(start: Start) -> Built:
    sections = start.sections
    study = _study(start)
    writer = build_writer(start.config, start.run)
    recording = _recording(start, writer, study)
    drop = _drop_compute(start, writer)
    times, slow = _times_and_stragglers(start, drop, writer)
    local_sgd = _local_sgd(start, writer, recording.detection)
    memory, saver = _savers(start, writer, recording.detection, local_sgd)
    evaluator = _evaluator(start, writer)
    if local_sgd is not None and evaluator is not None:
        local_sgd.after_late_round = evaluator.evaluate_when_due
    return Built(
        start=start,
        recording=recording,
        times=times,
        stragglers=slow,
        drop=drop,
        bounds=_gradient_bounds(start, writer),
        study=study,
        local_sgd=local_sgd,
        memory=memory,
        saver=saver,
        room=RoomWatch(sections.logging.wait_for_room_s),
        health=_health(start),
        links=_link_pings(start, writer),
        isolation=_isolation_limit(start),
        evaluator=evaluator,
        reporter=_reporter(start, writer),
        archiver=_archiver(start, writer),
    )


def _drop_compute(start: Start, writer: MetricsWriter | None) -> DropCompute | None:
    section = start.sections.drop_compute
    if not section.enabled:
        return None
    from megasdc.train.drop_compute import DropCompute

    return DropCompute(section, start.run, writer, start.sections.logging.interval)


def _gradient_bounds(start: Start, writer: MetricsWriter | None) -> GradientBounds | None:
    specs = start.sections.optimizer_hooks
    if not specs:
        return None
    from megasdc.train.gradient_bounds import GradientBounds

    return GradientBounds(specs, start.run, start.sections.logging.interval, writer)


def _local_sgd(start: Start, writer: MetricsWriter | None, detection: StepChecker | None) -> LocalSgd | None:
    section = start.sections.local_sgd
    if section.replicas is None:
        return None
    from megasdc.train.detection.finding_policy import Incidents
    from megasdc.train.local_sgd import LocalSgd

    hook = LocalSgd(section, start.run, start.sections.parallel.timeout_s, writer)
    hook.incidents = Incidents(start.config, start.run)
    if detection is not None and detection.chain is not None:
        hook.changed = detection.chain.restart
    return hook


def _stop_watch(start: Start) -> StopWatch:
    training = start.sections.training
    return StopWatch(start.signals, training.time_limit_s, start.clock.started_at, training.stop_step)


def _managed_collection(start: Start) -> ManagedCollection | None:
    training = start.sections.training
    managed = training.garbage_collection == "managed"
    return ManagedCollection(training.garbage_collection_interval) if managed else None


def _study(start: Start) -> Study | None:
    if start.shared is None:
        return None
    from megasdc.lab.studies.hook import Study, StudyLaunch

    assert isinstance(start.shared, StudyLaunch), "what share_launch has made"
    return Study(start.shared, start.run, start.eval_loader, start.sections.checkpoint.interval)


def _isolation_limit(start: Start) -> IsolationLimit | None:
    steps = start.sections.sdc.isolation.max_steps
    if start.remaining is None or steps is None:
        return None
    from megasdc.train.isolation import IsolationLimit

    return IsolationLimit(start.remaining, steps)


def _is_watched(start: Start) -> bool:
    launched = start.signals.leave_running is not None
    return start.sections.health.is_on(launched=launched, studied=start.shared is not None)


def _health(start: Start) -> Health | None:
    if not _is_watched(start):
        return None
    from megasdc.ops.health.hooks.progress import Health

    try:
        return Health(start.sections.health, start.run, start.signals.leave_running)
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
    from megasdc.ops.health.hooks.stragglers import StragglerWatch

    times = times or StepTimes(start.run.engine.device)
    return times, StragglerWatch(start.sections.health.slow_ratio, start.run, times, writer)


def _build_detection(start: Start, writer: MetricsWriter | None) -> StepChecker | None:
    config, run = start.config, start.run
    if start.batches is None:
        if run.dims.rank == 0:
            logger.info(UNCHECKED)
        return None
    from megasdc.train.detection.budget import coverage_table, measure_speed, plan_checks
    from megasdc.train.detection.step_checker import build_detection

    speed = measure_speed(config, run.engine)
    plan = plan_checks(config, run.engine, run.loader.dataset.vocab_size, speed, run.host_group)
    if run.dims.rank == 0:
        table = coverage_table(config, run.engine, plan, plan.cadence)
        level = logging.INFO if start.sections.protect == OFF else logging.DEBUG  # the word has lines of its own
        for line in ("coverage of silent data corruption:\n" + "\n".join(table), *plan.lines):
            logger.log(level, "%s", line)
        run.events.emit("start", "coverage", step=run.step, table=table)
        run.events.emit("start", "checks", step=run.step, coverage=plan.lines)
    return build_detection(config, run, start.batches, start.signals, start.injection.injector, plan, writer)


def _recording(start: Start, writer: MetricsWriter | None, study: Study | None) -> Recording:
    """Hooks that observe the tensors of a step; all watches share one observation."""
    section = start.sections.trace
    injector, detection = start.injection.injector, _build_detection(start, writer)
    asked = section.enabled or section.details
    if not asked and study is None and injector is None and detection is None:
        return Recording(None, None, None, None)
    from megasdc.engine.observer import ObserverSwitch
    from megasdc.train.trace import DetailsRecorder, TraceRecorder, build_tracer, watch_for_trace

    config, run, watches = start.config, start.run, []
    if injector is not None:
        from megasdc.faults.drill import watch_for_faults

        watches.append(watch_for_faults(injector, run.engine))
    if study is not None:
        watches += study.watches()
    if (tracer := build_tracer(section, run.engine)) is not None:
        watches.append(watch_for_trace(tracer))
    if (details := DetailsRecorder(run) if section.details else None) is not None:
        watches.append(details.watch)
    if detection is not None:
        from megasdc.train.detection.step_checker import build_search, watches_of

        watches += watches_of(detection)
    clock = None if detection is None else detection.budget.looks
    observation = ObserverSwitch(run.engine, watches, clock) if watches else None
    if detection is not None and observation is not None:
        detection.observe = observation.before_step
        detection.search = build_search(config.megasdc.sdc.always_on, detection, run, observation)
    return Recording(
        observation,
        detection,
        None if tracer is None else TraceRecorder(run, tracer, config),
        details,
    )


def _link_pings(start: Start, writer: MetricsWriter | None) -> LinkPings | None:
    interval = start.sections.health.ping_interval
    if not (_is_watched(start) and interval):
        return None
    from megasdc.ops.health.hooks.links import LinkPings

    return LinkPings(interval, start.run, writer)


def _evaluator(start: Start, writer: MetricsWriter | None) -> Evaluator | None:
    interval = start.sections.training.eval_interval
    return Evaluator(start.eval_loader, interval, writer) if start.eval_loader is not None and interval else None


def _reporter(start: Start, writer: MetricsWriter | None) -> Reporter:
    sections = start.sections
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


def _run_state(start: Start, local_sgd: LocalSgd | None) -> RunState:
    study = None if start.shared is None else start.shared.section
    return RunState(
        start.config,
        start.run,
        start.manifest.tokenizer.checksum,
        study,
        dict if local_sgd is None else local_sgd.own_state,
    )


def _savers(
    start: Start, writer: MetricsWriter | None, detection: StepChecker | None, local_sgd: LocalSgd | None
) -> tuple[MemoryCheckpoints | None, Saver]:
    """The hook that keeps checkpoints in memory, if the run has one, and the hook that writes them to disk."""
    section, run, state = start.sections.checkpoint.memory, start.run, _run_state(start, local_sgd)
    before_save = OncePerStep(None if detection is None else detection.before_save)
    after_save = None if detection is None else detection.after_save
    memory = MemoryCheckpoints(section, run, state, writer, before_save) if section.interval else None
    return memory, Saver(start.config, run, writer, state, before_save, after_save, start.fence)


def _archiver(start: Start, writer: MetricsWriter | None) -> Archiver | None:
    sections = start.sections
    if sections.checkpoint.archive.address is None:
        return None
    from megasdc.ops.archive.hook import build_archiver

    folder, audits = checkpoint_folder(start.config), sections.audit.enabled
    return build_archiver(sections.checkpoint, folder, start.run, verified_only=audits, writer=writer)


def _fault_drill(start: Start) -> FaultDrill | None:
    drills, sections = start.injection, start.sections
    if not (sections.faults or sections.process_faults):
        return None
    from megasdc.faults.drill import FaultDrill

    return FaultDrill(drills.injector, drills.process_faults, checkpoint_folder(start.config), start.run.host_group)


def _say_sizes(start: Start, sizes: ModelSizes) -> None:
    engine = start.run.engine
    if start.run.dims.rank == 0:
        logger.info(
            "%s parameters, %s, global batch %d samples of %d tokens, %s",
            f"{sizes.total:,}",
            start.run.dims,
            engine.samples_per_step,
            start.sections.data.sequence_length,
            start.config.precision,
        )


def _say_protection(start: Start, memory: MemoryCheckpoints | None) -> None:
    """Log what the word `protect` covers in this run, at which cost, and what not, and write it as an event."""
    run, hosts = start.run, None if memory is None else memory.hosts
    lines = start_lines(start.sections, start.config.deepspeed, run.dims.data, hosts)
    if run.dims.rank == 0 and lines:
        for line in lines:
            logger.info("%s", line)
        logger.info("what sees which phase of a step, and when: megasdc coverage --config FILE --world-size N")
        run.events.emit("start", "protection", step=run.step, word=start.sections.protect, lines=lines)


def _known_peak(precision: str) -> float | None:
    """Peak of this rank's GPU in 16-bit arithmetic, TFLOP/s; None: fp32, no GPU, or not in the table."""
    if precision == "fp32" or not torch.cuda.is_available():
        return None
    return peak_tflops(torch.cuda.get_device_name())


def share_launch(section: StudySection, world: ReplicaWorld, folder: Path) -> SharedLaunch:
    """This rank's part in a launch of several runs."""
    from megasdc.lab.studies.hook import StudyLaunch

    return StudyLaunch(section, world, folder)


FEATURES = Features(build_hooks=build_hooks, share_launch=share_launch)
