"""Detection of the first NaN or Inf: two numbers a result, on a device kept there and read all at once.

The smallest and largest element are exact and cannot overflow, as a sum could: both are NaN if any element is NaN, and
one of them is infinite if any element is. On the host a sum is four times as fast, and waits for nothing: an element
that is not finite makes every sum with it not finite, whatever the order, so a finite sum says that all elements are.
Any other is no answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasdc.addresses import Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.compare import execution_key

NAN, INF = "NaN", "Inf"
"""Kinds of a non-finite result; NaN where it holds both."""


@dataclass(frozen=True)
class NonFinite:
    """A result with elements that are not finite.

    Args:
        place: how many results its rank recorded before it.
        kind: ``NAN`` or ``INF``.
    """

    address: Address
    place: int
    kind: str


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


def kind_of(tensors: Sequence[Tensor]) -> str | None:
    """The kind of non-finite elements in some tensors; None: none; NaN before Inf.

    Sync: waits for the device.
    """
    values = [value for one in tensors if checkable(one) for value in start_extremes(one)]
    if not values:
        return None
    kinds = {kind_of_extremes(value, value) for value in torch.stack([one.double() for one in values]).tolist()}
    return next((kind for kind in (NAN, INF) if kind in kinds), None)


def checkable(tensor: Tensor) -> bool:
    """Whether a tensor's type can hold NaN or Inf, and it has elements."""
    return tensor.is_floating_point() and tensor.numel() > 0


class FiniteRecorder:
    """A listener of ``engine.observer.Observer`` that records whether results are finite, and changes nothing."""

    def __init__(self) -> None:
        self._seen = 0
        self._addresses: list[tuple[int, Address]] = []
        """Of results that may not be finite, with the number of those before."""
        self._values: list[Tensor] = []

    def __call__(self, address: Address, result: Tensor) -> None:
        """Record one result.

        Sync: none.
        """
        if not checkable(result):
            return
        if result.device.type != "cpu" or not is_surely_finite(result):
            self._addresses.append((self._seen, address))
            self._values += start_extremes(result)
        self._seen += 1

    def take(self, dims: ParallelDims) -> NonFinite | None:
        """This rank's first non-finite result since the last call, in execution order.

        Sync: waits for the device once.
        """
        self._seen = 0
        if not self._values:
            return None
        found = []
        addresses, values = self._addresses, torch.stack([one.double() for one in self._values])
        self._addresses, self._values = [], []
        extremes = values.view(-1, 2)
        for place in (~extremes.isfinite().all(1)).nonzero().flatten().tolist():
            kind = kind_of_extremes(*extremes[place].tolist())
            assert kind is not None, "one of the two extremes is not finite"
            number, address = addresses[place]
            found.append(NonFinite(address, number, kind))
        return min(found, key=lambda one: execution_key(one.address, one.place, dims), default=None)


def first_of(found: Sequence[NonFinite | None], layout: ParallelDims) -> tuple[int, NonFinite] | None:
    """The first non-finite result over all ranks, in execution order.

    Replicas do not influence each other within a micro-batch; of two at the same place the lower rank is taken.

    Args:
        found: by global rank; None: all results were finite.

    Returns:
        The rank and its result; None where all ranks' results were finite.
    """
    keyed = []
    for rank, one in enumerate(found):
        if one is not None:
            dims = ParallelDims(layout.tensor, layout.pipeline, layout.data, rank)
            keyed.append((execution_key(one.address, one.place, dims), rank, one))
    return min(keyed, key=lambda item: item[:2])[1:] if keyed else None
