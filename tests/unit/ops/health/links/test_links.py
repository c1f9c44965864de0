"""Slow links are named by pair, direction or shared host, and clean noise names nobody."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from megasdc.ops.health.links.judgement import (
    BANDWIDTH,
    LATENCY,
    LOSS,
    Direction,
    LinkFigures,
    combined,
    judge_links,
    lower_quartile,
    name_places,
)

PAYLOAD = 2 << 20
SPREAD, PINGS, TRANSFERS = 0.4, 20, 5
"""Of the logarithm of times, more than was measured; numbers of repeats, those of a stress test."""


def hosts(number: int) -> list[str]:
    return [f"node{one}" for one in range(1, number + 1)]


class Network:
    """Links whose figures are drawn as they were measured: log-normal times, single ones a hundred times as long.

    Args:
        seed: of the draws.
        rtt_s: of a clean link.
        rate: of a clean link, bytes per second.
    """

    def __init__(self, seed: int, rtt_s: float = 1.5e-4, rate: float = 1.2e9) -> None:
        self._random = np.random.default_rng(seed)
        self._rtt_s, self._rate = rtt_s, rate
        self._clock = {host: float(self._random.normal(0, 3.0)) for host in hosts(64)}
        self.delay_s: dict[tuple[str, str], float] = {}
        self.slower: dict[tuple[str, str], float] = {}
        self.loss: dict[tuple[str, str], float] = {}

    def measure(self, first: str, second: str) -> LinkFigures:
        there, back = (self.delay_s.get(way, 0.0) for way in ((first, second), (second, first)))
        rtt_s = self._time(self._rtt_s, PINGS) + there + back
        skew_s = self._clock[second] - self._clock[first] + (there - back) / 2 + float(self._random.normal(0, 3e-5))
        ways = [self._transfer(way, rtt_s) for way in ((first, second), (second, first))]
        return LinkFigures(first, second, rtt_s, skew_s, PAYLOAD, *ways)

    def all_pairs(self, number: int) -> list[LinkFigures]:
        return [self.measure(*pair) for pair in combinations(hosts(number), 2)]

    def ring(self, number: int) -> list[LinkFigures]:
        names = hosts(number)
        return [self.measure(*pair) for pair in zip(names, [*names[1:], names[0]], strict=True)]

    def _time(self, seconds: float, repeats: int) -> float:
        times = seconds * self._random.lognormal(0.0, SPREAD, repeats)
        times[self._random.random(repeats) < 0.05] *= 100
        return lower_quartile(times)

    def _transfer(self, way: tuple[str, str], rtt_s: float) -> Direction:
        seconds = self._time(PAYLOAD / self._rate * self.slower.get(way, 1.0), TRANSFERS) + rtt_s
        segments = 6000
        resent = self._random.binomial(segments, self.loss.get(way, 0.0)) + self._random.poisson(1.0)
        return Direction(seconds, segments, int(resent))


def places(figures: list[LinkFigures]) -> dict[str, tuple[str, ...]]:
    return {place: tuple(sorted({k for one in slow for k in one.kinds})) for place, slow in named(figures).items()}


def named(figures: list[LinkFigures]) -> dict[str, list]:
    return name_places(judge_links(figures))


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 3, 6])
def test_clean_noise_names_nobody(number: int) -> None:
    """A thousand drawn stress tests of three rounds, slow and fast networks: nobody is named in any of them."""
    for seed in range(1000):
        network = Network(seed, rtt_s=(3e-5, 1.5e-4, 2e-3)[seed % 3], rate=(2.5e7, 1.2e9)[seed % 2])
        rounds = [network.all_pairs(number) for _ in range(3)]
        assert judge_links([combined(of_pair) for of_pair in zip(*rounds, strict=True)]) == [], seed


@pytest.mark.parametrize("number", [3, 4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_a_pair_with_5_ms_is_named(number: int, seed: int) -> None:
    """5 ms in each direction: the pair, not its hosts."""
    network = Network(seed)
    network.delay_s = {("node1", "node3"): 5e-3, ("node3", "node1"): 5e-3}
    assert places(network.all_pairs(number)) == {"node1 - node3": (LATENCY,)}


@pytest.mark.parametrize("seed", range(20))
def test_a_delay_in_one_direction_is_named_without_a_common_clock(seed: int) -> None:
    """Clocks seconds apart: from which host to which, in all pairs and in a ring."""
    for way in (("node3", "node1"), ("node1", "node3")):
        network = Network(seed)
        network.delay_s = {way: 5e-3}
        assert places(network.all_pairs(4)) == {" -> ".join(way): (LATENCY,)}
        assert places(network.ring(3)) == {" -> ".join(way): (LATENCY,)}


@pytest.mark.parametrize("number", [2, 3, 8])
@pytest.mark.parametrize("seed", range(20))
def test_a_direction_with_a_tenth_of_the_bandwidth_is_named(number: int, seed: int) -> None:
    """Also of two hosts, by the other direction."""
    network = Network(seed)
    network.slower = {("node2", "node1"): 10.0}
    assert places(network.all_pairs(number)) == {"node2 -> node1": (BANDWIDTH,)}


@pytest.mark.parametrize("seed", range(20))
def test_a_direction_that_loses_one_in_a_hundred_is_named(seed: int) -> None:
    """By segments that were sent again."""
    network = Network(seed)
    network.loss = {("node1", "node2"): 0.01}
    assert places(network.all_pairs(3)) == {"node1 -> node2": (LOSS,)}
    assert "sent again" in named(network.all_pairs(3))["node1 -> node2"][0].text


@pytest.mark.parametrize("number", [3, 4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_a_host_that_all_slow_pairs_share_is_named(number: int, seed: int) -> None:
    """Also where most pairs are slow: of three hosts two pairs, of four three."""
    network = Network(seed)
    others = [host for host in hosts(number) if host != "node2"]
    network.delay_s = {("node2", other): 5e-3 for other in others} | {(other, "node2"): 5e-3 for other in others}
    assert places(network.all_pairs(number)) == {"node2": (LATENCY,)}


def test_pairs_without_a_common_host_are_named_each() -> None:
    """Two of the fifteen pairs of six hosts; and three pairs in a circle, which no host explains."""
    network = Network(1)
    network.slower = {("node1", "node2"): 10.0, ("node2", "node1"): 10.0, ("node4", "node5"): 10.0}
    assert places(network.all_pairs(6)) == {"node1 - node2": (BANDWIDTH,), "node4 -> node5": (BANDWIDTH,)}
    circle = Network(1)
    circle.slower = dict.fromkeys([("node1", "node2"), ("node2", "node3"), ("node3", "node1")], 10.0)
    assert set(places(circle.all_pairs(8))) == {"node1 -> node2", "node2 -> node3", "node3 -> node1"}


def test_what_a_step_would_not_notice_is_not_slow() -> None:
    """Half a millisecond to a host in another rack, ten times that of the others: nobody is named."""
    network = Network(4, rtt_s=5e-5)
    network.delay_s = {("node1", "node3"): 5e-4, ("node2", "node3"): 5e-4}
    assert places(network.all_pairs(3)) == {}


def test_bandwidth_is_judged_beside_a_slow_round_trip() -> None:
    """2 ms more and a tenth of the bandwidth: both are told; the delay alone is not told as bandwidth."""
    network = Network(6, rate=2.5e7)
    network.delay_s = {("node1", "node2"): 2e-3}
    assert places(network.all_pairs(3)) == {"node1 -> node2": (LATENCY,)}
    network.slower = {("node1", "node2"): 10.0, ("node2", "node1"): 10.0}
    assert places(network.all_pairs(3)) == {"node1 - node2": (BANDWIDTH, LATENCY)}


def test_losses_of_a_single_pair_are_named_in_both_directions() -> None:
    """One in a hundred each way: the other direction is no excuse."""
    network = Network(2)
    network.loss = {("node1", "node2"): 0.01, ("node2", "node1"): 0.01}
    assert places(network.all_pairs(2)) == {"node1 - node2": (LOSS,)}


def test_a_single_pair_is_judged_by_its_past() -> None:
    """Two hosts: nothing says what is usual, except what was measured before."""
    network = Network(5)
    (usual,) = network.all_pairs(2)
    slow = replace(usual, rtt_s=usual.rtt_s + 5e-3)
    assert judge_links([slow]) == []
    (found,) = judge_links([slow], {usual.pair: usual})
    assert (found.place, found.kinds, found.way) == ("node1 - node2", (LATENCY,), None)


def test_several_measurements_count_as_one() -> None:
    """The middle time, all segments, the last clock."""
    one, *_ = Network(3).all_pairs(2)
    later = [replace(one, rtt_s=rtt_s, skew_s=rtt_s) for rtt_s in (9.0, 2.0, 3.0)]
    both = combined(later)
    assert (both.rtt_s, both.skew_s) == (3.0, 3.0)
    assert both.forward.segments == 3 * one.forward.segments and both.forward.resent == 3 * one.forward.resent
    assert LinkFigures.from_dict(both.as_dict()) == both
