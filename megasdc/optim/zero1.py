"""DeepSpeed's ZeRO-1 optimizers: their gradients and shards, and control of norm, clipping and skipped steps.

``DeepSpeedZeroOptimizer`` (fp32, fp16, and bf16 with 16-bit accumulation) holds after the reduction only the owner's
part of each gradient. It takes the norm of the owned shards, so it keeps clipping, by the norm that it is given.

``BF16_Optimizer`` (bf16 with fp32 accumulation) holds the whole reduced gradient of the stage on every data-parallel
rank, and takes the norm of each rank's whole copy: where one copy is wrong, ranks clip differently, or one of them
alone skips the step and the others hang. Its step is run here instead (``StepControl``), with one norm that all ranks
agree on. The numbers of the norm can be recorded, which is for checks; a listener may change them on the way, which is
fault injection.

``blocks_of`` divides a rank's shard of the optimizer's state into blocks with digests: what one step left, the next is
to find. ``differ`` compares gradients of parameters that every tensor rank holds whole, bit for bit: a norm would miss
copies that differ at equal norm, such as two exchanged elements.

The names used here are DeepSpeed 0.19's private ones; a test fails if they disappear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasdc.tensors.checksum import ChecksumAlgorithm, default_algorithm, read_back


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


def complete_gradients(optimizer: Any) -> None:
    """Give zeros to parameters that have no accumulated gradient yet, so that all ranks reduce the same ones."""
    for group, parameters in enumerate(grouped_parameters(optimizer)):
        for place, parameter in enumerate(parameters):
            if is_bf16_optimizer(optimizer):
                parameter._hp_grad = optimizer.fp32_groups_gradients[group][place]
                optimizer.fp32_groups_has_gradients[group][place] = True
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


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
def scale_each_gradient(optimizer: Any, factor_of: Callable[[Tensor], Tensor]) -> None:
    """Multiply the reduced gradient of each parameter by a scalar of its own on the device.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer, after the reduction.
        factor_of: returns the factor of a parameter, 0-d, equal on all data-parallel ranks.

    Sync: none.
    """
    for group, every in enumerate(grouped_parameters(optimizer)):
        if is_bf16_optimizer(optimizer):
            held, gradients = every, optimizer.fp32_groups_gradients[group]
        else:
            held, gradients = optimizer.params_in_partition[group], optimizer.averaged_gradients.get(group) or []
        for parameter, gradient in zip(held, gradients, strict=False):  # zeros of alignment come last
            gradient.mul_(factor_of(parameter).to(gradient.dtype))


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


def clip_factor(norm: float, largest: float) -> float:
    """Factor by which DeepSpeed's ZeRO-1 optimizers clip a gradient of this norm; ``largest`` 0: no clip."""
    return min(1.0, largest / (norm + 1e-6)) if largest > 0 else 1.0


def loss_scale(engine: Any) -> float:
    """Factor of the gradients that an engine of DeepSpeed stores; 1 but with fp16."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0


def is_copied(parameter: nn.Parameter) -> bool:
    """Whether every tensor rank holds the whole parameter; the marks of others are those that DeepSpeed knows."""
    return not any(getattr(parameter, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))


def counts_here(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank's copy is the one counted in a sum over tensor ranks and stages.

    A parameter held by every tensor rank counts on tensor rank 0, a tied one on the first stage.
    """
    return not (is_copied(parameter) and tp_rank > 0) and not getattr(parameter, "ds_pipe_replicated", False)


_HALF = (1 << 32) - 1


def shard_checksum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """A checksum of shards that is exact when summed in fp64.

    Args:
        gradients: [n] each, of one type, in an order that is the same on all tensor ranks; may be empty.

    Returns:
        [2], fp64, on the device: the upper and the lower 32 bits of a checksum of all elements in order, 0 for none:
        whole numbers, whose sum over up to 2^21 ranks is exact.

    Sync: none.
    """
    if not gradients:
        return torch.zeros(2, dtype=torch.float64, device=device)
    value = default_algorithm(device).start(torch.cat(list(gradients)))
    if isinstance(value, Tensor):
        return torch.stack([(value >> 32) & _HALF, value & _HALF]).double()
    return torch.tensor([value >> 32, value & _HALF], dtype=torch.float64, device=device)


def differ(copies: Sequence[Sequence[float]]) -> bool:
    """Whether any tensor rank's digests, summed over its shards, differ from the first's."""
    return any(list(one) != list(copies[0]) for one in copies)


BLOCK = 1 << 20
"""Largest number of elements of a block: so large that a digest takes the time of reading."""
MASTER = "master"


@dataclass(frozen=True)
class StateBlock:
    """Consecutive elements of this rank's flat partition of one group.

    Args:
        group: number of the optimizer's group.
        start: place of the first element in the partition.
        numel: number of elements, at least 1.
    """

    group: int
    start: int
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """View of the block's elements in a tensor of the partition's shape, [numel]."""
        return flat.detach().narrow(0, self.start, self.numel)


Digests = Mapping[tuple[StateBlock, str], int]
"""Digests by block and state: ``MASTER``, or the optimizer's name of a state, such as ``exp_avg``."""


def blocks_of(optimizer: Any, most: int = BLOCK) -> list[StateBlock]:
    """All blocks of this rank's shard; together they hold every element of every group, alignment included.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer.
        most: largest number of elements of a block.
    """
    return [
        StateBlock(group, start, min(most, flat.numel() - start))
        for group, flat in enumerate(master_partitions(optimizer))
        for start in range(0, flat.numel(), most)
    ]


def start_digests(
    optimizer: Any, blocks: Iterable[StateBlock], algorithm: ChecksumAlgorithm
) -> dict[tuple[StateBlock, str], int | Tensor]:
    """Start the digests of blocks of the masters and of each state that has one value an element.

    With all of ``blocks_of`` they are of the rank's whole state.

    Sync: none on a GPU; ``finish_digests`` waits.
    """
    flats = master_partitions(optimizer)
    found: dict[tuple[StateBlock, str], int | Tensor] = {}
    for block in blocks:
        flat = flats[block.group]
        state = optimizer.optimizer.state.get(flat, {})
        found[block, MASTER] = algorithm.start(block.of(flat))
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                found[block, name] = algorithm.start(block.of(value))
    return found


def finish_digests(started: Mapping[tuple[StateBlock, str], int | Tensor]) -> Digests:
    """Complete digests.

    Sync: waits for the device.
    """
    return dict(zip(started, read_back(list(started.values())), strict=True))


def differing_state_blocks(before: Digests, after: Digests) -> list[tuple[StateBlock, str]]:
    """Blocks and states whose digests differ; what only one of them has is not compared."""
    return [place for place, value in before.items() if place in after and after[place] != value]


NormListener = Callable[[str, Tensor], Tensor | None]
"""Called with ``part``, this rank's part of the squared norm before the sum over ranks (in ``DeepSpeedZeroOptimizer``
one of each group), ``total``, the norm by which it clips, or ``factor``, by which it multiplies its shard, and the
number, [1]; or what a check says that it adds up beside them, ``blocks``, [n]. Returns None, or what to use instead."""


@dataclass
class Used:
    """Numbers with which a rank stepped, as tensors that may not be computed yet.

    Args:
        parts: the rank's parts of the squared norm before they were summed over ranks: one for each group, or one of
            its whole copy with ``BF16_Optimizer``; 0-d; empty where they are not known.
        factors: factors by which each group's shard, or all, was multiplied, 0-d; empty where nothing was clipped.
        skip: whether all ranks were told to skip the step.
    """

    parts: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    skip: bool = False


def norms_have_equal_bits(optimizer: Any, device: torch.device, ranks: int) -> bool:
    """Whether the norms of all replicas have equal bits; those of a replica's ranks always have.

    Where more than two ranks of the model add on devices, replicas may add in another order.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer.
        ranks: tensor ranks times stages.
    """
    return is_bf16_optimizer(optimizer) or device.type == "cpu" or ranks <= 2


class StepControl:
    """Replaces the norm and the skip decision of DeepSpeed's ZeRO-1 optimizer.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer.
        data_group: the data-parallel group of this rank.
    """

    def __init__(self, optimizer: Any, data_group: Any) -> None:
        self._optimizer = optimizer
        self._group = data_group
        self._norm: Tensor | None = None
        self._skip = False
        self.used_norm: Any = None
        """Norm by which this rank clips in the running step, or the last one, loss scale included; None: by none."""
        self._checks = getattr(optimizer, "check_grad_overflow", False)
        self._listener: NormListener | None = None
        self._used: Used | None = None
        self._has_parts: bool | None = None
        """Whether the norm of parts has the bits of DeepSpeed's, found out in the first step that is recorded."""
        if is_bf16_optimizer(optimizer):
            optimizer.step = self._step_bf16
        else:
            self._norm_of_shards, self._find_overflow = optimizer.scaled_global_norm, optimizer.has_overflow
            optimizer.scaled_global_norm = self._scaled_norm
            optimizer.has_overflow = self._has_overflow

    def listen(self, listener: NormListener | None) -> None:
        """Pass the numbers of every step's norm to a listener; None: to none.

        The norm is then computed here as DeepSpeed 0.19.8 computes it, with the same bits.
        """
        self._listener = listener
        self._follow()

    def pass_to_listener(self, slot: str, numbers: Tensor) -> Tensor:
        """Numbers that a check has computed beside the norm, or the listener's in their place; not recorded."""
        answer = None if self._listener is None or not numbers.numel() else self._listener(slot, numbers.detach())
        return numbers if answer is None else answer

    def record(self, *, on: bool = True) -> None:
        """Begin or stop to keep the numbers of each step's norm for ``pop_used``; no bit of a step changes."""
        self._used = Used() if on else None
        self._follow()

    def pop_used(self) -> Used:
        """Numbers that this rank has used since the last call; empty where it skipped the step, or does not record."""
        found = self._used or Used()
        found.skip = self._skip
        if self._used is not None:
            self._used = Used()
        return found

    def _follow(self) -> None:
        """Replace DeepSpeed's clipping by our own where a listener or a record needs the factor, else restore it."""
        if is_bf16_optimizer(self._optimizer):
            return
        vars(self._optimizer).pop("unscale_and_clip_grads", None)
        if self._listener is not None or self._used is not None:
            self._optimizer.unscale_and_clip_grads = self._clip_shard

    def close(self) -> None:
        """Give the optimizer back its own methods."""
        self._used = None
        self.listen(None)
        replaced = ("step",) if is_bf16_optimizer(self._optimizer) else ("scaled_global_norm", "has_overflow")
        for name in replaced:
            vars(self._optimizer).pop(name, None)
        if "scaled_global_norm" in replaced:
            self._optimizer.check_grad_overflow = self._checks

    def decide(self, norm: Tensor | None, skip: bool) -> None:
        """Set the norm and the skip decision of the next step.

        Args:
            norm: 2-norm of the whole gradient as it is stored, loss scale included, 0-d, finite, the same on all ranks;
                None: DeepSpeed's.
            skip: whether all ranks skip the step.
        """
        self._norm, self._skip = norm, skip
        if not is_bf16_optimizer(self._optimizer):
            self._optimizer.check_grad_overflow = skip or (self._checks and norm is None)

    def _scaled_norm(self, norm_type: int = 2) -> Tensor:
        if self._norm is not None:
            norm = self._norm.float()
        else:
            norm = self._by_parts(self._norm_of_parts, lambda: self._norm_of_shards(norm_type))
        self.used_norm = self._replaced("total", norm)
        return self.used_norm  # type: ignore[no-any-return]

    def _has_overflow(self, partition_gradients: bool = True) -> bool:
        return self._skip or bool(self._find_overflow(partition_gradients))

    def _by_parts(self, parts: Callable[[], Tensor], whole: Callable[[], Tensor]) -> Tensor:
        """The norm by its parts where a listener needs them, or where they are recorded and it has DeepSpeed's bits.

        Args:
            parts: computes the norm here.
            whole: computes it in DeepSpeed, whose versions may differ; infinite or -1 where it is not finite.
        """
        hears = self._listener is not None
        if self._used is None or getattr(self._optimizer, "cpu_offload", False) or self._has_parts is False:
            return parts() if hears else whole()
        own = parts()
        if self._has_parts is None:  # on all ranks alike, whoever has a listener
            theirs = whole()
            if bool(theirs.isfinite() & (theirs >= 0)):
                self._has_parts = bool(own == theirs)
            if not (self._has_parts or hears):
                self._used.parts.clear()
                return theirs
        return own

    def _replaced(self, slot: str, number: Tensor) -> Tensor:
        """The number, or the one that the listener returns instead; it is recorded."""
        answer = None if self._listener is None else self._listener(slot, number.detach().reshape(1))
        number = number if answer is None else answer.reshape(number.shape)
        if self._used is not None and slot != "total":
            (self._used.parts if slot == "part" else self._used.factors).append(number.clone())
        return number

    def _norm_of_parts(self) -> Tensor:
        """DeepSpeed's norm, of which this rank's parts are heard.

        Collective: the data group, then the ranks of the replica, once a group of the optimizer.
        """
        optimizer, norms = self._optimizer, []
        for group, parameters in enumerate(optimizer.params_in_partition):
            own = (one for one in optimizer.averaged_gradients[group] if not getattr(one, "_zero_padding", False))
            pairs = zip(own, parameters, strict=False)
            counted = [one for one, parameter in pairs if counts_here(parameter, optimizer.model_parallel_rank)]
            part = torch.zeros((), dtype=torch.float32, device=optimizer.device)
            if counted:
                part = torch.stack([torch.linalg.vector_norm(one.double()) for one in counted]).pow(2.0).sum().float()
            part = self._replaced("part", part)
            dist.all_reduce(part, group=optimizer.dp_process_group)
            optimizer._model_parallel_all_reduce(tensor=part, op=dist.ReduceOp.SUM)
            norms.append(part.pow(0.5))
        norm = torch.linalg.vector_norm(torch.stack(norms))
        return torch.where(torch.isfinite(norm), norm, math.inf)

    def _clip_shard(self, shards: list[Tensor], norm: Tensor) -> None:
        """DeepSpeed's clipping of this rank's shard, of which the factor is heard."""
        optimizer = self._optimizer
        if optimizer.clip_grad == 0.0 and optimizer.loss_scale == 1.0:
            return
        scale = torch.as_tensor(float(optimizer.loss_scale), device=optimizer.device)
        if optimizer.clip_grad > 0.0:
            scale = torch.clamp(((norm / optimizer.loss_scale) + 1e-6) / optimizer.clip_grad, min=1.0) * scale
        factor = self._replaced("factor", 1.0 / scale)
        for shard in shards:
            shard.data.mul_(factor)

    # --- BF16_Optimizer -----------------------------------------------------------------------------------------

    def _step_bf16(self, closure: Any = None) -> None:
        if closure is not None:
            raise NotImplementedError("a step with a closure is not supported")
        optimizer = self._optimizer
        norm = self._replaced("total", self._agreed_norm() if self._norm is None else self._norm.float())
        optimizer.overflow = self._skip or not math.isfinite(norm)
        if optimizer.overflow:
            optimizer._global_grad_norm = math.inf
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()
            return
        optimizer._global_grad_norm = self.used_norm = norm
        shards = list(
            zip(optimizer.fp32_groups_flat_partition, optimizer.fp32_groups_gradient_flat_partition, strict=True)
        )
        if optimizer.clip_grad > 0:
            factor = self._replaced("factor", _bf16_factor(optimizer, norm))
            for _, gradient in shards if factor != 1 else ():
                gradient.mul_(factor)
        for flat, gradient in shards:
            flat.grad = gradient.to(flat.dtype)
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
        optimizer.clear_hp_grads()

    def _agreed_norm(self) -> Tensor:
        """DeepSpeed's norm of the whole copies, maximum over replicas; infinite if any is not finite."""
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        optimizer = self._optimizer
        gradients, _ = optimizer.get_grads_for_norm()

        def whole() -> Tensor:
            norm: Tensor = get_global_norm_of_tensors(gradients, norm_type=optimizer.norm_type, mpu=optimizer.mpu)
            return norm

        def parts() -> Tensor:
            norm = torch.stack([one.detach().float().norm(2.0) for one in gradients]).pow(2.0).sum()
            norm = self._replaced("part", norm)
            dist.all_reduce(norm, group=optimizer.mpu.get_model_parallel_group())
            norm = norm.pow(0.5)
            return torch.where(torch.isfinite(norm), norm, -1.0)

        norm = self._by_parts(parts, whole)
        norm = torch.where(norm < 0, math.inf, norm)  # DeepSpeed returns -1 for a norm that is not finite
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self._group)
        return norm


def clip_again(optimizer: Any, gradient: Tensor, norm: Any) -> Tensor:
    """Unscale and clip some elements of a reduced gradient as the last step did.

    Args:
        optimizer: DeepSpeed's ZeRO optimizer.
        gradient: [n], as it is stored after the reduction; is not changed.
        norm: norm of the step, loss scale included, 0-d: that of this rank or another.

    Returns:
        [n], fp32.

    Sync: none.
    """
    clipped = gradient.to(torch.float32, copy=True)
    if not is_bf16_optimizer(optimizer):
        type(optimizer).unscale_and_clip_grads(optimizer, [clipped], norm)
    elif optimizer.clip_grad > 0 and (factor := _bf16_factor(optimizer, norm)) != 1:
        clipped.mul_(factor)
    return clipped


def _bf16_factor(optimizer: Any, norm: Tensor) -> Tensor:
    """Factor by which ``BF16_Optimizer`` multiplies gradients, where it clips."""
    return torch.clamp(optimizer.clip_grad / (norm + 1e-6), max=1.0)


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split the parameters of this rank's stage into those with weight decay and those without.

    Returns:
        Optimizer groups without empty ones. Only the group without decay sets ``weight_decay``; the other uses the
        optimizer's.
    """
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            (no_decay if parameter.dim() < 2 else decay).append(parameter)
    groups: list[dict[str, Any]] = []
    if decay:
        groups.append({"params": decay, "name": "decay"})
    if no_decay:
        groups.append({"params": no_decay, "name": "no_decay", "weight_decay": 0.0})
    return groups
