"""Blocks of a rank's shard of the optimizer's state, and their digests: what one step left, the next is to find."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megasdc.optim.zero1 import master_partitions
from megasdc.tensors.checksum import ChecksumAlgorithm, read_back

BLOCK = 1 << 20
"""Most elements of a block: large enough that a digest costs what reading costs."""
MASTER = "master"


@dataclass(frozen=True)
class StateBlock:
    """Consecutive elements of this rank's flat partition of one group.

    Args:
        group: of the optimizer.
        start: first element in the partition.
        numel: elements, at least 1.
    """

    group: int
    start: int
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """Its elements of a tensor of the partition's shape, [numel], a view."""
        return flat.detach().narrow(0, self.start, self.numel)


Digests = Mapping[tuple[StateBlock, str], int]
"""By block and state: ``MASTER``, or the optimizer's name, such as ``exp_avg``."""


def blocks_of(optimizer: Any, most: int = BLOCK) -> list[StateBlock]:
    """All blocks of this rank's shard; together they hold every element of every group, alignment included.

    Args:
        optimizer: DeepSpeed's ZeRO-1 optimizer.
        most: elements of a block.
    """
    return [
        StateBlock(group, start, min(most, flat.numel() - start))
        for group, flat in enumerate(master_partitions(optimizer))
        for start in range(0, flat.numel(), most)
    ]


def start_digests(
    optimizer: Any, blocks: Iterable[StateBlock], algorithm: ChecksumAlgorithm
) -> dict[tuple[StateBlock, str], int | Tensor]:
    """Start the digests of blocks of the masters and of each state that has one value an element.

    With all of ``blocks_of`` they are of the rank's whole state.

    Sync: none on a GPU; ``finish_digests`` waits.
    """
    flats = master_partitions(optimizer)
    found: dict[tuple[StateBlock, str], int | Tensor] = {}
    for block in blocks:
        flat = flats[block.group]
        state = optimizer.optimizer.state.get(flat, {})
        found[block, MASTER] = algorithm.start(block.of(flat))
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                found[block, name] = algorithm.start(block.of(value))
    return found


def finish_digests(started: Mapping[tuple[StateBlock, str], int | Tensor]) -> Digests:
    """Complete digests.

    Sync: waits for the device.
    """
    return dict(zip(started, read_back(list(started.values())), strict=True))


def differing_state_blocks(before: Digests, after: Digests) -> list[tuple[StateBlock, str]]:
    """Blocks and states whose digests differ; what only one of them has is not compared."""
    return [place for place, value in before.items() if place in after and after[place] != value]
