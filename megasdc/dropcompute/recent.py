"""Were too many micro-batches left out lately, and always by the same replica? Counts of the last steps."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from megasdc.dropcompute.decisions import StepDecisions

SLOW_SHARE = 0.9
"""Share of steps with micro-batches left out from which a replica is called slow,"""
UNLUCKY_SHARE = 0.5
"""if the median replica is not above this one."""


@dataclass(frozen=True)
class SlowReplica:
    """A replica that is late in nearly every step while others are not.

    Args:
        replica: which.
        late_steps: steps in which it left micro-batches out.
        of_steps: steps that were looked at.
        median: late steps of the median replica.
    """

    replica: int
    late_steps: int
    of_steps: int
    median: float


class RecentSteps:
    """The last steps in which micro-batches could be left out, and those in which too many had been.

    Args:
        length: steps.
    """

    def __init__(self, length: int) -> None:
        self._steps: deque[StepDecisions] = deque(maxlen=length)
        self._length = length

    def add(self, step: StepDecisions) -> None:
        """Take in a step."""
        self._steps.append(step)

    @property
    def dropped(self) -> int:
        """Micro-batches left out in these steps, by all replicas."""
        return sum(step.dropped for step in self._steps)

    def exceeds(self, max_drop_rate: float, per_step: int) -> bool:
        """Whether more were left out than the rate allows in a whole window.

        Args:
            max_drop_rate: share.
            per_step: micro-batches planned in a step, by all replicas.
        """
        return self.dropped > max_drop_rate * self._length * per_step

    def slow_replicas(self) -> list[SlowReplica]:
        """Replicas that are slow and not unlucky; none before the window is full."""
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
