"""Are Tc, the drop rate and the threshold of recorded steps what their definitions say?"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megasdc.dropcompute.threshold import search_recorded
from megasdc.dropcompute.tuning import RecordedSteps, TimeWindow, tune
from megasdc.engine.step_times import StepRecord
from megasdc.parallel.dims import ParallelDims
from megasdc.parallel.groups import single_process

REPLICAS, STEPS, MICRO_BATCHES = 5, 7, 6


def recorded(seed: int = 1, communication_s: float = 0.3) -> RecordedSteps:
    """One stage: micro-batches follow each other, and all replicas end the step together."""
    random = np.random.default_rng(seed)
    ends = (0.2 + random.gamma(0.7, 0.3, (REPLICAS, STEPS, MICRO_BATCHES))).cumsum(axis=2)
    starts = np.concatenate([np.zeros((REPLICAS, STEPS, 1)), ends[:, :, :-1]], axis=2)
    compute = ends[:, :, -1] + 0.01
    step = compute.max(axis=0) + communication_s + random.normal(0, 0.001, (REPLICAS, STEPS))
    return RecordedSteps(starts, ends, compute, step)


def test_communication_is_what_no_replica_computes() -> None:
    """Mean over steps of the replicas' mean step less the slowest replica's compute time, and never negative."""
    times = recorded()
    rest = []
    for step in range(STEPS):
        slowest = max(float(times.compute_s[replica, step]) for replica in range(REPLICAS))
        mean = sum(float(times.step_s[replica, step]) for replica in range(REPLICAS)) / REPLICAS
        rest.append(mean - slowest)
    assert times.communication_s == pytest.approx(sum(rest) / STEPS, rel=1e-12)
    assert times.communication_s == pytest.approx(0.3, abs=0.002)
    assert recorded(communication_s=-1.0).communication_s == 0.0


@pytest.mark.parametrize("least", [1, 3, MICRO_BATCHES])
@pytest.mark.parametrize("tau", [0.0, 0.5, 1.3, 99.0, math.inf])
def test_the_drop_rate_is_the_share_not_started_before_tau(tau: float, least: int) -> None:
    """Counted one by one; the first ``min_micro_batches`` always start."""
    times = recorded()
    dropped = sum(
        number >= least and times.start_s[replica, step, number] >= tau
        for replica in range(REPLICAS)
        for step in range(STEPS)
        for number in range(MICRO_BATCHES)
    )
    assert times.drop_rate(tau, least) == pytest.approx(dropped / times.start_s.size, rel=1e-12)


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("max_drop_rate", [1.0, 0.1, 0.0])
def test_auto_is_the_search(max_drop_rate: float, least: int) -> None:
    """Threshold, speed-up, drop rate and curve are those of the search with the Tc of these steps."""
    times = recorded()
    found = search_recorded(times.start_s, times.end_s, times.communication_s, max_drop_rate, least)
    tuning = tune(times, None, max_drop_rate, least)
    assert (tuning.tau_s, tuning.speedup, tuning.drop_rate) == (found.tau_s, found.speedup, found.drop_rate)
    assert tuning.communication_s == times.communication_s and tuning.drop_rate <= max_drop_rate
    assert tuning.curve is not None and np.array_equal(tuning.curve.speedup, found.curve.speedup)
    assert tuning.drop_rate == pytest.approx(times.drop_rate(tuning.tau_s, least), abs=1e-12)
    assert math.isinf(tuning.tau_s) == (max_drop_rate == 0.0)


def test_auto_takes_forward_passes_as_measured() -> None:
    """Where passes end the search has the measured ends of forward passes; what is not started is told by itself."""
    times = recorded()
    times = replace(times, forward_end_s=times.start_s + 0.7 * (times.end_s - times.start_s))
    rest_s = times.communication_s
    wanted = search_recorded(times.start_s, times.end_s, rest_s, 0.3, layers=4, forward_ends_s=times.forward_end_s)
    third = search_recorded(times.start_s, times.end_s, rest_s, 0.3, layers=4)
    tuning = tune(times, None, 0.3, 1, layers=4)
    assert (tuning.tau_s, tuning.speedup, tuning.drop_rate) == (wanted.tau_s, wanted.speedup, wanted.drop_rate)
    assert wanted.speedup != third.speedup
    assert tuning.not_started == times.drop_rate(wanted.tau_s, 1) < wanted.drop_rate


def test_a_given_threshold_is_kept() -> None:
    """Nothing is searched; its drop rate is measured, whatever the largest one allowed."""
    times = recorded()
    tuning = tune(times, 0.8, 0.01, 1)
    assert (tuning.tau_s, tuning.speedup, tuning.curve) == (0.8, None, None)
    assert tuning.drop_rate == times.drop_rate(0.8, 1) > 0.01


@pytest.mark.parametrize("passes_end", [False, True])
def test_a_window_gives_back_what_it_was_given(passes_end: bool) -> None:
    """Times of each step stand where they belong; the window is full after as many steps as it has."""
    times = recorded()
    middles = times.end_s - 0.1
    with single_process():
        window = TimeWindow(STEPS, MICRO_BATCHES, ParallelDims.from_world(1, 1, 1, 0), passes_end=passes_end)
        for step in range(STEPS):
            assert not window.is_full
            columns = [values[0, step].tolist() for values in (times.start_s, times.end_s)]
            busy, done = [0.1] * MICRO_BATCHES, [float(one[0, step]) for one in (times.compute_s, times.step_s)]
            window.add(StepRecord(*columns, busy, *done, middles[0, step].tolist()))
        assert window.is_full
        found = window.gather(torch.distributed.group.WORLD)
    assert np.array_equal(found.start_s, times.start_s[:1]) and np.array_equal(found.end_s, times.end_s[:1])
    assert np.array_equal(found.compute_s, times.compute_s[:1]) and np.array_equal(found.step_s, times.step_s[:1])
    assert np.array_equal(found.forward_end_s, middles[:1]) if passes_end else found.forward_end_s is None
