"""Does a launch of replicas go on without one that is lost, and take it back?"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from whole_runs import events_of, prepare_text, write_config

from megasdc.cli.config import check_config_file
from megasdc.metrics.writer import read_metrics
from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.launch.launch_verdict import read_met
from megasdc.ops.run_folder.summary import summarize_run

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]
EVERY, STEPS = 4, 160
NO_HOSTS = unavailable_reason()


def _rounds(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _command(config: Path, replicas: int = 2) -> list[str]:
    launch = [sys.executable, "-m", "megasdc", "launch", "--replicas", f"{replicas}", "--num-ranks", "1"]
    return [*launch, "--config", str(config)]


def _wait_for_rounds(process: subprocess.Popen[str], run_dir: Path, number: int) -> None:
    deadline = time.monotonic() + 120
    while len(_rounds(run_dir)) < number:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.1)


def _is_there(pid: int) -> bool:
    """Whether a process is, and is not only not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
    with subprocess.Popen(
        [*_command(config), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        _wait_for_rounds(process, run_dir, 2)
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
    back = events_of(run_dir / "replica_1", "local_sgd", "left_out")[-1]
    assert not back["wrong"] and members[back["round"] - 1] == [0], "the start that returns says which round it took"
    (skipped,) = events_of(run_dir / "replica_1", "local_sgd", "samples_skipped")
    assert skipped["samples"] == skipped["step"] == back["round"] * EVERY, "nothing was saved before it was lost"
    places = {row["step"]: row["data/stream_end"] for row in read_metrics(run_dir / "replica_1") if "train/loss" in row}
    assert places.keys() - set(range(skipped["step"])) and all(step == end for step, end in places.items())
    met = {one: [met.what for met in read_met(run_dir / f"replica_{one}")] for one in (0, 1)}
    assert "made without replica 1, late" in met[0][-1] and "made without this replica, late" in met[1][-1]
    assert "made without replica 1, late" in err, "the last lines of the others say it"
    assert "replica 1 was lost" in err and "goes on with replicas [0]" in err


def test_the_same_command_goes_on_after_a_stop_and_without_its_leader(tmp_path: Path) -> None:
    """SIGTERM to the command has both replicas save, one of which waits for the other, and it ends with 0; kill -9 of
    it alone ends them, and nothing is left behind. The same command goes on after either, with the weights and the
    losses of validation of a run that was never stopped.
    """
    data, digests = prepare_text(tmp_path), []
    for name, number in (("whole", None), ("stopped", signal.SIGTERM), ("stopped", signal.SIGKILL), ("stopped", None)):
        run_dir = tmp_path / name
        changes = {
            "deepspeed__train_batch_size": 1,
            "training__steps": 48,
            "training__eval_interval": EVERY,
            "checkpoint__interval": EVERY,
            "local_sgd": {"every": EVERY, "outer": "nesterov"},
            "delay": [{"kind": "slow_rank", "replica": 1, "delay_s": 0.5}] if number else [],
        }
        config = write_config(tmp_path / f"{name}.json", data, run_dir, **changes)
        with subprocess.Popen(_command(config), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            if number is not None:
                _wait_for_rounds(process, run_dir, len(_rounds(run_dir)) + 2)
                time.sleep(1.0)  # the first replica waits for the other one
                records = [one for k in (0, 1) for one in (run_dir / f"replica_{k}" / "done").glob("*/started_*.json")]
                pids = [json.loads(one.read_text())["pid"] for one in records]
                process.send_signal(number)
            out, _ = process.communicate(timeout=120)
        assert process.returncode == {None: 0, signal.SIGTERM: 0, signal.SIGKILL: -9}[number], out
        if number is signal.SIGTERM:
            assert "stopped by SIGTERM, all replicas saved and are done" in out
            assert re.search(r"replica 0: .* stopped at step \d+ of 48: the replicas were told to stop", out), out
        if number is not None:
            deadline = time.monotonic() + 60
            while any(map(_is_there, pids)):
                assert time.monotonic() < deadline, (number, pids)
                time.sleep(0.1)
            assert 0 < len(_rounds(run_dir)) < 48 // EVERY, "it was stopped before its end"
        else:
            ends = [events_of(run_dir / f"replica_{one}", "local_sgd", "round")[-1]["digest"] for one in (0, 1)]
            assert len(set(ends)) == 1
            digests += ends
    assert len(set(digests)) == 1, "stops change no bits"
    whole, stopped = (
        {row["step"]: row["eval/loss"] for row in read_metrics(tmp_path / name / "replica_0") if "eval/loss" in row}
        for name in ("whole", "stopped")
    )
    assert whole == stopped and sorted(whole) == list(range(EVERY, 49, EVERY))
    told = [events_of(run_dir / f"replica_{one}", "local_sgd", "round")[-1]["fetched_bytes"] for one in (0, 1)]
    rounds = check_config_file(config, ["megasdc.local_sgd.replicas=2"], 1).rounds
    assert rounds is not None and (rounds.rounds, rounds.fetched_bytes) == (48 // EVERY, sum(told))
    _is_refused_and_leaves_nothing(config, data, run_dir)


def _is_refused_and_leaves_nothing(config: Path, data: Path, run_dir: Path) -> None:
    """What the command knows it says once, and starts nothing; what a replica finds ends all. The run stays done."""

    def launched(*options: str, replicas: int = 2) -> tuple[int, str]:
        command = [*_command(config, replicas), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stderr

    before = sorted(run_dir.iterdir())
    code, said = launched(replicas=3)
    assert code == 72 and said.count("replicas: saved with 2, now 3") == 1 and "nothing was started" in said
    code, said = launched("--set", "megasdc.training.steps=7")
    assert code == 70 and said.count("steps: got 7") == 1 and "replica 0" not in said
    new = run_dir.parent / "new" / "run"
    for options in (["--dry-run"], ["--set", "megasdc.data.path=/nowhere"]):
        code, said = launched("--set", f"megasdc.logging.run_dir={new}", *options)
        assert code == (0 if options == ["--dry-run"] else 78) and not new.parent.exists(), said
    (data / "train.idx").write_bytes(b"")
    code, said = launched()
    assert code == 71 and "has not come to train (exit code 71): all end" in said
    assert sorted(run_dir.iterdir()) == before
    found = summarize_run(run_dir)
    assert found.finished and [one.state for one in found.of_replicas] == ["done", "done"] and found.failure is None
    assert "exit code 71" in found.refused


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.skipif(NO_HOSTS is not None, reason=str(NO_HOSTS))
def test_replicas_of_two_hosts_go_on_without_the_host_that_is_lost(tmp_path: Path, programs: Path) -> None:
    """Each host has a replica: both end with the same weights, and one goes on where the other's host is lost."""
    data = prepare_text(tmp_path)
    changes = {
        "deepspeed__train_batch_size": 1,
        "training__eval_interval": 0,
        "local_sgd": {"every": EVERY, "deadline_s": 5.0},
        "delay": [{"kind": "normal", "mean_s": 0.12, "std_s": 0.01}],
    }
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 2, env=env) as hosts:

        def argv(config: Path) -> list[str]:
            launch = [str(programs / "python"), "-m", "megasdc", "launch", "--replicas", "2", "--hostfile"]
            return [*launch, str(hosts.hostfile()), "--config", str(config)]

        clean = write_config(tmp_path / "clean.json", data, tmp_path / "clean", training__steps=16, **changes)
        done = hosts.run("node1", argv(clean), cwd=str(tmp_path), timeout_s=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [one["members"] for one in _rounds(tmp_path / "clean")] == [[0, 1]] * 4
        ends = [events_of(tmp_path / "clean" / f"replica_{one}", "local_sgd", "round")[-1]["digest"] for one in (0, 1)]
        assert ends[0] == ends[1]
        lost = write_config(tmp_path / "lost.json", data, tmp_path / "lost", training__steps=STEPS, **changes)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        launch = hosts.popen("node1", argv(lost), cwd=str(tmp_path), **pipes)
        _wait_for_rounds(launch, tmp_path / "lost", 3)
        hosts.power_off("node2")
        said, _ = launch.communicate(timeout=200)
    assert launch.returncode == 78, said
    members = [one["members"] for one in _rounds(tmp_path / "lost")]
    assert len(members) == STEPS // EVERY and members[0] == [0, 1] and members[-1] == [0], said
