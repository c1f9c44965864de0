"""Is every range of a tensor found in its blocks, wherever the range begins and ends?"""

from __future__ import annotations

import itertools

import pytest
import torch

from megasdc.checkpoint.tensor_files import BlockArrangement, TensorBlock

SHAPE = (5, 6, 4)
BOUNDS = {
    "rows": ((0, 2, 5), (0, 6), (0, 4)),
    "columns": ((0, 5), (0, 6), (0, 1, 4)),
    "all": ((0, 2, 5), (0, 3, 4, 6), (0, 1, 4)),
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_every_range_is_found(bounds: tuple[tuple[int, ...], ...]) -> None:
    """Each element once, at its place in its block, in order; places of elements are those of the whole tensor."""
    whole = torch.arange(5 * 6 * 4)
    cuts = list(itertools.product(*(list(itertools.pairwise(ends)) for ends in bounds)))
    blocks = tuple(TensorBlock(tuple(a for a, _ in cut), tuple(b - a for a, b in cut), SHAPE) for cut in cuts)
    held = [whole.view(SHAPE)[tuple(slice(a, b) for a, b in cut)].reshape(-1) for cut in cuts]
    arrangement = BlockArrangement(blocks)
    for piece, elements in enumerate(held):
        assert [arrangement.place(piece, place) for place in range(len(elements))] == elements.tolist()
    for start, stop in itertools.combinations(range(0, 121, 7), 2):
        found: list[int] = []
        ends = [0] * len(held)
        for piece, first, part in arrangement.cut(start, whole[start:stop]):
            assert torch.equal(held[piece][first : first + len(part)], part)
            assert first >= ends[piece]
            ends[piece] = first + len(part)
            found += part.tolist()
        assert sorted(found) == list(range(start, min(stop, 120)))
