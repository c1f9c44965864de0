"""Classification of differences between two tensors that should be bitwise equal: the pattern, and the pieces affected.

Tensors are passed range by range, so that neither is held in memory. For each piece the number of differing elements,
the positions of the first and the last, the differing bits and their distances are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import xxhash
from torch import Tensor

from megasdc.checkpoint.tensor_files import Places
from megasdc.checkpoint.views import Copy, Piece
from megasdc.lab.checkpoints.measure import unravel
from megasdc.tensors.bits import as_bits, element_bits

Pattern = Literal[
    "bit", "element", "run", "period", "scattered", "zeros", "tail", "shard", "swapped", "drift",
    "dtype", "shape", "missing", "scalar",
]  # fmt: skip
MEANINGS: dict[Pattern, str] = {
    "bit": "one bit of one element: a flip in memory, on a link or on a disk",
    "element": "one element, several bits: a wrong result of a computation, or damage of a memory word",
    "run": "adjacent elements: a wrong vector lane or tile of a computation, or damage of a memory line",
    "period": "elements at equal distances: one lane of a computation, or one memory column",
    "scattered": "elements here and there: a computation that is wrong now and then, or another step of a table whose "
    "rows are seldom used",
    "zeros": "a range of zeros: a write that did not reach the disk, or a block that was lost",
    "tail": "everything from one offset to the end of the piece: a torn write over an older file",
    "shard": "a whole piece, others not: the file of another step, or a rank that computed another update",
    "swapped": "a whole piece holds what belongs to another place: files under each other's names",
    "drift": "nearly all elements of most tensors of a slot: another step, or another trajectory",
    "dtype": "another type of number: saved or converted with another precision",
    "shape": "another shape: of another model, layout or vocabulary",
    "missing": "not there: a file was not written or not copied",
    "scalar": "another value: of another step, or a counter that diverged",
}
"""The usual cause of each pattern."""
_DENSE = 0.9
"""Share of the elements in a range that must differ for all to count as different: some are equal by chance."""
_MANY, _WIDE = 0.1, 0.8
"""Minimum share of differing elements, and of the piece that they span, to call it another state."""
_TAIL = 8
"""Minimum number of differing elements at the end of a piece to call it a tail."""


@dataclass(frozen=True)
class PieceDamage:
    """The differing elements of one piece.

    Attributes:
        first: index of the first in the logical tensor.
        last: index of the last.
        offsets: offset in the piece of the first and the last.
    """

    piece: Piece
    num_different: int
    first: list[int]
    last: list[int]
    offsets: tuple[int, int]

    @classmethod
    def whole(cls, piece: Piece) -> PieceDamage:
        """All of a piece, where single elements cannot be named."""
        return cls(piece, piece.numel, [], [], (0, piece.numel - 1))


@dataclass(frozen=True)
class DamagePattern:
    """A pattern with its details; ``covers_all``: every piece differs as a whole."""

    pattern: Pattern
    detail: str
    pieces: list[PieceDamage]
    covers_all: bool = False


@dataclass
class _Scan:
    """Running statistics of one piece, whose elements are passed in order; positions are offsets in the piece.

    Elements that are nonzero in either tensor are alive: zeros are equal in any two states and carry no information.
    """

    width: int = 0
    count: int = 0
    first: int = 0
    last: int = 0
    alive: int = 0
    alive_before: int = 0
    """Alive elements before the first that differs."""
    alive_through: int = 0
    """Alive elements up to the last that differs."""
    set_before: int = 0
    """Nonzero elements of ``got`` before the first that differs."""
    set_through: int = 0
    step: int | None = 0
    """Distance between consecutive differing elements; None: not constant."""
    masks: set[int] = field(default_factory=set)
    """Distinct XOR masks of differing elements, at most three."""
    wanted: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    found: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    _set: int = 0

    def add(self, start: int, expected: Tensor, got: Tensor) -> None:
        """Add the elements, [n], from offset ``start`` on."""
        self.width = element_bits(got.dtype)
        x, y = as_bits(expected), as_bits(got)
        for digest, bits in ((self.wanted, x), (self.found, y)):
            digest.update(bits.view(torch.uint8).numpy().data)
        different = x ^ y
        at = different.nonzero().view(-1)
        alive = (x | y) != 0
        if at.numel():
            first, last = int(at[0]), int(at[-1])
            self._add_distances(at + start)
            if not self.count:
                self.first = start + first
                self.alive_before = self.alive + int(alive[:first].sum())
                self.set_before = self._set + int((y[:first] != 0).sum())
            self.count += at.numel()
            self.last = start + last
            self.alive_through = self.alive + int(alive[: last + 1].sum())
            self.set_through = self._set + int((y[: last + 1] != 0).sum())
            if len(self.masks) < 2:
                masks = different[at].unique()[:2].tolist()
                self.masks |= {mask & ((1 << self.width) - 1) for mask in masks}
        self.alive += int(alive.sum())
        self._set += int((y != 0).sum())

    def _add_distances(self, at: Tensor) -> None:
        steps = at.diff()
        if self.count:
            steps = torch.cat((at[:1] - self.last, steps))
        if not steps.numel() or self.step is None:
            return
        step = self.step or int(steps[0])
        self.step = step if bool((steps == step).all()) else None

    def pattern(self, numel: int) -> tuple[Pattern, str, bool]:
        """Pattern, detail and whether all of the piece's ``numel`` elements differ."""
        mask = min(self.masks)
        flipped = f"bit {mask.bit_length() - 1}" if len(self.masks) == 1 and mask.bit_count() == 1 else ""
        if self.count == 1:
            return ("bit", flipped, False) if flipped else ("element", f"bits {mask:#x}", False)
        from_start, to_end = self.alive_before == 0, self.alive_through == self.alive
        dense = self.count >= _DENSE * (self.alive_through - self.alive_before)
        if dense and self.set_through == self.set_before:
            whole = from_start and to_end
            place = "all of the piece" if whole else "to the end of the piece" if to_end else "within the piece"
            return "zeros", place, whole
        if self.count >= _DENSE * self.alive:
            return "shard", "", True
        if dense:
            return ("tail", "", False) if to_end and self.count >= _TAIL else ("run", flipped, False)
        if self.count > 2 and self.step is not None:
            detail = f"every {self.step} elements"
            return "period", f"{detail}, {flipped}" if flipped else detail, False
        share, span = self.count / self.alive, (self.last - self.first + 1) / numel
        if share >= _MANY and span >= _WIDE:  # one step changes only some of the bits that bf16 keeps
            return "shard", f"{share:.0%} of the elements", True
        return "scattered", flipped, False


class Classifying:
    """Names the pattern of a difference between two tensors that are passed range by range.

    ``copy``: storage of the unexpected tensor; its shape may have more rows than are passed.
    """

    def __init__(self, copy: Copy) -> None:
        self.pieces, self.shape = copy.pieces, copy.shape
        self.arrangement: Places = copy.arrangement
        self.scans = [_Scan() for _ in self.pieces]

    def add(self, start: int, expected: Tensor, got: Tensor) -> None:
        """Add the next elements of both, [n], from index ``start`` of the whole tensor on."""
        cuts = (self.arrangement.cut(start, flat) for flat in (expected, got))
        for (number, first, x), (_, _, y) in zip(*cuts, strict=True):
            self.scans[number].add(first, x.reshape(-1), y.reshape(-1))

    def result(self) -> DamagePattern:
        """The damage after all elements; requires that some bit differs."""
        damaged: list[PieceDamage] = []
        kinds: dict[Pattern, int] = {}
        details: list[str] = []
        whole = 0
        for number, (piece, scan) in enumerate(zip(self.pieces, self.scans, strict=True)):
            if not scan.count:
                continue
            ends = (scan.first, scan.last)
            first, last = (unravel(self.arrangement.place(number, end), self.shape) for end in ends)
            damaged.append(PieceDamage(piece, scan.count, first, last, ends))
            kind, detail, covers = scan.pattern(piece.numel)
            whole += covers
            if covers and (moved := self._belongs(piece, scan)):
                kind, detail = "swapped", moved
            kinds[kind] = kinds.get(kind, 0) + scan.count
            details.append(detail)
        pattern = max(kinds, key=lambda kind: kinds[kind])
        alive = sum(scan.alive > 0 for scan in self.scans)
        return DamagePattern(pattern, "; ".join(dict.fromkeys(filter(None, details))), damaged, whole == alive)

    def _belongs(self, piece: Piece, scan: _Scan) -> str:
        """The other piece whose elements a piece holds; empty: none."""
        if piece.holds:
            return f"{piece.file.name} holds {piece.holds}"
        for other, like in zip(self.pieces, self.scans, strict=True):
            if other.numel == piece.numel and other is not piece and like.wanted.digest() == scan.found.digest():
                return f"{piece.file.name} holds what belongs into {other.file.name}"
        return ""
