"""Exact check of the gradient reduction: a slice of each shard is summed again from the replicas' own gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.optim.zero1 import is_bf16_optimizer
from megasdc.sdc.fp64.sums import mean_of
from megasdc.train.detection.slices.exchange import Exchange
from megasdc.train.detection.slices.layout import Slice, Slices

WITNESSES = 2
"""Other ranks that keep a copy of a slice, where they have one."""


@dataclass(frozen=True)
class WrongSum:
    """The element of a reduced gradient that is farthest outside of what rounding allows.

    Args:
        due: the slice that it is in.
        element: place in the slice.
        exact: the mean of the replicas' gradients, in fp64.
        bound: largest difference that rounding explains.
        got: what the owner has.
        elements: of the slice, that are outside.
    """

    due: Slice
    element: int
    exact: float
    bound: float
    got: float
    elements: int


class SumCheck:
    """Copies a slice of each replica's gradients before they are summed, and compares their mean with the sum's.

    With two replicas in fp32 only the two numbers beside the exact mean pass, unless gradients cancel. With the
    optimizer that keeps the whole reduced gradient on every rank, ``WITNESSES`` other ranks keep their copies of each
    slice: where one of them is within the bound, the sum was right, and the owner's copy of it is wrong.
    """

    def __init__(self, engine: TrainingEngine, slices: Slices) -> None:
        self._engine, self._slices = engine, slices
        self._group = engine.mpu.get_data_parallel_group() if engine.dims.data > 1 else None
        self._exchange: Exchange | None = None
        self._due: Slice | None = None
        self._every_due: Sequence[Slice | None] = ()
        self._copies: dict[int, Tensor] = {}

    def copy(self, turn: int) -> None:
        """Send this rank's part of each owner's slice that is due to its owner.

        Collective: the data group.
        """
        due = self._every_due = self._slices.at(turn)
        self._due = due[self._engine.dims.dp_rank]
        empty = torch.empty(0, dtype=self._kind, device=self._engine.device)
        sent = [empty if one is None else self._slices.accumulated(one) for one in due]
        sizes = [0 if self._due is None else self._due.numel] * len(due)
        self._exchange = Exchange(sent, sizes, self._group)

    @property
    def _kind(self) -> torch.dtype:
        """Type that gradients are accumulated in."""
        first = next(one for one in self._slices.at(0) if one is not None)
        return self._slices.accumulated(first).dtype

    def compare(self) -> WrongSum | None:
        """The worst element of this rank's slice, while gradients are reduced and not changed yet; None: none is wrong.

        Sync: waits for the device.
        """
        assert self._exchange is not None, "copied before the reduction"
        parts, self._exchange = self._exchange.finish(), None
        self._copies = dict(self._copied())
        if self._due is None:
            return None
        reduced = self._slices.reduced(self._due)
        optimizer = self._engine.optimizer
        sent_as = (self._engine if is_bf16_optimizer(optimizer) else optimizer).communication_data_type
        kinds = [reduced.dtype, parts[0].dtype, sent_as]
        coarsest = max(kinds, key=lambda kind: torch.finfo(kind).eps)
        exact = mean_of(parts, self._engine.gradient_factor.item(), coarsest, converted=sent_as != parts[0].dtype)
        return _worst(self._due, reduced.double(), exact.values, exact.bounds)

    def _copied(self) -> Iterator[tuple[int, Tensor]]:
        """This rank's copies of slices of the owners after it, by global rank, where it has any."""
        dims = self._engine.dims
        if not is_bf16_optimizer(self._engine.optimizer):
            return
        for after in range(1, min(WITNESSES + 1, dims.data)):
            replica = (dims.dp_rank + after) % dims.data
            if (due := self._every_due[replica]) is not None:
                yield self._slices.ranks[replica], self._slices.copy_of(due, replica)

    def copy_at(self, owner: int, element: int) -> float | None:
        """What this rank has where another one's slice is wrong; None: it keeps no copy."""
        copy = self._copies.get(owner)
        return None if copy is None else copy[element].item()


def _worst(due: Slice, got: Tensor, exact: Tensor, bounds: Tensor) -> WrongSum | None:
    outside = ~((got - exact).abs() <= bounds) & bounds.isfinite() & exact.isfinite()
    if not bool(outside.any()):
        return None
    distance = torch.where(outside, ((got - exact).abs() / bounds).nan_to_num(nan=torch.inf), -1.0)
    place = int(distance.argmax())
    values = exact[place].item(), bounds[place].item(), got[place].item()
    return WrongSum(due, place, *values, int(outside.sum()))
