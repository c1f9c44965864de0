"""How often checks look, so that their time stays within a share of the step's."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

MOST_EVERY = 50
"""Most steps from one look to the next: what lasts is to be seen while a run can still go back to before it."""


@dataclass(frozen=True)
class TimeShares:
    """Time of checks, each as a share of a step.

    Args:
        fixed: in every step, whatever is looked at: parameters, the reduction over ranks.
        audits: the mean over all steps.
        look: at results of one micro-batch.
        slice: at one slice of the optimizer.
    """

    fixed: float
    audits: float
    look: float
    slice: float


@dataclass(frozen=True)
class Cadence:
    """Which steps look at results, and at how many micro-batches each.

    Args:
        micro_batches: of a step that looks, others each time.
        every: steps from one such step to the next.
    """

    micro_batches: int
    every: int = 1

    def looked_at(self, step: int, of: int) -> Collection[int]:
        """Numbers of the micro-batches that a step looks at, ``of`` all that it has; empty: none."""
        first = self.turn(step) * self.micro_batches
        return (
            frozenset((first + one) % of for one in range(self.micro_batches))
            if step % self.every == 0
            else frozenset()
        )

    def turn(self, step: int) -> int:
        """Number of the look: what is looked at in turn follows from it."""
        return step // self.every

    def slices(self, step: int) -> bool:
        """Whether a step looks at a slice of the optimizer: between two looks at results, so that both are short."""
        return step % self.every == self.every // 2

    @property
    def rate(self) -> float:
        """Micro-batches that are looked at in a step, on average."""
        return self.micro_batches / self.every

    def period(self, of: int) -> int:
        """Steps in which results of each of a step's micro-batches have been looked at."""
        return math.ceil(of / self.micro_batches) * self.every

    def share(self, shares: TimeShares) -> float:
        """Time of all checks over that of all steps."""
        return shares.fixed + shares.audits + (shares.look * self.micro_batches + shares.slice) / self.every


def choose_cadence(shares: TimeShares, budget: float, micro_batches: int) -> Cadence:
    """As many looks as a share ``budget`` of a step leaves room for: from all ``micro_batches`` of every step down.

    One look in ``MOST_EVERY`` steps is made even where that is more than the budget.
    """
    room = budget - shares.fixed - shares.audits
    once = shares.look + shares.slice
    if once > room:
        return Cadence(1, MOST_EVERY if room <= once / MOST_EVERY else math.ceil(once / room))
    more = (room - once) / shares.look if shares.look else math.inf
    return Cadence(micro_batches if more >= micro_batches - 1 else 1 + int(more))
