"""Whose sum of squares is wrong, and which blocks are added up again at one look?"""

from __future__ import annotations

import math

import pytest
import torch

from megasdc.optim.state_blocks import BLOCK
from megasdc.train.detection.slices.squares import Claim, Told, _fsum, _is_near, _sets_of, wrong_of

RIGHT, WRONG = 3.0, 3.1


@pytest.mark.parametrize(
    ("got", "again", "elements", "named"),
    [
        (WRONG, RIGHT, (1, 1), 0),
        (RIGHT, WRONG, (1, 1), 1),
        (WRONG, WRONG, (1, 1), None),
        (WRONG, RIGHT, (1, 2), None),
    ],
    ids=["owner", "checker", "both", "elements_changed_on_the_way"],
)
def test_the_exact_sum_tells_whose_is_wrong(
    got: float, again: float, elements: tuple[int, int], named: int | None
) -> None:
    """Where both have the same elements, and one of two sums is within rounding of the exact one."""
    claim = Claim(0, 5, 0, 100, got, again)
    assert wrong_of(claim, 1, Told(elements[0], RIGHT), Told(elements[1], RIGHT)) == named


def test_a_rank_alone_is_the_one() -> None:
    """Its own two sums differ."""
    assert wrong_of(Claim(0, 5, 0, 100, WRONG, RIGHT), 0, Told(1, RIGHT), Told(1, RIGHT)) == 0


def test_every_element_is_in_one_set() -> None:
    """In order; no set is larger than a block; what does not count is in none."""
    numels = [10, 0, 2 * BLOCK + 3, BLOCK - 5, 7, 1]
    sets = _sets_of(numels)
    seen: dict[int, int] = {}
    for one in (piece for group in sets for piece in group.pieces):
        assert seen.get(one.fragment, 0) == one.start
        seen[one.fragment] = one.start + one.numel
    assert seen == {place: numel for place, numel in enumerate(numels) if numel}
    assert all(sum(one.sizes) <= BLOCK for one in sets)


def test_rounding_is_no_difference_and_a_flip_is_one() -> None:
    """Against the exact sum, in any order of addition; the lowest bit of a norm in fp32 is seen."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(3))
    exact = _fsum(values.double().square().tolist())
    for order in (values, values.flip(0), values.sort().values):
        assert _is_near(float(torch.linalg.vector_norm(order, dtype=torch.float64).square()), exact, len(values))
    assert not _is_near(exact * (1 + 2.0**-24), exact, len(values))
    assert _is_near(math.nan, math.inf, 3) and not _is_near(math.nan, 1.0, 3)
