"""Where are the gradients and the shards of ZeRO-1? One view of both optimizers that DeepSpeed may choose.

``DeepSpeedZeroOptimizer`` (fp32, fp16, and bf16 with 16-bit accumulation) holds after the reduction only the owner's
part of each gradient. ``BF16_Optimizer`` (bf16 with fp32 accumulation) holds the whole reduced gradient of the stage on
every data-parallel rank. The names used here are DeepSpeed 0.19's private ones; a test fails if they go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_bf16_optimizer(optimizer: Any) -> bool:
    """Whether this is the optimizer that keeps whole fp32 gradients on every rank."""
    return hasattr(optimizer, "fp32_groups_gradients_flat")


def accumulated_gradient(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """Where the micro-batches' gradient of one parameter accumulates before the reduction.

    Raises:
        RuntimeError: there is none: the optimizer accumulates elsewhere, and what was asked for would be lost.
    """
    gradient = parameter._hp_grad if is_bf16_optimizer(optimizer) else parameter.grad  # type: ignore[attr-defined]
    if gradient is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has no accumulated gradient in {type(optimizer).__name__}"
        )
    return gradient


def reduced_gradients(optimizer: Any) -> list[Tensor]:
    """The gradients after the reduction over data-parallel ranks, to be changed in place before the optimizer steps.

    With ``BF16_Optimizer`` every data-parallel rank must make the same change, since each computes the norm from its
    own whole copy.
    """
    if is_bf16_optimizer(optimizer):
        return list(optimizer.fp32_groups_gradients_flat)
    return [gradient for group in optimizer.averaged_gradients.values() if group for gradient in group]


@torch.no_grad()
def scale_gradients(optimizer: Any, factor: Tensor) -> None:
    """Multiply all reduced gradients by a scalar on the device.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer, after the reduction.
        factor: 0-d, equal on all data-parallel ranks.

    Sync: none.
    """
    for gradient in reduced_gradients(optimizer):
        gradient.mul_(factor.to(gradient.dtype))


@torch.no_grad()
def squared_norm(module: nn.Module, tp_rank: int) -> Tensor:
    """Sum of squares of the parameters that this rank counts, so that every parameter counts once over TP and PP.

    Parameters replicated over tensor ranks count on tensor rank 0; of a tied one, the copy on the first stage counts.

    Args:
        module: the stage.
        tp_rank: tensor rank.

    Returns:
        0-d, fp64; to be summed over one replica.
    """
    total = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
    for parameter in module.parameters():
        replicated = not getattr(parameter, "tensor_model_parallel", False)
        if (replicated and tp_rank > 0) or getattr(parameter, "ds_pipe_replicated", False):
            continue
        total += torch.linalg.vector_norm(parameter, dtype=torch.float32).double() ** 2
    return total


def parameter_states(optimizer: Any, module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """What the optimizer keeps for each parameter, as far as this rank owns it.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer.
        module: the stage.

    Yields:
        (parameter's name, ``master``, ``exp_avg`` or ``exp_avg_sq``, flat view), in the order of the stage's
        parameters; nothing for a parameter whose shard lies on other ranks.
    """
    inner = optimizer.optimizer
    for name, parameter in module.named_parameters():
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:
            continue
        flat = inner.param_groups[mapping.param_group_index]["params"][0]
        place = mapping.hp_fragment_address
        moments = [(key, value) for key, value in inner.state[flat].items() if key != "step"]
        for key, whole in [("master", flat.detach()), *moments]:
            yield name, key, whole.flatten().narrow(0, place.start, place.numel)
