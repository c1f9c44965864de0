"""Slices of all ranks' shards of an optimizer: their places, their elements of parameters, and when each is due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.optim.zero1 import accumulated_gradient, grouped_parameters, owned_fragments
from megasdc.parallel.collectives import gather_objects
from megasdc.sdc.host import StepEngine


@dataclass(frozen=True)
class ParameterPiece:
    """Consecutive elements of one parameter in the shard of one rank.

    Args:
        parameter: place of the parameter in its group.
        start: place of the first element in the owner's flat partition.
        offset: place of the first element in the parameter, row-major.
        numel: number of elements, at least 1.
    """

    parameter: int
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class GroupShard:
    """Consecutive elements of the flat partition of one rank in one group; ``pieces`` follow each other."""

    group: int
    pieces: tuple[ParameterPiece, ...]

    @property
    def start(self) -> int:
        """Place of the first element in the partition."""
        return self.pieces[0].start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def place(self) -> slice:
        """Range of its elements in the partition, and in tensors of its shape."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True)
class Slice:
    """Elements of one rank's shard, of as many groups as they reach over: its ``parts`` one after the other."""

    parts: tuple[GroupShard, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(part.numel for part in self.parts)

    def at(self, element: int) -> tuple[int, ParameterPiece]:
        """The group, and the piece in it, of an element of the slice."""
        for part in self.parts:
            if element < part.numel:
                place = part.start + element
                piece = next(one for one in part.pieces if place < one.start + one.numel)
                return part.group, piece
            element -= part.numel
        raise IndexError("the slice has fewer elements")


MISSES = 3
"""Number of looks in a row that miss a slice, after which the next slice is due all the same."""


@dataclass
class Turn:
    """The slice that is due; the next one is due once all ranks have checked it in full.

    Args:
        number: number of slices so far, over all periods.
        misses: number of looks in a row that missed this slice.
    """

    number: int = 0
    misses: int = 0

    def end(self, *, missed: bool, skipped: bool) -> bool:
        """End a look; returns whether its slice is given up, which is to be reported.

        Args:
            missed: whether a rank has not checked the slice in full.
            skipped: whether the step was skipped, which does not count as a miss.
        """
        self.misses += missed and not skipped
        given_up = self.misses == MISSES
        if given_up or not missed:
            self.number, self.misses = self.number + 1, 0
        return given_up


class Slices:
    """The slices of all ranks that share this rank's parameters.

    Args:
        most: largest number of elements of a slice.
        group: host group of all ranks.

    Attributes:
        ranks: global ranks that share these parameters, in the order of replicas.
        period: number of turns after which each slice has been due.

    Collective: all ranks of the world.
    """

    def __init__(self, engine: StepEngine, most: int, group: dist.ProcessGroup | None) -> None:
        self._optimizer, dims = engine.optimizer, engine.dims
        own = list(_cut(self._optimizer, most))
        first = dims.rank - dims.dp_rank * dims.tensor
        self.ranks = tuple(first + replica * dims.tensor for replica in range(dims.data))
        every = gather_objects(own, group)
        self._of_replica: list[list[Slice]] = [every[rank] for rank in self.ranks]
        self.period = max(map(len, every))

    def at(self, turn: int) -> Sequence[Slice | None]:
        """The slice of each replica's shard that is due; None: that shard has fewer, or none."""
        place = turn % self.period
        return [slices[place] if place < len(slices) else None for slices in self._of_replica]

    def parameter_of(self, group: int, piece: ParameterPiece) -> Tensor:
        """This rank's copy of the parameter that a piece belongs to."""
        parameter: Tensor = grouped_parameters(self._optimizer)[group][piece.parameter]
        return parameter

    def accumulated(self, due: Slice) -> Tensor:
        """This rank's gradient of a slice, before the sum over replicas: [numel], a copy."""
        found = []
        for group, piece in ((part.group, piece) for part in due.parts for piece in part.pieces):
            gradient = accumulated_gradient(self._optimizer, self.parameter_of(group, piece))  # type: ignore[arg-type]
            found.append(gradient.detach().flatten()[piece.offset : piece.offset + piece.numel])
        return torch.cat(found)

    def copy_of(self, due: Slice, replica: int) -> Tensor:
        """This rank's copy of the reduced gradient of another owner's slice: [numel], a copy; ``BF16_Optimizer`` alone.

        Args:
            replica: replica of the owner.
        """
        found = []
        for part in due.parts:
            shard = int(self._optimizer.fp32_groups_flat_partition[part.group].numel())
            whole: Tensor = self._optimizer.fp32_groups_gradients_flat[part.group]
            found.append(whole.detach()[replica * shard :][part.place])
        return torch.cat(found)

    def reduced(self, due: Slice) -> Tensor:
        """Copy of the reduced gradient of a slice of this rank, [numel]; valid between the reduction and the step.

        Raises:
            RuntimeError: there is no reduced gradient.
        """
        found = []
        owned = list(owned_fragments(self._optimizer))
        for part in due.parts:
            end = part.start + part.numel
            for fragment in (one for one in owned if one.group == part.group):
                first, last = max(part.start, fragment.start), min(end, fragment.start + fragment.numel)
                if first < last:
                    if fragment.gradient is None:
                        raise RuntimeError("a parameter of this rank's shard has no reduced gradient")
                    found.append(fragment.gradient[first - fragment.start : last - fragment.start])
        return torch.cat(found)


def _cut(optimizer: object, most: int) -> Iterator[Slice]:
    """This rank's slices, each of ``most`` elements but for the last: one group's follow those of the one before."""
    parts: list[GroupShard] = []
    room = most
    for group, parameters in enumerate(grouped_parameters(optimizer)):
        places = {id(one): place for place, one in enumerate(parameters)}
        for fragment in (one for one in owned_fragments(optimizer) if one.group == group):
            at = 0
            while at < fragment.numel:
                if not room:
                    yield Slice(tuple(parts))
                    parts, room = [], most
                start, count = fragment.start + at, min(room, fragment.numel - at)
                piece = ParameterPiece(places[id(fragment.parameter)], start, fragment.offset + at, count)
                if parts and (parts[-1].group, parts[-1].place.stop) == (group, start):
                    parts[-1] = GroupShard(group, (*parts[-1].pieces, piece))
                else:
                    parts.append(GroupShard(group, (piece,)))
                at, room = at + count, room - count
    if parts:
        yield Slice(tuple(parts))
