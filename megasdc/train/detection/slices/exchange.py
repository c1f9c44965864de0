"""Exchange of slices between the ranks that share parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
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
