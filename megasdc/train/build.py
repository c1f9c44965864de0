"""How does a configuration become a run? The one place that knows every section and every feature."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megasdc.checkpoint.manifest import installed_versions
from megasdc.config import Layout, RunConfig, check_layout, ffn_width, replica_config
from megasdc.data.dataset import TokenDataset, build_datasets, verify_data
from megasdc.data.loader import EvalLoader, MicroBatch, MicroBatchLoader
from megasdc.data.manifest import Manifest
from megasdc.data.step_batches import StepBatches
from megasdc.determinism import set_deterministic
from megasdc.engine.time_split import TimeSplit
from megasdc.errors import StorageError
from megasdc.events import EventLog
from megasdc.faults.injector import Injector
from megasdc.metrics.names import peak_tflops
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.sizes import model_sizes
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.parallel import ParallelDims, groups
from megasdc.parallel.cut import Cut
from megasdc.train.build_detection import build_detection, build_search, build_toleranced, detects, watches_of
from megasdc.train.build_engine import build_training_engine
from megasdc.train.coverage import measure_speed, plan_checks
from megasdc.train.delays import DelayReport
from megasdc.train.detection import Detection
from megasdc.train.drop_compute import DropCompute
from megasdc.train.evaluate import Evaluator
from megasdc.train.faults import FaultDrill, build_injector, build_process_faults
from megasdc.train.garbage import CollectionTimer, ManagedCollection
from megasdc.train.gradient_bounds import GradientBounds
from megasdc.train.observe import Observation, watch_for_faults, watch_for_trace
from megasdc.train.report import Reporter
from megasdc.train.run import Run, StepHook
from megasdc.train.saving import Saver, checkpoint_folder, resume
from megasdc.train.signals import StopSignals
from megasdc.train.startup import StartClock, StartReport
from megasdc.train.stop import SkipWatch, StopWatch
from megasdc.train.study import Study, StudyPart, agree_on_checkpoint, meet
from megasdc.train.trace import TraceRecorder, build_tracer, trace_header

logger = logging.getLogger(__name__)


def build_run(config: RunConfig, clock: StartClock, signals: StopSignals, cut: Cut | None = None) -> Run:
    """Build everything that a training rank needs, and resume from a checkpoint where there is one.

    Args:
        config: the checked configuration.
        clock: told where each part of the start ends.
        signals: what this rank was sent since it started.
        cut: place of this rank in a launch of several replicas; null without a study.

    Returns:
        The run with its hooks, at the step it goes on from.

    Raises:
        MegasdcError: with the class that says what is wrong.

    Collective: all ranks of the world.
    """
    clock.mark("imports")
    part = None
    if cut is not None:
        part = StudyPart(config.megasdc.study, cut, prepare_run_folder(Path(config.megasdc.logging.run_dir)))
        whole, config = config, replica_config(config, cut.replica)
    sections = config.megasdc
    layout = check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
    manifest = verify_data(sections.data)[0]
    folder = prepare_run_folder(Path(sections.logging.run_dir))
    set_threads(sections.parallel.threads)
    set_deterministic(sections.determinism)
    clock.mark("checks")
    bridge = None if part is None else meet(part, sections.parallel.timeout_s)
    if bridge is None:
        groups.init_process_group(sections.parallel.timeout_s)
    dims = groups.init_model_parallel(layout.tensor, layout.pipeline, sections.parallel.timeout_s)
    clock.mark("groups")
    events = EventLog(folder, dims.rank)
    if dims.rank == 0:
        versions = installed_versions()
        events.emit("start", "run", layout=dims.layout, world_size=dims.world_size, versions=versions)
    engine = build_training_engine(config, layout, dims, manifest.tokenizer.vocab_size, clock)
    loader, eval_loader = _build_loaders(config, layout, dims, manifest)
    clock.mark("data")
    host_group = dist.new_group(backend="gloo") if torch.cuda.is_available() else dist.group.WORLD
    groups.set_all_timeouts(sections.parallel.timeout_s)
    split = TimeSplit(engine.device) if dims.rank == 0 else None
    if split is not None:
        engine.hooks.append(split)
    batches: Iterator[MicroBatch] = loader if split is None else split.watch(loader)
    kept = StepBatches(loader, batches) if detects(sections) else None
    run = Run(
        folder=folder,
        dims=dims,
        engine=engine,
        loader=loader,
        batches=batches if kept is None else kept,
        events=events,
        steps=sections.training.steps,
        host_group=host_group,
    )
    injector = build_injector(sections, run)
    process_faults = build_process_faults(sections, run)
    delays = [DelayReport(sections.delay, sections.logging.interval, run)] if sections.delay else []
    hook_states = resume(run, config, None if bridge is None else partial(agree_on_checkpoint, bridge))
    if dims.rank == 0:  # only now: a resume that was refused must leave the run as it was
        _write_resolved(folder, config)
        if part is not None and part.cut.launch_rank == 0:
            _write_resolved(part.folder, whole)
    clock.mark("resume")
    tracer = build_tracer(sections.trace, engine)
    watches = [] if injector is None else [watch_for_faults(injector, engine)]
    studying: list[StepHook] = []
    if part is not None and bridge is not None:
        study = Study(part, bridge, run, eval_loader, sections.checkpoint.interval)
        watches += study.watches()
        studying.append(study)
    if tracer is not None:
        watches.append(watch_for_trace(tracer))
    detection = None if kept is None else _build_detection(config, run, kept, signals, injector)
    if detection is not None:
        watches += watches_of(detection)
    recording: list[StepHook] = []
    if watches:
        observation = Observation(engine, watches)
        recording.append(observation)
        if detection is not None:
            detection.search = build_search(sections.sdc.always_on, detection, run, observation)
    if detection is not None:
        recording.append(detection)
    if (toleranced := build_toleranced(sections, run, signals)) is not None:
        recording.append(toleranced)
    if tracer is not None:
        recording.append(TraceRecorder(tracer, trace_header(config, engine, tracer.algorithm)))
    drilling: list[StepHook] = [*delays]
    if sections.faults or sections.process_faults:
        drilling.append(FaultDrill(injector, process_faults, checkpoint_folder(config), host_group))
    before_save = None if detection is None else detection.before_save
    run.hooks = _build_hooks(
        config, run, eval_loader, manifest, split, clock, signals, recording, studying, drilling, before_save
    )
    for hook in run.hooks:
        if state := hook_states.get(type(hook).__name__):
            hook.load_state_dict(state)
    return run


def _build_hooks(
    config: RunConfig,
    run: Run,
    eval_loader: EvalLoader | None,
    manifest: Manifest,
    split: TimeSplit | None,
    clock: StartClock,
    signals: StopSignals,
    recording: list[StepHook],
    studying: list[StepHook],
    drilling: list[StepHook],
    before_save: Callable[[Run], None] | None,
) -> list[StepHook]:
    sections = config.megasdc
    writer = MetricsWriter(run.folder, run.engine.monitor) if run.dims.rank == 0 else None
    vocab = padded_vocab_size(manifest.tokenizer.vocab_size, sections.model.vocab_multiple)
    sizes = model_sizes(sections.model, ffn_width(sections.model), vocab)
    if run.dims.rank == 0:
        logger.info(
            "%s parameters, %s, global batch %d samples of %d tokens, %s",
            f"{sizes.total:,}",
            run.dims,
            run.engine.train_batch_size(),
            sections.data.sequence_length,
            config.precision,
        )
    evaluator = (
        [Evaluator(eval_loader, sections.training.eval_interval, writer)]
        if eval_loader is not None and sections.training.eval_interval
        else []
    )
    drop, interval = sections.drop_compute, sections.logging.interval
    dropping = [DropCompute(drop, run, writer, interval)] if drop.enabled else []
    hooks = sections.optimizer_hooks
    bounding = [GradientBounds(hooks, run, sections.logging.interval, writer)] if hooks else []
    managed = sections.training.garbage_collection == "managed"
    collecting = [ManagedCollection(sections.training.garbage_collection_interval)] if managed else []
    # How much a step computed, what it computed and its findings first, then what is measured, then the decision to
    # stop, first in each replica of a study, then in all, then what is kept; last what may harm a checkpoint that is
    # complete.
    return [
        StartReport(clock),
        *dropping,
        *recording,
        *bounding,
        SkipWatch(sections.training.max_skipped_steps),
        StopWatch(signals, sections.training.time_limit_s, clock.started_at, sections.training.stop_step),
        *studying,
        *evaluator,
        *collecting,
        Reporter(
            interval=sections.logging.interval,
            flops_per_token=sizes.flops_per_token(sections.data.sequence_length),
            split=split,
            collections=CollectionTimer() if writer is not None else None,
            writer=writer,
            peak=sections.logging.peak_tflops or _known_peak(config.precision),
            progress=sections.logging.progress_bar,
        ),
        Saver(config, writer, manifest.tokenizer.checksum, before_save),
        *drilling,
    ]


def _build_detection(
    config: RunConfig, run: Run, kept: StepBatches, signals: StopSignals, injector: Injector | None
) -> Detection:
    speed = measure_speed(config, run.engine)
    plan = plan_checks(config, run.engine, run.loader.dataset.vocab_size, speed, run.host_group)
    return build_detection(config, run, kept, signals, injector, plan)


def _build_loaders(
    config: RunConfig, layout: Layout, dims: ParallelDims, manifest: Manifest
) -> tuple[MicroBatchLoader, EvalLoader | None]:
    sections = config.megasdc
    eval_samples = sections.training.eval_samples if sections.training.eval_interval else 0
    train, valid = build_datasets(
        sections.data,
        manifest.tokenizer.vocab_size,
        sections.training.steps * layout.train_batch_size,
        eval_samples,
    )
    epoch = train.samples_per_epoch if isinstance(train, TokenDataset) else None
    loader = MicroBatchLoader(train, layout.micro_batch_size, dims.dp_rank, dims.data, samples_per_epoch=epoch)
    if valid is None:
        return loader, None
    return loader, EvalLoader(valid, layout.micro_batch_size, dims.dp_rank, dims.data, eval_samples)


def _known_peak(precision: str) -> float | None:
    """Peak of this rank's device where it is in the table; the table is of 16-bit arithmetic on GPUs."""
    if precision == "fp32" or not torch.cuda.is_available():
        return None
    return peak_tflops(torch.cuda.get_device_name())


def prepare_run_folder(folder: Path) -> Path:
    """Create the run folder.

    Raises:
        StorageError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(
            f"megasdc.logging.run_dir: {folder} is not writable ({error.strerror}); choose another folder"
        ) from error
    return folder


def _write_resolved(folder: Path, config: RunConfig) -> None:
    write_atomically(folder / "resolved.json", json.dumps(config.resolved(), indent=2) + "\n")


def set_threads(threads: int) -> None:
    """Set the CPU threads of this rank on a machine without an accelerator; 0 leaves PyTorch's choice."""
    if threads and not torch.cuda.is_available():
        torch.set_num_threads(threads)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file under a temporary name and rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
