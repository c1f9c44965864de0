"""Links over time: a single slow measurement is nothing, two are a finding, and recovery is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megasdc.ops.health.links.judgement import Direction, LinkFigures, SlowLink
from megasdc.ops.health.links.tcp_info import SentBytes
from megasdc.ops.health.links.watch import CONFIRM, LinkWatch

HOSTS = ("node1", "node2", "node3")


def ring(rtt_s: float = 1e-4, extra_s: float = 0.0, resent: int = 0, hosts: int = 3) -> list[LinkFigures]:
    """Figures of all neighbours; the first pair has the extra delay and losses."""
    pairs = [("node1", "node2"), ("node2", "node3"), ("node1", "node3")][: 3 if hosts == 3 else 1]
    found = [LinkFigures(*pair, rtt_s, 0.0, 1 << 18, *[Direction(3e-4 + rtt_s, 900, 0)] * 2) for pair in pairs]
    first = found[0]
    forward = replace(first.forward, resent=resent)
    return [replace(first, rtt_s=rtt_s + extra_s, forward=forward), *found[1:]]


def names(links: list[SlowLink]) -> list[str]:
    return [one.place for one in links]


def test_a_slow_link_must_repeat_and_so_must_its_recovery() -> None:
    """Once slow: nothing; twice: begun, and reported once; once fast: still slow; twice: ended."""
    watch = LinkWatch()
    told = [watch.update(ring(extra_s=extra_s)) for extra_s in (0, 5e-3, 0, 5e-3, 5e-3, 5e-3, 0, 5e-3, 0, 0, 0)]
    assert [names(begun) for begun, _ in told] == [[]] * 4 + [["node1 - node2"]] + [[]] * 6
    assert [names(ended) for _, ended in told] == [[]] * 9 + [["node1 - node2"]] + [[]]
    assert not watch.slow


def test_a_link_recovers_under_the_name_with_which_it_was_reported() -> None:
    """Losses both ways; one way stops before the other."""
    watch = LinkWatch()
    lossy = ring(resent=9)
    both = [replace(lossy[0], backward=replace(lossy[0].backward, resent=30)), *lossy[1:]]
    told = [watch.update(one) for one in [both] * 3 + [ring()] * 30]
    assert [names(begun) for begun, _ in told if begun] == [["node1 - node2"]]
    assert [names(ended) for _, ended in told if ended] == [["node1 - node2"]]


def test_two_hosts_are_judged_by_their_past_which_slow_times_do_not_enter() -> None:
    """After five usual measurements; however long it stays slow, it is not taken for usual."""
    watch = LinkWatch()
    for _ in range(5):
        assert watch.update(ring(hosts=2)) == ([], [])
    told = [watch.update(ring(extra_s=5e-3, hosts=2)) for _ in range(200)]
    assert [number for number, (begun, _) in enumerate(told, 1) if begun] == [CONFIRM]
    assert not any(ended for _, ended in told) and list(watch.slow) == [("node1", "node2")]


def test_losses_are_counted_over_several_measurements() -> None:
    """Two of 900 segments lost each time: too few to see in one measurement, and no loss; nine are one."""
    watch = LinkWatch()
    assert not any(watch.update(ring(resent=2))[0] for _ in range(30)), "0.2 %"
    watch = LinkWatch()
    begun = [one for _ in range(3) for one in watch.update(ring(resent=9))[0]]
    assert [(one.place, one.kinds) for one in begun] == [("node1 -> node2", ("loss",))]


@pytest.mark.slow
def test_clean_noise_is_never_reported() -> None:
    """Ten thousand drawn measurements with long single times and slow drifts: no event."""
    random = np.random.default_rng(7)
    for hosts in (2, 3):
        watch = LinkWatch()
        for number in range(5000):
            drift = 1.0 + 0.5 * np.sin(number / 300)
            noisy = [
                replace(one, rtt_s=one.rtt_s * drift * random.lognormal(0, 0.3) + 4e-3 * (random.random() < 0.005))
                for one in ring(hosts=hosts)
            ]
            assert watch.update(noisy) == ([], []), number


def test_a_burst_of_losses_in_one_measurement_is_not_reported() -> None:
    """However large; and what a run itself sends names a link in two measurements."""
    watch = LinkWatch()
    told = [watch.update(ring(resent=200 if number % 20 == 7 else 0)) for number in range(100)]
    assert told == [([], [])] * 100
    ways = [way for one in ring() for way in one.ways()]
    watch = LinkWatch()
    for _ in range(6):
        assert watch.update(ring(), dict.fromkeys(ways, SentBytes(3000))) == ([], [])
    told = [
        watch.update(ring(), {**dict.fromkeys(ways, SentBytes(3000)), ways[0]: SentBytes(3000, 30)}) for _ in range(2)
    ]
    assert [names(begun) for begun, _ in told] == [[], ["node1 -> node2"]]
    assert watch.slow["node1", "node2"].text == "30 of 3,000 segments from node1 to node2 sent again"
