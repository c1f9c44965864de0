"""Links of a run over time: each pair against the others and against its own past; a finding must repeat; pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megasdc.ops.health.links.carried import CarriedWatch
from megasdc.ops.health.links.judgement import LOSS_FLOOR, Direction, LinkFigures, Pair, SlowLink, combined, judge_links
from megasdc.ops.health.links.tcp_info import Sent

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

    def take(
        self, figures: Sequence[LinkFigures], carried: Mapping[Pair, Sent] | None = None
    ) -> tuple[list[SlowLink], list[SlowLink]]:
        """Judge a measurement of all pairs; returns the links that became slow, and those that no longer are.

        Args:
            figures: of each pair.
            carried: what the run itself has sent since the measurement before, by (from, to), where that is known.
        """
        lossy = self._carried.take(carried or {})
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
