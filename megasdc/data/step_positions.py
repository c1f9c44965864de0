"""Samples that all replicas take in one step, from their positions before it, with audits and drops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megasdc.data.position import Position


@dataclass(frozen=True)
class StepWork:
    """What decides which samples a step takes.

    Args:
        size: samples b of a micro-batch.
        planned: micro-batches of each replica.
        completed: micro-batches that each replica started, [replica]; the others were dropped.
        source: replica whose first micro-batch all replicas compute; None: each computes its own.
        given_up: samples of dropped micro-batches do not come in the next step.
        again: but once more before their epoch ends.
        skip: positions of the stream that are never taken.
    """

    size: int
    planned: int
    completed: tuple[int, ...]
    source: int | None = None
    given_up: bool = False
    again: bool = False
    skip: tuple[range, ...] = ()

    def own(self, replica: int, micro_batches: int) -> int:
        """Samples of its own in the first micro-batches of a replica: without those of another replica."""
        shared = self.source is not None and self.source != replica
        return (micro_batches - shared) * self.size


def advance(before: Sequence[Position], work: StepWork, epoch: int | None) -> list[Position]:
    """Positions of all replicas after a step; ``epoch``: samples per epoch, None: the stream has no common epochs."""
    num_replicas, after = len(before), []
    for replica, (position, completed) in enumerate(zip(before, work.completed, strict=True)):
        taken = position.after(work.own(replica, completed), replica, num_replicas, epoch, work.skip)
        if work.given_up and completed < work.planned:
            dropped = (work.planned - completed) * work.size
            taken = taken.skip_next(dropped, replica, num_replicas, epoch if work.again else None, work.skip)
        after.append(taken)
    return after


def planned_positions(before: Sequence[Position], work: StepWork, epoch: int | None) -> list[list[list[int]]]:
    """Positions in the stream of all samples that a step plans, [replica][micro-batch][b].

    Those of micro-batches that were dropped are included.
    """
    num_replicas, size, skip = len(before), work.size, work.skip
    shared = [] if work.source is None else before[work.source].take(size, work.source, num_replicas, epoch, skip)[0]
    found = []
    for replica, position in enumerate(before):
        own = position.take(work.own(replica, work.planned), replica, num_replicas, epoch, skip)[0]
        every = own if work.source in (None, replica) else [*shared, *own]
        found.append([every[first : first + size] for first in range(0, len(every), size)])
    return found
