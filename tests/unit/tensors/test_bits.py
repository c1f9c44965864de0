"""Are bit patterns, their meaning and distances what the formats say?"""

from __future__ import annotations

import math

import pytest
import torch

from megasdc.tensors.bits import as_bits, bit_layout, element_bits, ulp_distance

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]
SMALL = [dtype for dtype in FLOATS if dtype.itemsize <= 2]
LARGEST = 2**63 - 1


def epsilon(dtype):
    """Step from 1.0 to the next value; 8-bit types have their mantissa bits in their names.

    torch.finfo of PyTorch 2.13 states 1/8 for float8_e5m2fnuz, whose values next to 1.0 are 1/4 apart.
    """
    return 2.0 ** -int(str(dtype).split("m")[-1][0]) if dtype.itemsize == 1 else torch.finfo(dtype).eps


def all_values(dtype):
    """Every bit pattern of a type of 8 or 16 bits."""
    integers = {1: torch.int8, 2: torch.int16}[dtype.itemsize]
    ends = torch.iinfo(integers)
    return torch.arange(ends.min, ends.max + 1).to(integers).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_views_share_memory_and_strides(dtype):
    """A flip in the integer view is a flip in the tensor, also through a transposed view and under a gradient."""
    tensor = torch.zeros(3, 4).to(dtype).T
    bits = as_bits(tensor.requires_grad_())
    assert bits.shape == tensor.shape and bits.stride() == tensor.stride() and not bits.requires_grad
    assert torch.iinfo(bits.dtype).bits == element_bits(dtype) == 8 * tensor.element_size()
    bits[1, 2] = 1
    changed = tensor.detach().double() != 0
    assert changed.sum() == 1 and changed[1, 2]


def test_views_of_other_memory_are_refused():
    """Complex tensors, and those whose memory holds the negated values, are named with the way out."""
    with pytest.raises(ValueError, match=r"complex64.*view_as_real"):
        as_bits(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ValueError, match="resolve_neg"):
        as_bits(torch.zeros(1, dtype=torch.complex64).conj().imag)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_layouts_cover_all_bits_and_fit_the_type(dtype):
    """Every bit has one meaning; the mantissa is as wide as the type's epsilon says, the sign is the highest bit."""
    layout = bit_layout(dtype)
    assert sorted(bit for bits in layout.values() for bit in bits) == list(range(element_bits(dtype)))
    assert len(layout["mantissa"]) == -math.log2(epsilon(dtype))
    assert list(layout["sign"]) == [element_bits(dtype) - 1] and layout["exponent"].start == layout["mantissa"].stop


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_flips_do_what_the_layout_says(dtype):
    """In 1.0, the sign bit negates, the lowest mantissa bit adds epsilon, the lowest exponent bit doubles or halves."""
    layout = bit_layout(dtype)
    for part, values in (("sign", {-1.0}), ("mantissa", {1 + epsilon(dtype)}), ("exponent", {0.5, 2.0})):
        one = torch.ones(1).to(dtype)
        bits = as_bits(one)
        bits ^= torch.tensor(1, dtype=bits.dtype) << layout[part].start
        assert one.double().item() in values


def test_layouts_of_integers_are_refused():
    """The message names the type and those there are."""
    with pytest.raises(ValueError, match=r"torch\.int32.*torch\.bfloat16"):
        bit_layout(torch.int32)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_distances_count_the_values_between(dtype):
    """Over every value of a type, sorted, distances are the places between; both zeros are one place."""
    values = all_values(dtype)
    numbers = values[~values.float().isnan()]
    ordered = numbers[numbers.float().sort(stable=True).indices]
    places = (ordered.float().diff() > 0).long().cumsum(0)
    places = torch.cat([torch.zeros(1, dtype=torch.int64), places])
    other = torch.randperm(len(ordered), generator=torch.Generator().manual_seed(0))
    shuffled = as_bits(ordered)[other].view(dtype)
    assert torch.equal(ulp_distance(ordered, shuffled), (places - places[other]).abs())
    assert torch.equal(ulp_distance(shuffled, ordered), (places - places[other]).abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_distances_follow_nextafter(dtype):
    """Some steps of nextafter, over zero too, are as many units."""
    start = torch.tensor([1.0, -1.0, 0.0, 1e-45 if dtype == torch.float32 else 5e-324, 3.0e38], dtype=dtype)
    for towards in (math.inf, -math.inf):
        value = start.clone()
        for steps in range(1, 6):
            value = torch.nextafter(value, torch.full_like(value, towards))
            assert ulp_distance(start, value).tolist() == [steps] * 5


def test_distances_too_large_are_the_largest():
    """float64 values of opposite sign do not wrap round to a small or negative distance."""
    ends = torch.tensor([-math.inf, -1.0, -2.0, 1.0], dtype=torch.float64)
    others = torch.tensor([math.inf, 1.0, 2.0, 2.0], dtype=torch.float64)
    one = 0x3FF << 52
    assert ulp_distance(ends, others).tolist() == [LARGEST, 2 * one, LARGEST, 1 << 52]


def test_distances_of_nan():
    """NaN is at no distance from the same bits and at the largest from all else; -0.0 is 0.0."""
    nans = torch.tensor([0x7FC00000, 0x7FC00000, 0x7FC00000, -0x400000, 0], dtype=torch.int32).view(torch.float32)
    others = torch.tensor([0x7FC00000, 0x7FC00001, 0, -0x400000, -(2**31)], dtype=torch.int32).view(torch.float32)
    assert ulp_distance(nans, others).tolist() == [0, LARGEST, LARGEST, 0, 0]


def test_distances_need_like_tensors():
    """Both shapes and types are in the message; integers are refused."""
    with pytest.raises(ValueError, match=r"float32 \[2\] and torch\.float32 \[3\]"):
        ulp_distance(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"float32 \[2\] and torch\.float64 \[2\]"):
        ulp_distance(torch.zeros(2), torch.zeros(2).double())
    with pytest.raises(ValueError, match="int32"):
        ulp_distance(torch.zeros(2).int(), torch.zeros(2).int())
