"""Objects that ranks send each other: small named collectives that several parts need.

They are pickled, and who unpickles runs what the sender wants. The sockets of gloo and NCCL let in whoever reaches
them; so where the launch has a secret (``megasdc.parallel.stores``), what comes must be signed with it to be unpickled.
"""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.parallel.stores import check_size, launch_secret, sign, verified_value

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, anything that can be pickled, in rank order, on every rank.

    Raises:
        LaunchError: what came for a rank is not signed with the secret of the launch, or too large.

    Collective: the group, default the world.
    """
    if dist.get_world_size(group) == 1:
        return [_copy(value)]
    if launch_secret() is None:
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values
    own, sizes = _padded(_dump(value, dist.get_rank()), group)
    found = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(found, own, group=group)
    return _load_all(found, sizes, group)


def gather_objects_on(first: int, value: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Every rank's value, as of ``gather_objects``, on one rank; None on the others.

    Args:
        first: that rank of the world.

    Raises:
        LaunchError: see ``gather_objects``.

    Collective: the group, default the world.
    """
    is_first = dist.get_rank() == first
    if dist.get_world_size(group) == 1:
        return [_copy(value)] if is_first else None
    if launch_secret() is None:
        values: list[Any] | None = [None] * dist.get_world_size(group) if is_first else None
        dist.gather_object(value, values, dst=first, group=group)
        return values
    own, sizes = _padded(_dump(value, dist.get_rank()), group)
    found = [torch.empty_like(own) for _ in sizes] if is_first else None
    dist.gather(own, found, dst=first, group=group)
    return None if found is None else _load_all(found, sizes, group)


def broadcast_object(value: T | None, source: int, group: dist.ProcessGroup | None = None) -> T:
    """A rank's value, anything that can be pickled, on every rank.

    Args:
        value: looked at on that rank alone.
        source: that rank of the world.

    Raises:
        LaunchError: see ``gather_objects``.

    Collective: the group, default the world.
    """
    if dist.get_world_size(group) == 1:
        return _copy(value)  # type: ignore[return-value]
    if launch_secret() is None:
        held: list[Any] = [value]
        dist.broadcast_object_list(held, src=source, group=group)
        shared: T = held[0]
        return shared
    content = _dump(value, source) if dist.get_rank() == source else b""
    size = torch.tensor([len(content)], device=_device(group))
    dist.broadcast(size, src=source, group=group)
    check_size(_name(source), int(size))
    message = _as_tensor(content.ljust(int(size), b"\0"), group)
    dist.broadcast(message, src=source, group=group)
    return _load(message, source)  # type: ignore[no-any-return]


def _copy(value: T) -> T:
    """What one rank alone has of its own value, which needs no secret: as if it had been sent."""
    copied: T = pickle.loads(pickle.dumps(value))
    return copied


def _padded(content: bytes, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """A content as long as the longest of all ranks, and how long each is."""
    size = torch.tensor([len(content)], device=_device(group))
    found = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, size, group=group)
    sizes = [int(one) for one in found]
    for rank, one in zip(dist.get_process_group_ranks(group), sizes, strict=True):
        check_size(_name(rank), one)
    return _as_tensor(content.ljust(max(sizes), b"\0"), group), sizes


def _as_tensor(content: bytes, group: dist.ProcessGroup | None) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(_device(group))


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors of the group's collectives are: on the host, where it has a backend for that."""
    ours = dist.group.WORLD if group is None else group
    assert ours is not None, "the process group is not initialised"
    kinds = {device.type for device in ours._device_types}
    return torch.device("cpu" if "cpu" in kinds or not kinds else kinds.pop())


def _dump(value: object, rank: int) -> bytes:
    secret = launch_secret()
    assert secret is not None, "asked before"
    return sign(secret, _name(rank), pickle.dumps(value))


def _load_all(found: list[Tensor], sizes: list[int], group: dist.ProcessGroup | None) -> list[Any]:
    ranks = dist.get_process_group_ranks(group)
    return [_load(one[:size], rank) for one, size, rank in zip(found, sizes, ranks, strict=True)]


def _load(content: Tensor, rank: int) -> Any:
    secret = launch_secret()
    assert secret is not None, "asked before"
    return pickle.loads(verified_value(secret, _name(rank), content.cpu().numpy().tobytes()))


def _name(rank: int) -> str:
    return f"an object that came for rank {rank}"
