"""What an attempt has reported is read from metrics and events: sums by hand over lines with times by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.origin import Launch
from megasdc.ops.supervise.attempt_progress import AttemptProgress, trained_in


def metrics(folder: Path, *rows: dict[str, Any]) -> None:
    """Lines of metrics."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def events(folder: Path, *told: tuple[float, int | None, str, str, dict[str, Any]]) -> None:
    """Events of rank 0: time, step, kind, name, fields."""
    (folder / "events").mkdir(exist_ok=True)
    lines = [
        {"time": time, "rank": 0, "host": "a", "step": step, "micro_batch": None, "kind": kind, "name": name}
        | {"fields": fields}
        for time, step, kind, name, fields in told
    ]
    (folder / "events" / "rank_00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(step: int, time: float, step_s: float = 1.0) -> dict[str, Any]:
    """A line of the loss."""
    return {"step": step, "time": time, "train/loss": 1.0, "speed/step_s": step_s}


START = (102.0, 11, "start", "phases", {"phases": {"imports": 5.0, "resume": 3.0, "first_step": 9.0}, "step_s": 2.0})
LAUNCH = Launch("x", 90.0)
"""Lines above are of an earlier version, which does not name the launch."""
RESUME = (99.0, 10, "resume", "checkpoint", {})


def test_all_lines_since_the_plan_count(tmp_path: Path) -> None:
    """First step and loading from the start's event; pauses from all lines, those after the last loss too."""
    metrics(
        tmp_path,
        {**line(10, 40.0), "time/eval_s": 1e6, "checkpoint/save_s": 1e6},  # of the attempt before
        {"step": 20, "time": 111.0, "eval/loss": 1.0, "time/eval_s": 2.0},
        line(20, 112.0),
        {"step": 20, "time": 112.5, "checkpoint/save_s": 0.5},
        line(30, 122.0),
        {"step": 36, "time": 130.0, "memory/step": 34, "memory/stalled_s": 0.25, "memory/skipped": 0},
        {"step": 37, "time": 131.0, "memory/step": 34, "memory/stalled_s": 0.25, "memory/skipped": 1},
        {"step": 37, "time": 200.0, "archive/push_s": 60.0},  # at the end of the run, no sign of a step
    )
    events(tmp_path, (40.0, 3, "resume", "checkpoint", {}), RESUME, START)
    assert trained_in(tmp_path, LAUNCH) == AttemptProgress(
        10, 100.0, 37, 131.0, loading_s=3.0, evaluating_s=2.0, saving_s=0.75, stalled_s=0.0, line_s=10.0
    )


def test_steps_that_are_slow_by_the_median_of_the_run_stall(tmp_path: Path) -> None:
    """Beyond it, where they take more than 1.5 times as long, or a straggler was known; the first line is warm-up."""
    usual = [line(step, float(step)) for step in range(1, 21)]
    rows = [line(30, 130.0, 3.0), line(40, 155.0, 2.5), line(50, 169.0, 1.4), line(60, 183.0, 1.4), line(70, 193.0)]
    metrics(tmp_path, *usual, *rows)
    resume = (99.0, 20, "resume", "checkpoint", {})
    events(tmp_path, resume, START)
    found = trained_in(tmp_path, LAUNCH)
    assert found is not None and found.stalled_s == pytest.approx(10 * 1.5)
    place = {"replica": 1, "stage": 0}
    slow = (156.0, 42, "health", "straggler", {**place, "since_step": 41})
    events(tmp_path, resume, START, slow, (172.0, 50, "health", "recovered", {**place, "since_step": 50}))
    found = trained_in(tmp_path, LAUNCH)
    assert found is not None and found.stalled_s == pytest.approx(10 * 1.5 + 10 * 0.4)
    events(tmp_path, resume, START, slow)
    found = trained_in(tmp_path, LAUNCH)
    assert found is not None and found.stalled_s == pytest.approx(10 * 1.5 + 20 * 0.4)


def test_a_step_without_a_line_is_known_by_its_event(tmp_path: Path) -> None:
    """The first step of a start; before it nothing is known, and a damaged event does not stop the supervisor."""
    metrics(tmp_path)
    events(tmp_path, RESUME)
    assert trained_in(tmp_path, LAUNCH) is None and trained_in(tmp_path / "none", LAUNCH) is None
    events(tmp_path, RESUME, START)
    assert trained_in(tmp_path, LAUNCH) == AttemptProgress(10, 100.0, 11, 102.0, loading_s=3.0)
    path = tmp_path / "events" / "rank_00000.jsonl"
    path.write_bytes(b"damaged\n" + path.read_bytes().splitlines(keepends=True)[0])
    metrics(tmp_path, line(20, 112.0), line(30, 122.0))
    assert trained_in(tmp_path, LAUNCH) == AttemptProgress(10, 102.0, 30, 122.0, line_s=10.0)
