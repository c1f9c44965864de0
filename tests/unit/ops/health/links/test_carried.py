"""Losses of what a run itself sends are named where a direction loses more than before, and never of a full network."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest

from megasdc.ops.health.links.tcp_info import SentBytes
from megasdc.ops.health.links.watch import LEAST_PAST, CarriedWatch

Way = tuple[str, str]


class Run:
    """Hosts that send segments each look, of which shares are lost; a network that is full loses them in bursts."""

    def __init__(self, hosts: int, seed: int, segments: int = 3000, background: float = 0.0) -> None:
        self.ways: list[Way] = list(permutations([f"n{number}" for number in range(1, hosts + 1)], 2))
        self.segments = dict.fromkeys(self.ways, segments)
        self.loss = dict.fromkeys(self.ways, background)
        self._random = np.random.default_rng(seed)
        self._watch = CarriedWatch()

    def look(self, burst: bool = False) -> list[Way]:
        """The lossy directions of a look; with a burst each loses one more segment in twenty."""
        carried = {}
        for way, segments in self.segments.items():
            share = self.loss[way] * self._random.lognormal(0, 0.3) + 0.05 * burst
            carried[way] = SentBytes(segments, int(self._random.binomial(segments, min(1.0, share))))
        return list(self._watch.update(carried))


def repeated(looks: list[list[Way]]) -> set[Way]:
    """Directions that were found twice in a row, which a link's watch reports."""
    return {way for one, other in pairwise(looks) for way in one if way in other}


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("segments", [600, 3000, 200_000])
def test_a_lossy_direction_is_found(hosts: int, segments: int) -> None:
    """1 %, one way and both: after at most four looks, with much traffic in the first; nothing else is."""
    for ways in ([("n1", "n2")], [("n1", "n2"), ("n2", "n1")]):
        late = []
        for seed in range(40):
            run = Run(hosts, seed, segments)
            assert not any(run.look() for _ in range(20))
            run.loss |= dict.fromkeys(ways, 0.01)
            looks = [run.look() for _ in range(6)]
            assert {way for found in looks for way in found} <= set(ways)
            late.append(next(number for number, found in enumerate(looks, 1) if found == ways))
            run.loss |= dict.fromkeys(ways, 0.0)
            assert not [run.look() for _ in range(12)][-1], "it has recovered"
        assert np.quantile(late, 0.9) <= (5 if segments < 1000 else 2), late


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("background", [0.001, 0.01, 0.2])
def test_a_full_network_names_nobody(hosts: int, background: float) -> None:
    """Twice in a row; also where only some directions carry much and lose: each is judged by its own past."""
    for seed in range(10):
        run = Run(hosts, seed, background=background)
        for way in run.ways[::2]:
            run.segments[way], run.loss[way] = 300, 0.0
        assert not repeated([run.look() for _ in range(500)])


def test_a_burst_is_no_finding() -> None:
    """Losses in single looks are found in that look alone, so that no link is reported."""
    run = Run(3, 1)
    assert not repeated([run.look(burst=number % 7 == 6) for number in range(100)])


def test_nothing_is_judged_without_a_past() -> None:
    """A direction that loses from the start has nothing to be compared with; the measurements' own segments tell it."""
    run = Run(2, 1, background=0.01)
    assert not any(run.look() for _ in range(LEAST_PAST + 50))
