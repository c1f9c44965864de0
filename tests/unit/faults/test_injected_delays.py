"""Does a rank sleep what the environment draws, where and when stated? Sleeping is recorded, not done."""

from types import SimpleNamespace

import numpy as np
import pytest

from megasdc.config.faults import DelaySpec
from megasdc.faults import delay
from megasdc.faults.delay import InjectedDelays, build_delay, draw_delays
from megasdc.lab.planning.environment import DelayEnvironment
from megasdc.parallel.dims import ParallelDims

SPECS = [
    {"kind": "bounded_lognormal", "mean_s": 0.5, "micro_batch_latency_s": 0.25},
    {"kind": "gamma", "mean_s": 0.1, "std_s": 0.2},
    {"kind": "bursts", "probability": 0.3, "num_steps": 2, "delay_s": 1.0},
    {"kind": "slow_rank", "replica": 130, "stage": 1, "delay_s": 0.125},
    {"kind": "slow_periods", "period_steps": 3, "slow_steps": 1, "delay_s": 2.0},
]


def specs(*raw):
    return [DelaySpec.model_validate(spec) for spec in raw]


@pytest.fixture
def slept(monkeypatch):
    seconds: list[float] = []
    monkeypatch.setattr(delay.time, "sleep", seconds.append)
    return seconds


def start(delays, step, micro_batch, dims, time_left_s=float("inf"), micro_batches=4):
    """One micro-batch as the engine starts it on a rank."""
    engine = SimpleNamespace(step_number=step, micro_batches=micro_batches)
    if dims.is_first_stage and dims.tp_rank == 0:
        delays.before_start(engine, micro_batch, time_left_s)
    delays.before_forward(engine, micro_batch)


def test_delays_are_those_of_the_environment():
    """All entries together give what simulations draw: every step, replica, micro-batch and stage."""
    given = specs(*SPECS)
    unscaled = [build_delay(spec) for spec in given]
    unscaled[0] = build_delay(given[0].model_copy(update={"mean_s": 0.5 * 0.25}))
    environment = DelayEnvironment(0.0, tuple(unscaled), seed=1)
    for step in (1, 2, 7):
        for replica in (0, 5, 130):
            total = sum(draw_delays(spec, index, step, replica, 4, 2) for index, spec in enumerate(given))
            assert np.allclose(total, environment.draw(step, replica, replica + 1, 4, 2)[0], rtol=1e-14, atol=0)


def test_a_rank_sleeps_its_own_draws(slept):
    """Each rank sleeps the sum for its replica and stage before each micro-batch, tensor rank 1 nothing."""
    given = specs(*SPECS)
    for rank in range(8):
        dims = ParallelDims(2, 2, 2, rank)
        delays = InjectedDelays(given, dims, host="a")
        slept.clear()
        for step in (1, 2):
            for micro_batch in range(4):
                start(delays, step, micro_batch, dims)
        wanted = [
            sum(draw_delays(spec, i, step, dims.dp_rank, 4, 2)[m, dims.pp_rank] for i, spec in enumerate(given))
            for step in (1, 2)
            for m in range(4)
        ]
        assert slept == pytest.approx(wanted if dims.tp_rank == 0 else [], rel=1e-14)
        assert delays.pop_seconds() == pytest.approx((sum(slept), 0.0)) and delays.pop_seconds() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("place", "ranks"),
    [
        ({}, {0, 2, 4, 6}),
        ({"tensor_rank": 1}, {1, 3, 5, 7}),
        ({"rank": 3}, {3}),
        ({"replica": 1}, {2, 6}),
        ({"stage": 1}, {4, 6}),
        ({"host": "b*"}, set()),
    ],
)
def test_entries_are_for_the_ranks_they_name(place, ranks):
    """On tensor rank 0 of all that fit, on another tensor rank where the entry names it or its rank."""
    (spec,) = specs({"kind": "exponential", "mean_s": 0.1} | place)
    assert {r for r in range(8) if InjectedDelays([spec], ParallelDims(2, 2, 2, r), host="a").here} == ranks


def test_steps_and_micro_batches(slept):
    """Nothing is slept outside the stated steps and micro-batches."""
    dims = ParallelDims(1, 1, 1)
    delays = InjectedDelays(
        specs({"kind": "slow_rank", "replica": 0, "delay_s": 1.0, "steps": [2, 3], "micro_batches": [1]}), dims
    )
    done = []
    for step in range(1, 5):
        for micro_batch in range(3):
            start(delays, step, micro_batch, dims)
            done += [(step, micro_batch)] * len(slept)
            slept.clear()
    assert done == [(2, 1), (3, 1)]


def test_a_preemptible_delay_ends_with_the_time_of_the_replica(slept, monkeypatch):
    """The deciding rank sleeps before it is asked, at most the time left; what lasts to its end comes after, whole."""
    monkeypatch.setattr(delay.time, "monotonic", lambda: 100.0)
    given = specs(
        {"kind": "slow_periods", "period_steps": 1, "slow_steps": 1, "delay_s": 3.0, "preemptible": True},
        {"kind": "slow_periods", "period_steps": 1, "slow_steps": 1, "delay_s": 0.5},
    )
    dims = ParallelDims(1, 2, 1, 0)
    delays = InjectedDelays(given, dims)
    for left in (float("inf"), 2.0, 0.0, -1.0):
        slept.clear()
        start(delays, 1, 0, dims, left)
        assert slept == [min(3.0, max(left, 0.0)), 0.5]
    assert delays.pop_seconds() == (3.0 + 2.0 + 4 * 0.5, 1.0 + 3.0 + 3.0)
    later = ParallelDims(1, 2, 1, 1)
    slept.clear()
    start(InjectedDelays(given, later), 1, 0, later)
    assert slept == [3.5]


def test_global_generators_are_left_alone(slept):
    """Delays draw from generators of their own."""
    before = np.random.get_state()[1].copy()
    start(InjectedDelays(specs(*SPECS), ParallelDims(1, 1, 1)), 3, 1, ParallelDims(1, 1, 1))
    assert slept and np.array_equal(before, np.random.get_state()[1])
