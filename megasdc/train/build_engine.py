"""Building the engine of one rank from the configuration."""

from __future__ import annotations

import copy
import logging
import os
import socket
from typing import Any

import torch

from megasdc.checkpoint.files import list_steps
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.config.checks import BatchLayout
from megasdc.config.deepspeed import Bf16
from megasdc.config.load import RunConfig
from megasdc.config.model import ModelSection
from megasdc.config.sections import MegasdcSection
from megasdc.data.manifest import DataManifest
from megasdc.data.position import UnevenSplit
from megasdc.engine.engine import TrainingEngine, build_engine
from megasdc.model.pipeline import build_pipeline
from megasdc.optim.zero1 import parameter_groups
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.groups import device_index, ranks_on_device
from megasdc.train.checkpointer import checkpoint_folder
from megasdc.train.memory import HOST_BUCKET_ELEMENTS, check_memory, host_memory_bytes, memory_of_stages
from megasdc.train.process import StartClock

logger = logging.getLogger(__name__)

OWN_SINKS = ("tensorboard", "csv_monitor", "wandb")
"""DeepSpeed's keys of sinks that are ours (``megasdc.train.report``): with them DeepSpeed would write there, too."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_training_engine(
    config: RunConfig, layout: BatchLayout, dims: ParallelDims, vocab_size: int, clock: StartClock
) -> TrainingEngine:
    """Build the model's stage of this rank and its engine.

    Args:
        layout: sizes that depend on the number of ranks.
        vocab_size: entries of the tokenizer's vocabulary.
        clock: records when the model and the engine have been built.

    Raises:
        ConfigError: this rank's device does not support the configuration's precision.

    Collective: all ranks of the world.
    """
    check_precision(config.precision)
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
        # Before the engine is built, because it makes its fp32 copy of them; with a checkpoint, the resume sets them.
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
    if layout.is_uneven:
        engine.set_uneven_split(UnevenSplit(layout.train_batch_size // layout.micro_batch_size, layout.data))
    clock.mark("engine")
    return engine


def check_precision(precision: str) -> None:
    """Refuse a precision that DeepSpeed's accelerator does not support, before DeepSpeed fails with a traceback.

    Raises:
        ConfigError: this host's device does not support it.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if precision in supported and not supported[precision]():
        needs = " (a CPU needs AVX512-FP16)" if precision == "fp16" and accelerator.device_name() == "cpu" else ""
        raise ConfigError(
            f"{precision}.enabled: got true, but DeepSpeed does not train in {precision} on "
            f"{accelerator.device_name()} of {socket.gethostname()}{needs}; use another precision or host."
        )


def effective_model(sections: MegasdcSection) -> ModelSection:
    """The model section, with Megatron-core's deterministic mode where determinism is enabled.

    With it the embedding is looked up by indexing, whose backward pass is deterministic on GPUs, and Transformer
    Engine's attention checks its environment variable.
    """
    if not sections.determinism.enabled:
        return sections.model
    return sections.model.model_copy(update={"megatron": {**sections.model.megatron, "deterministic_mode": True}})


def _start_from(folder: str, pipeline: Any, config: RunConfig, dims: ParallelDims, vocab_size: int) -> None:
    """Load this rank's part of initial weights into its stage."""
    from megasdc.checkpoint.weights import InitialWeights, check_fits, check_tokenizer, load_weights, open_start

    sections = config.megasdc
    weights = open_start(folder)
    check_fits(weights, sections.model)
    check_tokenizer(weights, DataManifest.load(sections.data.path), sections.data.path)
    whence = weights.manifest.source if isinstance(weights, InitialWeights) else f"step {weights.step}"
    _agree_on_source(folder, whence)
    load_weights(
        weights,
        pipeline.named_parameters(),
        sections.model,
        vocab_size=vocab_size,
        tensor=dims.tensor,
        tp_rank=dims.tp_rank,
    )
    if dims.rank == 0:
        logger.info("initial weights from %s (%s)", weights.path, whence)


def _agree_on_source(folder: str, whence: str) -> None:
    """Refuse a start in which ranks found other weights: a folder of checkpoints may get a new one meanwhile.

    Raises:
        CheckpointError: ranks differ; on all ranks.

    Collective: all ranks of the world.
    """
    found = sorted(set(gather_objects(whence)))
    if len(found) > 1:
        raise CheckpointError(
            f"megasdc.model.initial_weights: in {folder} ranks found {' and '.join(found)}; name one of them"
        )


def check_memory_here(config: RunConfig, layout: BatchLayout, vocab_size: int) -> None:
    """Refuse a model that certainly does not fit into this rank's host or device, before any of it is built.

    Raises:
        ConfigError: the model does not fit; names the least memory that a rank needs, and the memory there is.
    """
    rank = int(os.environ.get("RANK", "0"))
    device: float | None = None
    if torch.cuda.is_available():
        share = config.megasdc.parallel.share_devices
        device = torch.cuda.get_device_properties(device_index(share)).total_memory / ranks_on_device(share)
    stages = memory_of_stages(config, vocab_size, layout.data, layout.micro_batch_size)
    stage = ParallelDims.from_world(layout.tensor, layout.pipeline, layout.world_size, rank).pp_rank
    host_ranks = int(os.environ.get("LOCAL_SIZE", "1"))  # set by DeepSpeed's launcher; else at least this rank
    check_memory(config, stages, stage, host_ranks, host_memory_bytes(), device)


def deepspeed_config(config: RunConfig, layout: BatchLayout) -> dict[str, Any]:
    """DeepSpeed's part of the configuration, with the values that depend on the layout."""
    deepspeed = copy.deepcopy(config.deepspeed)
    for key in OWN_SINKS:
        deepspeed.pop(key, None)
    # DeepSpeed's own equation; where replicas take different numbers, the engine counts what they take.
    deepspeed["train_batch_size"] = layout.micro_batch_size * layout.accumulation_steps * layout.data
    deepspeed["train_micro_batch_size_per_gpu"] = layout.micro_batch_size
    deepspeed["gradient_accumulation_steps"] = layout.accumulation_steps
    if config.precision == "bf16":  # DeepSpeed before 0.19.3 would not skip steps with non-finite gradients
        deepspeed["bf16"] = {"check_grad_overflow": Bf16().check_grad_overflow, **deepspeed["bf16"]}
    if not torch.cuda.is_available():
        deepspeed["zero_optimization"] = {"reduce_bucket_size": HOST_BUCKET_ELEMENTS, **deepspeed["zero_optimization"]}
    if config.megasdc.parallel.sequence_parallel:
        # Tensor ranks hold different parts of the sequence, which DeepSpeed would treat as copies of one tensor.
        deepspeed["pipeline"] = {
            **deepspeed.get("pipeline", {}),
            "pipe_partitioned": False,
            "grad_partitioned": False,
        }
    return deepspeed
