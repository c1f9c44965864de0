"""Exchange of slices and blocks between ranks that check each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.engine.engine import TrainingEngine


def ring_of(engine: TrainingEngine) -> tuple[dist.ProcessGroup | None, int, int]:
    """Ranks each of which checks blocks of the one before: their group, this rank's place in it, and their number.

    The replicas, or where there is one the ranks of the model; a rank alone is its own, without a group.
    """
    dims = engine.dims
    if dims.data > 1:
        return engine.mpu.get_data_parallel_group(), dims.dp_rank, dims.data
    if dims.world_size > 1:
        return engine.mpu.get_model_parallel_group(), dims.rank, dims.world_size
    return None, 0, 1


class TensorExchange:
    """Starts to send a tensor to each rank of a group, and to receive one from each.

    Args:
        sent: one for each rank of the group, [n], n may be 0; all of one type, on one device.
        sizes: elements that are received from each.
        group: None: this rank alone.

    Collective: the group.
    """

    def __init__(self, sent: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._sizes = list(sizes)
        self._sent = torch.cat(list(sent))
        self._received = torch.empty(sum(sizes), dtype=self._sent.dtype, device=self._sent.device)
        self._work: Any = None
        if group is None:
            self._received.copy_(self._sent)
        else:
            numbers = [one.numel() for one in sent]
            self._work = dist.all_to_all_single(
                self._received, self._sent, self._sizes, numbers, group=group, async_op=True
            )

    def finish(self) -> tuple[Tensor, ...]:
        """What was received from each rank of the group."""
        if self._work is not None:
            self._work.wait()
        return self._received.split(self._sizes)
