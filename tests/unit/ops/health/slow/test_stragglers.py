"""Who is named as slow, and who is not, from times drawn with log-normal noise."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from megasdc.ops.health.slow.stragglers import LONG, SHORT, Stragglers, compare_with_peers

TRIALS = 100


def run(
    seed: int, noise: float, factors: list[list[float]], steps: int = 50, micro_batches: int = 4, until: int = 10**9
) -> tuple[Stragglers, list[tuple[int, int]], list[tuple[int, int]]]:
    """Steps of places, [replica][stage], with noise of each micro-batch; slow ones are slow up to the step ``until``.

    Returns what judged them, the places named, and those that recovered.
    """
    draw = np.random.default_rng(seed)
    slow = np.array(factors)
    stragglers = Stragglers(*slow.shape, slow_ratio=1.05)
    begun, ended = [], []
    for step in range(1, steps + 1):
        shared = np.exp(0.3 * draw.standard_normal())  # what all have alike, as long sequences, names nobody
        times = shared * np.exp(noise * draw.standard_normal((*slow.shape, micro_batches)))
        times *= (slow if step <= until else np.ones_like(slow))[..., None]
        if stragglers.add(np.median(times, axis=2).ravel(), np.zeros(slow.size)):
            change = stragglers.judge(step)
            begun += [one.place for one in change.begun]
            ended += [one.place for one in change.ended]
    return stragglers, begun, ended


def one_slow(ratio: float, replicas: int = 4) -> list[list[float]]:
    """One stage; replica 2, or the last, takes ``ratio`` times as long."""
    slow = min(2, replicas - 1)
    return [[ratio if replica == slow else 1.0] for replica in range(replicas)]


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_ten_per_cent_slower_is_named_within_50_steps_in_95_of_100(noise: float, micro_batches: int) -> None:
    """The slow rank and no other, with noise of each micro-batch."""
    found = [run(seed, noise, one_slow(1.1), micro_batches=micro_batches)[1] for seed in range(TRIALS)]
    assert sum(names == [(2, 0)] for names in found) >= 95
    assert all(set(names) <= {(2, 0)} for names in found)


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_thirty_per_cent_slower_is_named_in_all(noise: float, micro_batches: int) -> None:
    """Also with one micro-batch a step, where noise is of the whole step."""
    found = [run(seed, noise, one_slow(1.3), micro_batches=micro_batches)[1] for seed in range(TRIALS)]
    assert found == [[(2, 0)]] * TRIALS


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_20_clean_runs_of_500_steps_name_nobody(noise: float, micro_batches: int) -> None:
    """Noise alone is no straggler."""
    for seed in range(20):
        assert run(seed, noise, one_slow(1.0), steps=500, micro_batches=micro_batches)[1] == []


def test_with_two_replicas_the_slower_is_named_against_its_one_peer() -> None:
    """One of two, with the peers counted, so that a report can say so."""
    for seed in range(TRIALS):
        stragglers, begun, _ = run(seed, 0.05, one_slow(1.3, replicas=2))
        assert begun == [(1, 0)] and stragglers.num_peers == 1


def test_a_stage_that_is_slow_in_all_replicas_is_imbalance_and_names_nobody() -> None:
    """Half as long again by design: told as ratio to the mean of stages; a slow rank in it is still named."""
    stragglers, begun, _ = run(1, 0.05, [[1.0, 1.5]] * 4, steps=200)
    assert begun == []
    assert stragglers.imbalance == pytest.approx(1.5 / 1.25, rel=0.02)
    assert stragglers.stage_s.argmax() == 1
    assert run(1, 0.05, [[1.0, 1.5]] * 3 + [[1.0, 1.8]])[1] == [(3, 1)]


def test_one_replica_has_no_peers_and_names_nobody() -> None:
    """Its stages are still compared with each other."""
    stragglers, begun, _ = run(1, 0.02, [[1.0, 2.0]])
    assert begun == [] and stragglers.recent is None
    assert stragglers.imbalance == pytest.approx(4 / 3, rel=0.02)


@pytest.mark.parametrize("ratio", [1.1, 1.3])
def test_one_straggler_begins_once_and_ends_once(ratio: float) -> None:
    """Over 400 slow steps and 100 that are not, in each of 20 runs with 10 % of noise."""
    for seed in range(20):
        stragglers, begun, ended = run(seed, 0.1, one_slow(ratio), steps=500, until=400)
        assert begun == ended == [(2, 0)] and stragglers.named == {}


def test_much_slower_is_seen_by_the_short_window_first() -> None:
    """A rank that slows down late is named before half of the long window shows it."""
    draw = np.random.default_rng(1)
    stragglers = Stragglers(4, 1, 1.05)
    for step in range(1, 300):
        times = np.exp(0.02 * draw.standard_normal((4, 1)))
        times[3] *= 1.2 if step > 200 else 1.0
        if stragglers.add(times.ravel(), np.zeros(4)) and (begun := stragglers.judge(step).begun):
            break
    assert begun[0].place == (3, 0) and 200 < step <= 200 + SHORT
    assert stragglers.recent is not None and stragglers.recent.steps == LONG


def test_a_single_hiccup_is_no_straggler() -> None:
    """One step of ten times its length among hundreds."""
    stragglers = Stragglers(4, 1, 1.05)
    for step in range(1, 200):
        times = np.ones((4, 1))
        times[1] = 10.0 if step % 50 == 0 else 1.0
        if stragglers.add(times.ravel(), np.zeros(4)):
            assert stragglers.judge(step).begun == ()


def test_a_step_without_a_time_is_not_kept_and_garbage_is_a_share_of_its_own() -> None:
    """A place that has no time yet would be infinitely fast."""
    stragglers = Stragglers(2, 1, 1.05)
    assert not stragglers.add([1.0, 0.0], [0.0, 0.0])
    for _ in range(LONG):
        stragglers.add([1.0, 1.0], [0.0, 0.25])
    assert stragglers.is_full and stragglers.garbage_share.tolist() == [[0.0], [0.25]]


@pytest.mark.parametrize("replicas", [2, 3, 4, 5])
def test_ratios_are_to_the_median_of_the_other_replicas(replicas: int) -> None:
    """Against the median computed by leaving each replica out."""
    busy_s = np.random.default_rng(2).lognormal(sigma=0.5, size=(1, replicas, 3))
    found = compare_with_peers(busy_s)
    for replica in range(replicas):
        others = np.exp(np.median(np.log(np.delete(busy_s, replica, axis=1)), axis=1))
        assert found.ratio[replica] == pytest.approx((busy_s[:, replica] / others)[0])


def test_a_judgement_imports_nothing() -> None:
    """What NumPy imports late is imported when a run is built, not in the middle of a step."""
    code = """
import sys, numpy as np
from megasdc.ops.health.slow.stragglers import SHORT, Stragglers
made = Stragglers(2, 1, 1.05)
before = set(sys.modules)
for step in range(SHORT):
    made.add([0.1, 0.1], [0.0, 0.0])
made.judge(SHORT)
assert made.recent is not None and made.imbalance == 1
assert set(sys.modules) == before, set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
