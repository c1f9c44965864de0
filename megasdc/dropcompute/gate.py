"""Agreement of a replica's ranks on whether it starts its next micro-batch.

The first tensor rank of the first stage decides and sends the decision to its tensor peers at once. Each rank of a
later stage receives it from the same tensor rank of the stage before, just before the activation that it announces.
Messages use a host (CPU) group on every device type, so no rank waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.groups import new_host_group

Decide = Callable[[int], bool]
TimeLeft = Callable[[int], float]

MESSAGE_BYTES = 8


def replica_ranks(dims: ParallelDims, replica: int) -> list[int]:
    """The ranks of one replica, ordered by stage, then by tensor rank."""
    first = replica * dims.tensor
    per_stage = dims.tensor * dims.data
    return [first + stage * per_stage + tensor for stage in range(dims.pipeline) for tensor in range(dims.tensor)]


def new_replica_group(dims: ParallelDims) -> dist.ProcessGroup:
    """A host group of the ranks of this rank's replica.

    Collective: all ranks of the world.
    """
    return [new_host_group(replica_ranks(dims, replica)) for replica in range(dims.data)][dims.dp_rank]


class ReplicaGate:
    """Sends the decisions of one replica to all its ranks.

    Args:
        group: a host group of the replica's ranks.
        decide: whether to start a micro-batch; called on the deciding rank only.
        time_left: seconds in which it may still be started.
        min_micro_batches: that are always started, at least 1.
    """

    def __init__(
        self,
        dims: ParallelDims,
        group: dist.ProcessGroup,
        decide: Decide,
        time_left: TimeLeft,
        min_micro_batches: int,
    ) -> None:
        self._dims = dims
        self._group = group
        self._decide = decide
        self._time_left = time_left
        self._min_micro_batches = min_micro_batches
        self.open = False
        """Whether every micro-batch is started without a decision; the same on all ranks of the replica."""
        self.num_sent = 0
        """Messages that this rank has sent since the run started."""
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._peers = [dims.rank + tensor for tensor in range(1, dims.tensor)]
        per_stage = dims.tensor * dims.data
        self._next = dims.rank + per_stage
        self._source = dims.rank - per_stage if dims.pp_rank else dims.rank - dims.tp_rank

    def time_left_s(self, micro_batch: int) -> float:
        """Seconds in which this replica may still start a micro-batch."""
        return float("inf") if self._is_certain(micro_batch) else self._time_left(micro_batch)

    def may_start(self, micro_batch: int) -> bool:
        """Decide, or receive the decision.

        Args:
            micro_batch: the next one; the first is 0.

        Raises:
            RuntimeError: the received decision is about another micro-batch.

        Collective: the ranks of the replica, in the order of the schedule.
        """
        if self._is_certain(micro_batch):
            return True
        if self._dims.rank == self._source:
            starts = self._decide(micro_batch)
            self._send(self._peers, micro_batch, starts)
            return starts
        return self._receive(micro_batch)

    def announce(self, micro_batch: int, starts: bool) -> None:
        """Send the decision to the next stage; does not block."""
        if not self._is_certain(micro_batch):
            self._send([self._next], micro_batch, starts)

    def finish(self) -> None:
        """End of the step: complete the sends, all of which have been received."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _is_certain(self, micro_batch: int) -> bool:
        return self.open or micro_batch < self._min_micro_batches

    def _send(self, ranks: list[int], micro_batch: int, starts: bool) -> None:
        for rank in ranks:
            message = torch.tensor([micro_batch if starts else -micro_batch])
            self._sent.append((dist.isend(message, rank, group=self._group), message))
            self.num_sent += 1

    def _receive(self, micro_batch: int) -> bool:
        message = torch.zeros(1, dtype=torch.int64)
        dist.recv(message, self._source, group=self._group)
        told = int(message)
        if abs(told) != micro_batch:
            raise RuntimeError(
                f"rank {self._dims.rank} asks for micro-batch {micro_batch}, rank {self._source} reported {abs(told)}"
            )
        return told > 0
