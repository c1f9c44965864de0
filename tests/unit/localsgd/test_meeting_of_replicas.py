"""Do replicas meet over real connections, and is each told what became of a round?"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megasdc.common.errors import LaunchError
from megasdc.common.wire import shut
from megasdc.localsgd.meeting import MeetingLine, MeetingServer
from megasdc.localsgd.round_clock import RoundWindow
from megasdc.localsgd.rounds import Meeting, Report
from megasdc.parallel.rendezvous import ROUNDS_VARIABLE

SECRET = b"x" * 32
LAST = 9
"""Round with which a run ends."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeetingServer]:
    """A meeting of three replicas."""
    found = MeetingServer(Meeting(3, None), 3, "127.0.0.1", SECRET, start_s=30.0)
    monkeypatch.setenv(ROUNDS_VARIABLE, f"127.0.0.1:{found.port}")
    yield found
    found.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Answers of calls that wait for each other."""
    answers: list[Any] = [None] * len(calls)

    def call(place: int) -> None:
        try:
            answers[place] = calls[place]()
        except Exception as error:
            answers[place] = error

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return answers


def report(line: MeetingLine, number: int = 1, **changes: Any) -> Callable[[], dict[str, Any]]:
    """A call that reports a round."""
    own = Report(number, 10, 2, 4, 1.0, True, "a")
    return lambda: line.report(Report(**{**vars(own), **changes}), is_last=number == LAST)


def test_training_begins_with_all_and_each_learns_of_its_round(server: MeetingServer) -> None:
    """One that joins seconds later is waited for; who is wrong is told so, also after the round was made."""
    lines = [MeetingLine(replica, SECRET) for replica in range(3)]

    def join_late() -> dict[str, Any]:
        time.sleep(1.5)
        return lines[2].join(0, "a", [("h", 2)])

    found = together(lambda: lines[0].join(0, "a", [("h", 0)]), lambda: lines[1].join(0, "a", [("h", 1)]), join_late)
    assert [one["goes_on"] for one in found] == [True] * 3
    wrong: list[dict[str, Any]] = []
    waits = threading.Thread(target=lambda: wrong.append(report(lines[1], finite=False)()))
    waits.start()
    time.sleep(0.3)
    members = together(report(lines[0]), report(lines[2]))
    assert [[one for one, _, _ in answer["members"]] for answer in members] == [[0, 2]] * 2
    made = together(lambda: lines[0].have(1, [0, 2], 30.0), lambda: lines[2].have(1, [0, 2], 30.0))
    without = {"left_out": {"1": "its weights are not finite"}, "absent": []}
    assert made == [{"members": [0, 2], "without": without}] * 2
    waits.join(10)
    assert wrong[0]["wrong"] and "not finite" in wrong[0]["left_out"] and wrong[0]["round"] == 1
    assert {replica for replica, _ in wrong[0]["sources"]} == {0, 2}
    lines[2].close()
    time.sleep(0.3)
    assert [one for one, _, _ in together(report(lines[0], 2), report(lines[1], 2))[0]["members"]] == [0, 1]


def test_a_round_of_which_nothing_can_be_used_ends_all(server: MeetingServer) -> None:
    """Every replica is told; and one without the secret, or the address, is refused with what to do."""
    lines = [MeetingLine(replica, SECRET) for replica in range(3)]
    together(*(lambda line=line: line.join(0, "a", []) for line in lines))
    for answer in together(*(report(line, finite=False) for line in lines)):
        assert answer["failed"].count("not finite") == 3 and answer["left_out"] == "its weights are not finite"
        assert answer["look"]["finite"] is False and len(answer["look"]["others"]) == 2
    with pytest.raises(LaunchError, match="megasdc launch --replicas"):
        MeetingLine(1, b"y" * 32)


def test_who_waits_when_all_are_told_to_stop_stops_there(server: MeetingServer) -> None:
    """Before training and within a round; the last round is made by those that are left."""
    line = MeetingLine(0, SECRET)
    joined: list[dict[str, Any]] = []
    waits = threading.Thread(target=lambda: joined.append(line.join(0, "a", [])))
    waits.start()
    time.sleep(0.3)
    assert not server.has_begun
    server.stop()
    waits.join(10)
    assert joined == [{"stopping": True}]

    other = MeetingServer(Meeting(3, None), 3, "127.0.0.1", SECRET, start_s=30.0)
    os.environ[ROUNDS_VARIABLE] = f"127.0.0.1:{other.port}"
    other.has_ended(2)
    lines = [MeetingLine(replica, SECRET) for replica in range(2)]
    found = together(*(lambda line=line: line.join(LAST - 2, "a", []) for line in lines))
    assert [one["goes_on"] for one in found] == [True] * 2 and other.has_begun, "the third is not waited for"
    asked = threading.Timer(0.5, lambda: lines[1].ask("stop"))
    asked.start()
    assert report(lines[0], LAST - 1)() == {"stopping": True}
    asked.join(10)
    assert report(lines[1], LAST - 1)() == {"stopping": True}
    other.close()

    last = MeetingServer(Meeting(2, None), 2, "127.0.0.1", SECRET, start_s=30.0)
    os.environ[ROUNDS_VARIABLE] = f"127.0.0.1:{last.port}"
    lines = [MeetingLine(replica, SECRET) for replica in range(2)]
    together(*(lambda line=line: line.join(LAST - 1, "a", []) for line in lines))
    last.stop()
    threading.Timer(0.5, lines[1].close).start()
    assert [one for one, _, _ in report(lines[0], LAST)()["members"]] == [0]
    assert lines[0].have(LAST, [0], 30.0)["members"] == [0] and lines[0].ask("done") == {}
    last.close()


def test_a_member_that_does_not_say_what_it_has_is_waited_for_no_longer_than_an_exchange_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The round is made of what the other one has; that member is told so when it says it."""
    server = MeetingServer(Meeting(2, None), 2, "127.0.0.1", SECRET, start_s=30.0)
    monkeypatch.setenv(ROUNDS_VARIABLE, f"127.0.0.1:{server.port}")
    lines = [MeetingLine(replica, SECRET) for replica in range(2)]
    together(*(lambda line=line: line.join(0, "a", []) for line in lines))
    assert len(together(*map(report, lines))[0]["members"]) == 2
    began = time.monotonic()
    assert lines[0].have(1, [0], 1.0)["members"] == [0]
    assert 0.9 < time.monotonic() - began < 10
    assert "could not fetch" in lines[1].have(1, [1], 1.0)["left_out"]
    server.close()


def test_the_others_go_on_where_the_only_member_of_a_round_is_lost(
    server: MeetingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has noticed that before it connects again; who was late for that round makes it."""
    monkeypatch.setattr(server._meeting, "_deadline_s", 0.5)
    lines = [MeetingLine(replica, SECRET) for replica in range(2)]
    server.has_ended(2)
    together(*(lambda line=line: line.join(0, "a", [("h", 0)]) for line in lines))
    assert [one for one, _, _ in report(lines[0])()["members"]] == [0]
    answers: list[dict[str, Any]] = []
    late = threading.Thread(target=lambda: answers.append(report(lines[1])()))
    late.start()
    time.sleep(0.3)
    assert not answers, "the round's members are fixed"
    again = MeetingLine(0, SECRET)
    late.join(10)
    with pytest.raises(LaunchError, match="has ended"):
        lines[0].ask("newest")
    assert [one for one, _, _ in answers[0]["members"]] == [1]
    assert lines[1].have(1, [1], 30.0)["members"] == [1]
    joined = again.join(0, "a", [("h", 0)])
    assert not joined["goes_on"] and [replica for replica, _ in joined["sources"]] == [1]


def test_what_a_replica_has_loaded_that_has_gone_before_training_does_not_count(server: MeetingServer) -> None:
    """Nobody could fetch it: the others begin with the newest that they have."""
    gone = MeetingLine(0, SECRET)
    waits = threading.Thread(target=lambda: together(lambda: gone.join(5, "b", [])))
    waits.start()
    while 0 not in server._loaded:
        time.sleep(0.01)
    server.has_ended(0)
    shut(gone._connection)
    while 0 in server._loaded:
        time.sleep(0.01)
    waits.join(10)
    lines = [MeetingLine(replica, SECRET) for replica in (1, 2)]
    joined = together(*(lambda line=line: line.join(3, "a", []) for line in lines))
    assert [(one["goes_on"], one["round"]) for one in joined] == [(True, 3)] * 2


def test_who_waits_shows_that_it_is_not_stuck(server: MeetingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, until the answer is there."""
    monkeypatch.setattr("megasdc.localsgd.meeting.WAITS_S", 0.1)
    waits: list[int] = []
    line = MeetingLine(0, SECRET, lambda: waits.append(1))
    others = [threading.Timer(1.0, MeetingLine(one, SECRET).join, (0, "a", [])) for one in (1, 2)]
    for one in others:
        one.start()
    assert line.join(0, "a", [])["goes_on"] and len(waits) >= 5


def test_a_threshold_that_was_chosen_before_is_every_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not measured once more; a replica that has lost it is told."""
    server = MeetingServer(Meeting(2, None, window=RoundWindow(3, 0.1)), 2, "127.0.0.1", SECRET, start_s=30.0)
    monkeypatch.setenv(ROUNDS_VARIABLE, f"127.0.0.1:{server.port}")
    lines = [MeetingLine(replica, SECRET) for replica in range(2)]
    joined = together(lambda: lines[0].join(3, "a", [], 2.5), lambda: lines[1].join(3, "a", []))
    assert [one["threshold_s"] for one in joined] == [2.5, 2.5]
    server.close()


def test_a_replica_alone_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by itself it has no address to go to."""
    monkeypatch.delenv(ROUNDS_VARIABLE, raising=False)
    with pytest.raises(LaunchError, match=r"no address .* start all replicas with megasdc launch --replicas"):
        MeetingLine(0, SECRET)
