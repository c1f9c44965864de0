"""Distance of a replica's gradients or weights from the trusted one's: norms of the whole model and of submodules.

||u - h|| / ||h|| over all elements of the model, each counted once: every rank sums over its ZeRO-1 shards, without
tensor ranks' copies and a tied weight's second copy; the sums are reduced over the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.lab.studies.bridge import Bridge
from megasdc.model.submodules import Submodule
from megasdc.ops.run_folder.study_log import WHOLE
from megasdc.optim.zero1 import Fragment, counts_here, owned_fragments
from megasdc.parallel.collectives import gather_objects


@dataclass(frozen=True)
class NormDifference:
    """One comparison.

    Args:
        fqn: of the submodule, or ``WHOLE``.
        difference_norm: ||u - h||.
        trusted_norm: ||h||.
    """

    fqn: str
    difference_norm: float
    trusted_norm: float

    @property
    def ratio(self) -> float:
        """||u - h|| / ||h||; NaN where h is zero and u is not."""
        if self.difference_norm == 0:
            return 0.0
        return self.difference_norm / self.trusted_norm if self.trusted_norm else float("nan")


class ShardNorms:
    """Compares the shards of this rank, and reduces the norms over its replica.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer.
        submodules: of this rank's stage.
        bridge: to the other replicas.
        host_group: a group of all ranks of the replica for tensors in host memory.

    Collective: all ranks of the replica.
    """

    def __init__(
        self, optimizer: Any, submodules: Sequence[Submodule], tp_rank: int, bridge: Bridge, host_group: Any
    ) -> None:
        self._optimizer = optimizer
        self._tp_rank = tp_rank
        self._bridge = bridge
        self._group = host_group
        self._owner = {
            id(parameter): (one.fqn, slot) for one in submodules for slot, parameter in one.parameters.items()
        }
        counted = [
            one.fqn for one in submodules if any(counts_here(value, tp_rank) for value in one.parameters.values())
        ]
        names = {name for on_rank in gather_objects(counted, host_group) for name in on_rank}
        self._rows = {name: row for row, name in enumerate(sorted(names, key=_in_order))}

    @torch.no_grad()
    def measure(self, pick: Callable[[Fragment], Tensor | None]) -> list[NormDifference]:
        """Compares one value of every owned fragment.

        Args:
            pick: returns the value, [numel]; None: there is none.

        Returns:
            The whole model first, then submodules in the order of the model; empty on the trusted replica.

        Collective: all ranks of all replicas.
        Sync: waits for the device.
        """
        sums = torch.zeros(len(self._rows), 2, dtype=torch.float64)
        for fragment in owned_fragments(self._optimizer):
            value = pick(fragment)
            if value is None:
                continue
            fqn, slot = self._owner[id(fragment.parameter)]
            healthy = self._bridge.share(value, f"{fqn} {slot}")
            if self._bridge.is_trusted or not counts_here(fragment.parameter, self._tp_rank):
                continue
            reference = healthy.double()
            row = sums[self._rows[fqn]]
            row[0] += (value.double() - reference).square().sum().cpu()
            row[1] += reference.square().sum().cpu()
        if self._bridge.is_trusted:
            return []
        dist.all_reduce(sums, group=self._group)
        rows = [(WHOLE, sums.sum(0)), *((name, sums[row]) for name, row in self._rows.items())]
        return [NormDifference(name, *row.sqrt().tolist()) for name, row in rows]


def _in_order(fqn: str) -> tuple[int, str]:
    return int(fqn.split(".", 1)[0]), fqn
