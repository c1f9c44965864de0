"""Which operations are no longer moved, and which differences are left to the audit."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from megasdc.sdc.audits import differ_in_nan_alone, order_matters, places_matter
from megasdc.tensors.permuted import Trial, Tried, Unequal
from tools.trainings.broken_unit import BrokenUnit

PRODUCT = ("aten::mm", "float32(32, 64)", "float32(64, 48)")


def tried(unequal: Unequal | None) -> Tried:
    """A rank that computed one product both ways."""
    return Tried(moved=Counter({PRODUCT: 1}), unequal={} if unequal is None else {PRODUCT: unequal})


@pytest.mark.parametrize(
    ("ranks", "of_kernel"),
    [
        ([Unequal(3, 1000, 1e-7)], True),  # another order of summation
        ([Unequal(3, 1000, 0.5)], False),  # a unit
        ([Unequal(600, 1000, 0.5)], True),  # more than a unit computes
        ([Unequal(3, 1000, 0.5), Unequal(3, 1000, 0.5)], True),  # the same on all
        ([Unequal(600, 1000, 0.5), None], False),  # on one of two
        ([Unequal(3, 1000, 1e-7), None], False),
        ([Unequal(4, 20, 21.6, far=2)], False),  # a unit, and rounding, of a small result
        ([Unequal(4, 20, 0.5, far=4)], False),
        ([Unequal(5, 20, 0.5, far=5)], True),
        ([Unequal(3, 4, 0.5, far=3)], True),  # most of all there is
        ([None, None], False),
    ],
)
def test_what_is_said_of_a_kernel(ranks: list[Unequal | None], of_kernel: bool) -> None:
    """What all ranks see, or one alone within rounding or nearly everywhere."""
    found = places_matter([*(tried(one) for one in ranks), Tried()])
    assert set(found) == ({PRODUCT} if of_kernel else set())
    if of_kernel:
        assert found[PRODUCT].of == sum(one.of for one in ranks if one is not None)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_unit_is_found_wherever_it_spoils_a_small_result(rows: int) -> None:
    """A product with few results is not left out as one whose kernel treats places in different ways."""
    draw = torch.Generator().manual_seed(3)
    bias, first, second = (torch.randn(*shape, generator=draw) for shape in ((10,), (rows, 16), (16, 10)))
    for place in product(range(rows), range(10)):
        with BrokenUnit((None, 16, 10), place, 64.0), Trial() as trial:
            torch.addmm(bias, first, second)
        assert [one.far for one in trial.tried.unequal.values()] == [2] and not places_matter([trial.tried])


@pytest.mark.parametrize(
    ("alike", "of_order"),
    [
        ([[Unequal(3, 20, 1e-7)]], True),  # one device, as little as rounding
        ([[Unequal(3, 20, 0.5, far=1)]], False),
        ([[Unequal(3, 20, 0.5, far=3), Unequal(3, 20, 0.5, far=3)]], True),  # both replicas
        ([[Unequal(3, 20, 1e-7), None]], False),  # one of two
        ([[Unequal(3, 20, 1e-7)], [None]], True),  # of two stages, whose numbers are others
        ([[Unequal(3, 20, 1e-7)], [Unequal(1, 20, 0.5, far=1)]], False),
        ([[Unequal(3, 20, 1e-7), Unequal(3, 20, 1e-7)], [Unequal(2, 20, 1e-7), None]], False),
        ([[None], [None, None]], False),
    ],
)
def test_what_is_said_of_another_order_of_summation(alike: list[list[Unequal | None]], of_order: bool) -> None:
    """Once something was found: small differences of one, or any that all have that compute the same."""
    found = [[*(tried(one) for one in ranks), Tried()] for ranks in alike]
    assert set(order_matters(found)) == ({PRODUCT} if of_order else set())
    assert not order_matters(found, {PRODUCT})


def test_bits_of_nan_are_no_difference() -> None:
    """But NaN at another place is one, and so is a number beside it."""
    one = torch.tensor([1.0, float("nan"), 2.0])
    other = one.clone()
    other.view(torch.int32)[1] ^= 1
    assert differ_in_nan_alone(one, other)
    assert not differ_in_nan_alone(one, one.roll(1))
    assert not differ_in_nan_alone(one, torch.tensor([1.0, float("nan"), 3.0]))
    assert not differ_in_nan_alone(torch.ones(3), torch.ones(3)), "then something else made the difference"
    assert not differ_in_nan_alone(one, None)
