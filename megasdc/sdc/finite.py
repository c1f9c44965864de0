"""Detection of the first NaN or Inf: two numbers a result, on a device kept there and read all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasdc.common.addresses import Address
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc.trace import execution_key
from megasdc.tensors.finite import checkable, is_surely_finite, kind_of_extremes, start_extremes


@dataclass(frozen=True)
class NonFinite:
    """A result with elements that are not finite.

    Args:
        place: how many results its rank recorded before it.
        kind: ``NAN`` or ``INF`` of ``megasdc.tensors.finite``.
    """

    address: Address
    place: int
    kind: str


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


def first_non_finite(found: Sequence[NonFinite | None], layout: ParallelDims) -> tuple[int, NonFinite] | None:
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
