"""Small named collectives that several parts need."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, anything that can be pickled, in rank order, on every rank.

    Collective: the group, default the world.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
