"""Sums of squares of blocks of the reduced gradient, of which some blocks in turn are added up again by another rank.

What all ranks' blocks add up to is compared with the norm that the step uses. A rank that adds wrongly each time has a
wrong part of the norm and wrong blocks alike: only another rank's sum of the same elements shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.optim.state_blocks import BLOCK
from megasdc.optim.zero1 import Fragment, counts_here, owned_fragments
from megasdc.parallel.collectives import gather_objects
from megasdc.train.detection.slices.exchange import Exchange

BLOCKS = "blocks"
"""What a listener of the norm's numbers is told of: the sums of squares of this rank's blocks, [blocks]."""
ULP = 2.0**-52
"""Relative rounding of fp64, twice: terms are positive, so that a sum of n is off by no more than n roundings."""
WORDS = 2
"""Elements of 32 bits in which a sum is sent."""


@dataclass(frozen=True)
class Claim:
    """A block of the rank before that this rank has added up to something else.

    Args:
        owner: global rank of the block.
        turn: which of the owner's sets of blocks.
        place: of the block in the set.
        numel: its elements.
        got: what its owner has.
        again: what this rank has.
    """

    owner: int
    turn: int
    place: int
    numel: int
    got: float
    again: float


@dataclass(frozen=True)
class Told:
    """What a rank has of a block that is in dispute: a checksum of its elements, and their squares added exactly."""

    elements: int
    exact: float


@dataclass(frozen=True)
class _Piece:
    """Elements of one of the owned parts of parameters."""

    fragment: int
    start: int
    numel: int


@dataclass
class _Set:
    """Blocks that are added up again at one look, no more than ``BLOCK`` elements together."""

    pieces: list[_Piece] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        return [one.numel for one in self.pieces]


class BlockSums:
    """Adds up squares of each block that this rank owns and counts, and one set of the rank before again.

    Args:
        engine: whose gradient it is.

    Collective: all ranks of the world.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine, dims = engine, engine.dims
        # Neighbours: the replicas, or where there is one the ranks of the model; a rank alone is its own.
        self._group, self._place, size = None, 0, 1
        if dims.data > 1:
            self._group, self._place, size = engine.mpu.get_data_parallel_group(), dims.dp_rank, dims.data
        elif dims.world_size > 1:
            self._group, self._place, size = engine.mpu.get_model_parallel_group(), dims.rank, dims.world_size
        self._before, self._after, self._size = (self._place - 1) % size, (self._place + 1) % size, size
        ranks = [0] if self._group is None else torch.distributed.get_process_group_ranks(self._group)
        self._owner = ranks[self._before]
        self._sets = _sets_of([one.numel if self._counts(one) else 0 for one in self._fragments()])
        every: list[list[list[int]]] = gather_objects([one.sizes for one in self._sets])
        self._theirs = every[self._owner]
        self._turn: int | None = None
        self._sent: Tensor | None = None
        self._exchange: Exchange | None = None
        self._received: list[Tensor] = []

    def _fragments(self) -> list[Fragment]:
        return list(owned_fragments(self._engine.optimizer))

    def _counts(self, fragment: Fragment) -> bool:
        return counts_here(fragment.parameter, self._engine.dims.tp_rank)

    @torch.no_grad()
    def add_up(self, turn: int) -> float:
        """Add up the squares of all blocks in fp64, and start to send those that are due.

        Args:
            turn: number of the look.

        Returns:
            What they add up to.

        Collective: the replicas, or where there is one all ranks of the model.
        Sync: waits for the device.
        """
        device, gradients = self._engine.device, [one.gradient for one in self._fragments()]

        def elements(piece: _Piece) -> Tensor:
            gradient = gradients[piece.fragment]
            if gradient is None:
                return torch.zeros(piece.numel, device=device)
            return gradient.narrow(0, piece.start, piece.numel)

        pieces = [piece for one in self._sets for piece in one.pieces]
        empty = torch.zeros(0, dtype=torch.float64, device=device)
        squares = torch.stack([_square(elements(one)) for one in pieces]) if pieces else empty
        squares = self._engine.step_control.hear(BLOCKS, squares)
        self._turn, message = turn, empty.view(torch.int32)
        if self._sets:
            due = turn % len(self._sets)
            first = sum(len(one.pieces) for one in self._sets[:due])
            parts = [elements(one).float() for one in self._sets[due].pieces]
            told = squares[first : first + len(parts)]
            self._sent = torch.cat(parts)  # a copy: clipping changes what it was taken from
            message = torch.cat([self._sent.view(torch.int32), told.view(torch.int32)])
        sizes, sent = [0] * self._size, [message.new_empty(0)] * self._size
        sent[self._after] = message
        sizes[self._before] = sum(theirs) + WORDS * len(theirs) if (theirs := self._their_sizes()) else 0
        self._exchange = Exchange(sent, sizes, self._group)
        return float(squares.sum())

    def _their_sizes(self) -> list[int]:
        return self._theirs[self._turn % len(self._theirs)] if self._theirs and self._turn is not None else []

    @torch.no_grad()
    def compare(self) -> Claim | None:
        """Add up the blocks of the rank before again; the first whose sum its owner has otherwise. None: none is.

        Sync: waits for the device.
        """
        exchange, self._exchange = self._exchange, None
        sizes = self._their_sizes()
        if exchange is None or self._turn is None or not sizes:
            return None
        received = exchange.finish()[self._before]
        count = sum(sizes)
        self._received = list(received[:count].view(torch.float32).split(sizes))
        told = received[count:].clone().view(torch.float64)
        # Alone a rank adds up its own, with the elements in another order.
        again = torch.stack([_square(one.flip(0) if self._group is None else one) for one in self._received])
        for place, (got, own, numel) in enumerate(zip(told.tolist(), again.tolist(), sizes, strict=True)):
            if not _is_near(got, own, numel):
                return Claim(self._owner, self._turn, place, numel, got, own)
        return None

    def tell(self, claim: Claim, *, as_owner: bool) -> Told:
        """What this rank has of a block in dispute: its own, or what it has received.

        Sync: waits for the device.
        """
        if as_owner:
            assert self._sent is not None, "it was sent"
            block = self._sent.split(self._sets[claim.turn % len(self._sets)].sizes)[claim.place]
        else:
            block = self._received[claim.place]
        values = block.cpu().contiguous()
        # Squares of fp32 values are exact in fp64, and fsum rounds once.
        return Told(xxhash.xxh3_64_intdigest(values.numpy().data), _fsum(values.double().square().tolist()))

    def parameter_of(self, claim: Claim) -> object:
        """The parameter that a block of this rank belongs to."""
        piece = self._sets[claim.turn % len(self._sets)].pieces[claim.place]
        return self._fragments()[piece.fragment].parameter


def wrong_of(claim: Claim, checker: int, owns: Told, has: Told) -> int | None:
    """Which rank has added wrongly; None: that cannot be told, since elements differ or both sums are as good."""
    if owns.elements != has.elements:
        return None
    right = {
        claim.owner: _is_near(claim.got, owns.exact, claim.numel),
        checker: _is_near(claim.again, has.exact, claim.numel),
    }
    if claim.owner == checker:
        return checker
    wrong = [rank for rank, is_right in right.items() if not is_right]
    return wrong[0] if len(wrong) == 1 else None


def _sets_of(numels: Sequence[int]) -> list[_Set]:
    """Divide fragments of so many elements into blocks, and these into sets of no more than ``BLOCK`` elements."""
    sets: list[_Set] = []
    room = 0
    for fragment, numel in enumerate(numels):
        for start in range(0, numel, BLOCK):
            piece = _Piece(fragment, start, min(BLOCK, numel - start))
            if piece.numel > room:
                sets.append(_Set())
                room = BLOCK
            sets[-1].pieces.append(piece)
            room -= piece.numel
    return sets


def _square(block: Tensor) -> Tensor:
    return torch.linalg.vector_norm(block, dtype=torch.float64).square()


def _is_near(one: float, other: float, numel: int) -> bool:
    """Whether two sums of squares are the same within rounding; those that are not finite are alike."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= (numel + 8) * ULP * max(one, other)


def _fsum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
