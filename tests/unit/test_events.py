"""Events survive a killed writer, and are read back in rank order."""

import json
import socket
import time

import pytest

from megasdc.common.origin import Origin
from megasdc.events import EventLog, read_events

BARE = {"time": 1.0, "rank": 0, "host": "a", "step": 1, "micro_batch": None, "kind": "a", "name": "b", "fields": {}}


def test_line_has_the_documented_fields(tmp_path):
    """A line holds exactly the keys that programs rely on, in the file named after the rank."""
    log = EventLog(tmp_path / "run dir", 3, Origin("r", 2, "GPU-1"))
    before = time.monotonic()
    event = log.emit("save", "checkpoint", step=7, micro_batch=1, path=tmp_path, size_bytes=5)
    log.close()
    (line,) = (tmp_path / "run dir" / "events" / "rank_00003.jsonl").read_text().splitlines()
    found = json.loads(line)
    names = "run attempt launch time monotonic boot rank host device step micro_batch kind name fields"
    assert " ".join(found) == names
    assert found["fields"] == {"path": str(tmp_path), "size_bytes": 5}
    assert (found["rank"], found["host"], found["step"]) == (3, socket.gethostname(), 7)
    assert (found["run"], found["attempt"], found["device"]) == ("r", 2, "GPU-1")
    assert event.time == found["time"] and before <= found["monotonic"] <= time.monotonic()


def test_lines_of_earlier_versions_are_read(tmp_path):
    """Lines without run, attempt, monotonic time and device are events, also beside newer ones in the same file."""
    log = EventLog(tmp_path, 0, Origin("r", 1))
    log.path.write_text(json.dumps(BARE) + "\n")
    log.emit("c", "d")
    log.close()
    old, new = read_events(tmp_path)
    assert (old.run, old.attempt, old.monotonic, old.device, old.time, old.step) == (None, None, None, None, 1.0, 1)
    assert (new.run, new.attempt) == ("r", 1)


def test_a_dataclass_is_written_as_an_object(tmp_path):
    """Its fields can be read back by name."""
    log = EventLog(tmp_path, 0)
    inner = log.emit("a", "b", step=1)
    log.emit("c", "d", of=inner, many=[inner])
    log.close()
    last = list(read_events(tmp_path))[-1].fields
    assert last["of"]["step"] == 1 and last["many"][0]["name"] == "b"


def test_events_are_on_disk_before_close(tmp_path):
    """A process that dies after emit leaves the event in the file."""
    log = EventLog(tmp_path, 0)
    log.emit("skip", "gradient_overflow", step=1)
    assert [event.name for event in read_events(tmp_path)] == ["gradient_overflow"]
    log.close()


def test_counts_and_filters(tmp_path):
    """Events are counted by kind and name, and read back by either, ranks in order."""
    for rank in (10, 2):
        log = EventLog(tmp_path, rank)
        log.emit("save", "checkpoint", step=1)
        log.emit("warning", "slow", step=2)
        log.emit("save", "checkpoint", step=3)
        assert log.counts == {"save/checkpoint": 2, "warning/slow": 1}
        log.close()
    assert [(event.rank, event.step) for event in read_events(tmp_path, kind="save")] == [
        (2, 1),
        (2, 3),
        (10, 1),
        (10, 3),
    ]
    assert [event.step for event in read_events(tmp_path, name="slow")] == [2, 2]
    assert list(read_events(tmp_path, kind="save", name="slow")) == []


def test_a_second_log_appends(tmp_path):
    """A resumed run keeps the events of the run before."""
    for step in (1, 2):
        log = EventLog(tmp_path, 0)
        log.emit("restart", "run", step=step)
        log.close()
    assert [event.step for event in read_events(tmp_path)] == [1, 2]


@pytest.mark.parametrize("torn", ["x", '{"time": 1.0, "ra', "y" * 200_000])
def test_a_second_log_cuts_off_half_a_line(tmp_path, torn):
    """What a killed process left half written does not spoil the first line of the restarted one."""
    for step in (1, 2):
        log = EventLog(tmp_path, 0)
        log.emit("restart", "run", step=step)
        log.close()
        with open(log.path, "a") as file:
            file.write(torn)
    assert [event.step for event in read_events(tmp_path)] == [1, 2]
    log.path.write_text(torn)
    EventLog(tmp_path, 0).close()
    assert log.path.read_text() == ""


def test_half_a_last_line_is_passed_over(tmp_path):
    """A line cut by a kill is not an event; those before it are."""
    log = EventLog(tmp_path, 0)
    log.emit("save", "checkpoint", step=1)
    log.close()
    with open(log.path, "a", encoding="utf-8") as file:
        file.write('{"time": 1.0, "ra')
    assert [event.step for event in read_events(tmp_path)] == [1]


@pytest.mark.parametrize(
    "line",
    ["not json\n", '{"time": 1.0}\n', '{"unknown": 1}\n', "[1]\n", "\udcff\n", "[" * 100_000 + "\n"]
    + [json.dumps({**BARE, **wrong}) + "\n" for wrong in ({"time": "now"}, {"time": 1e99}, {"fields": 1})],
)
def test_a_broken_whole_line_is_an_error_with_its_place(tmp_path, line):
    """Damage in the middle of a log is reported with file and line, not passed over."""
    log = EventLog(tmp_path, 0)
    log.emit("save", "checkpoint")
    log.close()
    with open(log.path, "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"rank_00000\.jsonl:2 is not an event"):
        list(read_events(tmp_path))
    broken: list[str] = []
    assert [event.name for event in read_events(tmp_path, broken=broken)] == ["checkpoint"]
    assert len(broken) == 1 and "rank_00000.jsonl:2 is not an event" in broken[0], "or it is listed, as asked for"
