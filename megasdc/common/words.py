"""Lists, numbers of things, ranges of numbers, moments and durations in words, for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby


def few(values: Sequence[object], count: int = 3, none: str = "-") -> str:
    """The first of several values, and how many more there are."""
    more = f" and {len(values) - count:,} more" if len(values) > count else ""
    return ", ".join(map(str, values[:count])) + more or none


def number_of(count: int, noun: str, nouns: str | None = None) -> str:
    """A number of things, such as ``1 rank`` and ``2,000 ranks``; ``nouns``: the plural where it is not with an s."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in ascending order as ``0-3, 7``."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def clock(seconds: float) -> str:
    """Date and time in UTC, from seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def duration(seconds: float, digits: int = 0) -> str:
    """Seconds in the largest unit of which there are at least two; ``digits``: of the unit, seconds get three then."""
    if math.isinf(seconds):
        return "never"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.{digits}f} {unit}"
    return f"{seconds:.3g} s" if digits else f"{seconds:.0f} s"
