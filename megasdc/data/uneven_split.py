"""How the micro-batches of a step are dealt to replicas whose number does not divide them.

Micro-batch j of the stream belongs to replica j mod N, and step s takes the M from (s - 1) M on: so each step takes the
samples that it takes with any other number of replicas, and the counts of two replicas differ by at most one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UnevenSplit:
    """Who takes which micro-batches of a step.

    Args:
        micro_batches: M of a step, over all replicas.
        replicas: N.
        before: micro-batches that were taken before the replicas began to deal: those of another number of replicas.
    """

    micro_batches: int
    replicas: int
    before: int = 0

    def count(self, step: int, replica: int) -> int:
        """How many micro-batches a replica takes in a step, the first of which is 1."""
        return len(range(self._lead(step, replica), self.micro_batches, self.replicas))

    def place(self, step: int, replica: int, micro_batch: int) -> int:
        """Which of the step's micro-batches is the replica's own ``micro_batch``; both from 0 on."""
        return self._lead(step, replica) + micro_batch * self.replicas

    def end(self, step: int, replica: int, taken: int) -> int:
        """How many micro-batches replicas have passed that are as far as this one.

        Args:
            step: the last one.
            taken: micro-batches that the replica itself has taken; fewer than were its own where it computed another
                replica's, more where it passed some over.
        """
        dealt = step * self.micro_batches - self.before
        return dealt - self.replicas * (len(range(replica, dealt, self.replicas)) - taken)

    def _lead(self, step: int, replica: int) -> int:
        begin = (step - 1) * self.micro_batches - self.before
        return (replica - begin) % self.replicas
