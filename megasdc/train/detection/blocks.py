"""Blocks of the reduced gradient whose squares ranks add up again for each other.

``BlockSums`` adds up squares of blocks again on another rank, some blocks in turn, or all. What all ranks' blocks add
up to is compared with the norm that the step uses. A rank that adds wrongly each time has a wrong part of the norm and
wrong blocks alike: only another rank's sum of the same elements shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.engine.engine import TrainingEngine
from megasdc.optim.zero1 import BLOCK, counts_here, owned_fragments
from megasdc.parallel.collectives import TensorExchange, gather_objects


def ring_of(engine: TrainingEngine) -> tuple[dist.ProcessGroup | None, int, int]:
    """Ranks of which each checks blocks of the one before: their group, this rank's place in it, and their number.

    The replicas, or where there is one the ranks of the model; a rank alone is its own, without a group.
    """
    dims = engine.dims
    if dims.data > 1:
        return engine.mpu.get_data_parallel_group(), dims.dp_rank, dims.data
    if dims.world_size > 1:
        return engine.mpu.get_model_parallel_group(), dims.rank, dims.world_size
    return None, 0, 1


BLOCKS = "blocks"
"""Name of a number of the norm for listeners: the sums of squares of this rank's blocks, [blocks]."""
ULP = 2.0**-52
"""Relative rounding of fp64, twice: terms are positive, so that a sum of n is off by no more than n roundings."""
WORDS = 2
"""Number of 32-bit elements in which a sum is sent."""


@dataclass(frozen=True)
class BlockMismatch:
    """A block of the rank before for which this rank has another sum of squares.

    Args:
        owner: global rank of the block.
        number: number of the owner's set of blocks.
        place: place of the block in the set.
        numel: number of its elements.
        got: sum of its owner.
        again: sum of this rank.
    """

    owner: int
    number: int
    place: int
    numel: int
    got: float
    again: float


@dataclass(frozen=True)
class BlockSum:
    """A rank's evidence on a block in dispute: a checksum of its elements, and the exact sum of their squares."""

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
    """Blocks that are sent together, no more than ``BLOCK`` elements."""

    pieces: list[_Piece] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        return [one.numel for one in self.pieces]


@dataclass(frozen=True)
class _UnderWay:
    """Sets that are being sent: one of this rank's, and one of the rank before.

    Args:
        number: number of this rank's set; None: it has no more.
        elements: copy of the set's elements, since clipping changes the gradient.
        before: number of the other rank's set; None: it has no more.
    """

    number: int | None
    elements: Tensor
    before: int | None
    exchange: TensorExchange


class BlockSums:
    """Adds up squares of each block that this rank owns and counts, and those of the rank before again.

    A set of blocks is sent at a time, and no more than two are in memory.

    Args:
        engine: engine whose gradient is added up.
        whole: whether each look sends all sets; else one set, in turn.

    Collective: all ranks of the world.
    """

    def __init__(self, engine: TrainingEngine, *, whole: bool) -> None:
        self._engine, self._whole = engine, whole
        self._group, place, size = ring_of(engine)
        self._before, self._after, self._size = (place - 1) % size, (place + 1) % size, size
        ranks = [engine.dims.rank] if self._group is None else dist.get_process_group_ranks(self._group)
        self._owner = ranks[self._before]
        self._sets = sets_of(engine)
        every: list[list[list[int]]] = gather_objects([one.sizes for one in self._sets])
        self._theirs = every[self._owner]
        self._rounds = max(len(every[rank]) for rank in ranks) if whole else 1
        self._open: _UnderWay | None = None
        self._claim: BlockMismatch | None = None
        self._received: Tensor | None = None
        """The block of the rank before that this rank claims to be wrong."""
        self._disputed: tuple[int, int, Tensor] | None = None
        """The block that the next rank claims to be wrong: number of its set, place in it, and its elements."""

    @torch.no_grad()
    def add_up(self, turn: int) -> float:
        """Add up the squares of all blocks in fp64, and send those that are due; the last set is under way afterwards.

        Args:
            turn: number of the look.

        Returns:
            Sum of squares of this rank's blocks.

        Collective: the replicas, or where there is one all ranks of the model.
        Sync: waits for the device.
        """
        device, gradients = self._engine.device, [one.gradient for one in owned_fragments(self._engine.optimizer)]

        def elements(piece: _Piece) -> Tensor:
            gradient = gradients[piece.fragment]
            if gradient is None:
                return torch.zeros(piece.numel, device=device)
            return gradient.narrow(0, piece.start, piece.numel)

        pieces = [piece for one in self._sets for piece in one.pieces]
        empty = torch.zeros(0, dtype=torch.float64, device=device)
        squares = torch.stack([_square(elements(one)) for one in pieces]) if pieces else empty
        squares = self._engine.step_control.pass_to_listener(BLOCKS, squares)
        told = squares.split([len(one.pieces) for one in self._sets]) if self._sets else ()
        self._open, self._claim, self._received, self._disputed = None, None, None, None
        last: _UnderWay | None
        for place in range(self._rounds):
            number, before = (self._due(place, turn, sets) for sets in (self._sets, self._theirs))
            parts = [] if number is None else [elements(one).float() for one in self._sets[number].pieces]
            last, self._open = self._open, self._send(number, parts, None if number is None else told[number], before)
            if last is not None:
                self._compare(last)
        if self._rounds > 1:
            self._answer(elements)
        return float(squares.sum())

    def _due(self, place: int, turn: int, sets: Sequence[object]) -> int | None:
        """Number of the set that is sent in one of the rounds of a look."""
        if not self._whole:
            return turn % len(sets) if sets else None
        return place if place < len(sets) else None

    def _send(self, number: int | None, parts: Sequence[Tensor], told: Tensor | None, before: int | None) -> _UnderWay:
        empty = torch.zeros(0, dtype=torch.int32, device=self._engine.device)
        words = [one.view(torch.int32) for one in (*parts, *([] if told is None else [told]))]
        message, count = torch.cat([empty, *words]), sum(one.numel() for one in parts)
        sizes, sent = [0] * self._size, [empty] * self._size
        sent[self._after] = message
        if before is not None:
            sizes[self._before] = sum(self._theirs[before]) + WORDS * len(self._theirs[before])
        return _UnderWay(number, message[:count].view(torch.float32), before, TensorExchange(sent, sizes, self._group))

    def _compare(self, last: _UnderWay) -> None:
        """Add up the blocks of the rank before again, and claim the first whose sum differs from its owner's."""
        received = last.exchange.finish()[self._before]
        if last.before is None or self._claim is not None:
            return
        sizes = self._theirs[last.before]
        count = sum(sizes)
        blocks = received[:count].view(torch.float32).split(sizes)
        told = received[count:].clone().view(torch.float64)
        # Alone a rank adds up its own, with the elements in another order.
        again = torch.stack([_square(one.flip(0) if self._group is None else one) for one in blocks])
        for place, (got, own, numel) in enumerate(zip(told.tolist(), again.tolist(), sizes, strict=True)):
            if not _is_near(got, own, numel):
                self._claim = BlockMismatch(self._owner, last.before, place, numel, got, own)
                self._received = blocks[place].clone()
                return

    def _answer(self, elements: Callable[[_Piece], Tensor]) -> None:
        """Send to the rank before which of its blocks is claimed, and keep the one that the next rank claims.

        Later the gradient is clipped. What is in the last set is not known yet, and kept until it is.
        """
        claim, device = self._claim, self._engine.device
        numbers = (-1, -1) if claim is None else (claim.number, claim.place)
        sizes, sent = [0] * self._size, [torch.zeros(0, dtype=torch.int32, device=device)] * self._size
        sent[self._before] = torch.tensor(numbers, dtype=torch.int32, device=device)
        sizes[self._after] = len(numbers)
        number, place = TensorExchange(sent, sizes, self._group).finish()[self._after].tolist()
        if number >= 0:
            self._disputed = number, place, elements(self._sets[number].pieces[place]).float().clone()

    @torch.no_grad()
    def compare(self) -> BlockMismatch | None:
        """The first block of the rank before whose sum differs from its owner's; None: all are equal.

        Sync: waits for the device.
        """
        if self._open is not None:
            self._compare(self._open)
        return self._claim

    def evidence_on(self, claim: BlockMismatch, *, as_owner: bool) -> BlockSum:
        """This rank's evidence on a block in dispute, from its own elements or from those it has received.

        Sync: waits for the device.
        """
        block = self._of_owner(claim) if as_owner else self._received
        assert block is not None, "it is in dispute"
        values = block.cpu().contiguous()
        # Squares of fp32 values are exact in fp64, and fsum rounds once.
        return BlockSum(xxhash.xxh3_64_intdigest(values.numpy().data), _fsum(values.double().square().tolist()))

    def _of_owner(self, claim: BlockMismatch) -> Tensor:
        if self._disputed is not None and self._disputed[:2] == (claim.number, claim.place):
            return self._disputed[2]
        assert self._open is not None and self._open.number == claim.number, "it was sent last"
        return self._open.elements.split(self._sets[claim.number].sizes)[claim.place]

    def parameter_of(self, claim: BlockMismatch) -> object:
        """The parameter that a block of this rank belongs to."""
        piece = self._sets[claim.number].pieces[claim.place]
        return list(owned_fragments(self._engine.optimizer))[piece.fragment].parameter


def wrong_of(claim: BlockMismatch, checker: int, owns: BlockSum, has: BlockSum) -> int | None:
    """Rank that has added wrongly; None: it cannot be told, since elements differ or both sums are equally good."""
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


def sets_of(engine: TrainingEngine) -> list[_Set]:
    """Blocks of the gradient that this rank owns and counts, in the sets in which they are sent."""
    tp_rank = engine.dims.tp_rank
    fragments = owned_fragments(engine.optimizer)
    return _sets_of([one.numel if counts_here(one.parameter, tp_rank) else 0 for one in fragments])


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
    """Whether two sums of squares are equal within rounding; all sums that are not finite count as equal."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= (numel + 8) * ULP * max(one, other)


def _fsum(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan
