"""Medians, their intervals and alternating blocks of the benchmarks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tools.bench.statistics import Cost, Estimate, estimate_median, in_turn, interval_coverage, ratios, run_alternating


@pytest.mark.parametrize("count", [1, 2, 5, 6, 30, 31])
def test_median_is_numpys(count):
    """The median is NumPy's, for odd and even counts, whatever the order of the values."""
    values = np.random.default_rng(count).normal(size=count)
    assert estimate_median(list(values)).median == pytest.approx(float(np.median(values)), rel=1e-15)


def test_interval_of_thirty_values():
    """With n = 30 the 95 % interval is from the 10th to the 21st value, coverage 95.72 % (Conover, table A3)."""
    found = estimate_median([float(i) for i in range(30, 0, -1)])
    assert (found.low, found.high, found.count) == (10.0, 21.0, 30)
    assert found.coverage == pytest.approx(0.9572, abs=5e-5)


@pytest.mark.parametrize("count", [6, 7, 12, 30, 101])
def test_interval_is_the_narrowest_that_covers(count):
    """The coverage is at least 95 %, and one value less at each end would not be."""
    found = estimate_median([float(i) for i in range(count)])
    left_out = int(found.low)
    assert found.high == count - 1 - left_out
    assert interval_coverage(count, left_out) >= 0.95 > interval_coverage(count, left_out + 1)


def test_coverage_in_random_samples():
    """In samples of a skewed distribution the interval holds the true median as often as it says."""
    rng = np.random.default_rng(0)
    found = [estimate_median(list(sample)) for sample in rng.exponential(size=(4000, 30))]
    hits = np.mean([one.low <= np.log(2) <= one.high for one in found])
    assert hits == pytest.approx(found[0].coverage, abs=4 * np.sqrt(0.0428 * 0.9572 / 4000))


def test_too_few_values_say_so():
    """Under six values no interval covers 95 %: it is the whole range, with its true coverage."""
    found = estimate_median([3.0, 1.0, 2.0])
    assert found == Estimate(median=2.0, low=1.0, high=3.0, coverage=0.75, count=3)
    with pytest.raises(ValueError, match="at least one value"):
        estimate_median([])


@pytest.mark.parametrize(
    ("median", "high", "passes"), [(1.01, 1.02, True), (1.0101, 1.0102, False), (1.0, 1.0201, False), (0.9, 0.95, True)]
)
def test_bar(median, high, passes):
    """It passes when the median is within the bar and the upper end within the bar and the slack."""
    assert Estimate(median, 0.0, high, 0.95, 30).passes(1.01, 0.01) is passes


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_each_side_follows_several(count):
    """Each comes once a block, and of more than two none always follows the same other."""
    blocks = [in_turn(range(count), block) for block in range(2 * count)]
    assert all(sorted(block) == list(range(count)) for block in blocks)
    order = [side for block in blocks for side in block]
    before = {side: {one for one, after in pairwise(order) if after == side} - {side} for side in range(count)}
    assert all(len(found) > 1 or count == 2 for found in before.values())
    if count == 2:
        assert blocks == [[0, 1], [1, 0], [0, 1], [1, 0]]


def test_blocks_alternate():
    """The order is AB BA AB, every pair is (first, second) whichever ran before, and progress is told."""
    order, told, clock = [], [], iter(range(100))

    def measure(block):
        block()
        return Cost(float(next(clock)), 1.0)

    costs = run_alternating(lambda: order.append("A"), lambda: order.append("B"), 3, measure, told.append)
    assert "".join(order) == "ABBAAB"
    assert [(ours.wall_s, other.wall_s) for ours, other in costs] == [(0, 1), (3, 2), (4, 5)]
    assert told == [1, 2, 3]


def test_ratios_are_of_pairs():
    """A machine that slows down tenfold between pairs does not move the ratio of pairs."""
    costs = [(Cost(1.1 * speed, 2.0 * speed), Cost(1.0 * speed, 2.5 * speed)) for speed in (1, 10, 1, 10, 10, 1)]
    found = ratios(costs)
    assert found["wall"].low == pytest.approx(1.1) and found["wall"].high == pytest.approx(1.1)
    assert found["cpu"].median == pytest.approx(0.8)
