"""What do distributed tests train? Tiny models on fixed tokens, the same global batch in every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megasdc.config.model import ModelSection
from megasdc.config.sections import ParallelSection
from megasdc.engine.engine import TrainingEngine, build_engine
from megasdc.engine.hooks import Hook
from megasdc.model.pipeline import build_pipeline
from megasdc.optim.zero1 import is_bf16_optimizer, parameter_groups
from megasdc.parallel import groups
from tools.trainings.styles import LLAMA as LLAMA_STYLE

VOCAB = 250
SEQUENCE = 32
GLOBAL_BATCH = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

GPT: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_positions": 64}
LLAMA: dict[str, Any] = {**GPT, **LLAMA_STYLE, "num_query_groups": 2}


def relative_distance(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses; NaN if one is NaN, which Python's ``max`` may lose."""
    assert len(found) == len(expected) > 0
    far = torch.tensor([abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)], dtype=torch.float64)
    return far.max().item()


def make_engine(
    model: dict[str, Any],
    tensor: int,
    pipeline: int,
    *,
    precision: str = "fp32",
    grad_accum: str = "fp32",
    sequence_parallel: bool = False,
    masks_tokens: bool = False,
    lr: float = 3e-3,
    deepspeed: dict[str, Any] | None = None,
    vocab: int = VOCAB,
    seed: int = 1,
) -> TrainingEngine:
    """Build an engine on the ranks of this test; the data dimension is what remains."""
    dims = groups.init_model_parallel(tensor, pipeline, 60)
    module, streams = build_pipeline(
        ModelSection(**model),
        ParallelSection(tensor=tensor, pipeline=pipeline, sequence_parallel=sequence_parallel),
        dims,
        vocab_size=vocab,
        seed=seed,
        dtype=DTYPES[precision],
    )
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True, "fused": True},
        },
    }
    if precision == "bf16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": grad_accum}}
    if sequence_parallel:
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    for key, value in (deepspeed or {}).items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return build_engine(module, config, parameter_groups(module), dims=dims, streams=streams, masks_tokens=masks_tokens)


def tokens_of_step(step: int, vocab: int = VOCAB) -> torch.Tensor:
    """The global batch of a step, [GLOBAL_BATCH, SEQUENCE + 1], with structure that can be learned."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, vocab, (GLOBAL_BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (GLOBAL_BATCH, 1), generator=generator)
    return (start + stride * torch.arange(SEQUENCE + 1)) % vocab


def micro_batches(engine: TrainingEngine, step: int, masked: bool = False) -> Iterator[Any]:
    """Yield the micro-batches of this replica; with ``masked``, samples use different numbers of tokens."""
    tokens = tokens_of_step(step)
    size = engine.train_micro_batch_size_per_gpu()
    for first in range(0, GLOBAL_BATCH // engine.dims.data, size):
        rows = [(first + i) * engine.dims.data + engine.dims.dp_rank for i in range(size)]
        mask = torch.ones(size, SEQUENCE)
        if masked:
            for i, row in enumerate(rows):
                mask[i, SEQUENCE - 3 * row :] = 0
        yield tokens[rows, :-1].contiguous(), (tokens[rows, 1:].contiguous(), mask)


def train_steps(engine: TrainingEngine, first: int, count: int, masked: bool = False) -> list[dict[str, Any]]:
    """Run steps ``first`` to ``first + count - 1`` and return loss, norm and tokens of each."""
    results = []
    for step in range(first, first + count):
        result = engine.train_step(micro_batches(engine, step, masked))
        results.append({"loss": result.loss, "grad_norm": result.grad_norm, "tokens": result.tokens})
    return results


def full_tensors(engine: TrainingEngine, values: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """All parameters of the model in full, by name, on every rank; of a tied one the first stage's copy.

    Args:
        engine: the engine.
        values: tensors to put together instead, by the names and in the shapes of this rank's parameters.
    """
    local = {}
    for name, parameter in engine.module.named_parameters():
        split = getattr(parameter, "tensor_model_parallel", False)
        place = (parameter.partition_dim, parameter.partition_stride) if split else None
        tensor = parameter if values is None else values[name]
        local[name] = (tensor.detach().float().cpu().clone(), place)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, ((engine.dims.pp_rank, engine.dims.dp_rank, engine.dims.tp_rank), local))
    by_place = dict(gathered)
    full: dict[str, torch.Tensor] = {}
    for pp_rank in reversed(range(engine.dims.pipeline)):
        shards = [by_place[pp_rank, 0, tp_rank] for tp_rank in range(engine.dims.tensor)]
        for name, (first, place) in shards[0].items():
            pieces = [shard[name][0] for shard in shards]
            full[name] = first if place is None else _join(pieces, *place)
    return full


def _join(pieces: list[torch.Tensor], dim: int, stride: int) -> torch.Tensor:
    """Put tensor-parallel shards together; with a stride each shard holds a part of every block."""
    blocks = [piece.chunk(stride, dim) for piece in pieces]
    return torch.cat([block[i] for i in range(stride) for block in blocks], dim)


class GradientTap(Hook):
    """Keeps the full reduced gradients of each step, by parameter name, put together from the owners' parts."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def before_optimizer_step(self, engine: Any) -> None:
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        optimizer, gradients = engine.optimizer, {}
        if is_bf16_optimizer(optimizer):
            for group in optimizer.bf16_groups:
                gradients |= {names[id(p)]: p._hp_grad.detach().clone().view_as(p) for p in group}
        else:
            for parameter, gradient in _assembled(engine):
                gradients[names[id(parameter)]] = gradient
        self.steps.append(full_tensors(engine, gradients))


def _assembled(engine: Any) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Reduced gradients of every parameter, the parts of all data-parallel ranks added (each holds its own part)."""
    optimizer, result = engine.optimizer, []
    for i, group in enumerate(optimizer.bit16_groups):
        owned = optimizer.params_in_partition[i]
        parts: dict[int, torch.Tensor] = {}
        for parameter, gradient in zip(owned, optimizer.averaged_gradients[i], strict=False):
            parts[id(parameter)] = gradient
        for parameter in group:
            full = torch.zeros(parameter.numel())
            if id(parameter) in parts:
                first = optimizer.first_offset[i] if owned and parameter is owned[0] else 0
                piece = parts[id(parameter)].flatten().float()
                full[first : first + piece.numel()] = piece
            dist.all_reduce(full, group=engine.mpu.get_data_parallel_group())
            result.append((parameter, full.view_as(parameter)))
    return result
