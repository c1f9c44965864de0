"""Does a launch of replicas go on without one that is lost, and take it back?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, prepare_text, write_config

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]
EVERY, STEPS = 4, 160


def _rounds(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_lost_replica_stops_nobody_and_returns(tmp_path: Path) -> None:
    """Its rank is killed: rounds go on without it; it is started again, and takes part in later ones to the end."""
    run_dir = tmp_path / "run"
    changes = {
        "deepspeed__train_batch_size": 1,
        "training__steps": STEPS,
        "training__eval_interval": 0,
        "local_sgd": {"every": EVERY, "deadline_s": 5.0},
        "delay": [{"kind": "normal", "mean_s": 0.12, "std_s": 0.01}],
    }
    config = write_config(tmp_path / "run.json", prepare_text(tmp_path), run_dir, **changes)
    command = [
        sys.executable,
        "-m",
        "megasdc",
        "launch",
        "--replicas",
        "2",
        "--num-ranks",
        "1",
        "--config",
        str(config),
    ]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while len(_rounds(run_dir)) < 2:
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.1)
        (started,) = (run_dir / "replica_1" / "done").glob("*/started_*.json")
        os.kill(json.loads(started.read_text())["pid"], signal.SIGKILL)
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["rounds"] == STEPS // EVERY and [one["starts"] for one in found["replicas"]] == [1, 2]
    members = [one["members"] for one in _rounds(run_dir)]
    assert len(members) == STEPS // EVERY and [0, 1] in members[:2] and [0] in members and members[-1] == [0, 1], err
    ends = [events_of(run_dir / f"replica_{one}", "local_sgd", "round")[-1]["digest"] for one in (0, 1)]
    assert ends[0] == ends[1]
    assert "replica 1 was lost" in err and "goes on with replicas [0]" in err
