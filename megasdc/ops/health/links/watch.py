"""Links of a run over time: each pair against the others and against its own past; a finding must repeat; pure.

Two things are judged: measurements of all pairs, and losses of what the run itself sends, each direction against its
own past. Training fills links and the buffers of switches, so that a healthy network loses segments, too, more of them
in those directions that carry most. Unlike the measurements' own segments, which are sent while nothing else is, these
are a finding only where a direction loses more than it did before, and more than others do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megasdc.ops.health.links.judgement import (
    LEAST_RESENT,
    LOSS_FLOOR,
    RATIO,
    Direction,
    LinkFigures,
    Pair,
    SlowLink,
    combined,
    judge_links,
    lower_quartile,
)
from megasdc.ops.health.links.tcp_info import SentBytes

ENOUGH = 2000
"""Segments with which fewer than ``COUNTED`` looks will do."""


class CarriedWatch:
    """What is known of what directions lose."""

    def __init__(self) -> None:
        self._past: defaultdict[Pair, deque[SentBytes]] = defaultdict(lambda: deque(maxlen=PAST))
        self._counted: defaultdict[Pair, deque[SentBytes]] = defaultdict(lambda: deque(maxlen=COUNTED))
        self._lossy: set[Pair] = set()

    def update(self, carried: Mapping[Pair, SentBytes]) -> dict[Pair, SentBytes]:
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

    def _sum(self, way: Pair, now: SentBytes) -> SentBytes:
        """The last looks until they are enough."""
        self._counted[way].append(now)
        total = SentBytes()
        for one in reversed(self._counted[way]):
            total += one
            if total.segments >= ENOUGH:
                break
        return total

    def _usual(self, way: Pair) -> float:
        """Share that a direction lost before; 1 where that is not known."""
        past = self._past[way]
        return sum(past, SentBytes()).loss if len(past) >= LEAST_PAST else 1.0


def _is_lossy(total: SentBytes, floor: float, usual: float) -> bool:
    return total.lost >= LEAST_RESENT and total.loss > floor and total.loss > RATIO * usual


CONFIRM = 2
"""Measurements in a row that a link must be slow, or not slow, to be reported as such."""
PAST = 50
"""Last measurements of a pair that say what is usual; those while it is slow do not count."""
LEAST_PAST = 5
COUNTED = 10
"""Last measurements whose segments are counted together: losses are rare."""


class LinkWatch:
    """What is known of the links so far."""

    def __init__(self) -> None:
        self.slow: dict[Pair, SlowLink] = {}
        """Pairs that are slow, and the finding with which each was reported."""
        self._past: defaultdict[Pair, deque[LinkFigures]] = defaultdict(lambda: deque(maxlen=PAST))
        self._counted: defaultdict[Pair, deque[LinkFigures]] = defaultdict(lambda: deque(maxlen=COUNTED))
        self._carried = CarriedWatch()
        self._streak: defaultdict[Pair, int] = defaultdict(int)

    def update(
        self, figures: Sequence[LinkFigures], carried: Mapping[Pair, SentBytes] | None = None
    ) -> tuple[list[SlowLink], list[SlowLink]]:
        """Judge a measurement of all pairs; returns the links that became slow, and those that no longer are.

        Args:
            figures: of each pair.
            carried: what the run itself has sent since the measurement before, by (from, to), where that is known.
        """
        lossy = self._carried.update(carried or {})
        usual = {pair: combined(list(past)) for pair, past in self._past.items() if len(past) >= LEAST_PAST}
        found = {one.pair: one for one in judge_links([self._with_counts(one) for one in figures], usual, lossy)}
        begun, ended = [], []
        for one in figures:
            pair, was_slow = one.pair, one.pair in self.slow
            self._streak[pair] = 0 if (pair in found) == was_slow else self._streak[pair] + 1
            if self._streak[pair] >= CONFIRM:
                self._streak[pair] = 0
                if was_slow:
                    ended.append(self.slow.pop(pair))
                else:
                    begun.append(found[pair])
                    self.slow[pair] = found[pair]
            elif not was_slow and pair not in found:
                self._past[pair].append(one)
        return begun, ended

    def _with_counts(self, one: LinkFigures) -> LinkFigures:
        """A measurement with the segments of the last ones, except those of an earlier burst of losses."""
        counted = self._counted[one.pair]
        counted.append(one)
        is_slow = one.pair in self.slow
        return replace(
            one,
            forward=_with_sums([each.forward for each in counted], is_slow),
            backward=_with_sums([each.backward for each in counted], is_slow),
        )


def _with_sums(counted: Sequence[Direction], is_slow: bool) -> Direction:
    """The last of these with the segments of all, where it shows losses, too, or the link is known to be slow."""
    last = counted[-1]
    if not is_slow and last.loss <= LOSS_FLOOR:
        return last
    segments, resent = (sum(numbers) for numbers in zip(*((one.segments, one.resent) for one in counted), strict=True))
    return replace(last, segments=segments, resent=resent)
