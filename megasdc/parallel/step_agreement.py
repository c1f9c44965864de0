"""Agreement of all ranks in a step: one reduction over host memory for everything that is decided between steps.

A field is a number that every rank gives, or one for each place, such as each replica. All fields of a step are packed
into one MAX reduction, which runs while the optimizer steps, so that no rank waits for it. A minimum is the negated
maximum of negated numbers. A sum is the sum of a field's places, which one rank each gives; so no rounding depends on
the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

MAX, MIN = "max", "min"


class Field:
    """A number on which all ranks agree once in a step.

    Args:
        give: returns this rank's number, called when its gradients are reduced; None: this rank has none.
        reduction: ``MAX`` or ``MIN``, of the ranks' numbers.
        default: result where no rank has a number.
        places: number of numbers that are agreed on.
        place: which of them this rank gives, from 0.
    """

    def __init__(
        self,
        give: Callable[[], float | None],
        reduction: str = MAX,
        default: float = 0.0,
        places: int = 1,
        place: int = 0,
    ) -> None:
        self._give = give
        self._sign = -1.0 if reduction == MIN else 1.0
        self._default = default
        self._place = place
        self.values = [default] * places
        """Results of the last finished step by place, the same on all ranks."""

    @property
    def value(self) -> float:
        """Result of the last finished step at the first place."""
        return self.values[0]

    def send(self) -> list[float]:
        """This rank's part of the reduction."""
        sent = [-math.inf] * len(self.values)
        own = self._give()
        if own is not None:
            sent[self._place] = self._sign * own
        return sent

    def receive(self, found: list[float]) -> None:
        """Take the result of the reduction, one number for each place."""
        self.values = [self._default if one == -math.inf else self._sign * one for one in found]


class StepAgreement:
    """The reduction of a step's fields, over a group of all ranks for tensors in host memory."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._fields: tuple[Field, ...] = ()
        self._numbers = torch.zeros(0, dtype=torch.float64)
        self._exchange: Any = None

    def start(self, fields: Iterable[Field]) -> None:
        """Ask every field for this rank's number, and start the reduction; does not block.

        Args:
            fields: the same on all ranks, in the same order; empty: nothing is exchanged.

        Collective: the group.
        """
        self._fields = tuple(fields)
        if not self._fields:
            return
        self._numbers = torch.tensor([one for field in self._fields for one in field.send()], dtype=torch.float64)
        self._exchange = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the reduction, and give each field its result."""
        if not self._fields:
            return
        self._exchange.wait()
        found, start = self._numbers.tolist(), 0
        for field in self._fields:
            field.receive(found[start : start + len(field.values)])
            start += len(field.values)
        self._fields = ()
