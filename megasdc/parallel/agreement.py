"""Equality of values over replicas: one reduction whose size does not grow with the number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megasdc.parallel.dims import ParallelDims

_LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Agreed:
    """Result of a comparison, the same on every rank.

    Args:
        differing: for each value, the positions (pp_rank, tp_rank) at which replicas hold different values.
        stages: for each value of a stage, the stages whose ranks hold different values.
        raised: for each flag, whether some rank raised it.
    """

    differing: tuple[tuple[tuple[int, int], ...], ...]
    stages: tuple[tuple[int, ...], ...]
    raised: tuple[bool, ...]


def compare_replicas(
    values: Sequence[int],
    flags: Sequence[bool],
    dims: ParallelDims,
    group: dist.ProcessGroup | None,
    stage_values: Sequence[int] = (),
) -> Agreed:
    """Compare values at each position of a replica over all replicas, and collect flags of all ranks.

    One MAX reduction of v and of its complement ~v yields the maximum and the complement of the minimum.

    Args:
        values: unsigned 64-bit, equally many on every rank; compared over replicas.
        flags: equally many on every rank.
        group: a group of all ranks for tensors in host memory.
        stage_values: as ``values``; compared over all ranks of a stage, tensor ranks too.

    Collective: all ranks of the world; 16 bytes a value and position.
    """
    positions = dims.pipeline * dims.tensor
    table = _table(values, positions, dims.pp_rank * dims.tensor + dims.tp_rank)
    stages = _table(stage_values, dims.pipeline, dims.pp_rank)
    sent = torch.cat(
        [table.flatten(), stages.flatten(), torch.tensor([int(flag) for flag in flags], dtype=torch.int64)]
    )
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    table, stages, raised = sent.split([table.numel(), stages.numel(), len(flags)])
    return Agreed(
        differing=tuple(
            tuple((place // dims.tensor, place % dims.tensor) for place in places)
            for places in _unequal(table, positions, len(values))
        ),
        stages=_unequal(stages, dims.pipeline, len(stage_values)),
        raised=tuple(bool(flag) for flag in raised.tolist()),
    )


def _table(values: Sequence[int], rows: int, own: int) -> torch.Tensor:
    """[rows, 2 values]: this rank's values and their complements in its row, the lowest number elsewhere."""
    table = torch.full((rows, 2 * len(values)), _LOWEST, dtype=torch.int64)
    signed = torch.tensor([value - (1 << 64) if value >> 63 else value for value in values], dtype=torch.int64)
    table[own] = torch.cat([signed, ~signed])
    return table


def _unequal(table: torch.Tensor, rows: int, number: int) -> tuple[tuple[int, ...], ...]:
    """For each value, the rows whose largest and smallest differ."""
    table = table.view(rows, 2 * number)
    unequal = table[:, :number] != ~table[:, number:]
    return tuple(tuple(unequal[:, column].nonzero().flatten().tolist()) for column in range(number))
