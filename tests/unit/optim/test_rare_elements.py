"""Does a bound leave elements with rare gradients alive, and elements with steady ones as bounded as eq. 1 has them?"""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from torch import Tensor

from megasdc.tensors.bound import bound_
from megasdc.tensors.bound_limits import SUMS, ElementLimits

STEPS, GRACE, SPIKE_STEP = 4000, 20, 3500
RATE, EPS, BETA1 = 1e-3, 1e-8, 0.9
GAPS, SIZES = (1, 10, 30, 100, 300, 1000), (1e-6, 1e-4, 1.0, 1e4)
CASES = list(itertools.product(GAPS, SIZES))
GAP, SIZE = (torch.tensor(column, dtype=torch.float32) for column in zip(*CASES, strict=True))
STEADY, RARE = GAP == 1, GAP > 1


class Elements:
    """One of every gap and size under torch's AdamW: gradients in every step of grace, then each in its gap."""

    def __init__(self, beta2: float, limits: ElementLimits | None) -> None:
        self._beta2, self._limits = beta2, limits
        self._weights = torch.zeros(len(CASES), requires_grad=True)
        self._inner = torch.optim.AdamW([self._weights], lr=RATE, betas=(BETA1, beta2), eps=EPS, weight_decay=0.0)

    @property
    def moved(self) -> Tensor:
        """How far each element has come."""
        return self._weights.detach().abs()

    @property
    def moment(self) -> Tensor:
        """V."""
        return self._inner.state[self._weights]["exp_avg_sq"]

    def step(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """(which were bounded, to what, what this adds to the update, free of the bias that Adam corrects)."""
        present = (step <= GRACE) | (step % GAP == 0)
        spike = torch.where(STEADY & (step == SPIKE_STEP), 1e6, 1.0)
        given = torch.where(present, SIZE * spike, 0.0)
        gradient = given.clone()
        if self._limits is not None and step > GRACE:
            bound_(gradient, self.moment, self._limits, torch.zeros(len(SUMS), dtype=torch.float64))
        self._weights.grad = gradient.clone()
        self._inner.step()
        corrected = math.sqrt(1 - self._beta2**step)
        return gradient < given, gradient, gradient.double() / (self.moment.double().sqrt() + EPS * corrected)


@cache
def _moved_without_a_bound(beta2: float) -> Tensor:
    elements = Elements(beta2, None)
    for step in range(1, STEPS + 1):
        elements.step(step)
    return elements.moved


def _least_share(theta: float, beta2: float) -> float:
    """What `megasdc.optim.bounds` promises of a bounded gradient's own part of the update, over Adam's largest."""
    return math.sqrt((1 - beta2) * theta) / (math.sqrt(beta2 + (1 - beta2) * theta) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("beta2", [0.95, 0.99, 0.999])
@pytest.mark.parametrize("theta", [10.0, 100.0, 1000.0, 10_000.0])
def test_no_element_freezes_however_rare_its_gradients_are(theta: float, beta2: float) -> None:
    """Over 4,000 steps every bounded gradient keeps the stated share of its update, and its element of its way."""
    elements, least = Elements(beta2, ElementLimits(spike=theta, floor=EPS**2)), _least_share(theta, beta2)
    for step in range(1, STEPS + 1):
        over, kept, update = elements.step(step)
        assert (update[over] * math.sqrt(1 - beta2) >= least * (1 - 1e-5)).all(), step
        assert (kept[over] >= math.sqrt(theta) * EPS * (1 - 1e-6)).all(), step
    assert 0.049 < least <= float((elements.moved / _moved_without_a_bound(beta2))[RARE].min())


def test_without_the_floor_rare_elements_freeze() -> None:
    """Eq. 1 as published takes all but 1e-5 of the update of an element with a small gradient in 100 steps."""
    elements = Elements(0.95, ElementLimits(spike=1000.0))
    for step in range(1, STEPS + 1):
        _, _, update = elements.step(step)
    small = (GAP == 100) & (SIZE < 1e-3)
    assert (update[small] * math.sqrt(1 - 0.95) < 1e-5).all()
    assert ((elements.moved / _moved_without_a_bound(0.95))[small] < 0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("theta", [10.0, 1000.0])
def test_the_floor_lets_no_spike_of_a_steady_element_pass(theta: float) -> None:
    """Steady elements have the bits of eq. 1 without a floor in every step; a lone one of 10^6 times is cut to it."""
    floored, published = (Elements(0.95, ElementLimits(spike=theta, floor=floor)) for floor in (EPS**2, 0.0))
    for step in range(1, STEPS + 1):
        limit = torch.zeros(0) if step == 1 else (theta * floored.moment.double()).sqrt()[STEADY]
        (over, kept, _), (_, other, _) = (one.step(step) for one in (floored, published))
        assert torch.equal(kept[STEADY], other[STEADY])
        assert bool(over[STEADY].any()) == bool(over[STEADY].all()) == (step == SPIKE_STEP)
        if step == SPIKE_STEP:
            torch.testing.assert_close(kept[STEADY].double(), limit, rtol=1e-6, atol=0)
            assert (limit < 1e-3 * 1e6 * SIZE[STEADY]).all()


@pytest.mark.parametrize(("theta", "beta2"), itertools.product([1.5, 10.0, 1000.0, 1e5], [0.9, 0.95, 0.999]))
def test_the_floor_lets_no_update_be_larger_than_eq_1_does(theta: float, beta2: float) -> None:
    """An outlier on an element with any V, 0 included, adds no more to the update than it may add to a large V's."""
    moment = torch.cat([torch.zeros(1), torch.logspace(-30, 4, 400)])
    gradient = torch.full_like(moment, 1e12)
    bound_(gradient, moment, ElementLimits(spike=theta, floor=EPS**2), torch.zeros(len(SUMS), dtype=torch.float64))
    after = beta2 * moment.double() + (1 - beta2) * gradient.double() ** 2
    update = gradient.double() / (after.sqrt() + EPS)
    assert float(update.max()) <= math.sqrt(theta / (beta2 + (1 - beta2) * theta)) * (1 + 1e-6)
    assert float(update.min()) >= _least_share(theta, beta2) / math.sqrt(1 - beta2) * (1 - 1e-6)
