"""Access to ZeRO-1's gradients and shards, the same for both optimizers that DeepSpeed may choose.

``DeepSpeedZeroOptimizer`` (fp32, fp16, and bf16 with 16-bit accumulation) holds after the reduction only the owner's
part of each gradient. ``BF16_Optimizer`` (bf16 with fp32 accumulation) holds the whole reduced gradient of the stage on
every data-parallel rank. The names used here are DeepSpeed 0.19's private ones; a test fails if they disappear.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_bf16_optimizer(optimizer: Any) -> bool:
    """Whether this is the optimizer that keeps whole fp32 gradients on every rank."""
    return hasattr(optimizer, "fp32_groups_gradients_flat")


def accumulated_gradient(optimizer: Any, parameter: nn.Parameter) -> Tensor:
    """The buffer in which one parameter's gradient accumulates over micro-batches, before the reduction.

    Raises:
        RuntimeError: there is none, because the optimizer accumulates elsewhere.
    """
    gradient = parameter._hp_grad if is_bf16_optimizer(optimizer) else parameter.grad  # type: ignore[attr-defined]
    if gradient is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} has no accumulated gradient in {type(optimizer).__name__}"
        )
    return gradient


@contextmanager
def gradients_set_aside(optimizer: Any) -> Iterator[None]:
    """Start with no accumulated gradients, and restore the previous ones at the end.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer, before the reduction.

    Sync: none. ``BF16_Optimizer``'s fp32 gradients are copied; others are only detached and put back.
    """
    if is_bf16_optimizer(optimizer):
        flats = [flat.clone() for flat in optimizer.fp32_groups_gradients_flat]
        has = [list(flags) for flags in optimizer.fp32_groups_has_gradients]
        optimizer.zero_grad()
        try:
            yield
        finally:
            optimizer.zero_grad()
            for flat, kept in zip(optimizer.fp32_groups_gradients_flat, flats, strict=True):
                flat.copy_(kept)
            optimizer.fp32_groups_has_gradients[:] = has
        return
    kept_of = [(one, one.grad, one.grad_accum) for group in optimizer.bit16_groups for one in group]
    optimizer.zero_grad()
    try:
        yield
    finally:
        optimizer.zero_grad()
        for parameter, gradient, accumulated in kept_of:
            parameter.grad, parameter.grad_accum = gradient, accumulated


def reduced_gradients(optimizer: Any) -> list[Tensor]:
    """The gradients after the reduction over data-parallel ranks, to be changed in place before the optimizer steps.

    With ``BF16_Optimizer`` every data-parallel rank must make the same change, since each computes the norm from its
    own whole copy.
    """
    if is_bf16_optimizer(optimizer):
        return list(optimizer.fp32_groups_gradients_flat)
    return [gradient for group in optimizer.averaged_gradients.values() if group for gradient in group]


def grouped_parameters(optimizer: Any) -> list[list[Any]]:
    """The parameters of this rank's stage, by group of the optimizer."""
    return list(optimizer.bf16_groups if is_bf16_optimizer(optimizer) else optimizer.bit16_groups)


def master_partitions(optimizer: Any) -> list[Tensor]:
    """This rank's flat fp32 partitions of the weights, by group; the inner optimizer's keys to its state."""
    if is_bf16_optimizer(optimizer):
        return list(optimizer.fp32_groups_flat_partition)
    return list(optimizer.single_partition_of_fp32_groups)


def own_parameters(optimizer: Any) -> list[Tensor]:
    """The part of the stage's flat parameters that this rank's masters are cast into and that all gather, by group.

    Views of the parameters that the model computes with, of the shapes of ``master_partitions``.
    """
    partitions = (
        optimizer.bf16_partitioned_groups
        if is_bf16_optimizer(optimizer)
        else optimizer.parallel_partitioned_bit16_groups
    )
    return [
        parts[dist.get_rank(group=group)]
        for parts, group in zip(partitions, optimizer.real_dp_process_group, strict=True)
    ]


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter that this rank owns.

    Args:
        parameter: the whole parameter of this stage and tensor rank.
        flat: the flat fp32 partition that holds the owned part; the inner optimizer's key to its state.
        start: first element in ``flat``.
        numel: number of elements, at least 1.
        gradient: the owned part of the reduced gradient, [numel], a view; valid between the reduction and the step.
        offset: first owned element in the parameter, row-major.
    """

    parameter: nn.Parameter
    flat: Tensor
    start: int
    numel: int
    gradient: Tensor | None
    offset: int
    group: int

    @property
    def master(self) -> Tensor:
        """The owned part of the fp32 weights, [numel], a view."""
        return self.flat.detach().narrow(0, self.start, self.numel)

    def states(self, optimizer: Any) -> dict[str, Tensor]:
        """The owned part of each optimizer state that has one value an element, [numel], views."""
        state = optimizer.optimizer.state.get(self.flat, {})
        return {
            name: value.detach().narrow(0, self.start, self.numel)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == self.flat.shape
        }


def owned_fragments(optimizer: Any) -> Iterator[Fragment]:
    """The part of each parameter that this rank owns, in the order of the groups of DeepSpeed's ZeRO-1 optimizer.

    Read from the fragment addresses and not through ``safe_get_full_optimizer_state``, because DeepSpeed links the
    optimizer state of the first of several groups only (0.19.8).
    """
    bf16 = is_bf16_optimizer(optimizer)
    for index, parameters in enumerate(grouped_parameters(optimizer)):
        if bf16:
            flat = optimizer.fp32_groups_flat_partition[index]
            gradients = optimizer.fp32_groups_gradient_flat_partition[index]
        else:
            flat = optimizer.single_partition_of_fp32_groups[index]
            owned = optimizer.averaged_gradients.get(index) or []
            by_parameter = {
                id(parameter): gradient
                for parameter, gradient in zip(optimizer.params_in_partition[index], owned, strict=False)
            }
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:
                continue
            place = mapping.hp_fragment_address
            gradient = gradients.narrow(0, place.start, place.numel) if bf16 else by_parameter.get(id(parameter))
            if gradient is not None and gradient.numel() != place.numel:
                raise RuntimeError(
                    f"the gradient has {gradient.numel()} elements, the parameter owned here {place.numel}; "
                    "zero_optimization.round_robin_gradients and parameter_alignment are not supported here"
                )
            yield Fragment(
                parameter,
                flat,
                place.start,
                place.numel,
                None if gradient is None else gradient.detach().flatten(),
                mapping.lp_fragment_address.start,
                index,
            )


@torch.no_grad()
def gather_parameters(optimizer: Any) -> None:
    """Gather the parameters once more from the copies that their owners have, without a cast of the masters.

    Collective: the data group.
    """
    from deepspeed.runtime.utils import all_gather_dp_groups

    bf16 = is_bf16_optimizer(optimizer)
    all_gather_dp_groups(
        groups_flat=optimizer.bf16_groups_flat if bf16 else optimizer.bit16_groups_flat,
        partitioned_param_groups=(
            optimizer.bf16_partitioned_groups if bf16 else optimizer.parallel_partitioned_bit16_groups
        ),
        dp_process_group=optimizer.real_dp_process_group,
        start_alignment_factor=optimizer.nccl_start_alignment_factor,
        allgather_bucket_size=optimizer.allgather_bucket_size,
    )


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
    """Sum of squares of the parameters of a stage that this rank counts: each parameter once over TP and PP.

    Returns:
        0-d, fp64; sum it over the ranks of one replica.
    """
    total = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
    for parameter in module.parameters():
        if counts_here(parameter, tp_rank):
            total += torch.linalg.vector_norm(parameter, dtype=torch.float32).double() ** 2
    return total


def is_copied(parameter: nn.Parameter) -> bool:
    """Whether every tensor rank holds the whole parameter."""
    return not getattr(parameter, "tensor_model_parallel", False)


def counts_here(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank's copy is the one counted in a sum over tensor ranks and stages.

    A parameter held by every tensor rank counts on tensor rank 0, a tied one on the first stage.
    """
    return not (is_copied(parameter) and tp_rank > 0) and not getattr(parameter, "ds_pipe_replicated", False)
