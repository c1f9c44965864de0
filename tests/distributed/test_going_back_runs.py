"""Runs that go back to an earlier checkpoint and skip samples end as one that skipped them from the beginning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
STEPS = 8
SKIP = [[18, 27]]
"""In the steps 5 and 6, and part of 7, of a run without."""


def test_going_back_and_skipping_is_as_never_having_trained_on_them(tmp_path: Path) -> None:
    """Losses and the last checkpoint are the same in every bit; newer checkpoints and snapshots never come back."""
    data = prepare_text(tmp_path)
    straight = write_config(tmp_path / "s.json", data, tmp_path / "straight", training__steps=STEPS, data__skip=SKIP)
    assert train_run(straight, 2) == [(0, None)] * 2
    sections = {"interval": 4, "keep_last": 0, "memory": {"interval": 1}}
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "c.json", data, run_dir, training__steps=STEPS, checkpoint=sections)
    assert train_run(config, 2, "megasdc.training.stop_step=6") == [(0, None)] * 2
    refused = train_run(config, 2, f"megasdc.data.skip={SKIP}")
    assert [code for code, _ in refused] == [72, 72]
    assert "past all samples before 24: set what was before 24 again" in refused[0][1]
    back = (f"megasdc.data.skip={SKIP}", "megasdc.checkpoint.resume_at_most=4")
    assert train_run(config, 2, *back, "megasdc.checkpoint.verify=false") == [(0, None)] * 2
    assert [one["step"] for one in events_of(run_dir, "resume", "not_verified")] == [4], "which is told"
    name = f"checkpoints/step_{STEPS:08d}"
    assert state_of(run_dir / name) == state_of(tmp_path / "straight" / name)
    assert metrics_of(run_dir) == metrics_of(tmp_path / "straight")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = {row["step"]: row["data/stream_end"] for row in rows if "data/stream_end" in row}
    assert ends[4] == 16 and ends[STEPS] == 42, "samples 0 to 40, of 2 replicas in turn, without 9 of them"
    (moved,) = events_of(run_dir, "move", "checkpoint")
    assert (moved["step"], moved["reason"]) == (6, "megasdc.checkpoint.resume_at_most is 4")
    assert [one["ranges"] for one in events_of(run_dir, "skip", "samples")][-1] == SKIP


def test_without_an_older_checkpoint_the_run_begins_anew(tmp_path: Path) -> None:
    """What it had is moved aside, and it ends as if it had never been."""
    data = prepare_text(tmp_path)
    config = write_config(tmp_path / "c.json", data, tmp_path / "run", training__steps=3)
    assert train_run(config, 2) == [(0, None)] * 2
    first = state_of(tmp_path / "run" / "checkpoints" / "step_00000003")
    assert train_run(config, 2, "megasdc.checkpoint.resume_at_most=2") == [(0, None)] * 2
    assert state_of(tmp_path / "run" / "checkpoints" / "step_00000003") == first
    assert (tmp_path / "run" / "checkpoints" / "unverified" / "step_00000003").is_dir()
