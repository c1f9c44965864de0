"""What agents write and read in a run folder: signs of life, journal, and a disk that does not answer."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.ops.health import agent, shared_folder_heartbeat
from megasdc.ops.health import agent as journal
from megasdc.ops.health.agent import AgentLog, RetryingWorker
from megasdc.ops.health.shared_folder_heartbeat import OwnState, SharedFolderHeartbeat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The monotonic clock of board and journal, set by the test; the other clock jumps wildly."""
    found = SimpleNamespace(now=1000.0)
    wall = itertools.cycle([86_400.0, 0.0, 3.0e9])
    both = SimpleNamespace(monotonic=lambda: found.now, time=lambda: next(wall))
    monkeypatch.setattr(shared_folder_heartbeat, "time", both)
    monkeypatch.setattr(journal, "time", both)
    return found


def boards(folder: Path, number: int = 2) -> list[SharedFolderHeartbeat]:
    """Boards of all hosts of a run."""
    return [SharedFolderHeartbeat(folder, "r", node, number) for node in range(number)]


def report(node: int) -> OwnState:
    """State of a host that is stuck."""
    return OwnState({"run": "r", "states": [node], "stacks": {}, "devices": {}, "addresses": []})


def test_hosts_learn_of_each_other_by_the_folder(tmp_path: Path, clock: SimpleNamespace) -> None:
    """All are stuck once each has reported; what one reports the others read."""
    first, second = boards(tmp_path)
    first.own = report(0)
    for one in (second, first):
        one.exchange()
    assert not first.all_stuck(), "the other one moves"
    second.own = report(1)
    for one in (second, first):
        one.exchange()
    assert first.all_stuck() and [one["states"] for one in first.reports()] == [[0], [1]]
    second.own = OwnState()
    for one in (second, first):
        one.exchange()
    assert not first.all_stuck() and [one["states"] for one in first.reports()] == [[0]]
    second.own = OwnState(ended=True)
    for one in (second, first):
        one.exchange()
    assert first.all_stuck() and first.lost() == []


def test_a_host_is_lost_by_the_readers_clock(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Its sign has not changed for 15 s, whatever the time of day does; one that writes on is not lost."""
    first, second = boards(tmp_path)
    second.exchange()
    for _ in range(14):
        clock.now += 1
        first.exchange()
        second.exchange()
    assert first.lost() == [] and second.lost() == []
    for _ in range(20):
        clock.now += 1
        first.exchange()
    assert first.lost() == [1] and first.all_stuck()
    second.exchange()
    clock.now += shared_folder_heartbeat.SIGN_S
    first.exchange()
    assert first.lost() == []


def test_without_an_answer_of_the_folder_nothing_is_known_of_others(tmp_path: Path, clock: SimpleNamespace) -> None:
    """A disk that stalls: a host judges by its own ranks alone, and calls nobody lost."""
    first, second = boards(tmp_path)
    first.own = report(0)
    for one in (second, first):
        one.exchange()
    assert not first.all_stuck()
    clock.now += shared_folder_heartbeat.LOST_S + 1
    assert first.all_stuck() and first.lost() == [] and [one["states"] for one in first.reports()] == [[0]]


def test_signs_of_another_start_and_damaged_ones_are_not_read(tmp_path: Path, clock: SimpleNamespace) -> None:
    """They neither hold up a judgement nor count as lost."""
    (first, _) = boards(tmp_path)
    first.own = report(0)
    for text in ('{"run": "old", "number": 1, "ended": false, "stuck": false}', "{", "[]", ""):
        (tmp_path / "node_00001.status").write_text(text)
        first.exchange()
        assert first.all_stuck() and first.lost() == []


def test_a_journal_keeps_lines_that_cannot_be_written(tmp_path: Path, clock: SimpleNamespace) -> None:
    """They follow when the disk has room again; of too many the oldest are dropped, and counted."""
    health = tmp_path / "health"
    found = AgentLog(health, "node_00000", "r", "l")
    for number in range(journal.MAX_WAITING + 7):
        found.write([], note=str(number))
    with pytest.raises(OSError, match="No such file"):
        found.flush()
    health.mkdir()
    found.write([], note="last")
    found.flush()
    lines = [json.loads(line) for line in (health / "node_00000.jsonl").read_text().splitlines()]
    assert [line["note"] for line in lines[:2]] == ["8", "9"] and lines[-1]["note"] == "last"
    assert len(lines) == journal.MAX_WAITING and lines[-1]["dropped_lines"] == 7
    assert json.loads((health / "node_00000.now").read_text()) == lines[-1]
    found.close()
    found.flush()
    assert [path.name for path in health.iterdir()] == ["node_00000.jsonl"]


@pytest.mark.slow
def test_a_journal_of_a_week_stays_small(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60,480 lines, one each ten seconds: the file never exceeds its limit by more than a line."""
    monkeypatch.setattr(journal, "MAX_LINES_BYTES", 100_000)
    found, largest = AgentLog(tmp_path, "node_00000", "r", "l"), 0
    rank: dict[str, Any] = {"rank": 0, "step": 1, "phase": "forward"}
    for _ in range(60_480):
        clock.now += 10
        found.write([rank])
        if len(found._waiting) == 50:  # as many at once as a slow disk may leave
            found.flush()
            largest = max(largest, (tmp_path / "node_00000.jsonl").stat().st_size)
    assert 50_000 < largest < 100_000 + 50 * 200
    for line in (tmp_path / "node_00000.jsonl").read_text().splitlines():
        json.loads(line)


def test_work_that_blocks_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again, and its error is known; closing waits no longer than it may."""
    monkeypatch.setattr(agent, "POLL_S", 0.01)
    called, release = threading.Event(), threading.Event()
    rounds: list[int] = []

    def fail() -> None:
        rounds.append(1)
        raise OSError("disk is full")

    def block() -> None:
        if len(rounds) > 3:
            called.set()
            release.wait()

    found = RetryingWorker("disk", [fail, block])
    assert called.wait(5)
    assert found.problem == "disk is full" and len(rounds) >= 4
    assert not found.close(0.1)
    release.set()
    assert found.close(5)


def test_what_is_done_once_is_tried_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An incident is written once the disk has room again; an error that nobody expects ends no thread."""
    monkeypatch.setattr(agent, "POLL_S", 0.01)
    errors: list[Exception] = [OSError("no room"), RuntimeError("odd")]
    done = threading.Event()

    def write() -> None:
        if errors:
            raise errors.pop()
        done.set()

    found = RetryingWorker("disk", [])
    found.once(write)
    assert done.wait(5) and found.close(5) and found.problem == ""
