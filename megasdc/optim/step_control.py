"""Control of the gradient norm, clipping and step skips of DeepSpeed's ZeRO-1 optimizers.

``DeepSpeedZeroOptimizer`` takes the norm of the owned shards, so it keeps clipping, by the norm that it is given.
``BF16_Optimizer`` takes the norm of each rank's whole copy of the gradient: where one copy is wrong, ranks clip
differently, or one of them alone skips the step and the others hang. Its step is run here instead, with one norm
that all ranks agree on. The numbers of the norm can be recorded, which is for checks; a listener may change them on the
way, which is fault injection. Private names are DeepSpeed 0.19's; a test fails if they disappear.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.optim.zero1 import counts_here, is_bf16_optimizer

NormListener = Callable[[str, Tensor], Tensor | None]
"""Called with ``part``, this rank's part of the squared norm before the sum over ranks (in ``DeepSpeedZeroOptimizer``
one of each group), ``total``, the norm by which it clips, or ``factor``, by which it multiplies its shard, and the
number, [1]; or what a check says that it adds up beside them, ``blocks``, [n]. Returns None, or what to use instead."""


@dataclass
class Used:
    """Numbers with which a rank stepped, as tensors that may not be computed yet.

    Args:
        parts: its parts of the squared norm before they were summed over ranks: one for each group, or one of its whole
            copy with ``BF16_Optimizer``; 0-d; empty where they are not known.
        factors: what each group's shard, or all, was multiplied by, 0-d; empty where nothing was clipped.
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
        """Pass the numbers of every step's norm to a listener; None: to nobody.

        The norm is then computed here as DeepSpeed 0.19.8 computes it, with the same bits.
        """
        self._listener = listener
        self._follow()

    def hear(self, slot: str, numbers: Tensor) -> Tensor:
        """What a check has computed beside the norm, or what the listener has used instead; it is not recorded."""
        answer = None if self._listener is None or not numbers.numel() else self._listener(slot, numbers.detach())
        return numbers if answer is None else answer

    def record(self, *, on: bool = True) -> None:
        """From now on keep the numbers of each step's norm for ``take``, or no more; no bit of a step changes."""
        self._used = Used() if on else None
        self._follow()

    def take(self) -> Used:
        """What this rank has used since the last call; empty where it skipped the step, or does not record."""
        found = self._used or Used()
        found.skip = self._skip
        if self._used is not None:
            self._used = Used()
        return found

    def _follow(self) -> None:
        """Clip here where somebody asks for the factor, else as DeepSpeed does."""
        if is_bf16_optimizer(self._optimizer):
            return
        vars(self._optimizer).pop("unscale_and_clip_grads", None)
        if self._listener is not None or self._used is not None:
            self._optimizer.unscale_and_clip_grads = self._clip_shard

    def close(self) -> None:
        """Give the optimizer back what it does by itself."""
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
        self.used_norm = self._heard("total", norm)
        return self.used_norm  # type: ignore[no-any-return]

    def clip_again(self, gradient: Tensor, norm: Any) -> Tensor:
        """Unscale and clip some elements of a reduced gradient as the last step did.

        Args:
            gradient: [n], as it is stored after the reduction; is not changed.
            norm: 0-d, that of the step: ``used_norm``, of this rank or another.

        Returns:
            [n], fp32.

        Sync: none.
        """
        clipped = gradient.to(torch.float32, copy=True)
        if not is_bf16_optimizer(self._optimizer):
            type(self._optimizer).unscale_and_clip_grads(self._optimizer, [clipped], norm)
        elif self._optimizer.clip_grad > 0 and (factor := self._factor(norm)) != 1:
            clipped.mul_(factor)
        return clipped

    def _has_overflow(self, partition_gradients: bool = True) -> bool:
        return self._skip or bool(self._find_overflow(partition_gradients))

    def _by_parts(self, parts: Callable[[], Tensor], whole: Callable[[], Tensor]) -> Tensor:
        """The norm by its parts where a listener needs them, or where they are recorded and it has DeepSpeed's bits.

        Args:
            parts: takes the norm here.
            whole: takes it in DeepSpeed, as another version may do otherwise; infinite or -1 where it is not finite.
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

    def _heard(self, slot: str, number: Tensor) -> Tensor:
        """The number, or what the listener has used instead; it is recorded."""
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
            part = self._heard("part", part)
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
        factor = self._heard("factor", 1.0 / scale)
        for shard in shards:
            shard.data.mul_(factor)

    # --- BF16_Optimizer -----------------------------------------------------------------------------------------

    def _step_bf16(self, closure: Any = None) -> None:
        if closure is not None:
            raise NotImplementedError("a step with a closure is not supported")
        optimizer = self._optimizer
        norm = self._heard("total", self._agreed_norm() if self._norm is None else self._norm.float())
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
            factor = self._heard("factor", self._factor(norm))
            for _, gradient in shards if factor != 1 else ():
                gradient.mul_(factor)
        for flat, gradient in shards:
            flat.grad = gradient.to(flat.dtype)
        optimizer.optimizer.step()
        optimizer._lazy_init_hp_params_optimizer_state()
        optimizer.update_lp_params()
        optimizer.clear_hp_grads()

    def _factor(self, norm: Tensor) -> Tensor:
        """What ``BF16_Optimizer`` multiplies gradients by, where it clips."""
        return torch.clamp(self._optimizer.clip_grad / (norm + 1e-6), max=1.0)

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
            norm = self._heard("part", norm)
            dist.all_reduce(norm, group=optimizer.mpu.get_model_parallel_group())
            norm = norm.pow(0.5)
            return torch.where(torch.isfinite(norm), norm, -1.0)

        norm = self._by_parts(parts, whole)
        norm = torch.where(norm < 0, math.inf, norm)  # DeepSpeed returns -1 for a norm that is not finite
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self._group)
        return norm
