"""Whose sum of squares is wrong, and which blocks are sent together?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megasdc.optim.zero1 import BLOCK
from megasdc.parallel.dims import ParallelDims
from megasdc.train.detection import blocks
from megasdc.train.detection.blocks import (
    BlockMismatch,
    BlockSum,
    BlockSums,
    _fsum,
    _is_near,
    _sets_of,
    wrong_of,
)

RIGHT, WRONG = 3.0, 3.1


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("got", "again", "elements", "named"),
    [
        (WRONG, RIGHT, (1, 1), 0),
        (RIGHT, WRONG, (1, 1), 1),
        (WRONG, WRONG, (1, 1), None),
        (WRONG, RIGHT, (1, 2), None),
    ],
    ids=["owner", "checker", "both", "elements_changed_on_the_way"],
)
def test_the_exact_sum_tells_whose_is_wrong(
    got: float, again: float, elements: tuple[int, int], named: int | None
) -> None:
    """Where both have the same elements, and one of two sums is within rounding of the exact one."""
    claim = BlockMismatch(0, 5, 0, 100, got, again)
    assert wrong_of(claim, 1, BlockSum(elements[0], RIGHT), BlockSum(elements[1], RIGHT)) == named


def test_a_rank_alone_is_the_one() -> None:
    """Its own two sums differ."""
    assert wrong_of(BlockMismatch(0, 5, 0, 100, WRONG, RIGHT), 0, BlockSum(1, RIGHT), BlockSum(1, RIGHT)) == 0


def test_every_element_is_in_one_set() -> None:
    """In order; no set is larger than a block; what does not count is in none."""
    numels = [10, 0, 2 * BLOCK + 3, BLOCK - 5, 7, 1]
    sets = _sets_of(numels)
    seen: dict[int, int] = {}
    for one in (piece for group in sets for piece in group.pieces):
        assert seen.get(one.fragment, 0) == one.start
        seen[one.fragment] = one.start + one.numel
    assert seen == {place: numel for place, numel in enumerate(numels) if numel}
    assert all(sum(one.sizes) <= BLOCK for one in sets)


@pytest.mark.parametrize("whole", [False, True])
def test_a_block_that_is_added_wrongly_is_claimed_with_what_it_was(
    group: None, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """In the look at its set, or in each: its elements are those from before the gradient was clipped."""
    monkeypatch.setattr(blocks, "BLOCK", 64)
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    for wrong in (2, 15):  # of 16 sets of one block; the last is compared when the optimizer has stepped
        sums = BlockSums(_engine(gradient.clone(), wrong), whole=whole)
        seen = {}
        for turn in range(16):
            now = sums._engine.optimizer.fp32_groups_gradient_flat_partition[0]
            now.copy_(gradient)
            sums.add_up(turn)
            now.mul_(0.5)
            if (claim := sums.compare()) is not None:
                seen[turn] = claim
                for as_owner in (False, True):
                    block = gradient[64 * wrong : 64 * (wrong + 1)]
                    assert sums.evidence_on(claim, as_owner=as_owner).exact == _fsum(block.double().square().tolist())
        assert list(seen) == (list(range(16)) if whole else [wrong])
        assert {(claim.number, claim.place) for claim in seen.values()} == {(wrong, 0)}


def _engine(gradient: torch.Tensor, wrong: int) -> Any:
    """An engine of one rank with one parameter, which has one sum of squares too large each time."""
    address = SimpleNamespace(start=0, numel=gradient.numel())
    parameter = torch.nn.Parameter(torch.zeros(gradient.numel()))
    parameter._hp_mapping = SimpleNamespace(hp_fragment_address=address, lp_fragment_address=address)  # type: ignore[attr-defined]
    optimizer = SimpleNamespace(
        bf16_groups=[[parameter]],
        fp32_groups_gradients_flat=[gradient],
        fp32_groups_gradient_flat_partition=[gradient],
        fp32_groups_flat_partition=[torch.zeros_like(gradient)],
    )

    def pass_to_listener(slot: str, numbers: torch.Tensor) -> torch.Tensor:
        numbers[wrong] *= 1 + 1e-9
        return numbers

    control, dims = SimpleNamespace(pass_to_listener=pass_to_listener), ParallelDims(1, 1, 1)
    return SimpleNamespace(dims=dims, device=gradient.device, optimizer=optimizer, step_control=control)


def test_rounding_is_no_difference_and_a_flip_is_one() -> None:
    """Against the exact sum, in any order of addition; the lowest bit of a norm in fp32 is seen."""
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(3))
    exact = _fsum(values.double().square().tolist())
    for order in (values, values.flip(0), values.sort().values):
        assert _is_near(float(torch.linalg.vector_norm(order, dtype=torch.float64).square()), exact, len(values))
    assert not _is_near(exact * (1 + 2.0**-24), exact, len(values))
    assert _is_near(math.nan, math.inf, 3) and not _is_near(math.nan, 1.0, 3)
