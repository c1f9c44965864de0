"""Which products differ from the exact one by more than rounding explains?"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from megasdc.ops.stress.products import (
    DTYPES,
    SLOTS,
    Linear,
    case_name,
    deviation,
    linears,
    make_inputs,
    product_factors,
)
from megasdc.tensors.bits import as_bits, bit_layout

LAYER = Linear("odd.33x1025x17", 33, 1025, 17)


def pair(dtype: str, phase: str = "forward") -> tuple[torch.Tensor, torch.Tensor]:
    inputs = {name: tensor.to(DTYPES[dtype]) for name, tensor in make_inputs(LAYER).items()}
    return product_factors(inputs, phase)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phase", SLOTS)
def test_right_products_pass(dtype: str, phase: str) -> None:
    """Torch's product, and sums added in fp32 in other orders, are within the bound; shapes are those of the layer."""
    left, right = pair(dtype, phase)
    result = left @ right
    assert tuple(result.shape) == LAYER.shape(phase)
    assert float(deviation(result, left, right).max()) <= 1
    random = np.random.default_rng(3)
    a, b = left.float().numpy(), right.float().numpy()
    for _ in range(3):
        total = np.zeros(result.shape, np.float32)
        for place in random.permutation(a.shape[1]):
            total = total + np.outer(a[:, place], b[place])
        assert float(deviation(torch.from_numpy(total).to(result.dtype), left, right).max()) <= 1


def test_the_bound_is_the_proven_one() -> None:
    """Of one element, in exact fractions: g sum |a||b| + the result's rounding, to a relative 1e-6."""
    left, right = torch.tensor([[1.5, -3.0, 0.25]]), torch.tensor([[2.0], [1.0], [8.0]])
    exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(left[0], right[:, 0], strict=True))
    size = sum(abs(Fraction(float(a)) * Fraction(float(b))) for a, b in zip(left[0], right[:, 0], strict=True))
    steps = 4 * (Fraction(1, 2**23) + Fraction(1, 2**52))
    bound = steps / (1 - steps) * size
    bound += Fraction(1, 2**23) * (abs(exact) + bound)
    off = torch.tensor([[1e-3]], dtype=torch.float32)
    found = float(deviation(torch.tensor([[float(exact)]]) + off, left, right))
    assert found == pytest.approx(float((Fraction(float(torch.tensor(float(exact)) + off)) - exact) / bound), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_elements_do_not_pass(dtype: str) -> None:
    """A flipped sign or upper exponent bit, NaN and Inf in a large element are seen, and nothing else."""
    left, right = pair(dtype)
    right_result = left @ right
    place = int(right_result.abs().argmax())
    parts = bit_layout(right_result.dtype)
    for bit in (parts["sign"][0], *parts["exponent"][-2:], parts["exponent"][0]):
        wrong = right_result.clone()
        bits = as_bits(wrong).view(-1)
        bits[place] ^= torch.tensor(1, dtype=bits.dtype) << bit
        far = deviation(wrong, left, right).flatten()
        assert int((far > 1).sum()) == 1 and int(far.argmax()) == place, bit
    for value in (torch.nan, torch.inf, -torch.inf):
        wrong = right_result.clone()
        wrong.view(-1)[place] = value
        assert int((deviation(wrong, left, right) > 1).sum()) == 1


def test_inputs_and_names_are_fixed() -> None:
    """Inputs are a function of the shape; no two products share a name."""
    again = make_inputs(LAYER)
    assert all(torch.equal(tensor, again[name]) for name, tensor in make_inputs(LAYER).items())
    for on_accelerator in (False, True):
        layers = linears(on_accelerator)
        names = [case_name(one, dtype, phase) for one in layers for dtype in DTYPES for phase in SLOTS]
        assert len(names) == len(set(names)) == 3 * 3 * len(layers)
    assert {one.hidden for one in linears(False) if one.fqn.startswith("h")} == {256, 768}
