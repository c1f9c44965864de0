"""How does a configuration become a run? The one place that knows every section and every feature."""

from __future__ import annotations

import copy
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.checkpoint.files import list_steps
from megasdc.checkpoint.initial import InitialWeights, check_fits, check_vocabulary
from megasdc.checkpoint.logical import load_weights
from megasdc.config import Layout, MegasdcSection, ModelSection, RunConfig, check_layout, ffn_width
from megasdc.data.dataset import build_datasets, verify_data
from megasdc.data.loader import EvalLoader, MicroBatchLoader
from megasdc.data.manifest import Manifest
from megasdc.determinism import set_deterministic
from megasdc.engine.engine import TrainingEngine, build_engine
from megasdc.engine.time_split import TimeSplit
from megasdc.errors import StorageError
from megasdc.events import EventLog
from megasdc.metrics.names import peak_tflops
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.pipeline import build_pipeline
from megasdc.model.sizes import model_sizes
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.optim.groups import parameter_groups
from megasdc.parallel import ParallelDims, groups
from megasdc.train.evaluate import Evaluator
from megasdc.train.faults import FaultDrill, build_injector, build_process_faults
from megasdc.train.observe import Observation, build_observer
from megasdc.train.report import Reporter
from megasdc.train.run import Run, StepHook
from megasdc.train.saving import Saver, checkpoint_folder, resume
from megasdc.train.signals import StopSignals
from megasdc.train.startup import StartClock, StartReport
from megasdc.train.stop import SkipWatch, StopWatch
from megasdc.train.trace import TraceRecorder, build_tracer, trace_header

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_run(config: RunConfig, clock: StartClock, signals: StopSignals) -> Run:
    """Build everything that a training rank needs, and resume from a checkpoint where there is one.

    Args:
        config: the checked configuration.
        clock: told where each part of the start ends.
        signals: what this rank was sent since it started.

    Returns:
        The run with its hooks, at the step it goes on from.

    Raises:
        MegasdcError: with the class that says what is wrong.

    Collective: all ranks of the world.
    """
    clock.mark("imports")
    sections = config.megasdc
    layout = check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
    manifest = verify_data(sections.data)[0]
    folder = prepare_run_folder(Path(sections.logging.run_dir))
    set_threads(sections.parallel.threads)
    set_deterministic(sections.determinism)
    clock.mark("checks")
    groups.init_process_group(sections.parallel.timeout_s)
    dims = groups.init_model_parallel(layout.tensor, layout.pipeline, sections.parallel.timeout_s)
    clock.mark("groups")
    events = EventLog(folder, dims.rank)
    if dims.rank == 0:
        events.emit("start", "run", layout=dims.layout, world_size=dims.world_size)
    engine = build_training_engine(config, layout, dims, manifest.tokenizer.vocab_size, clock)
    loader, eval_loader = _build_loaders(config, layout, dims, manifest)
    clock.mark("data")
    host_group = dist.new_group(backend="gloo") if torch.cuda.is_available() else dist.group.WORLD
    groups.set_all_timeouts(sections.parallel.timeout_s)
    split = TimeSplit(engine.device) if dims.rank == 0 else None
    if split is not None:
        engine.hooks.append(split)
    run = Run(
        folder=folder,
        dims=dims,
        engine=engine,
        loader=loader,
        batches=loader if split is None else split.watch(loader),
        events=events,
        steps=sections.training.steps,
        host_group=host_group,
    )
    injector = build_injector(sections, run)
    process_faults = build_process_faults(sections, run)
    hook_states = resume(run, config)
    if dims.rank == 0:  # only now: a resume that was refused must leave the run as it was
        write_atomically(folder / "resolved.json", json.dumps(config.resolved(), indent=2) + "\n")
    clock.mark("resume")
    tracer = build_tracer(sections.trace, engine)
    observer = build_observer(engine, injector, tracer)
    recording: list[StepHook] = [] if observer is None else [Observation(observer)]
    if tracer is not None:
        recording.append(TraceRecorder(tracer, trace_header(config, engine, tracer.algorithm)))
    drilling: list[StepHook] = []
    if sections.faults or sections.process_faults:
        drilling.append(FaultDrill(injector, process_faults, checkpoint_folder(config), host_group))
    run.hooks = _build_hooks(config, run, eval_loader, manifest, split, clock, signals, recording, drilling)
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
    drilling: list[StepHook],
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
    # What a step computed and its findings first, then what is measured, then the decision to stop, then what is kept;
    # last what may harm a checkpoint that is complete.
    return [
        StartReport(clock),
        *recording,
        SkipWatch(sections.training.max_skipped_steps),
        StopWatch(signals, sections.training.time_limit_s, clock.started_at, sections.training.stop_step),
        *evaluator,
        Reporter(
            interval=sections.logging.interval,
            flops_per_token=sizes.flops_per_token(sections.data.sequence_length),
            split=split,
            writer=writer,
            peak=sections.logging.peak_tflops or _known_peak(config.precision),
            progress=sections.logging.progress_bar,
        ),
        Saver(config, writer, manifest.tokenizer.checksum),
        *drilling,
    ]


def build_training_engine(
    config: RunConfig, layout: Layout, dims: ParallelDims, vocab_size: int, clock: StartClock
) -> TrainingEngine:
    """Build the model's stage of this rank and its engine.

    Args:
        config: the checked configuration.
        layout: sizes that depend on the number of ranks.
        dims: place of this rank.
        vocab_size: entries of the tokenizer's vocabulary.
        clock: told when the model and when the engine is built.

    Collective: all ranks of the world.
    """
    sections = config.megasdc
    pipeline, streams = build_pipeline(
        effective_model(sections),
        sections.parallel,
        dims,
        vocab_size=vocab_size,
        seed=sections.training.seed,
        dtype=DTYPES[config.precision],
    )
    goes_on = sections.checkpoint.universal is not None or bool(list_steps(checkpoint_folder(config)))
    if sections.model.initial_weights is not None and not goes_on:
        # Now, because the engine makes its fp32 copy of them; with a checkpoint there, the resume sets them.
        _start_from(sections.model.initial_weights, pipeline, config, dims, vocab_size)
    clock.mark("model")
    engine = build_engine(
        pipeline,
        deepspeed_config(config, layout),
        parameter_groups(pipeline),
        dims=dims,
        streams=streams,
        masks_tokens=sections.data.mask_end_of_document,
    )
    clock.mark("engine")
    return engine


def effective_model(sections: MegasdcSection) -> ModelSection:
    """The model section with what deterministic mode asks of Megatron-core.

    With it the embedding is looked up by indexing, whose backward pass repeats on GPUs, and Transformer Engine's
    attention checks its environment variable.
    """
    if not sections.determinism.enabled:
        return sections.model
    return sections.model.model_copy(update={"megatron": {**sections.model.megatron, "deterministic_mode": True}})


def _start_from(folder: str, pipeline: Any, config: RunConfig, dims: ParallelDims, vocab_size: int) -> None:
    """Put this rank's part of initial weights into its stage."""
    sections = config.megasdc
    weights = InitialWeights(folder)
    check_fits(weights, sections.model)
    check_vocabulary(weights, Manifest.load(sections.data.path), sections.data.path)
    load_weights(
        weights,
        pipeline.named_parameters(),
        sections.model,
        vocab_size=vocab_size,
        tensor=dims.tensor,
        tp_rank=dims.tp_rank,
    )
    if dims.rank == 0:
        logger.info("initial weights from %s (%s)", folder, weights.manifest.source)


HOST_BUCKET_ELEMENTS = 2_000_000
"""Default of ``zero_optimization.reduce_bucket_size`` on a machine without an accelerator, gradients a bucket.

DeepSpeed's own default of 500 million, made for GPUs, copies all gradients of a step into fresh memory at once.
"""


def deepspeed_config(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's part of the configuration, with what depends on the layout filled in."""
    deepspeed = copy.deepcopy(config.deepspeed)
    deepspeed["train_batch_size"] = layout.train_batch_size
    deepspeed["train_micro_batch_size_per_gpu"] = layout.micro_batch_size
    deepspeed["gradient_accumulation_steps"] = layout.accumulation_steps
    if not torch.cuda.is_available():
        deepspeed["zero_optimization"] = {"reduce_bucket_size": HOST_BUCKET_ELEMENTS, **deepspeed["zero_optimization"]}
    if config.megasdc.parallel.sequence_parallel:
        # Tensor ranks hold different parts of the sequence, which DeepSpeed would take for copies of one tensor.
        deepspeed["pipeline"] = {
            **deepspeed.get("pipeline", {}),
            "pipe_partitioned": False,
            "grad_partitioned": False,
        }
    return deepspeed


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
    loader = MicroBatchLoader(train, layout.micro_batch_size, dims.dp_rank, dims.data)
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


def set_threads(threads: int) -> None:
    """Set the CPU threads of this rank on a machine without an accelerator; 0 leaves PyTorch's choice."""
    if threads and not torch.cuda.is_available():
        torch.set_num_threads(threads)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file under a temporary name and rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
