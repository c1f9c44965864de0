"""Rounding never takes a sum over replicas, or an update of Adam, outside of its bound; what is wrong is outside."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest
import torch
from torch import Tensor

from megasdc.sdc.referee.adam import AdamSettings, AdamSlice, adam_bounds, adam_step
from megasdc.sdc.referee.referee import is_within
from megasdc.sdc.referee.rounding import mean_of


def hard(count: int, kind: torch.dtype) -> list[Tensor]:
    """Parts that cancel, are tiny, of a huge range, or random: [64] each."""
    draws = torch.Generator().manual_seed(count)
    info = torch.finfo(kind)
    scale = 2.0 ** torch.randint(-20, 20, (64,), generator=draws)
    parts = [torch.randn(64, generator=draws) * scale for _ in range(count)]
    if count > 1:
        parts[-1][:16] = -torch.stack(parts[:-1])[:, :16].sum(0) * (1 + 2.0**-7)
    parts[0][16:24] = info.tiny * 1.5
    return [one.to(kind) for one in parts]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_mean_is_within_its_bound_in_every_order(count: int, sent: torch.dtype, kind: torch.dtype) -> None:
    """Divided before or after, with and without a factor; exact values are those of rational arithmetic."""
    parts = hard(count, kind)
    coarsest = max((kind, sent), key=lambda one: torch.finfo(one).eps)
    for factor in (1.0, 1.0 / 3):
        exact = mean_of(parts, factor, coarsest, converted=sent != kind)
        for place in (0, 17, 40):
            wanted = sum((Fraction(one[place].item()) for one in parts), Fraction(0)) * Fraction(factor) / count
            assert abs(Fraction(exact.values[place].item()) - wanted) <= Fraction(exact.bounds[place].item())
        for order in permutations(range(count)):
            for before in (True, False):
                total = torch.zeros(64, dtype=sent)
                for place in order:
                    one = parts[place].to(sent)
                    total = total + (one * (1 / count) if before else one)
                total = total if before else total * (1 / count)
                got = total.to(kind)
                got = got if factor == 1.0 else got * torch.tensor(factor, dtype=torch.float64).to(kind)
                assert is_within(got.double(), exact).all()


def test_with_two_replicas_nothing_but_the_numbers_beside_the_mean_pass() -> None:
    """Where gradients have one sign: two steps away is outside, on either side."""
    parts = hard(2, torch.float32)
    parts[1] = parts[1].abs() * parts[0].sign()
    exact, right = mean_of(parts, 1.0, torch.float32), (parts[0] + parts[1]) / 2
    for way in (torch.inf, -torch.inf):
        far = torch.nextafter(torch.nextafter(right, torch.tensor(way)), torch.tensor(way))
        assert not is_within(far.double(), exact)[24:].any()


@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999), (0.99, 0.5)])
def test_an_update_is_within_its_bound(
    kind: type[torch.optim.Adam], how: dict[str, bool], betas: tuple[float, float]
) -> None:
    """Of all ways in which PyTorch computes it; a flip of a high bit of the mantissa is outside."""
    draws = torch.Generator().manual_seed(5)
    count = 4099

    def draw(low: int, high: int) -> Tensor:
        size = 2.0 ** torch.randint(low, high, (count,), generator=draws)
        return torch.randn(count, generator=draws) * size

    before = AdamSlice(draw(-8, 4), draw(-30, 2), draw(-60, 4).square())
    before.exp_avg[:50], before.exp_avg_sq[:50] = 0.0, 0.0
    gradient = draw(-30, 2)
    gradient[:25] = 0.0
    settings = AdamSettings(1e-3, betas, 1e-8, 0.1, decoupled=kind is torch.optim.AdamW)
    for step in (1, 2, 1000):
        flat = torch.nn.Parameter(before.master.clone())
        flat.grad = gradient.clone()
        optimizer = kind([flat], lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.1, **how)
        state = {"exp_avg": before.exp_avg.clone(), "exp_avg_sq": before.exp_avg_sq.clone()}
        optimizer.state[flat] = {"step": torch.tensor(float(step - 1)), **state}
        optimizer.step()
        exact, _ = adam_step(before, gradient, step, settings)
        bounds = adam_bounds(before, gradient, step, settings)
        for got, value, bound in zip((flat.detach(), *state.values()), exact.tensors, bounds.tensors, strict=True):
            distance = (got.double() - value).abs()
            assert (distance <= bound).all() and bound.isfinite().all()
            flipped = (got.view(torch.int32) ^ (1 << 18)).view(torch.float32)
            outside = (flipped.double() - value).abs() > bound
            assert outside[50:].double().mean() > 0.8, "the bound says something"
