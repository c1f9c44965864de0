"""How does a configuration become a run? The one place that knows every section and every feature."""

from __future__ import annotations

import copy
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.config import Layout, RunConfig, check_layout, ffn_width
from megasdc.data.dataset import build_datasets
from megasdc.data.loader import EvalLoader, MicroBatchLoader
from megasdc.data.manifest import Manifest, verify_prepared
from megasdc.engine.engine import TrainingEngine, build_engine
from megasdc.engine.time_split import TimeSplit
from megasdc.errors import StorageError
from megasdc.events import EventLog
from megasdc.metrics.writer import MetricsWriter
from megasdc.model.pipeline import build_pipeline
from megasdc.model.sizes import model_sizes
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.optim.groups import parameter_groups
from megasdc.parallel import ParallelDims, groups
from megasdc.train.evaluate import Evaluator
from megasdc.train.report import Reporter
from megasdc.train.run import Run, StepHook
from megasdc.train.saving import Saver, resume
from megasdc.train.stop import SkipWatch, StopWatch

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class BuiltRun:
    """A run and what looks in between its steps."""

    run: Run
    hooks: list[StepHook]


def build_run(config: RunConfig, started_at: float) -> BuiltRun:
    """Build everything that a training rank needs, and resume from a checkpoint where there is one.

    Args:
        config: the checked configuration.
        started_at: when this process started, on the clock of ``time.monotonic``.

    Returns:
        The run, at the step it goes on from, and its hooks in their order.

    Raises:
        MegasdcError: with the class that says what is wrong.

    Collective: all ranks of the world.
    """
    sections = config.megasdc
    layout = check_layout(config, int(os.environ.get("WORLD_SIZE", "1")))
    manifest = verify_prepared(sections.data.path)
    folder = prepare_run_folder(Path(sections.logging.run_dir))
    set_threads(sections.parallel.threads)
    groups.init_process_group(sections.parallel.timeout_s)
    dims = groups.init_model_parallel(layout.tensor, layout.pipeline, sections.parallel.timeout_s)
    events = EventLog(folder, dims.rank)
    if dims.rank == 0:
        write_atomically(folder / "resolved.json", json.dumps(config.resolved(), indent=2) + "\n")
        events.emit("start", "run", layout=dims.layout, world_size=dims.world_size)
    engine = build_training_engine(config, layout, dims, manifest.tokenizer.vocab_size)
    loader, eval_loader = _build_loaders(config, layout, dims, manifest)
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
    resume(run, config)
    return BuiltRun(run, _build_hooks(config, run, eval_loader, manifest, split, started_at))


def _build_hooks(
    config: RunConfig,
    run: Run,
    eval_loader: EvalLoader | None,
    manifest: Manifest,
    split: TimeSplit | None,
    started_at: float,
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
    # A step's findings first, then what is measured, then the decision to stop, then what is kept.
    return [
        SkipWatch(sections.training.max_skipped_steps),
        StopWatch(sections.training.time_limit_s, started_at, sections.training.stop_step),
        *evaluator,
        Reporter(
            interval=sections.logging.interval,
            flops_per_token=sizes.flops_per_token(sections.data.sequence_length),
            split=split,
            writer=writer,
            peak=sections.logging.peak_tflops,
            progress=sections.logging.progress_bar,
        ),
        Saver(config, writer),
    ]


def build_training_engine(config: RunConfig, layout: Layout, dims: ParallelDims, vocab_size: int) -> TrainingEngine:
    """Build the model's stage of this rank and its engine.

    Args:
        config: the checked configuration.
        layout: sizes that depend on the number of ranks.
        dims: place of this rank.
        vocab_size: entries of the tokenizer's vocabulary.

    Collective: all ranks of the world.
    """
    sections = config.megasdc
    pipeline, streams = build_pipeline(
        sections.model,
        sections.parallel,
        dims,
        vocab_size=vocab_size,
        seed=sections.training.seed,
        dtype=DTYPES[config.precision],
    )
    deepspeed = deepspeed_config(config, layout)
    return build_engine(
        pipeline,
        deepspeed,
        parameter_groups(pipeline),
        dims=dims,
        streams=streams,
        masks_tokens=sections.data.mask_end_of_document,
    )


def deepspeed_config(config: RunConfig, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's part of the configuration, with what depends on the layout filled in."""
    deepspeed = copy.deepcopy(config.deepspeed)
    deepspeed["train_batch_size"] = layout.train_batch_size
    deepspeed["train_micro_batch_size_per_gpu"] = layout.micro_batch_size
    deepspeed["gradient_accumulation_steps"] = layout.accumulation_steps
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


def prepare_run_folder(folder: Path) -> Path:
    """Create the run folder.

    Raises:
        StorageError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe_{os.getpid()}"
        probe.write_text("")
        probe.unlink()
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
