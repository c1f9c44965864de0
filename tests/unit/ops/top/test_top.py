"""The live view of a run: what its folder says, on a terminal of any size, and again when more was written."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_folder import add_hang, add_incident, losses, write_replicas, write_run
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import DataError, MegasdcError
from megasdc.events import EventLog
from megasdc.metrics.writer import MetricsWriter, cut_back, set_metrics_aside
from megasdc.ops.health.hosts import FileClock
from megasdc.ops.health.shared_folder_heartbeat import LOST_S
from megasdc.ops.run_folder.record import load_run
from megasdc.ops.run_folder.status import SILENT_S, status_of
from megasdc.ops.top.command import wait_for_run
from megasdc.ops.top.replicas import watcher_of
from megasdc.ops.top.screen import Screen
from megasdc.ops.top.view import RunFollower, RunView, RunWatcher

WATCHED = ("megasdc.health.enabled=true",)


def add_host(
    folder: Path, node: int, ranks: Sequence[int], *, sign: dict[str, Any] | None = None, age_s: float = 0.5, **of: Any
) -> None:
    """Write what an agent writes of its ranks; ``of``: what differs from a forward pass of step 21."""
    own = {"step": 21, "micro_batch": 1, "phase": "forward", "stuck_s": 0.25, "process": "running", **of}
    content = {"run": "abc", "time": 0.0, "note": "", "ranks": [{"rank": rank, **own} for rank in ranks]}
    files = {"jsonl": content, "status": {"run": "abc", "time": 0.0, "ended": False, "stuck": False, **(sign or {})}}
    for ending, value in files.items():
        path = folder / "health" / f"node_{node:05d}.{ending}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value) + "\n")
        os.utime(path, (time.time() - age_s,) * 2)


def shown(view: RunView, width: int = 100, height: int | None = None) -> str:
    """What a terminal of this size shows."""
    console = Console(width=width, height=height or 25, file=io.StringIO(), color_system=None)
    console.print(Screen(view, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def age(folder: Path, seconds: float) -> None:
    """Let metrics and events be as old."""
    for path in (folder / "metrics.jsonl", *(folder / "events").iterdir()):
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_is_shown_rank_by_rank(tmp_path: Path) -> None:
    """State, progress, a row a rank with its host, who is slow, devices, incidents, events; the same as JSON."""
    folder = write_run(tmp_path / "run", losses(20), planned=60, ended=False, settings=WATCHED)
    add_host(folder, 0, [0, 1], process="stopped", stuck_s=40.0)
    add_host(folder, 1, [2, 3], micro_batch=-1, phase="receive activation")
    suspects = [{"host": "node 1", "ranks": [3], "ratio": 1.84, "since_step": 12}]
    (folder / "health" / "suspects.json").write_text(json.dumps({"suspects": suspects}))
    now = json.loads((folder / "health" / "node_00001.jsonl").read_text())
    devices = [{"name": "GPU-7", "verdict": "unfit", "text": "XID 79"}, {"name": "GPU-8", "verdict": "fit"}]
    (folder / "health" / "node_00001.now").write_text(json.dumps({**now, "devices": devices}))
    add_incident(folder, 20)
    hang = add_hang(folder, 10)
    view = RunWatcher(folder).read()
    assert (view.state, view.over, view.step, view.planned) == ("running", False, 20, 60)
    assert view.eta_s is not None and view.loss == losses(20)[-1]
    text = shown(view)
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:4] == ["1", "21", "1", "forward"] and row[-1] == "stopped" for row in rows)
    assert "node 1     2    21      -  receive activation" in text and "1.84 times as long" in text
    assert "slow: node 1, ranks 3: 1.84 times as long as their peers, since step 12" in text
    assert (
        "devices and hosts: 1 unfit, 1 fit" in text and "node 1 GPU-7: unfit, XID 79" in text and "GPU-8:" not in text
    )
    assert "incidents: 1 case of corruption, 1 hang\n" in text and str(hang) in "".join(text.split("\n"))
    assert "save checkpoint step 20" in text and "running, step 20 of 60" in text
    said = json.loads(CliRunner().invoke(app, ["top", str(folder), "--json"]).stdout)
    assert [one["rank"] for host in said["hosts"] for one in host["ranks"]] == [0, 1, 2, 3]
    assert said["slow"] == suspects and said["last_incident"]["path"] == str(hang)
    once = CliRunner().invoke(app, ["top", str(folder)])
    assert once.exit_code == 0 and "receive activation" in once.stdout, "no terminal: once"


def test_replicas_of_local_sgd_are_shown_together(tmp_path: Path) -> None:
    """The current round, members, who was left out; each replica with its hosts; of one alone the rounds, too."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rounds.jsonl").touch()
    starting = watcher_of(folder)
    assert starting.read().state == "starting" and "no replica has begun yet" in shown(starting.read(), 160)
    (folder / "rounds.jsonl").unlink()
    rounds = write_replicas(folder)
    add_host(folder / "replica_1", 0, [0, 1], phase="save")
    view = starting.read()
    assert [one.state for one in view.of_replicas] == ["done", "running"]
    assert (view.state, view.over) == ("running", False)
    assert view.loss == (losses(30, seed=0)[-1] + losses(30, seed=1)[-1]) / 2 and view.tokens_per_s == 2 * 1030.0
    text = shown(view, width=160)
    assert "rounds: 6 of 6, the last of replicas 0-1" in text and "save" in text
    assert "left out: replica 1, round 2, wrong: its weights are not finite; it returned in round 3" in text
    assert "left out: replica 1, rounds 4 to 5, late" in text and "replica_0  done" in text
    assert json.loads(json.dumps(view.as_dict()))["rounds"]["members"] == [0, 1]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(one.as_dict()) + "\n" for one in rounds[:5]))
    alone = RunWatcher(folder / "replica_0").read()
    assert alone.rounds is not None and alone.rounds.members == (0,) and not alone.of_replicas
    assert "late, or not there; it has not returned" in shown(alone, width=160)
    assert RunWatcher(write_run(tmp_path / "other", losses(3))).read().rounds is None
    result = CliRunner().invoke(app, ["top", str(folder), "--once"])
    assert result.exit_code == 0 and "rounds: 5 of 6" in result.stdout


def test_slow_links_are_those_of_this_start_that_are_still_measured(tmp_path: Path) -> None:
    """Until they recover, are measured no more, or rank 0 starts again."""
    folder = write_run(tmp_path / "run", losses(20), planned=60, ended=False)
    pairs = [{"place": place, "kinds": ["loss"], "text": "bad"} for place in ("a - b", "b -> c", "c - d")]

    def shown_after(kind: str, name: str, **fields: Any) -> list[str]:
        log = EventLog(folder, 0)
        log.emit(kind, name, step=20, **fields)
        log.close()
        return [*RunWatcher(folder).read().slow_links]

    assert shown_after("health", "slow_link", place="b", hosts=["a", "b", "c", "d"], pairs=pairs) == [
        "a - b",
        "b -> c",
        "c - d",
    ]
    assert shown_after("health", "link_recovered", place="a - b", hosts=["a", "b"]) == ["b -> c", "c - d"]
    assert shown_after("health", "link_unmeasured", hosts=["c", "b"], problem="gone") == ["c - d"]
    assert shown_after("start", "run", world_size=4) == []


@pytest.mark.parametrize("height", [12, 24, 60])
@pytest.mark.parametrize("width", [60, 160])
def test_nothing_is_cut_off_without_a_word(height: int, width: int, tmp_path: Path) -> None:
    """Ranks that do not fit become a row a host, with the one to look at; hosts that do not fit are counted."""
    folder = write_run(tmp_path / "run", losses(20), planned=60, ended=False, settings=WATCHED)
    for node in range(20):
        add_host(folder, node, range(8 * node, 8 * node + 8))
    add_host(folder, 17, range(136, 144), stuck_s=90.0)
    text = shown(RunWatcher(folder).read(), width, height)
    lines = text.splitlines()
    assert len(lines) <= height
    rows = [line for line in lines if line.startswith(("node ", socket.gethostname()))]
    left = [int(line.split()[0]) for line in lines if "more hosts are not shown" in line]
    assert len(rows) + sum(left) == 20 and rows[0].startswith("node 17"), "the one to look at is the first"
    assert "160 ranks do not fit" in text.replace("\n", " ") and "136" in rows[0]
    assert shown(RunWatcher(folder).read(), width).count("forward") == 160, "--once shows all"


def test_a_run_that_is_not_watched_shows_progress_and_how_to_watch_it(tmp_path: Path) -> None:
    """Without health: loss, speed, time left, events, and the setting that shows more; ended, it is over."""
    folder = write_run(tmp_path / "run", losses(20), planned=60, ended=False)
    view = RunWatcher(folder).read()
    assert view.state == "running" and view.eta_s is not None and view.hosts == ()
    assert "megasdc.health.enabled=true" in shown(view) and "1,020 tokens/s" in shown(view)
    log = EventLog(folder, 0)
    log.emit("end", "run", step=20, reason="stopped on request")
    log.close()
    view = RunWatcher(folder).read()
    assert view.state == "stopped" and view.over and "stopped on request" in shown(view)


@pytest.mark.parametrize(
    ("signs", "process", "age_s", "quiet_s", "state", "over"),
    [
        (({}, {}), "running", 1, 300, "running", False),
        (({"stuck": True}, {}), "running", 1, 30, "running", False),
        (({"stuck": True}, {"stuck": True}), "running", 1, 30, "stuck", False),
        (({"ended": True}, {"ended": True}), "gone", 2, 2, "ending", False),
        (({"ended": True}, {"ended": True}), "gone", 60, LOST_S + 46, "gone", True),
        (({"ended": True}, {"ended": True}), "gone", 900, 10, "running", False),
        (({}, {}), "running", LOST_S + 200, 300, "silent", False),
    ],
)
def test_its_agents_tell_the_state_of_a_run(
    signs: tuple[dict[str, Any], ...],
    process: str,
    age_s: float,
    quiet_s: float,
    state: str,
    over: bool,
    tmp_path: Path,
) -> None:
    """Watched hosts show that it runs; ranks that have ended without a record, that it was killed; none is silent."""
    folder = write_run(tmp_path / "run", losses(20), planned=60, ended=False, settings=WATCHED)
    for node, sign in enumerate(signs):
        add_host(folder, node, [node], sign=sign, age_s=age_s, process=process)
    age(folder, quiet_s)
    view = RunWatcher(folder).read()
    assert (view.state, view.over) == (state, over)
    assert "no sign for" in shown(view) or state != "silent"


def test_a_follower_reads_what_is_new_and_forgets_what_was_cut(tmp_path: Path) -> None:
    """New lines, torn ones once they are whole; a resume that cuts metrics back, a run anew in the same folder."""
    folder = write_run(tmp_path / "run", losses(20), planned=60, ended=False)
    follower = RunFollower(folder, FileClock(folder))
    assert follower.read().run.last_step == 20
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('broken\n{"step": 21, "time": 1.0, "train/l')
        file.flush()
        look = follower.read()
        assert look.run.last_step == 20 and look.run.notes == ("metrics.jsonl: 1 damaged lines are left out",)
        file.write('oss": 2.5}\n')
    assert follower.read().run.series["train/loss"].at(21) == 2.5
    cut_back(folder, 10)
    assert follower.read().run.series["train/loss"].steps[-1] == 10
    set_metrics_aside(folder)
    log, writer = EventLog(folder, 0), MetricsWriter(folder)
    log.emit("start", "run", world_size=2)
    log.emit("start", "metrics_set_aside")
    writer.write(1, {"train/loss": 7.0})
    for one in (log, writer):
        one.close()
    run = follower.read().run
    assert run.last_step == load_run(folder).last_step == 1 and run.of("save") == []
    assert status_of(replace(run, quiet_s=1.0)) == status_of(replace(load_run(folder), quiet_s=1.0))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """Nothing there, no folder, or a study: exit code 71, and what to give instead."""
    (tmp_path / "replicas" / "study").mkdir(parents=True)
    for name, why in ((".", "holds no run"), ("no", "is no folder"), ("replicas", "replica_K")):
        result = CliRunner().invoke(app, ["top", str(tmp_path / name), "--once"])
        assert isinstance(result.exception, DataError) and why in str(result.exception)


@pytest.mark.parametrize("command", [["summary"], ["top", "--once"]])
def test_a_run_folder_cannot_control_the_terminal(tmp_path: Path, command: list[str]) -> None:
    """Escape sequences in names, events and errors of a folder from anybody are shown, not sent."""
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\ud800evil"
    folder = write_run(tmp_path / "run", losses(20), planned=60, ended=False, settings=WATCHED)
    add_host(folder, 0, [0, 1], phase=hostile, process=hostile)
    events = EventLog(folder, 0)
    events.emit("warning", hostile, problem=hostile, message=hostile)
    events.emit("end", "failed", exit_code=77, error=hostile, message=hostile, process_started=0.0)
    events.close()
    shown = CliRunner().invoke(app, [*command, str(folder)])
    assert shown.exit_code == 0, shown.output
    assert not set("\x1b\x07\x9b\u202e\ud800") & set(shown.output) and r"\x1b]0;owned" in shown.output


@pytest.mark.parametrize("command", [["summary"], ["top", "--once"]])
def test_no_file_of_a_run_ends_a_command_with_a_traceback(tmp_path: Path, command: list[str]) -> None:
    """JSON that is nested for ever, values of other types: the line or the file is left out, or refused by its name."""
    folder = write_run(tmp_path / "run", losses(20), planned=60, ended=False, settings=WATCHED)
    add_host(folder, 0, [0, 1])
    add_hang(folder, 10)
    suspect = {"host": "node 1", "ranks": [3], "ratio": None, "since_step": 12}
    (folder / "health" / "suspects.json").write_text(json.dumps({"suspects": [suspect]}))
    (folder / "lock.json").write_text("{}")
    event = json.loads((folder / "events" / "rank_00000.jsonl").read_text().splitlines()[0])
    with open(folder / "events" / "rank_00000.jsonl", "a") as events:
        for change in ({"attempt": "7"}, {"monotonic": "x"}, {"boot": {}}, {"host": None}, {"step": [1]}):
            events.write(json.dumps({**event, **change}) + "\n")
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".status")]
    assert len(files) >= 8
    for path in files:
        content = path.read_text()
        path.write_text(("" if path.suffix == ".json" else content) + "[" * 100_000 + "\n")
        done = CliRunner().invoke(app, [*command, str(folder)])
        assert done.exception is None or isinstance(done.exception, SystemExit | MegasdcError), (path, done.exception)
        path.write_text(content)


@pytest.mark.parametrize("sign", ["health/front_20261130-001910-a54b03.json", "done/20261130-001910-a54b03/rank_0"])
def test_a_run_that_is_starting_again_is_not_over(sign: str, tmp_path: Path) -> None:
    """From the launch's first file on until a rank has told of it; not for ever, where that launch was killed."""
    folder = write_run(tmp_path / "run", losses(20), planned=20)
    assert RunWatcher(folder).read().state == "done"
    path = folder / sign
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    view = RunWatcher(folder).read()
    assert (view.state, view.over) == ("starting", False)
    assert view.text.startswith("starting; of the start before: done")
    for one in (path, path.parent):
        os.utime(one, (time.time() - 2 * SILENT_S,) * 2)
    assert RunWatcher(folder).read().over


def test_a_run_that_is_being_started_is_waited_for(tmp_path: Path) -> None:
    """Its folder comes after the checks of hosts; one that stays empty is refused after the wait, others at once."""
    console = Console(file=io.StringIO())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_run, tmp_path / "run", console, 30.0, 0.01)
        (tmp_path / "run" / "health").mkdir(parents=True)
        (tmp_path / "run" / "health" / "front_a.json").write_text("{}")
        view = waiting.result().read()
    assert (view.state, view.over) == ("starting", False)
    for folder, wait_s in ((tmp_path / "none", 0.02), (tmp_path, 30.0)):
        with pytest.raises(DataError, match="holds no run"):
            wait_for_run(folder, console, wait_s, 0.01)
    assert isinstance(console.file, io.StringIO) and "waiting up to" in console.file.getvalue()
