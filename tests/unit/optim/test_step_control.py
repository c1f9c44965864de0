"""The norm that an optimizer clips by is the one that was decided on, or DeepSpeed's; listeners hear each number."""

from __future__ import annotations

import torch
from torch import Tensor

from megasdc.optim.zero1 import StepControl


class Optimizer:
    """What ``StepControl`` uses of ``DeepSpeedZeroOptimizer``: gradients of norm 5, a loss scale of 4."""

    check_grad_overflow, clip_grad, loss_scale, device = True, 0.5, 4.0, "cpu"

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """DeepSpeed's."""
        return torch.tensor(5.0)

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """None."""
        return False

    def unscale_and_clip_grads(self, shards: list[Tensor], norm: Tensor) -> None:
        """DeepSpeed's own formula."""
        for shard in shards:
            shard.data.mul_(1.0 / (self.loss_scale * max(1.0, (float(norm) / self.loss_scale + 1e-6) / self.clip_grad)))


def test_numbers_of_a_step_are_heard_and_used() -> None:
    """Who listens and says nothing changes no bit; what it answers is used, of norm and factor, and is recorded."""
    optimizer = Optimizer()
    control = StepControl(optimizer, None)
    assert optimizer.scaled_global_norm() == control.used_norm == 5.0
    control.decide(torch.tensor(3.0, dtype=torch.float64), skip=False)
    norm = optimizer.scaled_global_norm()
    assert (norm, norm.dtype, norm.shape) == (3.0, torch.float32, torch.Size([]))
    plain = torch.ones(3)
    optimizer.unscale_and_clip_grads([plain], norm)
    heard: dict[str, Tensor] = {}
    control.listen(lambda slot, number: heard.update({slot: number}))
    control.record()
    same = torch.ones(3)
    optimizer.unscale_and_clip_grads([same], optimizer.scaled_global_norm())
    torch.testing.assert_close(same, plain)
    assert {slot: number.shape for slot, number in heard.items()} == {"total": (1,), "factor": (1,)}
    assert [float(one) for one in control.pop_used().factors] == [float(heard["factor"])] == [float(same[0])]
    control.listen(lambda slot, number: number * 2)
    assert optimizer.scaled_global_norm() == control.used_norm == 6.0
    twice = torch.ones(3)
    optimizer.unscale_and_clip_grads([twice], norm)
    assert torch.equal(twice, 2 * same) and [float(one) for one in control.pop_used().factors] == [float(twice[0])]


def test_a_step_is_skipped_where_that_was_decided_and_all_is_given_back() -> None:
    """By all ranks, through DeepSpeed's own question, which it then asks."""
    optimizer = Optimizer()
    control = StepControl(optimizer, None)
    control.record()
    assert not optimizer.has_overflow()
    control.decide(torch.tensor(3.0), skip=True)
    assert optimizer.check_grad_overflow and optimizer.has_overflow() and control.pop_used().skip
    control.decide(torch.tensor(3.0), skip=False)
    assert not optimizer.check_grad_overflow and not optimizer.has_overflow()
    control.close()
    assert vars(optimizer) == {"check_grad_overflow": True} and optimizer.scaled_global_norm() == 5.0
