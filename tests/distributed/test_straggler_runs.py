"""A rank that sleeps longer than its peers is named, in a run with the bits of one that nobody watches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

pytestmark = pytest.mark.distributed

STEPS, SLOW_UNTIL = 96, 24


def test_a_slow_rank_is_named_and_recovers_and_no_bit_changes(tmp_path: Path) -> None:
    """Rank 2 of four replicas takes three times as long for 24 steps; DropCompute measures the same steps."""
    data = prepare_text(tmp_path)
    changes = {
        "deepspeed__train_batch_size": 8,
        "training__steps": STEPS,
        "training__eval_interval": 0,
        "drop_compute": {"enabled": True, "threshold": "inf"},
        "delay": [
            {"kind": "bounded_lognormal", "mean_s": 0.04},
            {"kind": "slow_rank", "replica": 2, "delay_s": 0.12, "steps": [1, SLOW_UNTIL]},
        ],
    }
    plain = write_config(tmp_path / "plain.json", data, tmp_path / "plain", **changes)
    watched = write_config(tmp_path / "watched.json", data, tmp_path / "watched", health__enabled=True, **changes)
    for config in (plain, watched):
        assert [code for code, _ in train_run(config, 4)] == [0] * 4
    assert metrics_of(tmp_path / "plain") == metrics_of(tmp_path / "watched")
    name = f"checkpoints/step_{STEPS:08d}"
    assert state_of(tmp_path / "plain" / name) == state_of(tmp_path / "watched" / name)
    assert not (tmp_path / "plain" / "health").exists() and events_of(tmp_path / "plain", "health", "straggler") == []
    (event,) = events_of(tmp_path / "watched", "health", "straggler")
    assert (event["ranks"], event["replica"], event["stage"]) == ([2], 2, 0)
    assert event["num_peers"] == 3 and event["ratio"] > 1.5 and event["step"] <= SLOW_UNTIL
    (recovered,) = events_of(tmp_path / "watched", "health", "recovered")
    assert recovered["ranks"] == [2] and recovered["since_step"] == event["step"]
    health = tmp_path / "watched" / "health"
    assert json.loads((health / "suspects.json").read_text())["suspects"] == []
    lines = [json.loads(line) for line in (health / "slowness.jsonl").read_text().splitlines()]
    assert lines and lines[0]["ratios"].keys() == {"0", "1", "2", "3"}
    assert max(lines[0]["ratios"], key=lines[0]["ratios"].get) == "2"
    for run in ("plain", "watched"):
        assert len((tmp_path / run / "step_times" / "rank_00002.jsonl").read_text().splitlines()) == 1 + STEPS


def test_a_start_suspects_nobody_before_it_has_compared(tmp_path: Path) -> None:
    """What an earlier start has left is replaced, by an empty list that names this start, though it does two steps."""
    left = tmp_path / "run" / "health" / "suspects.json"
    left.parent.mkdir(parents=True)
    left.write_text('{"suspects": [{"host": "gone"}]}')
    changes = {"training__steps": 2, "training__eval_interval": 0, "health__enabled": True}
    config = write_config(tmp_path / "config.json", prepare_text(tmp_path), tmp_path / "run", **changes)
    assert [code for code, _ in train_run(config, 2)] == [0, 0]
    found = json.loads(left.read_text())
    assert found["suspects"] == [] and found["attempt"] == 1
    assert found["run"] == json.loads((tmp_path / "run" / "run.json").read_text())["run"]
