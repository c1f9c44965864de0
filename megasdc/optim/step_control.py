"""Control of the gradient norm, clipping and step skips of DeepSpeed's ZeRO-1 optimizers.

``DeepSpeedZeroOptimizer`` takes the norm of the owned shards, so it keeps clipping, by the norm that it is given.
``BF16_Optimizer`` takes the norm of each rank's whole copy of the gradient: where one copy is wrong, ranks clip
differently, or one of them alone skips the step and the others hang. Its step is run here instead, with one norm
that all ranks agree on. Private names are DeepSpeed 0.19's; a test fails if they disappear.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.optim.zero1 import is_bf16_optimizer


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
        self._checks = getattr(optimizer, "check_grad_overflow", False)
        if is_bf16_optimizer(optimizer):
            optimizer.step = self._step_bf16
        else:
            self._norm_of_shards, self._find_overflow = optimizer.scaled_global_norm, optimizer.has_overflow
            optimizer.scaled_global_norm = self._scaled_norm
            optimizer.has_overflow = self._has_overflow

    def close(self) -> None:
        """Give the optimizer back what it does by itself."""
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
        return self._norm_of_shards(norm_type) if self._norm is None else self._norm.float()

    def _has_overflow(self, partition_gradients: bool = True) -> bool:
        return self._skip or bool(self._find_overflow(partition_gradients))

    # --- BF16_Optimizer -----------------------------------------------------------------------------------------

    def _step_bf16(self, closure: Any = None) -> None:
        if closure is not None:
            raise NotImplementedError("a step with a closure is not supported")
        optimizer = self._optimizer
        norm = self._agreed_norm() if self._norm is None else self._norm.float()
        optimizer.overflow = self._skip or not math.isfinite(norm)
        if optimizer.overflow:
            optimizer._global_grad_norm = math.inf
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()
            return
        optimizer._global_grad_norm = norm
        shards = list(
            zip(optimizer.fp32_groups_flat_partition, optimizer.fp32_groups_gradient_flat_partition, strict=True)
        )
        if optimizer.clip_grad > 0 and (coefficient := optimizer.clip_grad / (norm + 1e-6)) < 1:
            for _, gradient in shards:
                gradient.mul_(coefficient)
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
        norm = get_global_norm_of_tensors(gradients, norm_type=optimizer.norm_type, mpu=optimizer.mpu)
        norm = torch.where(norm < 0, math.inf, norm)  # DeepSpeed returns -1 for a norm that is not finite
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self._group)
        return norm
