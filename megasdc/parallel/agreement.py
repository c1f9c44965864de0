"""Do all replicas hold the same values? One reduction whose size does not grow with the number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megasdc.parallel.dims import ParallelDims

_LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the exchange.

    Args:
        differing: for each value, the positions (pp_rank, tp_rank) whose replicas do not hold the same.
        raised: for each flag, whether some rank raised it.
    """

    differing: tuple[tuple[tuple[int, int], ...], ...]
    raised: tuple[bool, ...]


def compare_replicas(
    values: Sequence[int], flags: Sequence[bool], dims: ParallelDims, group: dist.ProcessGroup | None
) -> Agreed:
    """Compare values at each position of a replica over all replicas, and collect flags of all ranks.

    The maximum of v and of its complement over all ranks is the maximum and the complement of the minimum.

    Args:
        values: unsigned 64-bit, as many on every rank.
        flags: as many on every rank.
        dims: layout and place of this rank.
        group: a group of all ranks on the host.

    Collective: all ranks of the world; 16 bytes a value and position.
    """
    positions = dims.pipeline * dims.tensor
    table = torch.full((positions, 2 * len(values)), _LOWEST, dtype=torch.int64)
    signed = torch.tensor([value - (1 << 64) if value >> 63 else value for value in values], dtype=torch.int64)
    table[dims.pp_rank * dims.tensor + dims.tp_rank] = torch.cat([signed, ~signed])
    sent = torch.cat([table.flatten(), torch.tensor([int(flag) for flag in flags], dtype=torch.int64)])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    table = sent[: table.numel()].view_as(table)
    equal = table[:, : len(values)] == ~table[:, len(values) :]
    places = [divmod(position, dims.tensor) for position in range(positions)]
    return Agreed(
        differing=tuple(
            tuple(place for place, same in zip(places, equal[:, column].tolist(), strict=True) if not same)
            for column in range(len(values))
        ),
        raised=tuple(bool(flag) for flag in sent[positions * 2 * len(values) :].tolist()),
    )
