"""Where ranks are is read from what agents write: the newest description, its age, what a sign of life says."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megasdc.ops.health.hosts import LAST_BYTES, LOST_S, FileClock, HostPosition, last_line, last_step_seen, read_hosts

NAMES = {0: "node1", 1: "node1", 2: "node2"}


def line(*ranks: int, run: str = "abc", **changes: Any) -> dict[str, Any]:
    """What an agent writes of its ranks; its clocks are of no use to anyone else."""
    own = {"step": 7, "micro_batch": -1, "phase": "reduction", "stuck_s": 2.0, "process": "running"}
    of_ranks = [{"rank": rank, **own, **changes} for rank in ranks]
    return {"run": run, "time": 1e9, "monotonic": 5.0, "note": "", "ranks": of_ranks}


def put(path: Path, content: Any, age_s: float = 0.0) -> None:
    """Write a file of the folder of health, as if so long ago."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    os.utime(path, (time.time() - age_s,) * 2)


def read(run: Path) -> tuple[tuple[HostPosition, ...], list[str]]:
    return read_hosts(run, FileClock(run), NAMES)


def test_the_newest_description_counts_with_its_age(tmp_path: Path) -> None:
    """A fresh ``.now`` before the last line; an old one not; seconds in a phase go on with the age of the file."""
    health = tmp_path / "health"
    put(health / "node_00000.jsonl", json.dumps(line(0, 1)) + "\n" + json.dumps(line(0, 1, step=8)) + "\n", age_s=6)
    (host,), notes = read(tmp_path)
    assert notes == [] and (host.name, host.state, host.node) == ("node1", "watched", 0)
    assert host.age_s == pytest.approx(6, abs=1) and [one.step for one in host.ranks] == [8, 8]
    assert host.ranks[0].in_phase_s == pytest.approx(8, abs=1) and host.ranks[0].micro_batch is None
    put(health / "node_00000.now", line(0, 1, step=9, micro_batch=3), age_s=1)
    (host,), _ = read(tmp_path)
    assert host.age_s == pytest.approx(1, abs=1) and (host.ranks[1].step, host.ranks[1].micro_batch) == (9, 3)
    put(health / "node_00000.now", line(0, 1, step=1), age_s=12)
    assert read(tmp_path)[0][0].ranks[0].step == 8, "an agent that was killed left it"


@pytest.mark.parametrize(
    ("sign", "sign_age_s", "age_s", "state", "in_phase_s"),
    [
        ({"ended": False, "stuck": False}, 1, 5, "watched", 7),
        ({"ended": False, "stuck": True}, 1, 5, "stuck", 7),
        ({"ended": True, "stuck": False}, 400, 400, "ended", 2),
        ({"ended": False, "stuck": False}, LOST_S + 5, 30, "silent", 2),
        ({"ended": True, "stuck": False, "run": "before"}, 1, 5, "watched", 7),
        (None, 0, 30, "silent", 2),
    ],
)
def test_a_sign_of_life_says_what_a_host_does(
    sign: dict[str, Any] | None, sign_age_s: float, age_s: float, state: str, in_phase_s: float, tmp_path: Path
) -> None:
    """Stuck, ended, or silent; seconds go on only while somebody is there to see them."""
    put(tmp_path / "health" / "node_00000.jsonl", line(0), age_s)
    if sign is not None:
        put(tmp_path / "health" / "node_00000.status", {"run": "abc", **sign}, sign_age_s)
    (host,), _ = read(tmp_path)
    assert host.state == state and host.ranks[0].in_phase_s == pytest.approx(in_phase_s, abs=1)


def test_the_last_step_of_a_launch_is_known_once_its_agents_have_written_it(tmp_path: Path) -> None:
    """They are waited for, but not one that is silent; another launch, or one without a name, has none."""
    path = tmp_path / "health" / "node_00000.jsonl"
    put(path, {**line(0), "launch": "l"})
    assert last_step_seen(tmp_path, "l") == last_step_seen(tmp_path) == 6 and last_step_seen(tmp_path, "k") == 0
    put(tmp_path / "later", {**line(0, step=9, process="gone"), "launch": "l"})
    ends = threading.Timer(0.2, os.replace, (tmp_path / "later", path))
    ends.start()
    assert last_step_seen(tmp_path, "l", 60.0) == 8
    ends.join()
    put(path, {**line(0), "launch": "l"}, LOST_S + 5)
    assert last_step_seen(tmp_path, "l", 60.0) == 6
    for other in ({}, {"launch": None}, {"launch": 7}):
        put(path, {**line(0), **other})
        assert last_step_seen(tmp_path, "l") == 0 and last_step_seen(tmp_path) == 6


def test_hosts_of_an_earlier_start_are_left_out_and_counted(tmp_path: Path) -> None:
    """Of several starts the newest; what is damaged is told, and the rest is shown."""
    health = tmp_path / "health"
    put(health / "node_00000.jsonl", line(0, 1, run="new"), 3)
    put(health / "node_00001.jsonl", line(2, run="old"), 90)
    put(health / "node_00002.jsonl", "{}\n")
    hosts, notes = read(tmp_path)
    assert [one.name for one in hosts] == ["node1"]
    assert len(notes) == 2 and "node_00002 is left out" in notes[0] and notes[1].startswith("1 host of an earlier")


def test_ranks_that_are_gone_end_their_host(tmp_path: Path) -> None:
    """Also where the agent was killed before it could say so."""
    put(tmp_path / "health" / "node_00000.jsonl", line(0, 1, process="gone"), 2)
    assert read(tmp_path)[0][0].state == "ended"


def test_the_last_line_is_found_however_long(tmp_path: Path) -> None:
    """Of a file of many lines, of one that is longer than what is read at first, and not the torn one after it."""
    path = tmp_path / "lines"
    for long in (10, LAST_BYTES * 3):
        path.write_bytes(b"first\n" * 50_000 + b"x" * long + b"\n" + b"torn")
        assert last_line(path) == b"x" * long
    path.write_bytes(b"torn")
    assert last_line(path) == b""


def test_devices_are_taken_as_they_come(tmp_path: Path) -> None:
    """With what is known of them; none where nobody has looked."""
    listed = [{"name": "H100 (GPU-1)", "verdict": "unfit", "text": "XID 79", "temperature_c": 80}]
    put(tmp_path / "health" / "node_00000.now", {**line(0), "devices": listed})
    (host,), _ = read(tmp_path)
    assert host.devices == tuple(listed)


def test_ages_are_by_the_clock_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose clock is wrong by an hour sees the same ages, and leaves no file behind."""
    put(tmp_path / "health" / "node_00000.jsonl", line(0), 5)
    right = time.time()
    monkeypatch.setattr(time, "time", lambda: right + 3600)
    clock = FileClock(tmp_path / "health")
    assert clock.age_s(tmp_path / "health" / "node_00000.jsonl") == pytest.approx(5, abs=1) and not clock.is_local
    assert clock.age_s(tmp_path / "health" / "nothing") is None
    assert [path.name for path in (tmp_path / "health").iterdir()] == ["node_00000.jsonl"]
    assert FileClock(tmp_path / "nowhere").is_local


def test_a_number_that_nothing_has_leaves_its_host_out(tmp_path: Path) -> None:
    """As any other that is none."""
    (tmp_path / "health").mkdir()
    rank = {"rank": 0, "step": 1, "micro_batch": math.inf, "phase": "forward", "stuck_s": 1.0, "process": "running"}
    (tmp_path / "health" / "node_00000.now").write_text(json.dumps({"run": "r", "ranks": [rank]}))
    hosts, notes = read_hosts(tmp_path, FileClock(tmp_path), {})
    assert not hosts and "health/node_00000 is left out: OverflowError" in notes[0]
