"""Rows of products: healthy ones are not suspicious, wrong ones are, and only a proven bound names an element."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megasdc.sdc.rows import suspicion, worst_element

KINDS = [torch.float32, torch.bfloat16]
MAKERS: dict[str, Callable[..., Tensor]] = {
    "normal": torch.randn,
    "positive": torch.rand,
    "wide": lambda *shape: torch.randn(*shape) * torch.exp(3 * torch.randn(*shape)),
    "outliers": lambda *shape: torch.randn(*shape) * (1 + 100 * (torch.rand(shape[-1]) < 0.02)),
    "half zero": lambda *shape: torch.relu(torch.randn(*shape)),
    "tiny": lambda *shape: torch.randn(*shape) * 1e-22,
}


def factors(make: Callable[..., Tensor], kind: torch.dtype, terms: int = 192) -> tuple[Tensor, Tensor, Tensor]:
    """Of a product of 100 rows and 150 columns, both no multiples of a block."""
    return make(100, terms).to(kind), make(150, terms).to(kind), torch.randn(150).to(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("terms", [16, 192, 1000])
def test_healthy_rows_are_far_below_the_limit(kind: torch.dtype, name: str, terms: int) -> None:
    """Also transposed, as in gradients, and with a bias."""
    torch.manual_seed(terms)
    left, right, bias = factors(MAKERS[name], kind, terms)
    assert suspicion(left, right, bias, torch.nn.functional.linear(left, right, bias)).max() < 0.75
    turned = left.T.contiguous().T
    assert suspicion(turned, right, None, turned @ right.T).max() < 0.75
    assert suspicion(left, right.T.contiguous().T, None, left @ right.T).max() < 0.75


def test_equal_terms_round_in_one_direction_and_name_nobody() -> None:
    """What the limit takes for independent is not: such a row is looked at, and every element is within its bound."""
    left, right = torch.full((4, 4096), 1.37), torch.full((256, 4096), 1.37)
    result = left @ right.T
    assert suspicion(left, right, None, result).max() > 1
    assert worst_element(left, right, None, result, 0) is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_wrong_element_is_found_and_named(kind: torch.dtype) -> None:
    """A hundredth, in bf16 a half, of a usual element is enough; NaN and Inf too."""
    torch.manual_seed(0)
    left, right, bias = factors(torch.randn, kind)
    healthy = torch.nn.functional.linear(left, right, bias)
    small = 0.01 if kind is torch.float32 else 8.0
    for change in (small, -100.0, torch.nan, torch.inf):
        wrong = healthy.clone()
        wrong[7, 149] += change
        found = suspicion(left, right, bias, wrong)
        suspicious = (~(found <= 1)).nonzero().flatten().tolist()
        assert suspicious == [7], change
        outside = worst_element(left, right, bias, wrong, 7)
        assert outside is not None and outside.element == (7, 149)
        exact = (left[7].double() @ right[149].double() + bias[149].double()).item()
        assert outside.exact == pytest.approx(exact, rel=1e-12)
    assert worst_element(left, right, bias, healthy, 7) is None
