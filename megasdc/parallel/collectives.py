"""Collectives between ranks: objects gathered, equality over replicas, tensors exchanged, one agreement a step.

Objects are pickled, and who unpickles runs what the sender wants. The sockets of gloo and NCCL let in whoever reaches
them; so where the launch has a secret (``megasdc.parallel.rendezvous``), what comes must be signed with it to be
unpickled.

``compare_replicas`` finds which values differ over replicas, and which flags were raised, by one reduction whose size
does not grow with the number of replicas.

``StepAgreement`` is one reduction over host memory for everything that is decided between steps. A field is a number
that every rank gives, or one for each place, such as each replica. All fields of a step are packed into one MAX
reduction, which runs while the optimizer steps, so that no rank waits for it. A minimum is the negated maximum of
negated numbers. A sum is the sum of a field's places, which one rank each gives; so no rounding depends on the order of
ranks.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
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


REPLICAS, STAGE, WORLD, ANY = "replicas", "stage", "world", "any"
"""Ranks that must have the same value: at one position of all replicas, of one stage, all; a flag may be of any."""


@dataclass(frozen=True)
class Compared:
    """Number that one rank gives to a comparison.

    Args:
        value: unsigned 64-bit number; of a flag 1 where this rank raises it, else 0.
        among: ranks that must have the same number, such as ``REPLICAS``; ``ANY``: a flag.
    """

    value: int
    among: str = REPLICAS


Agreed = Mapping[str, tuple[tuple[int, int], ...]]
"""Result of a comparison, the same on every rank: by name the places at which values differ, or a flag was raised.

A place is (pp_rank, tp_rank) of a position, (pp_rank, 0) of a stage, and (0, 0) of the world and of a flag.
"""


def compare_replicas(values: Mapping[str, Compared], dims: ParallelDims, group: dist.ProcessGroup | None) -> Agreed:
    """Compare values of all ranks, and collect flags.

    One MAX reduction of v and of its complement ~v yields the maximum and the complement of the minimum. Of a flag the
    minimum is 0.

    Args:
        values: values and flags by name, the same names in the same order on every rank.
        group: a group of all ranks for tensors in host memory.

    Collective: all ranks of the world; 16 bytes a value and place.
    """
    numbers = {(name, place): two for name, one in values.items() for place, two in _numbers(one, dims).items()}
    sent = torch.tensor(list(numbers.values()), dtype=torch.int64)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    agreed: dict[str, tuple[tuple[int, int], ...]] = dict.fromkeys(values, ())
    for (name, place), (largest, smallest) in zip(numbers, sent.tolist(), strict=True):
        if largest != ~smallest:
            agreed[name] += (place,)
    return agreed


def _numbers(one: Compared, dims: ParallelDims) -> dict[tuple[int, int], tuple[int, int]]:
    """A value and its complement, signed, at this rank's place; the lowest number at others of the value."""
    stages, parts = dims.pipeline if one.among in (REPLICAS, STAGE) else 1, dims.tensor if one.among == REPLICAS else 1
    numbers = dict.fromkeys(product(range(stages), range(parts)), (_LOWEST, _LOWEST))
    signed = one.value - (1 << 64) if one.value >> 63 else one.value
    numbers[dims.pp_rank % stages, dims.tp_rank % parts] = signed, ~(0 if one.among == ANY else signed)
    return numbers


class TensorExchange:
    """Starts to send a tensor to each rank of a group, and to receive one from each.

    Args:
        sent: tensor for each rank of the group, [n], n may be 0; all of one type, on one device.
        sizes: number of elements that are received from each rank.
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
        """Wait; returns the tensor received from each rank of the group."""
        if self._work is not None:
            self._work.wait()
        return self._received.split(self._sizes)


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
