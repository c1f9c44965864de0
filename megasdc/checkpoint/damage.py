"""What kind of difference is it, by how much, and in which pieces? From two tensors that should hold the same bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megasdc.checkpoint.view import Copy, Piece
from megasdc.tensors.bits import as_bits, count_flips, element_bits, ulp_distance

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
    "tail": "everything from one place to the end of the piece: a torn write over an older file",
    "shard": "a whole piece, others not: the file of another step, or a rank that computed another update",
    "swapped": "a whole piece holds what belongs to another place: files under each other's names",
    "drift": "nearly all elements of most tensors of a slot: another step, or another trajectory",
    "dtype": "another type of number: saved or converted with another precision",
    "shape": "another shape: of another model, layout or vocabulary",
    "missing": "not there: a file was not written or not copied",
    "scalar": "another value: of another step, or a counter that went apart",
}
"""What usually makes a pattern."""
_DENSE = 0.9
"""Share of the elements in a range that must differ for it to count as wholly different: some are equal by chance."""
_MANY, _WIDE = 0.1, 0.8
"""Share of the elements that differ, and of the piece that they are spread over, from which on it is another state."""
_TAIL = 8
"""Shortest range at the end of a piece that is called a tail."""
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Measure:
    """How far two tensors of one type and shape are apart.

    Attributes:
        num_different: elements that differ in some bit.
        numel: all.
        first: index of the first that differs.
        last: index of the last.
        max_ulp: largest distance in representable values; null: not a floating-point type, or a NaN against another
            value.
        max_relative: largest |a - b| / max(|a|, |b|) over finite pairs; infinite if some pair is not finite.
        mean_relative: mean of the same over the finite pairs that differ.
        norms: Euclidean, of what was expected and what was got.
        num_nan: in both.
        num_inf: in both.
        dtype: of both, such as ``float32``.
        flips: in how many elements each bit differs, the lowest bit first.
    """

    num_different: int
    numel: int
    first: list[int]
    last: list[int]
    max_ulp: int | None
    max_relative: float
    mean_relative: float
    norms: tuple[float, float]
    num_nan: tuple[int, int]
    num_inf: tuple[int, int]
    dtype: str
    flips: list[int]


@dataclass(frozen=True)
class PieceDamage:
    """What is different in one piece.

    Attributes:
        piece: where it lies, and whose it is.
        num_different: elements that differ.
        first: index of the first in the logical tensor.
        last: index of the last.
        offsets: place of the first and the last in the piece.
    """

    piece: Piece
    num_different: int
    first: list[int]
    last: list[int]
    offsets: tuple[int, int]

    @classmethod
    def whole(cls, piece: Piece) -> PieceDamage:
        """All of a piece, where nothing tells which of its elements."""
        return cls(piece, piece.numel, [], [], (0, piece.numel - 1))


@dataclass(frozen=True)
class Damage:
    """A pattern with its details."""

    pattern: Pattern
    detail: str
    pieces: list[PieceDamage]
    covers_all: bool


def measure(expected: Tensor, got: Tensor) -> Measure:
    """Measure two tensors of one type and shape, block by block."""
    a, b = expected.reshape(-1), got.reshape(-1)
    count, first, last, ulp, largest, total, finite_pairs = 0, -1, -1, 0, 0.0, 0.0, 0
    squares, nans, infs = [0.0, 0.0], [0, 0], [0, 0]
    floating = a.dtype.is_floating_point
    flips = [0] * element_bits(a.dtype)
    for start in range(0, a.numel(), _BLOCK):
        x, y = a[start : start + _BLOCK], b[start : start + _BLOCK]
        wide = (x.to(torch.float64), y.to(torch.float64))
        for side, values in enumerate(wide):
            squares[side] += float(values.square().sum())
            nans[side] += int(values.isnan().sum())
            infs[side] += int(values.isinf().sum())
        places = (as_bits(x) != as_bits(y)).nonzero().view(-1)
        if not places.numel():
            continue
        count += places.numel()
        first = start + int(places[0]) if first < 0 else first
        last = start + int(places[-1])
        flips = [old + new for old, new in zip(flips, count_flips(x[places], y[places]), strict=True)]
        if floating:
            ulp = max(ulp, int(ulp_distance(x[places], y[places]).max()))
        one, other = wide[0][places], wide[1][places]
        finite = one.isfinite() & other.isfinite()
        scale = torch.maximum(one.abs(), other.abs())
        relative = torch.where(scale > 0, (one - other).abs() / scale, 0.0)[finite]
        if relative.numel():
            largest, total = max(largest, float(relative.max())), total + float(relative.sum())
            finite_pairs += relative.numel()
        if not bool(finite.all()):
            largest = math.inf
    shape = list(expected.shape)
    return Measure(
        num_different=count,
        numel=a.numel(),
        first=unravel(first, shape),
        last=unravel(last, shape),
        max_ulp=ulp if floating and ulp < torch.iinfo(torch.int64).max else None,
        max_relative=largest,
        mean_relative=total / finite_pairs if finite_pairs else 0.0,
        norms=(math.sqrt(squares[0]), math.sqrt(squares[1])),
        num_nan=(nans[0], nans[1]),
        num_inf=(infs[0], infs[1]),
        dtype=str(a.dtype).removeprefix("torch."),
        flips=flips,
    )


def classify(expected: Tensor, got: Tensor, copy: Copy) -> Damage:
    """Name the pattern of a difference.

    Args:
        expected: the whole tensor as it should be.
        got: the same, as it is in ``copy``; a bit differs. Both may lack rows at the end of ``copy``'s shape.
        copy: where it lies.
    """
    expected, got = _filled(expected, copy.shape), _filled(got, copy.shape)
    wanted, found = list(copy.cut(expected)), list(copy.cut(got))
    places = copy.cut(torch.arange(expected.numel()).view(expected.shape))
    damaged: list[PieceDamage] = []
    kinds: dict[Pattern, int] = {}
    details: list[str] = []
    whole, alive = 0, 0
    for piece, x, y, place in zip(copy.pieces, wanted, found, places, strict=True):
        alive += bool(_alive(x, y).any())
        at = (as_bits(x) != as_bits(y)).nonzero().view(-1)
        if not at.numel():
            continue
        ends = place[at].aminmax()
        first, last = (unravel(int(end), list(expected.shape)) for end in (ends.min, ends.max))
        damaged.append(PieceDamage(piece, at.numel(), first, last, (int(at[0]), int(at[-1]))))
        kind, detail, covers = _pattern(x, y, at)
        whole += covers
        if covers and (moved := _belongs(piece, y, wanted, copy.pieces)):
            kind, detail = "swapped", moved
        kinds[kind] = kinds.get(kind, 0) + at.numel()
        details.append(detail)
    pattern = max(kinds, key=lambda kind: kinds[kind])
    return Damage(pattern, "; ".join(dict.fromkeys(filter(None, details))), damaged, whole == alive)


def unravel(place: int, shape: list[int]) -> list[int]:
    """The index of an element, from its place in row-major order."""
    index = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.append(rest)
    return index[::-1]


def _pattern(expected: Tensor, got: Tensor, at: Tensor) -> tuple[Pattern, str, bool]:
    """Pattern, detail and whether all of a piece differs; ``at``: the places that do."""
    first, last = int(at[0]), int(at[-1])
    masks = _unsigned((as_bits(expected) ^ as_bits(got))[at].unique(), element_bits(got.dtype))
    flipped = f"bit {masks[0].bit_length() - 1}" if len(masks) == 1 and masks[0].bit_count() == 1 else ""
    if at.numel() == 1:
        return ("bit", flipped, False) if flipped else ("element", f"bits {masks[0]:#x}", False)
    alive = _alive(expected, got)
    from_start, to_end = (not bool(part.any()) for part in (alive[:first], alive[last + 1 :]))
    dense = at.numel() >= _DENSE * int(alive[first : last + 1].sum())
    if dense and not bool(as_bits(got[first : last + 1]).any()):
        whole = from_start and to_end
        place = "all of the piece" if whole else "to the end of the piece" if to_end else "within the piece"
        return "zeros", place, whole
    if at.numel() >= _DENSE * int(alive.sum()):
        return "shard", "", True
    if dense:
        return ("tail", "", False) if to_end and at.numel() >= _TAIL else ("run", flipped, False)
    steps = at.diff()
    if at.numel() > 2 and bool((steps == steps[0]).all()):
        detail = f"every {int(steps[0])} elements"
        return "period", f"{detail}, {flipped}" if flipped else detail, False
    share, span = at.numel() / int(alive.sum()), (last - first + 1) / alive.numel()
    if share >= _MANY and span >= _WIDE:  # one step changes only some of the bits that bf16 keeps
        return "shard", f"{share:.0%} of the elements", True
    return "scattered", flipped, False


def _belongs(piece: Piece, got: Tensor, wanted: list[Tensor], pieces: list[Piece]) -> str:
    """Whose elements a piece holds, if they are another's."""
    if piece.holds:
        return f"{piece.file.name} holds {piece.holds}"
    for other, like in zip(pieces, wanted, strict=True):
        if other is not piece and like.shape == got.shape and torch.equal(as_bits(like), as_bits(got)):
            return f"{piece.file.name} holds what belongs into {other.file.name}"
    return ""


def _alive(expected: Tensor, got: Tensor) -> Tensor:
    """Elements that are not zero in both: zeros are equal in any two states, so they say nothing."""
    return (as_bits(expected) != 0) | (as_bits(got) != 0)


def _filled(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    return torch.cat((tensor, torch.zeros(shape[0] - tensor.shape[0], *shape[1:], dtype=tensor.dtype)))


def _unsigned(masks: Tensor, width: int) -> list[int]:
    """At most two of some bit patterns as numbers from 0 on."""
    return [int(mask) & ((1 << width) - 1) for mask in masks[:2]]
