"""Losses of what a run itself sends from host to host, each direction against its own past; pure.

Training fills links and the buffers of switches, so that a healthy network loses segments, too, more of them in those
directions that carry most. Unlike the measurements' own segments, which are sent while nothing else is, these are a
finding only where a direction loses more than it did before, and more than others do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from megasdc.ops.health.links.judgement import LEAST_RESENT, LOSS_FLOOR, RATIO, Pair, lower_quartile
from megasdc.ops.health.links.tcp_info import Sent

PAST, LEAST_PAST = 50, 5
"""Last looks at a direction that say what is usual, those with losses left out, and how many there must be."""
COUNTED, ENOUGH = 10, 2000
"""Last looks whose segments are counted together, and segments with which fewer will do."""


class CarriedWatch:
    """What is known of what directions lose."""

    def __init__(self) -> None:
        self._past: defaultdict[Pair, deque[Sent]] = defaultdict(lambda: deque(maxlen=PAST))
        self._counted: defaultdict[Pair, deque[Sent]] = defaultdict(lambda: deque(maxlen=COUNTED))
        self._lossy: set[Pair] = set()

    def take(self, carried: Mapping[Pair, Sent]) -> dict[Pair, Sent]:
        """Judge a look; returns the directions that lose segments, with the last counts.

        Args:
            carried: by (from, to), since the look before.
        """
        sums = {way: self._sum(way, now) for way, now in carried.items()}
        others = lower_quartile(one.loss for one in sums.values()) if len(sums) > 2 else 0.0

        usual = {way: max(others, self._usual(way)) for way in sums}
        # A burst of losses in an earlier look is no finding; one that is known ends when all looks together say so.
        shown = {way for way, now in carried.items() if way in self._lossy or now.loss > LOSS_FLOOR}
        self._lossy = {way for way in shown if _is_lossy(sums[way], LOSS_FLOOR, usual[way])}
        # Where one direction of a link loses segments, half of the floor tells whether the other does, too.
        self._lossy |= {
            way for way in sums if way[::-1] in self._lossy and _is_lossy(sums[way], LOSS_FLOOR / 2, usual[way])
        }
        for way in set(carried) - self._lossy:
            self._past[way].append(carried[way])
        return {way: sums[way] for way in sorted(self._lossy)}

    def _sum(self, way: Pair, now: Sent) -> Sent:
        """The last looks until they are enough."""
        self._counted[way].append(now)
        total = Sent()
        for one in reversed(self._counted[way]):
            total += one
            if total.segments >= ENOUGH:
                break
        return total

    def _usual(self, way: Pair) -> float:
        """Share that a direction lost before; 1 where that is not known."""
        past = self._past[way]
        return sum(past, Sent()).loss if len(past) >= LEAST_PAST else 1.0


def _is_lossy(total: Sent, floor: float, usual: float) -> bool:
    return total.lost >= LEAST_RESENT and total.loss > floor and total.loss > RATIO * usual
