"""Another user of a host neither overwrites a file of a run's nor holds it up, and a group that shares it still can."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megasdc.common import durable, run_lock
from megasdc.common.durable import write_durably
from megasdc.common.errors import LaunchError, StorageError
from megasdc.common.run_lock import LOCK_FILE, Holder, acquire_lock, open_lock_file, read_holder
from megasdc.ops.launch.on_host import running
from megasdc.ops.supervise import host_reliability_log
from megasdc.ops.supervise.host_reliability_log import HostReliabilityLog, HostUsage
from megasdc.ops.supervise.journal import Journal

OTHER, THIRD, GROUP = 65_534, 65_533, 4_242
"""Ids of other users, and of a group."""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users can read, as run folders are."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def another_user(action: Callable[[], object], groups: tuple[int, ...] = (), user: int | None = None) -> Iterator[bool]:
    """A process of another user that has done something, and stays; yields whether it could."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups(list(groups))
        os.setgid(OTHER)
        os.setuid(OTHER if user is None else user)
        try:
            kept = action()
            os.write(writes, b"1")
        except OSError:
            kept = os.write(writes, b"0")
        time.sleep(600)
        os._exit(0 if kept else 1)
    try:
        yield os.read(reads, 1) == b"1"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def lock_by_reading(path: Path) -> object:
    """Lock a file as ``flock -s`` does, which needs no more than the right to read it."""
    found = os.open(path, os.O_RDONLY)
    fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return found


def keep(path: Path) -> object:
    """Lock a file for this process alone."""
    file = open(path, "ab")  # noqa: SIM115 - as long as the process lives
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def launch(folder: Path, said: list[str]) -> run_lock.RunLock:
    """Take the lock of a run."""
    return acquire_lock(folder, Holder.this_process("own", "20260102-030405-abcdef"), said.append)


@as_root
def test_no_reader_can_lock_what_guards_a_run(folder: Path) -> None:
    """Neither the launch's lock, nor the supervisor's, nor that of the ledger, whatever the umask is."""
    before = os.umask(0)
    try:
        launch(folder, []).release()
        with Journal(folder, print):
            pass
        (folder / "ledger").touch(0o644)
        HostReliabilityLog(folder / "ledger").add(HostUsage("key", 0.0, 1.0, ("a",)))
    finally:
        os.umask(before)
    for name in (LOCK_FILE, ".lock", ".ledger.lock"):
        with another_user(lambda name=name: lock_by_reading(folder / name)) as could:  # type: ignore[misc]
            assert (folder / name).exists() and not could, name


@pytest.mark.slow
@as_root
def test_a_lock_of_an_earlier_version_that_a_reader_holds_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could be locked by whoever may read it; the next one cannot, and the launch begins."""
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.5)
    (folder / LOCK_FILE).touch(0o644)
    said: list[str] = []
    with another_user(lambda: lock_by_reading(folder / LOCK_FILE)) as could:
        assert could
        lock = launch(folder, said)
        assert (holder := read_holder(folder)) is not None and holder.token == "own"
        assert any("replaced" in line for line in said)
        with another_user(lambda: lock_by_reading(folder / LOCK_FILE)) as again:
            assert not again
        lock.release()


@as_root
def test_a_lock_of_an_earlier_version_that_a_member_of_its_group_holds_is_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers could lock it, but he who does may launch: his record may be late, on slow storage."""
    monkeypatch.setattr(run_lock, "SETTLE_S", 0.5)
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    (folder / LOCK_FILE).touch()
    (folder / LOCK_FILE).chmod(0o664)
    with another_user(lambda: lock_by_reading(folder / LOCK_FILE), (GROUP,)) as could:
        assert could
        with pytest.raises(LaunchError, match="left no record"):
            launch(folder, [])
    with another_user(lambda: lock_by_reading(folder / LOCK_FILE)) as could:
        assert not could


@as_root
@pytest.mark.parametrize("mask", [0o022, 0o002])
def test_a_group_that_shares_a_folder_launches_in_it(folder: Path, mask: int) -> None:
    """Its members take the lock in turn, with each umask; who is no member does not."""
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    before = os.umask(mask)
    try:
        launch(folder, []).release()
        with another_user(lambda: launch(folder, []), (GROUP,)) as could:
            assert could
    finally:
        os.umask(before)
    with another_user(lambda: lock_by_reading(folder / LOCK_FILE)) as could:
        assert not could
    assert stat.S_IMODE((folder / LOCK_FILE).stat().st_mode) == 0o660


@as_root
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_who_may_write_in_a_folder_of_another_group_may_lock(folder: Path, mode: int) -> None:
    """Whoever makes the lock need be no member of the folder's group; a third user of his own group is none either."""
    os.chown(folder, 0, GROUP)
    folder.chmod(mode)
    opening = lambda: open_lock_file(folder / LOCK_FILE)  # noqa: E731 - of two users
    with another_user(opening, (GROUP,) if mode == 0o775 else ()) as could:
        assert could
    with another_user(opening, user=THIRD) as could:
        assert could == (mode != 0o775)


@as_root
def test_users_whom_an_access_list_names_launch_in_turn(folder: Path) -> None:
    """What new files inherit would give them nothing, since a lock is made with mode 0600; readers cannot lock it."""
    entries = [(1, 7, -1), (2, 7, OTHER), (2, 5, THIRD), (4, 5, -1), (16, 7, -1), (32, 5, -1)]
    rights = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in entries)
    for kind in ("access", "default"):
        os.setxattr(folder, f"system.posix_acl_{kind}", rights)
    launch(folder, []).release()
    for user in (OTHER, THIRD):
        with another_user(lambda: launch(folder, []), user=user) as could:
            assert could == (user == OTHER)
    with another_user(lambda: lock_by_reading(folder / LOCK_FILE), user=THIRD) as could:
        assert not could
    (folder / LOCK_FILE).unlink()
    os.chown(folder, THIRD, GROUP)
    with another_user(lambda: launch(folder, [])) as could:
        assert could, "he who is named makes it"
    with another_user(lambda: launch(folder, []), user=THIRD) as could:
        assert could, "the folder is his"


@as_root
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o664), (OTHER, 0o644)])
def test_a_ledger_is_written_by_users_who_may_write_nothing_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int
) -> None:
    """They and those who may lock the same file: none writes while another does."""
    path = folder / "ledger"
    path.touch()
    path.chmod(mode)
    os.chown(path, owner, GROUP)

    def add() -> None:
        try:
            HostReliabilityLog(path).add(HostUsage("theirs", 0.0, 1.0, ("a",)))
        except StorageError as error:
            raise OSError(str(error)) from error

    with another_user(add, (GROUP,)) as could:
        assert could
    monkeypatch.setattr(host_reliability_log, "LOCK_S", 0.1)
    own = HostReliabilityLog(path)
    with another_user(lambda: keep(path), (GROUP,)) as could:
        assert could and own.add(HostUsage("own", 0.0, 1.0, ("b",))) == 1
    own.close()
    assert [one.key for one in own.read()] == ["theirs", "own"]


@as_root
def test_processes_of_another_user_are_none_of_a_launch(folder: Path) -> None:
    """Whatever stands on their command lines; an own one with the same is found."""
    words = ["megasdc.ops.launch 20260102-030405-abcdef", "60"]
    theirs = subprocess.Popen(words, executable="/bin/sleep", user=OTHER, group=OTHER, extra_groups=[])
    own = subprocess.Popen(words, executable="/bin/sleep")
    try:
        deadline = time.monotonic() + 30
        while own.pid not in (found := running.answer({"launch_id": "20260102-030405-abcdef"})):
            assert time.monotonic() < deadline
        assert found == [own.pid]
    finally:
        for process in (theirs, own):
            process.kill()
            process.wait()


def test_a_file_is_not_replaced_through_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write in a folder and knows the temporary name puts a link there: what it leads to stays."""
    victim = folder / "victim"
    victim.write_text("precious")
    monkeypatch.setattr(durable.secrets, "token_hex", lambda size: "0" * 2 * size)
    (folder / f".tmp_latest.{'0' * 32}").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_durably(folder / "latest", "new")
    assert victim.read_text() == "precious" and (folder / f".tmp_latest.{'0' * 32}").is_symlink()


def test_a_lock_is_not_opened_through_a_link(folder: Path) -> None:
    """It would make the other file one that is locked, and change its mode."""
    (folder / "victim").touch(0o644)
    (folder / LOCK_FILE).symlink_to(folder / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        open_lock_file(folder / LOCK_FILE)
    assert stat.S_IMODE((folder / "victim").stat().st_mode) == 0o644
