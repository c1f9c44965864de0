"""Bit patterns of tensors: layout, differences and ULP distance, without arithmetic on the values."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA_BITS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 3,
    torch.float8_e5m2: 2,
    torch.float8_e5m2fnuz: 2,
}
_LARGEST = torch.iinfo(torch.int64).max
_BYTES = torch.arange(256)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a data type without its module, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def element_bits(dtype: torch.dtype) -> int:
    """Bits of one element.

    Raises:
        ValueError: the type is complex.
    """
    if dtype.is_complex:
        raise ValueError(f"{dtype} has no integer view: need a real type; torch.view_as_real() gives the parts")
    return 8 * dtype.itemsize


def as_bits(tensor: Tensor) -> Tensor:
    """The bit patterns of a tensor as signed integers of the same width.

    Args:
        tensor: any shape, strides and device; any real type.

    Returns:
        The same shape and strides, int8, int16, int32 or int64; shares memory, detached.

    Raises:
        ValueError: the type is complex, or the negation of the tensor is pending, so its memory does not hold its
            bits.

    Sync: none.
    """
    width = element_bits(tensor.dtype)
    if tensor.is_neg():
        raise ValueError("the tensor's negation is pending, its memory holds other bits; call resolve_neg() first")
    return tensor.detach().view(_INTEGERS[width // 8])


def bit_layout(dtype: torch.dtype) -> dict[str, range]:
    """Bit numbers of sign, exponent and mantissa of a floating-point type.

    Returns:
        Bit numbers, 0 is the lowest, of ``sign``, ``exponent`` and ``mantissa``.

    Raises:
        ValueError: the type is not a floating-point type with a sign, an exponent and a mantissa.

    Source: IEEE 754-2019, section 3.4; Micikevicius et al. 2022, FP8 Formats for Deep Learning, table 1.
    """
    if dtype not in _MANTISSA_BITS:
        raise ValueError(f"{dtype} has no known bit layout; known are {', '.join(map(str, _MANTISSA_BITS))}")
    mantissa, width = _MANTISSA_BITS[dtype], element_bits(dtype)
    return {"sign": range(width - 1, width), "exponent": range(mantissa, width - 1), "mantissa": range(mantissa)}


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Distance of two tensors in steps from one representable value to the next (ULP), element by element.

    Both zeros are one value; infinity is one step beyond the largest number. NaN has no place in that order: its
    distance is 0 to the same bits and the largest int64 to anything else, another NaN included. A distance that int64
    cannot hold (float64 only) is the largest int64 too.

    Args:
        a: any shape, a type of `bit_layout`.
        b: the same shape, type and device.

    Returns:
        The shape of ``a``, int64, at least 0.

    Raises:
        ValueError: types or shapes differ, or the type is no floating-point type of `bit_layout`.

    Sync: none.
    Source: Dawson 2012, Comparing Floating Point Numbers,
        https://randomascii.wordpress.com/2012/02/25/comparing-floating-point-numbers-2012-edition/
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(
            f"need two tensors of one type and shape, got {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        )
    bit_layout(a.dtype)  # refuses other types
    left, right = as_bits(a), as_bits(b)
    magnitude = torch.iinfo(left.dtype).max
    i, j = ((bits & magnitude).to(torch.int64) for bits in (left, right))
    distance = torch.where((left < 0) == (right < 0), (i - j).abs(), i + j)
    distance = torch.where(distance < 0, _LARGEST, distance)  # the sum of two float64 patterns has wrapped
    nan = _is_nan(a) | _is_nan(b)
    return torch.where(nan, torch.where(left == right, 0, _LARGEST), distance)


def count_flips(a: Tensor, b: Tensor) -> list[int]:
    """For each bit, the number of elements of two tensors in which it differs.

    Args:
        a: any shape, a real type, on the host.
        b: the same shape and type.

    Returns:
        One number a bit of an element, the lowest bit first.

    Raises:
        ValueError: the type is complex.
    """
    flips = as_bits(a).contiguous() ^ as_bits(b).contiguous()
    lanes = flips.view(-1, 1).view(torch.uint8)  # the lowest byte first
    if sys.byteorder == "big":
        lanes = lanes.flip(1)
    counts = []
    for lane in range(lanes.shape[1]):
        of_value = torch.bincount(lanes[:, lane], minlength=256)
        counts += [int(of_value[_BYTES >> bit & 1 == 1].sum()) for bit in range(8)]
    return counts


def _is_nan(tensor: Tensor) -> Tensor:
    if tensor.element_size() == 1:  # torch has no isnan for 8-bit floats
        tensor = tensor.to(torch.float32)
    return tensor.isnan()
