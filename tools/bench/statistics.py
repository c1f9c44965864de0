"""Statistics of noisy timings: alternating blocks, ratios of pairs, the median and an exact interval of it.

Two loops run in turn on the same machine, and the order changes from pair to pair (AB BA AB ...), so that a machine
that becomes slower or faster meanwhile touches both alike. The interval of the median comes from order statistics: it
needs no assumption about the distribution and no random numbers.

Source: Conover 1999, Practical Nonparametric Statistics, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Block = Callable[[], object]
Side = TypeVar("Side")
SLACK = 0.01
"""Largest distance of the upper end of a ratio's interval above its bar."""


@dataclass(frozen=True)
class Cost:
    """Cost of one block.

    Args:
        cpu_s: seconds of processor time, all threads of all ranks.
    """

    wall_s: float
    cpu_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


@dataclass(frozen=True)
class Estimate:
    """A median and the interval that holds the true one.

    Args:
        low: lower end of the interval.
        coverage: probability that such an interval holds the true median; under 0.95 only with fewer than six values.
    """

    median: float
    low: float
    high: float
    coverage: float
    count: int

    def passes(self, bar: float, slack: float = SLACK) -> bool:
        """Whether the median is within the bar, and the upper end within the bar and some slack."""
        return self.median <= bar and self.high <= bar + slack


def estimate_median(values: Sequence[float], coverage: float = 0.95) -> Estimate:
    """The median of independent values and its narrowest symmetric interval by order statistics.

    Args:
        values: at least one.
        coverage: wanted probability, in (0, 1).

    Returns:
        The estimate; with too few values for the wanted coverage the interval is from the smallest to the largest.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a median needs at least one value, got none")
    ordered = sorted(values)
    n = len(ordered)
    below = 0  # values left out at each end
    while 2 * (below + 1) < n and interval_coverage(n, below + 1) >= coverage:
        below += 1
    middle = ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2
    return Estimate(middle, ordered[below], ordered[n - 1 - below], interval_coverage(n, below), n)


def interval_coverage(count: int, left_out: int) -> float:
    """1 - 2 P(Binomial(n, 1/2) <= k): the probability that the median of n values lies between two order statistics.

    These are the (k+1)-th smallest and the (k+1)-th largest; k values are left out at each end.
    """
    return 1.0 - 2.0 * sum(math.comb(count, i) for i in range(left_out + 1)) / 2.0**count


def in_turn(sides: Sequence[Side], block: int) -> list[Side]:
    """Sides in their order in a block: the other way round from block to block, begun later in each second one.

    Of two: AB BA AB; of more, none always follows the same other.
    """
    first = block // 2 * 2 % len(sides)
    found = [*sides[first:], *sides[:first]]
    return found[::-1] if block % 2 else found


def run_alternating(
    first: Side,
    second: Side,
    pairs: int,
    measure: Callable[[Side], Cost],
    after_pair: Callable[[int], None] = lambda done: None,
) -> list[tuple[Cost, Cost]]:
    """Run two blocks ``in_turn``.

    Args:
        pairs: blocks of each side.
        measure: runs a block and returns its cost.
        after_pair: called with the number of pairs that are done.

    Returns:
        (cost of first, cost of second) of each pair, whichever ran before the other.
    """
    costs = []
    for pair in range(pairs):
        found = {side: measure((first, second)[side]) for side in in_turn((0, 1), pair)}
        costs.append((found[0], found[1]))
        after_pair(pair + 1)
    return costs


def run_pairs(
    what: str,
    sides: tuple[Side, Side],
    pairs: int,
    measure: Callable[[Side], Cost],
    on_progress: Callable[[str, int, int], None],
    after_pair: Callable[[], None] = lambda: None,
) -> list[tuple[Cost, Cost]]:
    """Run two blocks in turn after one pair that does not count: it fills caches and compiles what is compiled.

    Args:
        what: name of what is measured.
        pairs: how many count.
        measure: see ``run_alternating``.
        on_progress: called with ``what``, the number of pairs that are done, and their total.
        after_pair: called after each that counts.
    """

    def after_done(done: int) -> None:
        after_pair()
        on_progress(what, done, pairs)

    on_progress(what, 0, pairs)
    run_alternating(*sides, 1, measure)
    return run_alternating(*sides, pairs, measure, after_done)


def cost_of(block: Callable[[], Cost]) -> Cost:
    """Run a block that measures itself, because not all that it does counts."""
    return block()


def median_walls(costs: Sequence[tuple[Cost, Cost]]) -> tuple[float, float]:
    """Median seconds of a block, of the first and of the second."""
    ours, other = (estimate_median([pair[side].wall_s for pair in costs]).median for side in (0, 1))
    return ours, other


def ratios(
    costs: Sequence[tuple[Cost, Cost]], quantities: Sequence[Literal["wall", "cpu"]] = ("wall", "cpu")
) -> dict[str, Estimate]:
    """First over second of each pair, as estimates by quantity."""
    return {
        name: estimate_median([getattr(ours, f"{name}_s") / getattr(other, f"{name}_s") for ours, other in costs])
        for name in quantities
    }
