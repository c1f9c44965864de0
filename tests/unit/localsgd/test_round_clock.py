"""When does a replica stop its work in a round, and from which times is that chosen?"""

from __future__ import annotations

import math

import numpy as np
import pytest

from megasdc.dropcompute.threshold import DropRule, search_threshold
from megasdc.localsgd.round_clock import Done, RoundClock, RoundWindow


def test_the_time_of_a_round_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches are started before the threshold, and a round is over once it has passed."""
    now = [10.0]
    monkeypatch.setattr("megasdc.localsgd.round_clock.time.monotonic", lambda: now[0])
    clock = RoundClock(3.0)
    clock.begin(4)
    for second in range(3):
        assert clock.decide(second) and clock.time_left_s(second) == 3.0 - second and not clock.is_over
        clock.start()
        now[0] += 1.0
        clock.end()
    assert not clock.decide(0) and clock.is_over
    clock.start()  # it was asked for, and is not started
    assert clock.times == ([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])
    clock.begin(5)
    assert clock.decide(0) and clock.times == ([], [])
    clock.begin(5, Done(1, 2), 2.0)
    assert clock.time_left_s(0) == 1.0, "of a round that was stopped for a while"


def test_replayed_work_decides() -> None:
    """As many steps as before, the last of as many micro-batches; also from within a round; all of unknown rounds."""
    clock = RoundClock(math.inf, {1: Done(2, 5), 3: Done(1, 3)})
    clock.begin(1)
    assert all(clock.decide(number) for number in range(9)) and not clock.is_over
    for _ in range(3):
        clock.end()
    clock.end_step()
    assert clock.decide(0) and clock.is_over
    clock.end()
    clock.end()
    assert not clock.decide(2) and clock.is_over
    clock.begin(2)
    assert clock.decide(0) and not clock.is_over
    clock.begin(1, Done(1, 3))
    assert clock.decide(0) and clock.is_over


def test_the_threshold_is_that_of_the_search() -> None:
    """DropCompute's own, on steps as long as a round; rounds that lack a replica or a micro-batch are left out."""
    latencies = np.random.default_rng(2).lognormal(-1.0, 0.8, (4, 6, 10))
    ends = latencies.cumsum(axis=2)
    starts = np.concatenate([np.zeros((4, 6, 1)), ends[:, :, :-1]], axis=2)
    window = RoundWindow(6, 0.2)
    window.add([None, *([([0.0], [1.0])] * 3)], 9.0)
    for step in range(6):
        assert window.threshold_s is None
        times = [(starts[one, step].tolist(), ends[one, step].tolist()) for one in range(4)]
        window.add(times, ends[:, step, -1].max() + 0.5)
        if step == 2:
            window.add([(one[:-1], other[:-1]) for one, other in times], 9.0)
    wanted = search_threshold(latencies, 0.5, 0.2, DropRule(True, 1))
    assert window.threshold_s == pytest.approx(wanted.tau_s) and window.speedup == pytest.approx(wanted.speedup)
    assert 0 < window.drop_rate <= 0.2 and window.speedup > 1
    three = RoundWindow(6, 0.2)
    for step in range(6):
        times = [(starts[one, step].tolist(), ends[one, step].tolist()) for one in range(3)]
        three.add([None, *times], ends[:3, step, -1].max() + 0.5)
    assert three.threshold_s == pytest.approx(search_threshold(latencies[:3], 0.5, 0.2, DropRule(True, 1)).tau_s)
    before = window.threshold_s
    window.add([([0.0], [1.0])] * 4, 2.0)
    assert window.threshold_s == before
