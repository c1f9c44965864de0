"""Does the clock decide as the rules say, and is a log of decisions read back as it was meant?"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from megasdc.common.errors import ConfigError
from megasdc.dropcompute.gate import (
    DECISIONS_FILE,
    ClockDecisions,
    DecisionLog,
    RecentSteps,
    ReplayedDecisions,
    StepDecisions,
    read_decisions,
)
from megasdc.engine.step_times import StepRecord, StepTimes


class Clock:
    """Shows what it is set to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def decisions_of(sigmas: float | None = None) -> tuple[Clock, ClockDecisions]:
    """A step that has just begun, at 100 s."""
    clock = Clock()
    times = StepTimes(torch.device("cpu"), clock)
    times.before_micro_batches(None)  # type: ignore[arg-type]
    return clock, ClockDecisions(times, 1, sigmas)


def record_of(*durations: float) -> StepRecord:
    starts = [float(number) for number in range(len(durations))]
    ends = [start + duration for start, duration in zip(starts, durations, strict=True)]
    return StepRecord(starts, ends, list(durations), 9.0, 10.0)


@pytest.mark.parametrize(("tau", "elapsed", "starts"), [(2.0, 1.9, True), (2.0, 2.1, False), (0.0, 0.1, False)])
def test_a_micro_batch_is_started_before_tau(tau: float, elapsed: float, starts: bool) -> None:
    """The rule `elapsed` counts from the beginning of the step, whatever micro-batches have taken."""
    clock, decisions = decisions_of()
    decisions.update(record_of(5.0, 5.0))
    decisions.tau_s = tau
    clock.now = 100.0 + elapsed
    assert decisions.decide(1) is starts
    assert decisions.time_left_s(1) == pytest.approx(tau - elapsed)


def test_without_a_threshold_everything_is_started() -> None:
    """Tau is infinite until it is set."""
    clock, decisions = decisions_of()
    clock.now = 1e9
    assert decisions.decide(1) and decisions.time_left_s(1) == math.inf


@pytest.mark.parametrize("sigmas", [0.0, 1.0, 2.5])
def test_predictive_leaves_room_for_what_is_expected(sigmas: float) -> None:
    """A micro-batch is started where mean and deviations of the earlier ones, of all steps, still fit before tau."""
    clock, decisions = decisions_of(sigmas)
    decisions.tau_s = 10.0
    decisions.update(record_of(1.0, 2.0))
    decisions.update(record_of(1.5, 4.0, 3.0))
    seen = [1.0, 2.0, 1.5, 4.0, 3.0]
    last = 10.0 - (statistics.fmean(seen) + sigmas * statistics.pstdev(seen))
    for elapsed, starts in ((last - 0.01, True), (last + 0.01, False)):
        clock.now = 100.0 + elapsed
        assert decisions.decide(1) is starts


def test_predictive_forgets_what_is_long_ago() -> None:
    """Only the last micro-batches count, so that what is expected follows a machine that has changed."""
    _, decisions = decisions_of(1.0)
    decisions.tau_s = 10.0
    decisions.update(record_of(*[100.0] * 300))
    for _ in range(256):
        decisions.update(record_of(2.0))
    assert decisions.time_left_s(1) == pytest.approx(8.0)


def test_a_step_begins_anew() -> None:
    """The time of a step begins with it."""
    clock, decisions = decisions_of()
    decisions.tau_s = 1.0
    clock.now = 105.0
    assert not decisions.decide(1)
    decisions._times.before_micro_batches(None)  # type: ignore[arg-type]
    assert decisions.decide(1)


def test_replayed_decisions_are_those_of_the_replica() -> None:
    """Each replica starts as many as the log says of it, with time without end until then."""
    for replica, count in enumerate((3, 1)):
        replayed = ReplayedDecisions(replica)
        replayed.begin(StepDecisions(4, (3, 1)))
        assert [replayed.decide(number) for number in range(4)] == [number < count for number in range(4)]
        assert [replayed.time_left_s(number) for number in range(4)] == [
            math.inf if number < count else 0.0 for number in range(4)
        ]


def test_replayed_backward_passes_end_where_the_log_says() -> None:
    """Only the last one of a replica does, and another's is whole; without layers in the log all are."""
    step = StepDecisions(4, (3, 1), (2, None), 4)
    first, second, whole = (ReplayedDecisions(replica) for replica in (0, 1, 0))
    first.begin(step)
    second.begin(step)
    whole.begin(StepDecisions(4, (3, 1)))
    assert [[first.goes_on(number, layers) for layers in range(5)] for number in (0, 1)] == [[True] * 5] * 2
    assert [first.goes_on(2, layers) for layers in range(5)] == [True, True, False, False, False]
    assert all(one.goes_on(number, 4) for one, number in ((second, 0), (whole, 2)))


def test_a_backward_pass_goes_on_before_tau() -> None:
    """The clock decides between layers; what it took then is not expected of a micro-batch."""
    clock, decisions = decisions_of(sigmas=0.0)
    decisions.tau_s = 2.0
    clock.now = 101.9
    assert decisions.goes_on(0, 1)
    clock.now = 102.1
    assert not decisions.goes_on(0, 2)
    decisions.update(record_of(1.0, 1.5, 0.1), is_whole=False)
    decisions._times.before_micro_batches(None)  # type: ignore[arg-type]
    assert decisions.time_left_s(1) == pytest.approx(2.0 - 1.25)


def test_what_ended_backward_passes_lose() -> None:
    """A pass that is not whole counts by the layers that it left out, and its replica is late."""
    step = StepDecisions(4, (3, 4, 4), (None, 1, None), 4)
    assert step.dropped == 1 and step.lost == 1.75 and step.ended == {1: 1}
    assert [step.is_late(replica) for replica in range(3)] == [True, True, False]
    recent = RecentSteps(2)
    recent.add(step)
    assert recent.exceeds(0.07, 12) and not recent.exceeds(0.073, 12)


# --- the log ----------------------------------------------------------------------------------------------------------


def write(folder: Path, after: int, steps: dict[int, tuple[int, ...]], planned: int = 4) -> Path:
    """A start of a run of 2 replicas with 4 micro-batches after a step, and the steps that follow."""
    log = DecisionLog(folder, after, 2, 4)
    for step, completed in steps.items():
        log.add(step, StepDecisions(planned, completed))
    log.close()
    return folder / DECISIONS_FILE


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Counts of every replica and what was planned come back, more than configured included."""
    path = write(tmp_path, 0, {1: (4, 4), 2: (3, 1)})
    write(tmp_path, 2, {3: (5, 6)}, planned=6)
    assert read_decisions(path, 2, 4) == {
        1: StepDecisions(4, (4, 4)),
        2: StepDecisions(4, (3, 1)),
        3: StepDecisions(6, (5, 6)),
    }


def test_ended_backward_passes_are_read_as_written(tmp_path: Path) -> None:
    """A line has layers where a pass was ended, and is as ever where none was."""
    log = DecisionLog(tmp_path, 0, 2, 4)
    log.add(1, StepDecisions(4, (3, 4), (None, 2), 4))
    log.add(2, StepDecisions(4, (3, 4), (None, None), 4))
    log.close()
    path = tmp_path / DECISIONS_FILE
    assert read_decisions(path, 2, 4) == {1: StepDecisions(4, (3, 4), (None, 2), 4), 2: StepDecisions(4, (3, 4))}
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 2, "planned": 4, "completed": [3, 4]}


def test_a_restart_takes_back_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """Steps that are run again are those of the last run; none that it did not reach are left."""
    path = write(tmp_path, 0, {step: (4, 4) for step in range(1, 8)})
    write(tmp_path, 4, {5: (1, 2)})
    assert sorted(read_decisions(path, 2, 4)) == [1, 2, 3, 4, 5]
    assert read_decisions(path, 2, 4)[5].completed == (1, 2)


@pytest.mark.parametrize("torn", ['{"step": 3, "plan', '{"step": 3, "planned": 4, "completed": [4, 4]}'])
def test_half_a_last_line(tmp_path: Path, torn: str) -> None:
    """What a killed run left half written is left out, and does not spoil what its restart writes."""
    path = write(tmp_path, 0, {1: (4, 4), 2: (3, 3)})
    with open(path, "a") as file:
        file.write(torn)
    assert sorted(read_decisions(path, 2, 4)) == [1, 2]
    write(tmp_path, 2, {3: (2, 2)})
    assert read_decisions(path, 2, 4)[3].completed == (2, 2)


@pytest.mark.parametrize(("data", "micro_batches"), [(3, 4), (2, 5)])
def test_a_log_of_another_layout(tmp_path: Path, data: int, micro_batches: int) -> None:
    """The numbers of both runs are told."""
    path = write(tmp_path, 0, {1: (4, 4)})
    with pytest.raises(ConfigError, match=f"2 replicas with 4 .* this run has {data} with {micro_batches}"):
        read_decisions(path, data, micro_batches)


WRONG: list[Any] = [
    "no JSON",
    [1, 2],
    {"step": 2, "planned": 4},
    {"step": 2, "planned": 4, "completed": [4]},
    {"step": 2, "planned": 4, "completed": [4, 5]},
    {"step": 2, "planned": 4, "completed": [0, 4]},
    {"step": "two", "planned": 4, "completed": [4, 4]},
    {"step": 2, "planned": 4, "completed": [4, 4], "layers": [1, None]},
    {"step": 2, "planned": 4, "completed": [4, 4], "layers": [1], "of_layers": 2},
    {"step": 2, "planned": 4, "completed": [4, 4], "layers": [3, None], "of_layers": 2},
    {"start": {"step": 2}},
    {"start": 2},
]


@pytest.mark.parametrize("line", [*WRONG, "[" * 100_000], ids=lambda line: json.dumps(line)[:60])
def test_a_line_that_is_no_decision(tmp_path: Path, line: Any) -> None:
    """File, number and beginning of the line are told."""
    path = write(tmp_path, 0, {1: (4, 4)})
    with open(path, "a") as file:
        file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(ConfigError) as caught:
        read_decisions(path, 2, 4)
    (text,) = caught.value.problems
    assert text.startswith("megasdc.drop_compute.replay_decisions: line 3 of ") and str(path) in text


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "no text"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    """The file and what to name instead are told."""
    path = tmp_path / "d.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{path} cannot be read .* name the {DECISIONS_FILE} of a run"):
        read_decisions(path, 2, 4)
