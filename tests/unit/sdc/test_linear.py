"""Are linear sums right in float64, the same whole and in shards, and do residuals show what a reduction changed?"""

import itertools

import numpy as np
import pytest
import torch

from megasdc.sdc.fp64.linear import HOST_ROWS, PERIOD, draw_signs, linear_sums, residuals, squared_norm


@pytest.mark.parametrize("numel", [1, 100, PERIOD, PERIOD + 1, HOST_ROWS * PERIOD + 3, 2 * HOST_ROWS * PERIOD - 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_numpy(numel, dtype):
    """Both sums are NumPy's in float64, with one sign for each place."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    signs = draw_signs(3, torch.device("cpu"))
    exact = values.double().numpy()
    tiled = np.resize(signs.numpy(), numel)
    assert linear_sums(values, signs).tolist() == pytest.approx([exact.sum(), (exact * tiled).sum()], abs=1e-9)


def test_shards_add_up_to_the_whole():
    """Sums of consecutive parts, each with its offset, add up to those of the tensor."""
    values = torch.randn(3, 2 * PERIOD + 17)
    signs = draw_signs(1, torch.device("cpu"))
    flat, cuts = values.flatten(), [0, 5, PERIOD + 2, 4 * PERIOD, values.numel()]
    parts = sum(linear_sums(flat[a:b], signs, a) for a, b in itertools.pairwise(cuts))
    assert parts.tolist() == pytest.approx(linear_sums(values, signs).tolist(), abs=1e-9)


def test_signs_repeat_by_seed_and_are_both():
    """The same seed gives the same signs, another gives others, and about half are negative."""
    device = torch.device("cpu")
    assert torch.equal(draw_signs(5, device), draw_signs(5, device))
    assert not torch.equal(draw_signs(5, device), draw_signs(6, device))
    assert set(draw_signs(5, device).tolist()) == {-1.0, 1.0}
    assert abs(float(draw_signs(5, device).mean())) < 0.05


def _judge(gradients, reduced, factor=1.0):
    signs = draw_signs(2, torch.device("cpu"))
    before = sum(linear_sums(one, signs) for one in gradients).unsqueeze(0)
    squares = sum(squared_norm([one], torch.device("cpu")) for one in gradients).view(1)
    after = linear_sums(reduced, signs).unsqueeze(0)
    return residuals(before, squares, after, len(gradients), torch.tensor(factor, dtype=torch.float64))


def test_a_clean_mean_leaves_rounding_alone():
    """The mean of fp32 gradients, scaled, has a residual of a few roundings, and one that is exact has none."""
    gradients = [torch.randn(5 * PERIOD) for _ in range(4)]
    reduced = torch.stack(gradients).mean(0) * 1.25
    assert float(_judge(gradients, reduced, 1.25).max()) < 4 * torch.finfo(torch.float32).eps
    assert float(_judge([torch.zeros(9), torch.zeros(9)], torch.zeros(9)).max()) == 0.0


def test_errors_that_cancel_show_in_the_signed_sum():
    """One wrong element shows in both sums; two swapped ones show in the signed sum alone."""
    gradients = [torch.randn(5 * PERIOD) for _ in range(4)]
    wrong = torch.stack(gradients).mean(0)
    norm = float(torch.stack(gradients).double().norm())
    wrong[77] += 1.0
    assert _judge(gradients, wrong).tolist()[0] == pytest.approx([4 / norm, 4 / norm], rel=1e-4)
    signs = draw_signs(2, torch.device("cpu"))
    other = int((signs != signs[77]).nonzero()[0])
    swapped = torch.stack(gradients).mean(0)
    swapped[[77, other]] = swapped[[other, 77]]
    plain, signed = _judge(gradients, swapped).tolist()[0]
    assert plain < 1e-6 < signed
