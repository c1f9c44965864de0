"""When are moments reset, and how does the learning rate rise again?"""

from __future__ import annotations

import math

import pytest
import torch

from megasdc.optim.bounds import MomentumReset, RateWarmup


def test_the_schedule_is_a_function_of_the_step() -> None:
    """Reset before steps n + 1, 2 n + 1; from the start factor along a half cosine to 1; none after the start."""
    reset = MomentumReset(interval=10, warmup_steps=4, warmup_start=0.2, restart_bias_correction=False)
    assert [step for step in range(1, 32) if reset.is_due(step)] == [11, 21, 31]
    assert [reset.steps_since(step) for step in (1, 10, 11, 12)] == [0, 9, 0, 1]
    assert [reset.rate_factor(step) for step in (1, 4, 10)] == [1, 1, 1]
    expected = [0.2 + 0.8 * (1 - math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert [reset.rate_factor(step) for step in range(11, 16)] == pytest.approx([*expected, 1.0])
    assert MomentumReset(10, 0, 0.2, False).rate_factor(11) == 1.0


@pytest.mark.parametrize("restart", [True, False])
def test_moments_become_zero(restart: bool) -> None:
    """Both moments, of every shard; the count of steps only where the bias correction begins anew."""
    weights = [torch.ones(4, requires_grad=True), torch.ones(2, requires_grad=True)]
    inner = torch.optim.AdamW(weights, lr=0.1)
    for _ in range(3):
        for one in weights:
            one.grad = torch.ones_like(one)
        inner.step()
    MomentumReset(10, 0, 1.0, restart).reset(inner)
    for one in weights:
        state = inner.state[one]
        assert not state["exp_avg"].any() and not state["exp_avg_sq"].any()
        assert float(state["step"]) == (0 if restart else 3)


@pytest.mark.full
@pytest.mark.parametrize("restart", [True, False])
def test_deepspeeds_cpu_adam(restart: bool) -> None:
    """Its states are reset and its learning rate lowered like those of PyTorch's optimizer; it is compiled first."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = {name: torch.ones(64, requires_grad=True) for name in ("theirs", "pytorch")}
    optimizers = {
        "theirs": DeepSpeedCPUAdam([weights["theirs"]], lr=0.1, weight_decay=0.01, adamw_mode=True),
        "pytorch": torch.optim.AdamW([weights["pytorch"]], lr=0.1, weight_decay=0.01),
    }
    for name, inner in optimizers.items():
        warmup = RateWarmup(inner)
        for step in range(6):
            if step == 3:
                MomentumReset(10, 0, 1.0, restart).reset(inner)
            warmup.factor = 0.5 if step > 3 else 1.0
            weights[name].grad = torch.linspace(-1, 1, 64) * (step + 1)
            inner.step()
    assert torch.allclose(weights["theirs"], weights["pytorch"], rtol=1e-5, atol=1e-6)


def test_the_scheduled_rate_is_there_again_after_each_step() -> None:
    """The factor holds inside the optimizer's step alone, so a scheduler sees its own values."""
    weight = torch.zeros(1, requires_grad=True)
    inner = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    warmup = RateWarmup(inner)
    warmup.factor = 0.5
    weight.grad = torch.ones(1)
    inner.step()
    assert float(weight) == pytest.approx(-0.05, rel=1e-5)
    assert inner.param_groups[0]["lr"] == 0.1
    warmup.close()
    weight.grad = torch.ones(1)
    inner.step()
    assert float(weight) == pytest.approx(-0.15, rel=1e-5)
