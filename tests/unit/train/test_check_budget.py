"""What checks take is measured, and how often they look follows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megasdc.config.load import parse_config
from megasdc.events import EventLog, read_events
from megasdc.optim.zero1 import BLOCK
from megasdc.parallel.collectives import ANY, Agreed, Compared
from megasdc.parallel.dims import ParallelDims
from megasdc.sdc import budget, slice_checks
from megasdc.sdc.budget import AuditPace, CheckBudget, CheckPlan, Stopwatch
from megasdc.sdc.cost import Cadence, Rates, TimeShares
from megasdc.sdc.slice_checks import KEPT_STATE, SUMS, UPDATES, Checkable, CheckedUpdates, SliceChecks
from megasdc.sdc.used_settings import SETTINGS
from megasdc.train.detection.budget import RankSpeed, plan_checks


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that tests make pass."""
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """As much of a run as a budget needs."""
    events = EventLog(tmp_path, 0)
    yield SimpleNamespace(step=0, dims=SimpleNamespace(rank=0), events=events)
    events.close()


def made(
    expected: TimeShares | None, limit: float | None = 0.01, device: str = "cpu", cadence: Cadence | None = None
) -> CheckBudget:
    """A budget of a run of two micro-batches."""
    engine: Any = SimpleNamespace(most_micro_batches=2, device=torch.device(device))
    return CheckBudget(CheckPlan(cadence or Cadence(1), (), limit, expected), engine)


def steps(
    one: CheckBudget,
    run: Any,
    clock: Clock,
    number: int,
    look_s: float,
    fixed_s: float = 0.001,
    updated: Callable[[], None] = lambda: None,
) -> list[int]:
    """Take steps of a second in which a look and what is fixed take so long; the micro-batches looked at in each.

    What is called when the optimizer has updated takes its own time.
    """
    looked = []
    for _ in range(number):
        run.step += 1
        one.begin(run.step)
        covered = one.looked_at(run.step)
        for field in one.fields:  # the reduction of this step, of one rank
            field.receive(field.send())
        for _ in covered:
            with one.looks:
                clock.now += look_s
        with one.waits:
            clock.now += fixed_s
        clock.now += 1.0 - look_s * len(covered) - fixed_s
        updated()
        one.end(run, run.step)
        looked.append(len(covered))
    return looked


def test_looks_follow_what_they_take(run: Any, clock: Clock, tmp_path: Path) -> None:
    """Ten times as slow as expected: within ten steps they become rarer, and stay so; faster again: they come back."""
    one = made(TimeShares(0.001, 0.0, 0.004, 0.0))
    steps(one, run, clock, 10, look_s=0.04)
    assert one.cadence == Cadence(1, 5)
    looked = steps(one, run, clock, 100, look_s=0.04)
    assert one.cadence == Cadence(1, 5) and sum(looked) == 20
    assert (sum(looked) * 0.04 + 100 * 0.001) / 100 <= 0.01
    steps(one, run, clock, 200, look_s=0.002)
    assert one.cadence == Cadence(2)
    told = [event for event in read_events(tmp_path) if (event.kind, event.name) == ("sdc", "cadence")]
    first = told[0].fields
    assert (first["every"], first["budget"]) == (5, 0.01) and first["was"] == pytest.approx(0.041, rel=0.01)


def _audited(one: CheckBudget, run: Any, clock: Clock, number: int, audit_s: float) -> list[int]:
    """Take steps of a second, of which each ``10 * audit_factor``-th is audited; the audited steps."""
    audited = []
    for _ in range(number):
        run.step += 1
        due = run.step % (10 * one.audit_factor) == 0
        one.begin(run.step, audits=due)
        for field in one.fields:
            field.receive(field.send())
        if due:
            audited.append(run.step)
            with one.audits:
                clock.now += audit_s
        clock.now += 1.0 - audit_s * due
        one.end(run, run.step)
    return audited


def test_audits_follow_what_they_take(run: Any, clock: Clock, tmp_path: Path) -> None:
    """At half of the budget they become rarer as one of them takes longer, up to the longest interval, and come back;
    what one takes at least is known before the first step.
    """
    engine: Any = SimpleNamespace(most_micro_batches=2, device=torch.device("cpu"))
    pace = AuditPace(10, 160, after_saves=0, least=0.2)
    one = CheckBudget(CheckPlan(Cadence(1), (), 0.02, pace=pace), engine)
    assert one.audit_factor == 2, "a fifth of a step in 20 steps is half of two per cent"
    audited = _audited(one, run, clock, 400, audit_s=0.35)
    assert one.audit_factor == 4 and len([step for step in audited if step > 100]) * 0.35 <= 300 * 0.01
    _audited(one, run, clock, 200, audit_s=0.9)
    assert one.audit_factor == 16
    _audited(one, run, clock, 600, audit_s=0.99)
    assert one.audit_factor == 16, "the longest interval"
    _audited(one, run, clock, 600, audit_s=0.05)
    assert one.audit_factor == 1
    told = [event.fields for event in read_events(tmp_path) if event.name == "audit_interval"]
    assert [one["interval"] for one in told][-1] == 10 and told[0]["budget"] == 0.02


def test_what_cannot_be_kept_is_told_once(run: Any, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Where what every step needs is more than the budget."""
    one = made(None)
    steps(one, run, clock, 60, look_s=0.04, fixed_s=0.02)
    assert one.cadence.every == budget.MOST_EVERY
    assert ["more than sdc.budget (1.00% of a step)" in text for text in caplog.messages] == [True]
    assert "2.00% is of what every step needs" in caplog.text


def _compared(one: CheckBudget, run: Any, clock: Clock, number: int, fixed_s: float, saved_s: float = 0.0) -> list[int]:
    """Take steps of a second; the steps in which ranks compare, which takes them so long each."""
    compared = []
    for _ in range(number):
        run.step += 1
        due = one.cadence.compares(run.step)
        one.begin(run.step, compares=due)
        for field in one.fields:
            field.receive(field.send())
        with one.waits:
            clock.now += fixed_s * due
        clock.now += 1.0 - fixed_s * due
        one.end(run, run.step)
        compared += [run.step] * due
        with one.waits:  # before a save, between two steps
            clock.now += saved_s
    return compared


def test_comparisons_follow_what_they_take(
    run: Any, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three hundredths of a step: in each of the first twenty, then in every fifth, within the budget, and in each
    again where they take less; what is compared before saves is no part of it.
    """
    engine: Any = SimpleNamespace(most_micro_batches=2, device=torch.device("cpu"))
    one = CheckBudget(CheckPlan(Cadence(1), (), 0.01, TimeShares(0.001, 0.0, 0.001, 0.0), thins=True), engine)
    assert _compared(one, run, clock, 20, 0.03, saved_s=0.5) == list(range(1, 21))
    _compared(one, run, clock, 20, 0.03, saved_s=0.5)
    assert one.cadence == Cadence(1, budget.MOST_EVERY, 5)
    assert len(_compared(one, run, clock, 100, 0.03, saved_s=0.5)) == 22
    assert one.cadence.share(one.shares) <= 0.01 and "more than sdc.budget" not in caplog.text
    _compared(one, run, clock, 200, 0.002)
    assert one.cadence.apart == 1
    told = [event.fields["apart"] for event in read_events(tmp_path) if event.name == "cadence"]
    assert 5 in told and told[-1] == 1
    _compared(one, run, clock, 300, 0.9)
    assert one.cadence.apart == budget.MOST_EVERY
    assert "ranks compare in one step in 50" in caplog.text


def test_a_step_with_a_finding_does_not_count(run: Any, clock: Clock) -> None:
    """Repeats of a micro-batch are no cost of looking."""
    one = made(TimeShares(0.001, 0.0, 0.004, 0.0))
    steps(one, run, clock, 8, look_s=0.004)
    one.ignore_step()
    steps(one, run, clock, 1, look_s=0.9)
    steps(one, run, clock, 11, look_s=0.004)
    assert one.cadence.every == 1


@pytest.mark.parametrize("found", [SUMS, KEPT_STATE, UPDATES, SETTINGS, None])
def test_a_step_in_which_slices_find_something_does_not_count(
    run: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    """Whatever they find; with ``None`` they find nothing, take as long, and are looked at more rarely."""
    one = made(TimeShares(0.001, 0.0, 0.004, 0.001))
    used: Any = SimpleNamespace(pop_digest=lambda: 7)
    told: list[int] = []

    def act(step: int, settles: object) -> bool:
        told.append(step)
        return False

    def agreed(values: dict[str, Compared], *_: object) -> Agreed:
        now = found if run.step == 9 else None
        raised = {name for name, one in values.items() if one.among == ANY and one.value}
        return {name: ((0, 0),) if name in {now, *raised} else () for name in values}

    def finish() -> CheckedUpdates:
        clock.now += 0.9 if run.step == 9 else 0.001
        return CheckedUpdates()

    monkeypatch.setattr(slice_checks, "compare_replicas", agreed)
    monkeypatch.setattr(slice_checks, "gather_objects", lambda value, group: [value])
    checks: Any = SliceChecks(1, act, lambda texts: None, one, used, Checkable())
    checks._updates = SimpleNamespace(changed=None, finish=finish, snapshot=lambda turn: None)
    checks._slices, checks._looks, checks._is_whole = SimpleNamespace(period=1), True, True
    engine: Any = SimpleNamespace(is_skipped=False, dims=ParallelDims(1, 1, 1))

    def updated() -> None:
        engine.step_number = run.step
        checks.after_optimizer_step(engine)

    steps(one, run, clock, 20, look_s=0.004, updated=updated)
    assert told == ([] if found is None else [9])
    assert (one.cadence.every == 1) == (found is not None)


def test_after_a_finding_each_step_looks_at_everything(run: Any, clock: Clock) -> None:
    """For twenty steps, whatever the budget allows; then as before. A cadence that is given stays."""
    one = made(TimeShares(0.0, 0.0, 0.9, 0.0), cadence=Cadence(1, 50))
    assert sum(steps(one, run, clock, 49, look_s=0.5)) == 0
    one.watch()
    assert one.looked_at(49) == frozenset(), "nothing changes in the running step"
    assert steps(one, run, clock, 1, look_s=0.5) == [1], "the step with the finding"
    assert steps(one, run, clock, 20, look_s=0.5) == [2] * 20
    assert sum(steps(one, run, clock, 29, look_s=0.5)) == 0
    given = made(None, limit=None, cadence=Cadence(1))
    given.watch()
    assert steps(given, run, clock, 3, look_s=0.5) == [1] * 3


def test_a_device_costs_at_least_what_was_expected(run: Any, clock: Clock) -> None:
    """The host's clock does not see what a device computes beside it."""
    one = made(TimeShares(0.0, 0.0, 0.04, 0.0), device="meta", cadence=Cadence(1, 4))
    steps(one, run, clock, 40, look_s=0.0001, fixed_s=0.0)
    assert one.cadence == Cadence(1, 4)


def test_without_a_budget_nothing_is_exchanged(run: Any, clock: Clock) -> None:
    """A given coverage stays."""
    one = made(None, limit=None)
    assert one.fields == ()
    steps(one, run, clock, 30, look_s=0.5)
    assert one.cadence == Cadence(1)


@pytest.mark.parametrize(("whole", "looked"), [(False, 1), (True, 3)])
def test_micro_batches_that_are_added_are_looked_at(whole: bool, looked: int) -> None:
    """DropCompute may plan more than there were at the start: in turn, or all in each step."""
    engine: Any = SimpleNamespace(most_micro_batches=2, device=torch.device("cpu"))
    one = CheckBudget(CheckPlan(Cadence(2 if whole else 1), (), whole=whole), engine)
    engine.most_micro_batches = 3
    steps = [set(one.looked_at(step)) for step in range(1, 4)]
    assert set().union(*steps) == {0, 1, 2} and {len(step) for step in steps} == {looked}
    assert one.turns == 3 // looked


def test_only_the_innermost_stopwatch_runs(clock: Clock) -> None:
    """So that no second is counted twice."""
    running: list[Stopwatch] = []
    outer, inner = Stopwatch(running), Stopwatch(running)
    with outer:
        clock.now += 1
        with inner, inner:
            clock.now += 10
        clock.now += 100
    assert (outer.pop_seconds(), inner.pop_seconds(), outer.pop_seconds()) == (101, 10, 0)


def test_what_is_expected_at_a_start_counts_all_checks(tmp_path: Path) -> None:
    """Links of the chain and tokens are read in each look, and are no part of what is expected where they are off.

    What is sent costs what it takes at the measured rate.
    """
    base = {
        "data": {"path": "x"},
        "protect": "off",
        "training": {"steps": 9},
        "logging": {"run_dir": "r"},
        "determinism": {"enabled": True},
    }
    engine: Any = SimpleNamespace(
        dims=ParallelDims(1, 1, 1),
        most_micro_batches=2,
        train_micro_batch_size_per_gpu=lambda: 4,
        device="cpu",
        optimizer=SimpleNamespace(bit16_groups=[]),
    )
    speed, slow = (RankSpeed(Rates(1e9, 1e9, 1e-6, 1e-6, 1e-4, sent), 1e12) for sent in (1e9, 1e8))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        looks = {}
        for off in ((), ("chain",), ("tokens",), ("chain", "tokens")):
            section = {"enabled": True, **dict.fromkeys(off, False)}
            config = parse_config({"megasdc": {**base, "sdc": {"always_on": section}}})
            plan = plan_checks(config, engine, 4096, speed, dist.group.WORLD)
            assert plan.expected is not None
            looks[off] = plan.expected.look
            told = " ".join(plan.lines)
            for check, text in (("tokens", "tokens ("), ("chain", "links from gradient to parameters (")):
                assert (text in told) is (check not in off)
        wide, sent = {"model": {"hidden_size": 512, "num_attention_heads": 4}}, {}
        for coverage in ("one", "all"):
            section = {"enabled": True, "coverage": coverage}
            config = parse_config({"megasdc": {**base, **wide, "sdc": {"always_on": section}}})
            plans = [plan_checks(config, engine, 4096, one, dist.group.WORLD) for one in (slow, speed)]
            sent[coverage] = [plan.cadence.share(plan.expected) for plan in plans if plan.expected is not None]
    finally:
        dist.destroy_process_group()
    elements = (4096 + 2048) * 512 + 2 * (12 * 512 * 512 + 13 * 512) + 2 * 512
    more = {coverage: slower - faster for coverage, (slower, faster) in sent.items()}
    assert more["all"] / more["one"] == pytest.approx(elements / BLOCK), "the whole gradient in each step, or a set"
    bare = looks["chain", "tokens"]
    assert looks[("chain",)] > bare and looks[("tokens",)] > looks[("chain",)], "a shard is far larger than a batch"
    assert looks[()] - bare == pytest.approx(looks[("chain",)] + looks[("tokens",)] - 2 * bare)


def test_the_share_that_is_written_counts_all_that_checks_take(run: Any, clock: Clock) -> None:
    """Looks, audits, what every step needs, slices, and waiting for other ranks, each once."""
    written: list[dict[str, float]] = []
    writer: Any = SimpleNamespace(write=lambda step, values: written.append(values))
    engine: Any = SimpleNamespace(most_micro_batches=1, device=torch.device("cpu"))
    one = CheckBudget(CheckPlan(Cadence(1), (), 0.9, None), engine, writer)
    takes = {"looks": 0.1, "audits": 0.02, "fixed": 0.003, "slices": 0.0004, "waits": 0.00005}
    for _ in range(12):
        run.step += 1
        one.begin(run.step)
        for field in one.fields:
            field.receive(field.send())
        for name, seconds in takes.items():
            with getattr(one, name):
                clock.now += seconds
        clock.now += 1.0 - sum(takes.values())
        one.end(run, run.step)
    assert written and all(one["sdc/cost_share"] == pytest.approx(0.12345) for one in written)
