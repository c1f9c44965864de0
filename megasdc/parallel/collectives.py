"""Small named collectives that several parts need."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def any_rank(flag: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the flag is set on at least one rank.

    Collective: the group, default the world.
    Sync: waits for the device.
    """
    value = torch.tensor([int(flag)], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return bool(value.item())


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in rank order, on every rank.

    Args:
        value: anything that can be pickled.

    Collective: the group, default the world.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: T | None, source: int = 0) -> T:
    """The value of rank ``source``, on every rank.

    Collective: the world.
    """
    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]  # type: ignore[return-value]
