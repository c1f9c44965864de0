"""Are patterns of differences named right, and their sizes measured right? Against NumPy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megasdc.checkpoint.views import Copy, Piece, WriterRank, shard_fragments
from megasdc.lab.checkpoints.damage import MEANINGS, Classifying, DamagePattern
from megasdc.lab.checkpoints.measure import Measure, Measuring
from megasdc.lab.checkpoints.report import Options
from megasdc.model.sharding import Split

SHAPE = (16, 8)


def _whole() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) + 10


def _classify(expected: torch.Tensor, got: torch.Tensor, copy: Copy, size: int = 128) -> DamagePattern:
    """The pattern of a difference, from ranges of so many elements."""
    classifying = Classifying(copy)
    for start in range(0, 128, size):
        classifying.add(start, *(one.reshape(-1)[start : start + size] for one in (expected, got)))
    return classifying.result()


def _measure(expected: torch.Tensor, got: torch.Tensor, size: int = 128) -> Measure:
    measuring = Measuring(SHAPE)
    for pair in zip(expected.reshape(-1).split(size), got.reshape(-1).split(size), strict=True):
        measuring.add(*pair)
    return measuring.result()


def _copy(whole: torch.Tensor) -> Copy:
    """Two tensor ranks that hold columns, each in two pieces of 40 and 24 elements."""
    shards = []
    for tp_rank in range(2):
        flat = whole[:, 4 * tp_rank : 4 * tp_rank + 4].reshape(-1)
        pieces = []
        for dp_rank, (start, numel) in enumerate(((0, 40), (40, 24))):
            owner = WriterRank(2 * dp_rank + tp_rank, dp_rank, 0, tp_rank, "host")
            stored = partial(torch.clone, flat)
            pieces.append(Piece(Path(f"tp{tp_rank}_dp{dp_rank}"), owner, numel, stored, start))
        shards.append(tuple(pieces))
    return Copy(SHAPE, tuple(shards), Split.ROW)


def _found(change: dict[tuple[int, int], float]) -> DamagePattern:
    """What is found where elements of the whole tensor were given other values; in ranges of any size the same."""
    expected, got = _whole(), _whole()
    for index, value in change.items():
        got[index] = value
    copy = _copy(expected)
    found = _classify(expected, got, copy)
    for size in (1, 3, 8, 50):
        assert _classify(expected, got, copy, size) == found, f"in ranges of {size} elements"
    return found


def test_elements_are_found_in_the_piece_that_holds_them() -> None:
    """Column 5 of row 12 is element 49 of tensor rank 1's 64, so the ninth of its second piece."""
    found = _found({(12, 5): 99.0})
    (damaged,) = found.pieces
    assert damaged.piece.file.name == "tp1_dp1"
    assert (damaged.first, damaged.offsets, damaged.num_different) == ([12, 5], (9, 9), 1)
    assert found.pattern == "element"


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        ("run", [(0, 1), (0, 2), (0, 3), (1, 0)]),
        ("period", [(0, 1), (2, 1), (4, 1)]),
        ("scattered", [(0, 1), (2, 1), (5, 1)]),
        ("shard", [(row, column) for row in range(10) for column in range(4)]),
        ("tail", [(row, column) for row in range(7, 10) for column in range(4)]),
    ],
)
def test_patterns(pattern: str, rows: list[tuple[int, int]]) -> None:
    """Each pattern in the first piece of tensor rank 0, which has 10 rows of 4."""
    found = _found({index: 50.0 + place for place, index in enumerate(rows)})
    assert found.pattern == pattern
    assert [damaged.piece.file.name for damaged in found.pieces] == ["tp0_dp0"]
    assert not found.covers_all
    assert pattern in MEANINGS


@pytest.mark.parametrize(("last", "pattern"), [(31, "shard"), (30, "scattered")])
def test_a_few_elements_that_reach_over_most_of_a_piece_are_a_shard(last: int, pattern: str) -> None:
    """A tenth of the 40 elements, from the first on: first and last count when 80 % are reached."""
    changed = {divmod(element, 4): 50.0 + element for element in (0, 5, 12, last)}
    assert _found(changed).pattern == pattern


def test_zeros_and_all() -> None:
    """Zeros are told from other ranges; a difference of everything says so."""
    assert _found({(row, column): 0.0 for row in range(2) for column in range(4)}).pattern == "zeros"
    everything = _found({(row, column): 1.0 + row for row in range(16) for column in range(8)})
    assert everything.pattern == "shard"
    assert everything.covers_all


def test_one_bit_is_named() -> None:
    """The number of the bit that was flipped, the highest too."""
    for bit in (0, 23, 31):
        expected, got = _whole(), _whole()
        got.view(torch.int32)[3, 3] ^= -(1 << 31) if bit == 31 else 1 << bit
        found = _classify(expected, got, _copy(expected))
        assert (found.pattern, found.detail) == ("bit", f"bit {bit}")


def test_swapped_pieces_are_named() -> None:
    """Two tensor ranks' halves exchanged: each holds what belongs to the other."""
    whole = _whole()
    got = torch.cat((whole[:, 4:], whole[:, :4]), 1)
    found = _classify(whole, got, _copy(whole))
    assert found.pattern == "swapped"
    assert "tp0_dp0 holds what belongs into tp1_dp0" in found.detail


def test_measure() -> None:
    """Counts, places, relative differences and norms are NumPy's; NaN is beyond every distance."""
    expected, got = _whole(), _whole()
    got[2, 3] += 1
    got[9, 1] *= 1.5
    found = _measure(expected, got)
    a, b = (one.double().numpy() for one in (expected, got))
    differs = a != b
    relative = (np.abs(a - b) / np.maximum(np.abs(a), np.abs(b)))[differs]
    assert (found.num_different, found.numel, found.first, found.last) == (2, 128, [2, 3], [9, 1])
    assert found.max_relative == pytest.approx(relative.max(), rel=1e-12)
    assert found.mean_relative == pytest.approx(relative.mean(), rel=1e-12)
    assert found.norms == pytest.approx((np.linalg.norm(a), np.linalg.norm(b)), rel=1e-12)
    steps = np.abs(expected.numpy().view(np.int32)[differs] - got.numpy().view(np.int32)[differs])
    assert found.max_ulp == int(steps.max())
    got[0, 0], got[0, 1] = float("nan"), float("-inf")
    found = _measure(expected, got)
    assert (found.num_nan, found.num_inf, found.max_ulp) == ((0, 1), (0, 1), None)
    assert found.max_relative == float("inf")


def test_measuring_in_ranges_changes_nothing() -> None:
    """Ranges that divide the tensor unevenly give the same numbers and places as one."""
    expected, got = _whole(), _whole()
    got[2, 3] += 1
    got[15, 7] *= 1.5
    whole = _measure(expected, got)
    parts = _measure(expected, got, 50)
    assert (parts.num_different, parts.first, parts.last, parts.max_ulp) == (2, [2, 3], [15, 7], whole.max_ulp)
    assert parts.norms == pytest.approx(whole.norms, rel=1e-12)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_element_lies_in_one_shard(replicas: int) -> None:
    """Shards are of one length, a multiple of 2; all elements lie in order, none twice."""
    shapes = {"a": torch.Size([7, 3]), "b": torch.Size([5]), "c": torch.Size([1, 3])}
    length, found = shard_fragments(shapes, replicas)
    assert length % 2 == 0
    assert len(found) == replicas
    assert 29 <= replicas * length < 29 + 2 * replicas
    flat = [(rank * length + start, numel) for rank, one in enumerate(found) for start, numel in one.values()]
    ends = [0, *(start + numel for start, numel in flat)]
    assert [start for start, _ in flat] == ends[:-1]
    assert ends[-1] == 29


@pytest.mark.parametrize(
    ("expected", "got", "relative"), [(0.0, -5.0, 1.0), (-5.0, 0.0, 1.0), (-5.0, 5.0, 2.0), (-4.0, -5.0, 0.2)]
)
def test_the_relative_difference_knows_signs(expected: float, got: float, relative: float) -> None:
    """|a - b| / max(|a|, |b|) for negative values too: no difference is lost, or lets a tolerance pass."""
    found = _measure(torch.full(SHAPE, expected), torch.full(SHAPE, got))
    assert (found.max_relative, found.mean_relative) == pytest.approx((relative, relative), rel=1e-12)
    assert not Options(rtol=0.1).tolerates(found)
