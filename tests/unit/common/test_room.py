"""Writes to a folder without room are kept or waited for, and nothing is lost silently."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megasdc.common import durable
from megasdc.common.durable import append_bounded
from megasdc.common.errors import LaunchError, StorageError
from megasdc.events import EventLog, read_events
from megasdc.metrics.writer import MetricsWriter, read_metrics
from megasdc.ops.supervise.host_reliability_log import HostReliabilityLog, HostUsage
from megasdc.ops.supervise.journal import Journal, read_journal


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(path)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
    durable._process.since.clear()
    durable._process.hurries_since = None


def fill(folder: Path) -> Path:
    """Take all room; the last page of a file has some left."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return path


def test_lines_without_room_are_written_later(small: Path) -> None:
    """Events and metrics of a time without room are all there after it, in order; so is the time that they waited."""
    events, metrics = EventLog(small, 0), MetricsWriter(small)
    filler = fill(small)
    for step in range(1, 200):
        events.emit("test", "event", step=step)
        metrics.write(step, {"train/loss": 0.5})
    assert durable.waiting_s() > 0
    assert len(list(read_events(small))) < 199
    filler.unlink()
    durable._process.retry_at = 0.0
    assert durable.waiting_s() == 0 and durable.lost_lines() == 0
    assert [one.step for one in read_events(small)] == list(range(1, 200))
    assert [one["step"] for one in read_metrics(small)] == list(range(1, 200))
    events.close()
    metrics.close()


def test_small_files_without_room_are_written_later(small: Path) -> None:
    """The last content that was given to each path."""
    filler = fill(small)
    path = small / "reports" / "one.json"
    assert not durable.write_when_room(path, "first" * 2000) and not durable.write_when_room(path, "last" * 2000)
    assert not path.exists() or not path.read_text()
    filler.unlink()
    durable._process.retry_at = 0.0
    assert durable.waiting_s() == 0 and path.read_text() == "last" * 2000


@pytest.mark.slow
def test_the_journal_waits_for_room_and_gives_up_after_the_limit(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that had room for a part of it is written whole later; without room for too long it is an error."""
    said: list[str] = []
    with Journal(small, said.append) as journal:
        journal.write("opened", config="x")
        filler = fill(small)
        threading.Timer(1.5, filler.unlink).start()
        journal.write("long", text="x" * 5000)
        assert [one.kind for one in read_journal(small)] == ["opened", "long"]
        assert len(said) == 2 and "waiting up to 900 s" in said[0] and "again, after" in said[1]
        fill(small)
        monkeypatch.setattr(durable._process, "limit_s", 1.5)
        began = time.monotonic()
        with pytest.raises(StorageError, match="No space left"):
            journal.write("long", text="x" * 5000)
        assert time.monotonic() - began > 1.0
    assert [one.kind for one in read_journal(small)] == ["opened", "long"]


@pytest.mark.slow
def test_an_entry_that_waits_is_not_written_to_another_supervisors_journal(small: Path) -> None:
    """Which has taken the run over meanwhile, as it may where a file server gives the lock away."""
    with Journal(small, lambda text: None) as journal:
        journal.write("opened", config="x")
        filler = fill(small)

        def take_over() -> None:
            filler.unlink()
            with open(journal.path, "a", encoding="utf-8") as file:
                file.write("another's\n")

        timer = threading.Timer(1.5, take_over)
        timer.start()
        with pytest.raises(LaunchError, match="changed by another supervisor"):
            journal.write("long", text="x" * 5000)
        timer.join()
        assert journal.path.read_text().splitlines()[-1] == "another's"


@pytest.mark.slow
def test_who_is_asked_to_end_does_not_wait_for_long(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it waits for at that moment, and what it writes after that; who is not asked waits on."""
    monkeypatch.setattr(durable, "END_S", 1.0)
    monkeypatch.setattr(durable._process, "limit_s", 20.0)
    asked = threading.Event()
    durable.end_waits_when(asked.is_set)
    fill(small)
    began = time.monotonic()
    threading.Timer(1.5, asked.set).start()
    for name in ("first", "second"):
        with pytest.raises(StorageError, match="No space left"):
            durable.need_room(lambda name=name: (small / name).write_text("x" * 5000), small / name)  # type: ignore[misc]
    assert 1.5 < time.monotonic() - began < 10.0
    durable.end_waits_when(bool)
    assert not durable.is_asked_to_end()


@pytest.mark.slow
def test_a_ledger_without_room_keeps_what_it_is_told(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there is room, or its supervisor ends; what is lost then is said."""
    monkeypatch.setattr(durable, "END_S", 0.5)
    ledger = HostReliabilityLog(small / "ledger.jsonl")
    uses = [HostUsage(f"use {number}", 1.0, 1.0, ("a",), None, "x" * 4000) for number in range(5)]
    assert ledger.add(uses[0]) == 0
    filler = fill(small)
    assert [ledger.add(one) for one in uses[1:3]] == [1, 2]
    assert ledger.read() == uses[:1]
    filler.unlink()
    assert ledger.add(uses[3]) == 0 and ledger.read() == uses[:4]
    filler = fill(small)
    assert ledger.add(uses[4]) == 1
    filler.unlink()
    ledger.close()
    assert ledger.read() == uses
    fill(small)
    assert ledger.add(replace(uses[0], key="last")) == 1
    with pytest.raises(StorageError, match="1 uses of hosts are lost"):
        ledger.close()


def test_an_agents_line_that_has_room_in_part_is_not_there(small: Path) -> None:
    """It is written whole by the next try."""
    path = small / "node.jsonl"
    append_bounded(path, '{"a": 1}\n', 1 << 20)
    filler = fill(small)
    with pytest.raises(OSError, match="No space"):
        append_bounded(path, json.dumps({"b": "x" * 5000}) + "\n", 1 << 20)
    filler.unlink()
    append_bounded(path, json.dumps({"b": "x" * 5000}) + "\n", 1 << 20)
    assert [list(json.loads(line)) for line in path.read_text().splitlines()] == [["a"], ["b"]]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_all_kinds_of_no_room_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A used-up quota, and a file system that becomes read-only, which no test can make here, as a full one."""
    lines, write, full = durable.LineFile(tmp_path / "lines"), os.write, [True]

    def fail(descriptor: int, data: bytes) -> int:
        if full[0] and descriptor == lines.fileno():
            raise OSError(number, os.strerror(number))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", fail)
    lines.write("one\n")
    assert durable.waiting_s() > 0 and (tmp_path / "lines").read_text() == ""
    full[0] = False
    lines.write("two\n")
    assert durable.waiting_s() == 0 and (tmp_path / "lines").read_text() == "one\ntwo\n"
    full[0] = True
    with pytest.raises(OSError, match="not permitted") as caught:
        number = errno.EPERM
        lines.write("three\n")
    assert caught.value.filename == str(tmp_path / "lines")
    full[0] = False
    lines.close()


def break_descriptor(number: int) -> None:
    """Let writing to a descriptor fail with EIO: it is this process's memory then, at an address that it has not."""
    memory = os.open("/proc/self/mem", os.O_WRONLY)
    os.dup2(memory, number)
    os.close(memory)


def test_lines_are_kept_while_a_disk_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All are there in the end, in order; one line names each file, and its descriptor is made anew."""
    events, metrics = EventLog(tmp_path, 0), MetricsWriter(tmp_path)
    for step in range(1, 5):
        if step == 2:
            break_descriptor(events._file.fileno())
            break_descriptor(metrics._file.fileno())
        events.emit("test", "event", step=step)
        metrics.write(step, {"train/loss": 0.5})
        if step == 2:
            assert durable.waiting_files() == [str(events.path), str(metrics.path)]
    assert durable.waiting_s() == 0
    events.close()
    metrics.close()
    assert [one.step for one in read_events(tmp_path)] == [1, 2, 3, 4]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("cannot be written (Input/output error)" in line for line in said)
    assert str(events.path) in said[0] and str(metrics.path) in said[1]


@pytest.mark.slow
def test_a_disk_that_fails_where_nothing_waits_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting it is an error, which names the file; when a file is closed its last line is tried again."""
    lines = durable.LineFile(tmp_path / "lines")
    monkeypatch.setattr(durable._process, "limit_s", 0.0)
    break_descriptor(lines.fileno())
    with pytest.raises(OSError, match=r"Input/output error: '.*lines'"):
        lines.write("one\n")
    monkeypatch.setattr(durable._process, "limit_s", 1.0)
    lines.write("two\n")
    assert (tmp_path / "lines").read_text() == "one\ntwo\n", "it was only this descriptor"
    lines.add(b"three\n")
    break_descriptor(lines.fileno())
    lines.close()
    assert (tmp_path / "lines").read_text() == "one\ntwo\nthree\n"
    assert durable.waiting_s() == 0


@pytest.mark.slow
def test_a_file_that_gets_room_while_it_is_closed_is_whole(small: Path) -> None:
    """Nothing waits then, and nothing is lost."""
    lines = durable.LineFile(small / "lines")
    filler = fill(small)
    lines.write("x" * 5000 + "\n")
    timer = threading.Timer(1.5, filler.unlink)
    timer.start()
    lines.close()
    timer.join()
    assert (small / "lines").read_text() == "x" * 5000 + "\n"
    assert durable.waiting_s() == 0


@pytest.mark.slow
def test_what_was_given_up_does_not_wait_any_more(small: Path) -> None:
    """A run that has room again is not stopped for the sake of a file that nobody writes."""
    filler = fill(small)
    with pytest.raises(OSError, match="No space"):
        durable.wait_for_room(lambda: (small / "file").write_text("x" * 5000), small / "file", at_most_s=0.1)
    filler.unlink()
    assert durable.waiting_s() == 0


@pytest.mark.slow
def test_no_room_for_too_long_has_an_exit_code_of_its_own(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says which file it was."""
    monkeypatch.setattr(durable._process, "limit_s", 0.1)
    fill(small)
    with pytest.raises(StorageError, match="file cannot be written: No space") as caught:
        durable.need_room(lambda: (small / "file").write_text("x" * 5000), small / "file")
    assert caught.value.no_room
    durable._process.since.clear()


@pytest.mark.slow
def test_what_can_neither_be_written_nor_kept_is_counted_and_said(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines beyond the bound, and what is left when a process ends."""
    monkeypatch.setattr(durable, "MAX_KEPT_BYTES", 20_000)
    monkeypatch.setattr(durable, "END_S", 0.5)
    monkeypatch.setattr(durable._process, "lost", 0)
    lines = durable.LineFile(small / "lines")
    fill(small)
    for _ in range(10):
        lines.write("x" * 4000 + "\n")
    assert lines.lost == durable.lost_lines() > 0
    assert not durable.write_when_room(small / "file", "x" * 5000)
    lines.close()
    durable.finish()
    said = capsys.readouterr().err
    assert f"{small / 'lines'}: " in said and "lines could not be written and are lost" in said
    assert f"{small / 'file'} could not be written and is lost" in said
    assert durable.waiting_s() == 0
