"""Only one launch works in a folder, and what a dead one leaves holds nobody up."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from megasdc.common import run_lock
from megasdc.common.durable import replacing
from megasdc.common.errors import LaunchError
from megasdc.common.run_lock import (
    Holder,
    RunLock,
    acquire_lock,
    check_free,
    join_lock,
    launches_locked_out,
    read_holder,
)
from megasdc.lab.sweeps.sweep import alone

HOLD = """
import os, sys, time
from pathlib import Path
from megasdc.common.run_lock import Holder, acquire_lock
lock = acquire_lock(Path(sys.argv[1]), Holder.this_process("theirs", "20260102-030405-abcdef"), print)
if sys.argv[2] == "fork" and os.fork():
    print(os.getpid(), flush=True)
elif sys.argv[2] != "fork":
    print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def said() -> list[str]:
    """What the user was told."""
    return []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts beat, and are given up, in shorter time."""
    monkeypatch.setattr(run_lock, "STALE_S", 1.0)
    monkeypatch.setattr(run_lock, "BEAT_S", 0.1)


@pytest.fixture
def other(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """Process id of another launch that holds the folder; it has forked where the parameter is ``fork``."""
    how = getattr(request, "param", "alone")
    command = [sys.executable, "-c", HOLD, str(tmp_path), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    yield int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def own(token: str = "ours") -> Holder:
    """This process as the holder of a launch."""
    return Holder.this_process(token, None)


def far(folder: Path, **changes: object) -> Holder:
    """Leave the record of a process on another host."""
    holder = replace(own("theirs"), host="elsewhere", pid=4242, **changes)  # type: ignore[arg-type]
    run_lock._write(folder, holder)
    return holder


def until(done: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_folder_in_use_is_refused_with_who_has_it(tmp_path: Path, other: int, said: list[str]) -> None:
    """Launch, host, process and remedy are named, and the record stays theirs."""
    for attempt in (lambda: acquire_lock(tmp_path, own(), said.append), lambda: check_free(tmp_path, said.append)):
        with pytest.raises(LaunchError) as caught:
            attempt()
        assert f"in use by launch 20260102-030405-abcdef (host {os.uname().nodename}, process {other}, since " in str(
            caught.value
        )
        assert "megasdc.logging.run_dir" in str(caught.value)
        assert caught.value.exit_code == 78
    assert (found := read_holder(tmp_path)) is not None and found.token == "theirs"


@pytest.mark.parametrize("other", ["alone", "fork"], indirect=True)
def test_a_killed_process_holds_nothing(tmp_path: Path, other: int, said: list[str]) -> None:
    """Also where a child of it lives on, its folder is free at once, and who left it is told."""
    os.kill(other, signal.SIGKILL)
    while run_lock.start_ticks(other) is not None:
        time.sleep(0.01)
    start = time.monotonic()
    check_free(tmp_path, said.append)
    lock = acquire_lock(tmp_path, own(), said.append)
    assert time.monotonic() - start < run_lock.STALE_S / 2
    assert lock.replaced is not None and lock.replaced.pid == other
    lock.release()


def test_a_process_id_used_again_is_another_process(tmp_path: Path, said: list[str]) -> None:
    """The record of a process that started at another time than the one with its id now does not count."""
    run_lock._write(tmp_path, replace(own("theirs"), process_start_ticks=1))
    lock = acquire_lock(tmp_path, own(), said.append)
    assert lock.replaced is not None and lock.replaced.token == "theirs"
    lock.release()


def test_release_leaves_nobody_recorded(tmp_path: Path, said: list[str]) -> None:
    """The next launch finds a free folder and nothing to tell."""
    for _ in range(2):
        lock = acquire_lock(tmp_path, own(), said.append)
        assert lock.replaced is None
        lock.release()
    assert read_holder(tmp_path) is None
    assert said == []


def test_what_was_killed_within_a_write_is_removed_a_day_later(tmp_path: Path, said: list[str]) -> None:
    """By whoever has the folder next; not what may be written still, nor what no write of a file has left."""
    written = ("lock.json", "health/limits.json", "health/incidents/hang_1.json", "done/launch/ended.0.1.json")
    for path in map(tmp_path.joinpath, written):
        path.parent.mkdir(parents=True, exist_ok=True)
        if (child := os.fork()) == 0:
            with replacing(path):
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
    left = list(tmp_path.rglob(".tmp_*"))
    assert len(left) == len(written)
    (tmp_path / ".tmp_notes").touch()
    (folder := tmp_path / f".tmp_replaced_x.{'0' * 32}").mkdir()
    acquire_lock(tmp_path, own(), said.append).release()
    assert all(path.exists() for path in left)
    for path in (*left, tmp_path / ".tmp_notes", folder):
        os.utime(path, (time.time() - 90_000,) * 2)
    acquire_lock(tmp_path, own(), said.append).release()
    assert sorted(tmp_path.rglob(".tmp_*")) == [tmp_path / ".tmp_notes", folder]


def test_another_host_lives_while_its_record_changes(tmp_path: Path, said: list[str], quick: None) -> None:
    """A record that changes within the time is refused, whatever its clock says."""
    holder = far(tmp_path, since=0.0)
    beating = RunLock(tmp_path, holder, open(tmp_path / "unused", "w"), None, watched=True)  # noqa: SIM115 - closed by release
    with pytest.raises(LaunchError, match="host elsewhere, process 4242"):
        acquire_lock(tmp_path, own(), said.append)
    beating.release()


@pytest.mark.slow
@pytest.mark.parametrize("server_keeps_lock", [False, True])
def test_another_host_is_gone_when_its_record_stands_still(
    tmp_path: Path, said: list[str], quick: None, server_keeps_lock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its folder is taken, also where a file server still keeps the lock for it."""
    monkeypatch.setattr(run_lock, "RACE_S", 0.1)
    far(tmp_path)
    with open(tmp_path / run_lock.LOCK_FILE, "a") as kept:
        if server_keeps_lock:
            fcntl.flock(kept, fcntl.LOCK_EX)
        start = time.monotonic()
        lock = acquire_lock(tmp_path, own(), said.append)
        assert time.monotonic() - start >= run_lock.STALE_S
        assert lock.replaced is not None and lock.replaced.host == "elsewhere"
        with pytest.raises(LaunchError, match=str(os.getpid())):
            acquire_lock(tmp_path, own("third"), said.append)
        lock.release()
        acquire_lock(tmp_path, own("fourth"), said.append).release()  # the lost host's lock is out of the way
    assert any("waiting up to" in line for line in said)


@pytest.mark.slow
def test_who_was_watched_once_is_not_watched_again(tmp_path: Path, said: list[str], quick: None) -> None:
    """What the front of a launch has found silent, its ranks do not wait for."""
    far(tmp_path)
    check_free(tmp_path, said.append)
    assert (found := read_holder(tmp_path)) is not None and found.silent
    start = time.monotonic()
    acquire_lock(tmp_path, own(), said.append).release()
    assert time.monotonic() - start < run_lock.STALE_S


@pytest.mark.slow
def test_whose_launch_was_seen_to_end_is_not_watched(
    tmp_path: Path, said: list[str], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced at once; where it lives it learns that, and the new launch waits until it has."""
    monkeypatch.setattr(run_lock, "LEARN_S", 1.0)
    ended = ["20260102-030405-000000", "of-them"]
    holder = far(tmp_path, launch_id="of-them")
    beating = RunLock(tmp_path, holder, open(tmp_path / "unused", "w"), None, watched=True)  # noqa: SIM115 - released
    with pytest.raises(LaunchError, match="host elsewhere, process 4242"):
        check_free(tmp_path, said.append, ended[:1])
    start = time.monotonic()
    check_free(tmp_path, said.append, ended)
    lock = acquire_lock(tmp_path, own(), said.append, ended)
    assert time.monotonic() - start < run_lock.STALE_S
    lock.wait_until_alone()
    assert time.monotonic() - start >= 1.0
    until(lambda: beating.taken_by is not None)  # at once, unless the disk is slow
    assert beating.taken_by is not None and beating.taken_by.token == "ours" and lock.taken_by is None
    beating.release()
    lock.release()
    assert read_holder(tmp_path) is None


@pytest.mark.slow
def test_a_replaced_launch_that_writes_once_more_does_not_win(
    tmp_path: Path, said: list[str], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record may overwrite the new one, where it had read the old before: ours returns, and we wait again."""
    monkeypatch.setattr(run_lock, "LEARN_S", 1.0)
    holder = far(tmp_path, launch_id="of-them")
    lock = acquire_lock(tmp_path, own(), said.append, ["of-them"])
    time.sleep(0.5)
    late = time.monotonic()  # before: on a slow disk the record is read while its write still goes on
    run_lock._write(tmp_path, holder)
    until(lambda: (found := read_holder(tmp_path)) is not None and found.token == "ours")
    lock.wait_until_alone()
    assert lock.taken_by is None and time.monotonic() - late >= 1.0
    lock.release()


def test_a_launch_that_lives_here_is_refused_though_it_was_seen_to_end(
    tmp_path: Path, said: list[str], other: int
) -> None:
    """A process can be seen, whatever anybody says of it."""
    with pytest.raises(LaunchError, match=f"process {other}"):
        acquire_lock(tmp_path, own(), said.append, ["20260102-030405-abcdef"])


def test_without_flock_the_record_guards(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has none is told, and the second launch is refused all the same."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    monkeypatch.setattr(run_lock, "RACE_S", 0.1)
    lock = acquire_lock(tmp_path, own(), said.append)
    assert "has no flock (No locks available); lock.json alone guards it" in said[0]
    with pytest.raises(LaunchError, match="in use by a launch"):
        acquire_lock(tmp_path, own("second"), said.append)
    lock.release()


def test_ranks_of_a_launch_share_a_folder_and_take_their_own(tmp_path: Path, said: list[str]) -> None:
    """On a shared file system the launch has the folder already; on a node's own disk its first rank takes it."""
    lock = acquire_lock(tmp_path, own("launch"), said.append)
    assert join_lock(tmp_path, own("launch"), said.append) is None
    with pytest.raises(LaunchError, match="in use by"):
        acquire_lock(tmp_path, own("other"), said.append)
    (tmp_path / "local").mkdir()
    local = join_lock(tmp_path / "local", own("launch"), said.append)
    assert local is not None
    local.release()
    lock.release()


def test_a_holder_learns_that_its_place_was_taken(tmp_path: Path, said: list[str], quick: None) -> None:
    """Who slept longer than others wait finds another's record, leaves it, and knows."""
    lock = acquire_lock(tmp_path, own(), said.append)
    theirs = far(tmp_path)
    until(lambda: lock.taken_by is not None)
    lock.release()
    assert lock.taken_by == read_holder(tmp_path) == theirs


def test_the_lock_of_a_sweep_is_another(tmp_path: Path, said: list[str]) -> None:
    """A run that is one task of a sweep is trained in a folder that the sweep itself holds."""
    with alone(tmp_path):
        lock = acquire_lock(tmp_path, own(), said.append)
        assert (holder := read_holder(tmp_path)) is not None and holder.token == "ours"
        lock.release()


def test_a_line_is_written_only_where_no_other_launch_works(tmp_path: Path, other: int, said: list[str]) -> None:
    """Not beside a living launch, but in its own folder, and where the last launch is dead or its host was given up."""
    with launches_locked_out(tmp_path, None, said.append) as free:
        assert not free and f"process {other}, since " in said[0]
    with launches_locked_out(tmp_path, "theirs", said.append) as free:
        assert free, "another rank of the same launch holds it"
    os.kill(other, signal.SIGKILL)
    while run_lock.start_ticks(other) is not None:
        time.sleep(0.01)
    with (
        launches_locked_out(tmp_path, None, said.append) as free,
        launches_locked_out(tmp_path, None, said.append) as too,
    ):
        assert free and too, "ranks of one start write at the same time"
    for silent in (False, True):
        far(tmp_path, silent=silent)
        with launches_locked_out(tmp_path, None, said.append) as free:
            assert free == silent


def test_a_folder_that_its_launch_releases_meanwhile_can_be_written(
    tmp_path: Path, other: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank holds it while another finds it locked, and is gone when that looks who holds it."""
    seen = iter([read_holder(tmp_path)])
    monkeypatch.setattr(run_lock, "read_holder", lambda folder: next(seen, None))
    with launches_locked_out(tmp_path, "theirs", said.append) as free:
        assert free and not said


def test_nfs_shares_a_lock_with_readers_alone(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux refuses a shared lock there on a file that is open for writing alone (flock(2))."""

    def flock(file: IO[str], kind: int) -> None:
        if kind & fcntl.LOCK_SH and not file.readable():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    with launches_locked_out(tmp_path, None, said.append) as free:
        assert free


def test_a_launch_waits_for_a_line_that_is_written(tmp_path: Path, said: list[str]) -> None:
    """Who takes the folder in that moment has it as soon as the line is there."""
    with ThreadPoolExecutor(1) as pool:
        with launches_locked_out(tmp_path, None, said.append) as free:
            assert free
            taking = pool.submit(acquire_lock, tmp_path, own(), said.append)
            time.sleep(0.3)
            assert not taking.done() and read_holder(tmp_path) is None
        taking.result(timeout=30).release()
    assert not said
