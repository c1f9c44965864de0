"""Does a rank end, stop or slow down where stated, and only there? What it does to itself is recorded, not done."""

from types import SimpleNamespace

import pytest

from megasdc.config.faults import ProcessFaultSpec
from megasdc.faults import process
from megasdc.faults.drill import armed_text
from megasdc.faults.process import ProcessFaults
from megasdc.parallel.dims import ParallelDims


def build(specs, rank=0, **options):
    told = []
    specs = [ProcessFaultSpec.model_validate(spec) for spec in specs]
    faults = ProcessFaults(
        specs,
        ParallelDims(1, 2, 2, rank=rank),
        lambda i, spec, step, m: told.append((i, spec.kind, step, m)),
        **options,
    )
    return faults, told


def run(faults, steps=range(1, 5), micro_batches=2):
    for step in steps:
        engine = SimpleNamespace(step_number=step)
        for number in range(micro_batches):
            faults.before_forward(engine, number)
            faults.after_forward(engine, number)
            faults.before_backward(engine, number)
            faults.after_backward(engine, number)
        faults.before_reduction(engine)
        faults.before_optimizer_step(engine)


@pytest.fixture
def done(monkeypatch):
    acts = []
    monkeypatch.setattr(process, "_do", lambda spec: acts.append(spec.kind))
    return acts


@pytest.mark.parametrize("phase", ["forward", "backward", "collective", "update"])
def test_it_acts_once_where_stated(done, phase):
    """At the first step and micro-batch that fit, in the stated phase, after it was told."""
    faults, told = build([{"kind": "exit", "phase": phase, "steps": [2, None]}])
    run(faults)
    assert done == ["exit"]
    assert told == [(0, "exit", 2, 0 if phase in ("forward", "backward") else None)]
    assert faults.waiting == []


def test_other_ranks_are_left_alone(done):
    """A spec for another rank, replica, stage or host does nothing."""
    elsewhere = [{"rank": 1}, {"replica": 1}, {"stage": 1}, {"host": "b"}, {"steps": [9, None]}, {"micro_batches": [7]}]
    faults, told = build([{"kind": "sigkill", **place} for place in elsewhere], host="a")
    run(faults)
    assert done == told == []
    assert faults.waiting == [4, 5]


def test_a_restarted_rank(done):
    """What fired before the restart does not again, unless the spec says so."""
    specs = [{"kind": "exit"}, {"kind": "exit", "after_restart": True}, {"kind": "exit"}]
    faults, told = build(specs, fired_before={0, 1})
    run(faults)
    assert [index for index, *_ in told] == [1, 2]


def test_a_slow_rank_sleeps_in_proportion(monkeypatch):
    """Each pass that fits takes factor times as long; it is told once."""
    clock = SimpleNamespace(now=0.0, slept=[])
    monkeypatch.setattr(process, "_time_on_device", lambda: clock.now)
    monkeypatch.setattr(process.time, "sleep", clock.slept.append)
    faults, told = build([{"kind": "slow", "phase": "backward", "factor": 2.5, "steps": [2, 3], "micro_batches": [1]}])
    for step in range(1, 5):
        engine = SimpleNamespace(step_number=step)
        for number in (0, 1):
            faults.before_backward(engine, number)
            clock.now += 4.0 * step
            faults.after_backward(engine, number)
    assert clock.slept == [1.5 * 8.0, 1.5 * 12.0]
    assert told == [(0, "slow", 2, 1)]


@pytest.mark.parametrize(
    ("faults", "ranks", "text"),
    [
        (1, 0, "1 fault in results and states, none in processes"),
        (2, 1, "2 faults in results and states, processes of 1 rank"),
        (0, 2, "no faults in results and states, processes of 2 ranks"),
    ],
)
def test_the_warning_counts_what_is_armed(faults, ranks, text):
    """Faults in results and states, and the ranks whose processes are to fail."""
    assert armed_text(faults, ranks) == text
