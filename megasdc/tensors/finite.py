"""Whether tensors are finite: two numbers a tensor on a device, which are read all at once, and one sum on the host.

The smallest and largest element are exact and cannot overflow, as a sum could: both are NaN if any element is NaN, and
one of them is infinite if any element is. On the host a sum is four times as fast, and waits for nothing: an element
that is not finite makes every sum with it not finite, whatever the order, so a finite sum says that all elements are.
Any other is no answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

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
