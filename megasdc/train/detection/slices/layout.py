"""The slices of all shards: which elements of which parameters each rank owns, and when each is due."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.optim.zero1 import accumulated_gradient, grouped_parameters, owned_fragments
from megasdc.parallel.collectives import gather_objects


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of one parameter in the shard of one rank.

    Args:
        parameter: place of the parameter in its group.
        start: of its first element in the owner's flat partition.
        offset: of its first element in the parameter, row-major.
        numel: elements, at least 1.
    """

    parameter: int
    start: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of the flat partition of one rank; ``pieces`` follow each other."""

    group: int
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> int:
        """First element in the partition."""
        return self.pieces[0].start

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def place(self) -> slice:
        """Where it is in the partition, and in what has its shape."""
        return slice(self.start, self.start + self.numel)

    def piece_at(self, element: int) -> Piece:
        """The piece that an element of the slice is in."""
        place = self.start + element
        return next(piece for piece in self.pieces if place < piece.start + piece.numel)


class Slices:
    """The slices of all ranks that share this rank's parameters.

    Args:
        most: elements of a slice.
        group: of all ranks, on the host.

    Attributes:
        ranks: global ranks that share them, in the order of replicas.
        period: turns after which each has been due.

    Collective: all ranks of the world.
    """

    def __init__(self, engine: TrainingEngine, most: int, group: dist.ProcessGroup | None) -> None:
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

    def parameter_of(self, group: int, piece: Piece) -> Tensor:
        """This rank's copy of the parameter that a piece belongs to."""
        parameter: Tensor = grouped_parameters(self._optimizer)[group][piece.parameter]
        return parameter

    def accumulated(self, due: Slice) -> Tensor:
        """This rank's gradient of a slice, before the sum over replicas: [numel], a copy."""
        parts = []
        for piece in due.pieces:
            gradient = accumulated_gradient(self._optimizer, self.parameter_of(due.group, piece))  # type: ignore[arg-type]
            parts.append(gradient.detach().flatten()[piece.offset : piece.offset + piece.numel])
        return torch.cat(parts)

    def copy_of(self, due: Slice, replica: int) -> Tensor:
        """This rank's copy of the reduced gradient of another owner's slice: [numel], a copy; ``BF16_Optimizer`` alone.

        Args:
            replica: the owner's.
        """
        shard = int(self._optimizer.fp32_groups_flat_partition[due.group].numel())
        whole: Tensor = self._optimizer.fp32_groups_gradients_flat[due.group]
        return whole.detach()[replica * shard :][due.place].clone()

    def reduced(self, due: Slice) -> Tensor | None:
        """The reduced gradient of a slice of this rank's: [numel], a copy; None: there is none."""
        parts, end = [], due.start + due.numel
        for fragment in owned_fragments(self._optimizer):
            first, last = max(due.start, fragment.start), min(end, fragment.start + fragment.numel)
            if fragment.group == due.group and first < last:
                if fragment.gradient is None:
                    return None
                parts.append(fragment.gradient[first - fragment.start : last - fragment.start])
        return torch.cat(parts)


def _cut(optimizer: object, most: int) -> Iterator[Slice]:
    """This rank's slices: each of one group, whose parameters follow each other in the flat partition."""
    for group, parameters in enumerate(grouped_parameters(optimizer)):
        places = {id(one): place for place, one in enumerate(parameters)}
        pieces: list[Piece] = []
        room = most
        for fragment in (one for one in owned_fragments(optimizer) if one.group == group):
            at = 0
            while at < fragment.numel:
                start = fragment.start + at
                if pieces and (not room or start != pieces[-1].start + pieces[-1].numel):
                    yield Slice(group, tuple(pieces))
                    pieces, room = [], most
                count = min(room, fragment.numel - at)
                pieces.append(Piece(places[id(fragment.parameter)], start, fragment.offset + at, count))
                at, room = at + count, room - count
        if pieces:
            yield Slice(group, tuple(pieces))
