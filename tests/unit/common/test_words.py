"""Lists, ranges, moments and durations as people read them."""

from __future__ import annotations

import math

import pytest

from megasdc.common.words import clock, duration, few, ranges


def test_the_first_of_a_list_and_how_many_more() -> None:
    """All of a short list, a mark for an empty one."""
    assert few([]) == "-" and few([], none="none") == "none"
    assert few([7]) == "7" and few("abc") == "a, b, c"
    assert few("abcd") == "a, b, c and 1 more" and few(range(2000), 1) == "0 and 1,999 more"


def test_numbers_that_follow_each_other_are_a_range() -> None:
    """In any order; two are a range, too."""
    assert ranges([]) == "" and ranges([7]) == "7"
    assert ranges([3, 0, 2, 1, 7, 10, 9]) == "0-3, 7, 9-10"


def test_a_moment_is_in_utc() -> None:
    """Wherever the reader is."""
    assert clock(86_400 * 365 + 3_661.9) == "1971-01-01 01:01:01 UTC"


@pytest.mark.parametrize(
    ("seconds", "digits", "text"),
    [
        (math.inf, 0, "never"),
        (0.4, 0, "0 s"),
        (0.1234, 1, "0.123 s"),
        (119.0, 0, "119 s"),
        (120.0, 0, "2 min"),
        (7_199.0, 0, "120 min"),
        (7_200.0, 1, "2.0 h"),
        (172_799.0, 0, "48 h"),
        (172_800.0, 2, "2.00 days"),
        (8.64e7, 0, "1,000 days"),
    ],
)
def test_a_duration_has_the_largest_unit_of_which_there_are_two(seconds: float, digits: int, text: str) -> None:
    """Seconds, minutes, hours, days; rounded, with as many digits as asked for."""
    assert duration(seconds, digits) == text
