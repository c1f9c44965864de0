"""A run that is stuck is named and ended within seconds; health changes no bit, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from harness import run_distributed
from terminal import Terminal
from typer.testing import CliRunner
from whole_runs import events_of, failure_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.cli import app
from megasdc.lab.report.run_pages.command import write_report
from megasdc.ops.health.phases import COLLECTIVE
from megasdc.ops.top.view import RunWatcher

pytestmark = pytest.mark.distributed

QUICK = {"health__enabled": True, "health__hang_floor_s": 2.0, "health__slow_floor_s": 6.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def train_and_leave(config: str) -> NoReturn:
    """Body of a rank that its agent can end, as the entry script can be."""
    from megasdc.pretrain import pretrain

    code, _ = pretrain(config, [], (), lambda code, _: os._exit(code))
    os._exit(code)


def agents_of(run_dir: Path) -> list[psutil.Process]:
    """Agents of a run that are still there."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "megasdc.ops.health.agent" in words and str(run_dir) in words[-1]:
            found.append(process)
    return found


def wait_for_agents(run_dir: Path) -> None:
    """Until none is left, at most 20 s."""
    until = time.monotonic() + 20
    while agents_of(run_dir):
        assert time.monotonic() < until, "an agent has not ended"
        time.sleep(0.1)


def records_of(run: str) -> list[Path]:
    """What lies in shared memory of a start of a run."""
    return list(Path("/dev/shm").glob(f"megasdc-*-{run}-*"))


def test_with_health_a_run_has_the_same_bits_and_nothing_stays(tmp_path: Path, data: Path) -> None:
    """Losses and checkpoint are those without; the agent wrote where ranks were, and is gone with its records."""
    plain = write_config(tmp_path / "plain.json", data, tmp_path / "plain")
    watched = write_config(tmp_path / "watched.json", data, tmp_path / "watched", health__enabled=True)
    for config in (plain, watched):
        assert [code for code, _ in train_run(config, 4, "megasdc.parallel.pipeline=2")] == [0] * 4
    assert metrics_of(tmp_path / "plain") == metrics_of(tmp_path / "watched")
    name = "checkpoints/step_00000006"
    assert state_of(tmp_path / "plain" / name) == state_of(tmp_path / "watched" / name)
    wait_for_agents(tmp_path / "watched")
    said = json.loads(CliRunner().invoke(app, ["top", str(tmp_path / "watched"), "--once", "--json"]).stdout)
    assert (said["state"], said["over"], said["step"], said["eta_s"]) == ("done", True, 6, None)
    assert [(one["rank"], one["phase"]) for one in said["hosts"][0]["ranks"]] == [(rank, "done") for rank in range(4)]
    health = tmp_path / "watched" / "health"
    lines = [json.loads(line) for line in (health / "node_00000.jsonl").read_text().splitlines()]
    assert [one["phase"] for one in lines[-1]["ranks"]] == ["done"] * 4
    assert {one["step"] for one in lines[-1]["ranks"]} == {7}, "the step that would have followed"
    assert any(one.get("load_per_cpu", -1) >= 0 for one in lines[-1]["devices"])
    durations = json.loads((health / "durations.json").read_text())
    assert sum(durations["FORWARD"]) == 4 * 6 * 2, "four ranks, six steps, two micro-batches; none of the evaluations"
    assert (
        sum(durations["EVALUATION"]) == 4 * 2 and sum(durations["SAVE"]) == 4 and sum(durations["SEND_ACTIVATION"]) > 0
    )
    assert (health / "agent_00000.log").read_text() == "" and not (tmp_path / "plain" / "health").exists()
    assert records_of(lines[0]["run"]) == []


@pytest.mark.parametrize(
    ("fault", "exit_code", "kind"),
    [
        ({"kind": "hang", "rank": 2, "phase": "forward"}, 75, "hang/behind"),
        ({"kind": "hang", "rank": 1, "phase": "update"}, 75, "hang/behind"),
        ({"kind": "sigstop", "rank": 3, "phase": "backward"}, -9, "hang/stopped"),
    ],
)
def test_a_stuck_rank_is_named_and_the_run_ends(
    fault: dict[str, Any], exit_code: int, kind: str, tmp_path: Path, data: Path
) -> None:
    """Two stages, two replicas: the incident names the rank, what the others wait for, and their stacks."""
    run_dir, rank = tmp_path / "run", fault["rank"]
    faults = [{**fault, "steps": [5, 5]}]
    config = write_config(
        *(tmp_path / "c.json", data, run_dir),
        training__steps=50,
        parallel__pipeline=2,
        process_faults=faults,
        health__alert_command=["dd", f"of={tmp_path / 'alert'}"],
        **QUICK,
    )
    began = time.monotonic()
    run_distributed(train_and_leave, 4, str(config), init=False, expect_exit={rank: exit_code}, timeout_s=180)
    assert time.monotonic() - began < 100
    wait_for_agents(run_dir)
    (path,) = (run_dir / "health" / "incidents").glob("*.json")
    assert (tmp_path / "alert").read_text() == path.read_text()
    incident = json.loads(path.read_text())
    assert (incident["kind"], incident["ranks"]) == (kind, [rank]), incident["message"]
    assert incident["hosts"] == [incident["states"][rank]["host"]]
    assert len(incident["waits"]) == 4 and incident["stacks"]
    for one in incident["states"]:
        has_collectives = one["phase"] in COLLECTIVE
        assert (bool(one["group"]), one["sequence"] > 5) == (has_collectives, has_collectives)
    assert [one["host"] for one in incident["devices"]] == incident["hosts"], "what telemetry read of this host"
    if kind == "hang/behind":
        assert "process.py" in incident["message"], "where it hangs, in the code of the fault"
    events = [json.loads(line) for line in (run_dir / "events" / "rank_00000.jsonl").read_text().splitlines()]
    ends = [one for one in events if one["kind"] == "end"]
    assert ends and ends[-1]["fields"]["exit_code"] in (75, 79)
    assert records_of(incident["run"]) == []
    failure = failure_of(run_dir)
    assert failure.incident == str(path) and failure.suspects[0].startswith(f"rank {rank} on ")
    written = write_report([run_dir])
    assert written.page.summary["hangs"] == [str(path)] and "Hangs" in {one.heading for one in written.page.sections}


def test_a_run_is_watched_in_a_terminal_until_it_has_ended(tmp_path: Path, data: Path) -> None:
    """A real terminal shows steps counting, then each rank and its phase, then how the run ended, and gives it back."""
    run_dir, faults = tmp_path / "run", [{"kind": "hang", "rank": 1, "phase": "forward", "steps": [30, 30]}]
    (run_dir / "events").mkdir(parents=True)  # of a run that is about to start
    config = write_config(tmp_path / "c.json", data, run_dir, training__steps=50, process_faults=faults, **QUICK)
    terminal = Terminal(["top", str(run_dir), "--interval", "0.1"])
    terminal.wait_for("starting, no step was reported yet")
    run_distributed(train_and_leave, 2, str(config), init=False, expect_exit={1: 75}, timeout_s=180)
    assert terminal.wait() == 0
    steps = [int(step) for step in re.findall(r"running, step (\d+) of 50", terminal.screens)]
    assert len(set(steps)) > 1 and steps == sorted(steps) and max(steps) == 29
    rows = re.findall(r"\b([01]) +(\d+) +(\d+|-)  ([a-z ]+?)  +", terminal.screens + terminal.after)
    assert {row[0] for row in rows} == {"0", "1"} and ("1", "30", "0", "forward") in rows
    assert "failed at step 29 of 50 with exit code 75" in terminal.after and "incidents: 1 hang\r" in terminal.after


def test_ranks_that_were_killed_are_shown_where_they_were(tmp_path: Path, data: Path) -> None:
    """Of a run whose ranks were all killed: gone, at which step, in which phase; nobody else recorded an end."""
    run_dir = tmp_path / "run"
    faults = [{"kind": "sigkill", "rank": rank, "phase": "backward", "steps": [4, 4]} for rank in range(2)]
    config = write_config(tmp_path / "c.json", data, run_dir, process_faults=faults, **QUICK)
    run_distributed(train_and_leave, 2, str(config), init=False, expect_exit={0: -9, 1: -9}, timeout_s=180)
    wait_for_agents(run_dir)
    for path in run_dir.rglob("*.*"):
        os.utime(path, (time.time() - 3600,) * 2)  # an hour later
    view = RunWatcher(run_dir).read()
    assert (view.state, view.over, view.step, view.eta_s) == ("gone", True, 3, None)
    (host,) = view.hosts
    assert host.state == "ended" and host.name == socket.gethostname()
    assert {(one.rank, one.step, one.phase, one.process) for one in host.ranks} == {
        (rank, 4, "backward", "gone") for rank in range(2)
    }


def test_a_run_whose_agent_cannot_start_goes_on_and_reports_it(tmp_path: Path, data: Path) -> None:
    """A file lies where the agent's folder would be: a warning and an event, and all steps are done."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "health").write_text("not a folder")
    config = write_config(tmp_path / "c.json", data, run_dir, health__enabled=True)
    assert [code for code, _ in train_run(config, 2)] == [0, 0]
    (event,) = events_of(run_dir, "health", "unwatched")
    assert event["rank"] == 0 and "could not be started" in event["problem"]
    assert metrics_of(run_dir)[-1]["step"] == 6


def test_a_killed_agent_is_started_again_and_the_run_goes_on(tmp_path: Path, data: Path) -> None:
    """Killed while a rank sleeps: an event tells it, the second agent watches to the end, and nothing stays."""
    run_dir = tmp_path / "run"
    slow = [{"kind": "slow", "factor": 200.0, "rank": 1, "steps": [2, 4], "phase": "forward"}]
    config = write_config(tmp_path / "c.json", data, run_dir, health__enabled=True, process_faults=slow)
    killed: list[int] = []

    def kill_agent() -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and not killed:
            for process in agents_of(run_dir):
                if (run_dir / "health" / "node_00000.now").exists():
                    process.kill()
                    killed.append(process.pid)
            time.sleep(0.1)

    killer = threading.Thread(target=kill_agent)
    killer.start()
    assert [code for code, _ in train_run(config, 2)] == [0, 0]
    killer.join()
    (event,) = events_of(run_dir, "health", "agent_restarted")
    assert event["rank"] == 0 and "had ended" in event["problem"]
    wait_for_agents(run_dir)
    lines = [json.loads(line) for line in (run_dir / "health" / "node_00000.jsonl").read_text().splitlines()]
    notes = [note for line in lines for note in line["note"].split("; ") if note and not note.startswith("host:")]
    assert notes == ["begins", "begins", "ends"], "besides verdicts on a host that does other work"
    assert records_of(lines[0]["run"]) == []
