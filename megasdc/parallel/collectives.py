"""Small collectives between ranks: objects gathered and broadcast, equality over replicas, one agreement a step.

Objects are pickled, and who unpickles runs what the sender wants. The sockets of gloo and NCCL let in whoever reaches
them; so where the launch has a secret (``megasdc.parallel.rendezvous``), what comes must be signed with it to be
unpickled.

``compare_replicas`` finds which values differ over replicas by one reduction whose size does not grow with their
number.

``StepAgreement`` is one reduction over host memory for everything that is decided between steps. A field is a number
that every rank gives, or one for each place, such as each replica. All fields of a step are packed into one MAX
reduction, which runs while the optimizer steps, so that no rank waits for it. A minimum is the negated maximum of
negated numbers. A sum is the sum of a field's places, which one rank each gives; so no rounding depends on the order of
ranks.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.rendezvous import check_size, launch_secret, sign, verified_value

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, anything that can be pickled, in rank order, on every rank.

    Raises:
        LaunchError: the value received for a rank is not signed with the secret of the launch, or too large.

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
        first: rank of the world that gets the values.

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
        value: value to send; used on the source alone.
        source: rank of the world that sends.

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
    """Copy of a single rank's own value, as if it had been sent; it needs no secret."""
    copied: T = pickle.loads(pickle.dumps(value))
    return copied


def _padded(content: bytes, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """A content padded to the longest of all ranks, and the length of each."""
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
    """Device of tensors in the group's collectives: the host, where the group has a backend for that."""
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


_LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Agreed:
    """Result of a comparison, the same on every rank, by the names of the compared values.

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
        values: unsigned 64-bit numbers by name, the same names in the same order on every rank; compared over replicas.
        flags: flags by name, as ``values``.
        group: a group of all ranks for tensors in host memory.
        stage_values: numbers as ``values``; compared over all ranks of a stage, tensor ranks too.
        world_values: numbers as ``values``; compared over all ranks.

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
    """Table [rows, 2 values]: this rank's values and their complements in its row, the lowest number elsewhere."""
    table = torch.full((rows, 2 * len(values)), _LOWEST, dtype=torch.int64)
    signed = torch.tensor([value - (1 << 64) if value >> 63 else value for value in values], dtype=torch.int64)
    table[own] = torch.cat([signed, ~signed])
    return table


def _unequal(table: torch.Tensor, rows: int, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Rows whose largest and smallest number differ, for each value by name."""
    number = len(names)
    table = table.view(rows, 2 * number)
    unequal = table[:, :number] != ~table[:, number:]
    return {name: tuple(unequal[:, column].nonzero().flatten().tolist()) for column, name in enumerate(names)}


MAX, MIN = "max", "min"


class Field:
    """A number on which all ranks agree once in a step.

    Args:
        give: returns this rank's number, called when its gradients are reduced; None: this rank has none.
        reduction: ``MAX`` or ``MIN`` of the ranks' numbers.
        default: result where no rank has a number.
        places: how many numbers are agreed on.
        place: place of the number that this rank gives, from 0.
    """

    def __init__(
        self,
        give: Callable[[], float | None],
        reduction: str = MAX,
        default: float = 0.0,
        places: int = 1,
        place: int = 0,
    ) -> None:
        self._give = give
        self._sign = -1.0 if reduction == MIN else 1.0
        self._default = default
        self._place = place
        self.values = [default] * places
        """Results of the last finished step by place, the same on all ranks."""

    @property
    def value(self) -> float:
        """Result of the last finished step at the first place."""
        return self.values[0]

    def send(self) -> list[float]:
        """This rank's part of the reduction."""
        sent = [-math.inf] * len(self.values)
        own = self._give()
        if own is not None:
            sent[self._place] = self._sign * own
        return sent

    def receive(self, found: list[float]) -> None:
        """Take the result of the reduction, one number for each place."""
        self.values = [self._default if one == -math.inf else self._sign * one for one in found]


class StepAgreement:
    """The reduction of a step's fields, over a group of all ranks for tensors in host memory."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._fields: tuple[Field, ...] = ()
        self._numbers = torch.zeros(0, dtype=torch.float64)
        self._exchange: Any = None

    def start(self, fields: Iterable[Field]) -> None:
        """Ask every field for this rank's number, and start the reduction; does not block.

        Args:
            fields: fields, the same on all ranks, in the same order; empty: nothing is exchanged.

        Collective: the group.
        """
        self._fields = tuple(fields)
        if not self._fields:
            return
        self._numbers = torch.tensor([one for field in self._fields for one in field.send()], dtype=torch.float64)
        self._exchange = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def finish(self) -> None:
        """Wait for the reduction, and give each field its result."""
        if not self._fields:
            return
        self._exchange.wait()
        found, start = self._numbers.tolist(), 0
        for one in self._fields:
            one.receive(found[start : start + len(one.values)])
            start += len(one.values)
        self._fields = ()
