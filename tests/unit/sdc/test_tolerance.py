"""Is a threshold what clean values were, times a factor, and does an unusual value leave it alone?"""

import math

import numpy as np

from megasdc.sdc.tolerance import KEPT, MEASURED, Tolerance


def test_nothing_is_judged_before_it_is_measured():
    """The first values are taken as clean, and the threshold is the factor times their upper quartile."""
    tolerance = Tolerance(factor=3.0, floor=0.0)
    for value in range(MEASURED):
        assert tolerance.threshold is None
        assert not tolerance.judge(float(value))
    assert tolerance.threshold == 3.0 * np.quantile(np.arange(MEASURED), 0.75, method="higher")


def test_an_unusual_value_is_not_learned():
    """A value above the threshold is unusual as often as it comes; at the threshold it is not."""
    tolerance = Tolerance(factor=2.0, floor=0.0)
    for _ in range(MEASURED):
        tolerance.judge(1.0)
    assert [tolerance.judge(value) for value in (2.1, 2.1, math.inf, math.nan, 2.0)] == [True, True, True, True, False]
    assert tolerance.threshold == 2.0


def test_one_odd_value_does_not_make_it_blind():
    """A huge value among those that are measured leaves the threshold where it was."""
    tolerance = Tolerance(factor=2.0, floor=0.0)
    for value in [1.0] * (MEASURED - 1) + [1e9]:
        tolerance.judge(value)
    assert tolerance.threshold == 2.0


def test_the_floor_holds_where_clean_values_are_nothing():
    """Values that were exact so far do not make the next rounding unusual."""
    tolerance = Tolerance(factor=2.0, floor=0.5)
    for _ in range(MEASURED):
        tolerance.judge(0.0)
    assert tolerance.threshold == 0.5
    assert [tolerance.judge(0.6), tolerance.judge(0.4)] == [True, False]


def test_old_values_are_forgotten():
    """Only the newest clean values count."""
    tolerance = Tolerance(factor=2.0, floor=0.0)
    for value in [10.0] * MEASURED + [1.0] * KEPT:
        tolerance.judge(value)
    assert tolerance.threshold == 2.0


def test_its_state_goes_on():
    """A tolerance that is restored judges as the one that was saved."""
    tolerance, other = Tolerance(2.0, 0.0), Tolerance(2.0, 0.0)
    for value in range(MEASURED + 3):
        tolerance.judge(1.0 + value / 100)
    other.load_state_dict(tolerance.state_dict())
    assert other.threshold is not None
    assert other.threshold == tolerance.threshold
