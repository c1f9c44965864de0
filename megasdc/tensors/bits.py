"""Which bits does a tensor hold? Integer views."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def element_bits(dtype: torch.dtype) -> int:
    """Bits of one element.

    Raises:
        ValueError: the type is complex.
    """
    if dtype.is_complex:
        raise ValueError(f"{dtype} has no integer view: need a real type; torch.view_as_real() gives the parts")
    return 8 * dtype.itemsize


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor as signed integers of the same width.

    Args:
        tensor: any shape, strides and device; any real type.

    Returns:
        The same shape and strides, int8, int16, int32 or int64; shares memory, knows no gradient.

    Raises:
        ValueError: the type is complex, or the negation of the tensor is pending, so that the memory does not hold its
            bits.
    """
    width = element_bits(tensor.dtype)
    if tensor.is_neg():
        raise ValueError("the tensor's negation is pending, its memory holds other bits; call resolve_neg() first")
    return tensor.detach().view(_INTEGERS[width // 8])
