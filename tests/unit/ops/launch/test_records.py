"""Start and done records survive the way from a rank to the front."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasdc.common.errors import DataError
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, collect, parse_records, write_done, write_started


def test_records_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank writes is what the front reads, only of the asked launch."""
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "one")
    write_started(tmp_path, 0)
    write_started(tmp_path, 3)
    write_done(tmp_path, 3, 71, DataError("first\nsecond"))
    records = collect(tmp_path, "one")
    assert sorted(records.started) == [0, 3]
    (done,) = records.done.values()
    assert (done.rank, done.exit_code, done.error_class) == (3, 71, "DataError")
    assert (done.message, done.first_line) == ("first\nsecond", "first")
    assert collect(tmp_path, "two").started == {}
    on_disk = json.loads((tmp_path / "done" / "one" / "rank_00003.json").read_text())
    names = [
        "boot_id",
        "end",
        "error_class",
        "exit_code",
        "first_line",
        "host",
        "launcher_gone",
        "message",
        "monotonic",
    ]
    names += ["rank", "time"]
    assert sorted(on_disk) == names
    for new in ("launcher_gone", "boot_id", "monotonic"):
        del on_disk[new]  # as earlier versions wrote it
    assert not parse_records({"rank_00003.json": json.dumps(on_disk)}).unreadable
    assert not list((tmp_path / "done" / "one").glob(".*")), "no temporary file is left"


def test_without_launch_id_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain `deepspeed` command leaves no records."""
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    assert write_started(tmp_path, 0) is None
    assert write_done(tmp_path, 0, 0) is None
    assert list(tmp_path.iterdir()) == []


def test_unwritable_record_does_not_hide_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or read-only disk is a warning, not an exception."""
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "one")
    (tmp_path / "run").write_text("a file where the folder should be")
    assert write_done(tmp_path / "run", 0, 77) is None


def test_broken_file_is_named() -> None:
    """Half a record is told, and the others are read."""
    good = '{"rank": 1, "host": "a", "pid": 2, "time": 3.0}'
    records = parse_records({"rank_00000.json": '{"rank": 0', "started_00001.json": good})
    assert "rank_00000.json is not a record" in records.unreadable[0]
    assert list(records.started) == [1]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Bytes that are no text, or a record that has gone again: those who watch a launch go on."""
    folder = tmp_path / "done" / "one"
    (folder / "rank_00000.json").mkdir(parents=True)
    (folder / "rank_00001.json").write_bytes(b"\xff\xfe")
    unreadable = collect(tmp_path, "one").unreadable
    assert sorted(text.split(".json")[0] for text in unreadable) == ["rank_00000", "rank_00001"]
