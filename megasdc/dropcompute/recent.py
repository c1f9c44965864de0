"""Counts over the last steps: whether too many micro-batches were dropped, and which replica drops in nearly all."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from megasdc.dropcompute.decisions import StepDecisions

SLOW_SHARE = 0.9
"""A replica is slow if it dropped micro-batches in at least this share of the steps,"""
UNLUCKY_SHARE = 0.5
"""and the median replica in no more than this share."""


@dataclass(frozen=True)
class SlowReplica:
    """A replica that is late in nearly every step while most others are not.

    Args:
        late_steps: steps in which it dropped micro-batches.
        of_steps: steps in the window.
        median: late steps of the median replica.
    """

    replica: int
    late_steps: int
    of_steps: int
    median: float


class RecentSteps:
    """The last ``length`` steps in which micro-batches could be dropped."""

    def __init__(self, length: int) -> None:
        self._steps: deque[StepDecisions] = deque(maxlen=length)
        self._length = length

    def add(self, step: StepDecisions) -> None:
        """Add a step; the oldest one leaves a full window."""
        self._steps.append(step)

    @property
    def dropped(self) -> int:
        """Micro-batches dropped in these steps, over all replicas."""
        return sum(step.dropped for step in self._steps)

    def exceeds(self, max_drop_rate: float, per_step: int) -> bool:
        """Whether more were dropped than the rate allows in a full window.

        Args:
            per_step: micro-batches planned in a step, over all replicas.
        """
        return self.dropped > max_drop_rate * self._length * per_step

    def slow_replicas(self) -> list[SlowReplica]:
        """Replicas late in nearly every step while the median replica is not; none before the window is full."""
        if len(self._steps) < self._length:
            return []
        replicas = range(len(self._steps[0].completed))
        late = [sum(step.completed[replica] < step.planned for step in self._steps) for replica in replicas]
        median = statistics.median(late)
        if median > UNLUCKY_SHARE * self._length:
            return []
        return [
            SlowReplica(replica, count, self._length, median)
            for replica, count in enumerate(late)
            if count >= SLOW_SHARE * self._length
        ]
