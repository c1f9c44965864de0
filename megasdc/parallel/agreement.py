"""Equality of values over replicas: one reduction whose size does not grow with the number of replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megasdc.parallel.dims import ParallelDims

_LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Agreed:
    """Result of a comparison, the same on every rank, by the names of what was compared.

    Args:
        differing: for each value, the positions (pp_rank, tp_rank) at which replicas hold different values.
        stages: for each value of a stage, the stages whose ranks hold different values.
        raised: for each flag, whether some rank raised it.
        world: for each value of the world, whether all ranks hold the same.
    """

    differing: Mapping[str, tuple[tuple[int, int], ...]]
    stages: Mapping[str, tuple[int, ...]]
    raised: Mapping[str, bool]
    world: Mapping[str, bool] = field(default_factory=dict)


def compare_replicas(
    values: Mapping[str, int],
    flags: Mapping[str, bool],
    dims: ParallelDims,
    group: dist.ProcessGroup | None,
    stage_values: Mapping[str, int] | None = None,
    world_values: Mapping[str, int] | None = None,
) -> Agreed:
    """Compare values at each position of a replica over all replicas, and collect flags of all ranks.

    One MAX reduction of v and of its complement ~v yields the maximum and the complement of the minimum.

    Args:
        values: unsigned 64-bit by name, the same names in the same order on every rank; compared over replicas.
        flags: by name, as ``values``.
        group: a group of all ranks for tensors in host memory.
        stage_values: as ``values``; compared over all ranks of a stage, tensor ranks too.
        world_values: as ``values``; compared over all ranks.

    Collective: all ranks of the world; 16 bytes a value and position.
    """
    positions = dims.pipeline * dims.tensor
    stage_values, world_values = stage_values or {}, world_values or {}
    table = _table(values.values(), positions, dims.pp_rank * dims.tensor + dims.tp_rank)
    stages = _table(stage_values.values(), dims.pipeline, dims.pp_rank)
    world = _table(world_values.values(), 1, 0)
    parts = [table.flatten(), stages.flatten(), world.flatten()]
    sent = torch.cat([*parts, torch.tensor([int(flag) for flag in flags.values()], dtype=torch.int64)])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    table, stages, world, raised = sent.split([*(one.numel() for one in parts), len(flags)])
    return Agreed(
        differing={
            name: tuple((place // dims.tensor, place % dims.tensor) for place in places)
            for name, places in _unequal(table, positions, values).items()
        },
        stages=_unequal(stages, dims.pipeline, stage_values),
        raised={name: bool(flag) for name, flag in zip(flags, raised.tolist(), strict=True)},
        world={name: not rows for name, rows in _unequal(world, 1, world_values).items()},
    )


def _table(values: Collection[int], rows: int, own: int) -> torch.Tensor:
    """[rows, 2 values]: this rank's values and their complements in its row, the lowest number elsewhere."""
    table = torch.full((rows, 2 * len(values)), _LOWEST, dtype=torch.int64)
    signed = torch.tensor([value - (1 << 64) if value >> 63 else value for value in values], dtype=torch.int64)
    table[own] = torch.cat([signed, ~signed])
    return table


def _unequal(table: torch.Tensor, rows: int, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """For each value, the rows whose largest and smallest differ."""
    number = len(names)
    table = table.view(rows, 2 * number)
    unequal = table[:, :number] != ~table[:, number:]
    return {name: tuple(unequal[:, column].nonzero().flatten().tolist()) for column, name in enumerate(names)}
