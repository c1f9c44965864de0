"""Elements of tensors: their bit patterns, how far two tensors are apart, and whether all are finite.

Bits are compared without arithmetic on the values: layout, differences, ULP distance. The distance of two tensors is
the norm of the difference over that of the reference.

Whether elements are finite takes two numbers a tensor on a device, which are read all at once, and one sum on the host.
The smallest and largest element are exact and cannot overflow, as a sum could: both are NaN if any element is NaN, and
one of them is infinite if any element is. On the host a sum is four times as fast, and waits for nothing: an element
that is not finite makes every sum with it not finite, whatever the order, so a finite sum says that all elements are.
Any other is no answer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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


_BLOCK = 1 << 22


@dataclass
class Distance:
    """Distance of some parameters from the reference.

    Attributes:
        squares: sum of (theta - theta_ref)^2 over the elements that differ in some bit.
        reference: sum of theta_ref^2.
        num_different: elements that differ in some bit.
    """

    squares: float = 0.0
    reference: float = 0.0
    num_different: int = 0
    numel: int = 0

    @property
    def equal(self) -> bool:
        """Whether every bit is equal."""
        return self.num_different == 0

    @property
    def relative(self) -> float:
        """||theta - theta_ref|| / ||theta_ref||; 0 where every bit is equal; NaN with NaN or infinities."""
        if self.equal:
            return 0.0
        if self.reference == 0:
            return math.inf if self.squares else 0.0
        return math.sqrt(self.squares / self.reference)

    def add(self, other: Distance) -> None:
        """Add the counts of further parameters."""
        self.squares += other.squares
        self.reference += other.reference
        self.num_different += other.num_different
        self.numel += other.numel

    def as_dict(self) -> dict[str, Any]:
        """As JSON-compatible values."""
        norms = {"difference_norm": math.sqrt(self.squares), "reference_norm": math.sqrt(self.reference)}
        numbers = {"relative": self.relative, **norms}
        return {
            "equal": self.equal,
            **{name: value if math.isfinite(value) else str(value) for name, value in numbers.items()},
            "num_different": self.num_different,
            "numel": self.numel,
        }


def distance(got: Tensor, reference: Tensor) -> Distance:
    """Distance of two tensors of one shape, block by block in float64.

    Types may differ; elements then differ if their values do.
    """
    found = Distance(numel=got.numel())
    for x, y in _blocks(got.reshape(-1), reference.reshape(-1)):
        wide = y.to(torch.float64)
        found.reference += float(wide.square().sum())
        differs = as_bits(x) != as_bits(y) if x.dtype == y.dtype else x.to(torch.float64) != wide
        count = int(differs.sum())
        if count:
            found.num_different += count
            found.squares += float((x[differs].to(torch.float64) - wide[differs]).square().sum())
    return found


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, a.numel(), _BLOCK):
        yield a[start : start + _BLOCK], b[start : start + _BLOCK]


NAN, INF = "NaN", "Inf"
"""Kinds of a non-finite result; NaN where it holds both."""


def checkable(tensor: Tensor) -> bool:
    """Whether a tensor's type can hold NaN or Inf, and it has elements."""
    return tensor.is_floating_point() and tensor.numel() > 0


def start_extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest element of a non-empty floating-point tensor, each [], without waiting for the device."""
    found = torch.aminmax(tensor.detach())
    return found.min, found.max


def is_surely_finite(tensor: Tensor) -> bool:
    """Whether the sum of a floating-point tensor in host memory is finite, and so all of its elements."""
    return math.isfinite(tensor.detach().sum().item())


def kind_of_extremes(smallest: float, largest: float) -> str | None:
    """The kind of non-finite elements, from smallest and largest element; None: none."""
    if math.isnan(smallest) or math.isnan(largest):
        return NAN
    return INF if math.isinf(smallest) or math.isinf(largest) else None


def non_finite_kind(tensors: Sequence[Tensor]) -> str | None:
    """The kind of non-finite elements in some tensors; None: none; NaN before Inf.

    Sync: waits for the device.
    """
    values = [value for one in tensors if checkable(one) for value in start_extremes(one)]
    if not values:
        return None
    devices = {one.device for one in values}  # of an optimizer that is offloaded, several
    read = [torch.stack([one.double() for one in values if one.device == device]).tolist() for device in devices]
    kinds = {kind_of_extremes(value, value) for found in read for value in found}
    return next((kind for kind in (NAN, INF) if kind in kinds), None)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of some tensors are finite; each is read once, on the host a second time if in doubt.

    Sync: waits for the device.
    """
    unsure = [one for one in tensors if checkable(one) and (one.device.type != "cpu" or not is_surely_finite(one))]
    return non_finite_kind(unsure) is None
