"""Lock of a run folder: one launch at a time, by the kernel's lock and a record that names the holder.

``.launch.lock`` is locked with flock(2) while the process that took it lives; ``lock.json`` names that process, which
increments a counter in it. Whether a launch that left a record is still active:

| its process | active if |
|---|---|
| on this host, seen in /proc | a process with that id and start time lives |
| on another host | its record changes within 30 s; clocks of two hosts are not compared |
| on another host, and its launch was seen to end | never: it is replaced, and notices that if it still lives |

Only users who may write in the folder may lock the file (``open_lock_file``).
On a file system without flock, or whose server keeps the lock of a lost host, the record alone decides.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from megasdc.common.durable import TEMPORARY_PREFIX, parse_json, remove_unfinished, write_durably
from megasdc.common.errors import LaunchError
from megasdc.common.origin import Origin, boot_id

logger = logging.getLogger(__name__)

ENDED_LAUNCHES_VARIABLE = "MEGASDC_ENDED_LAUNCHES"
"""Environment variable with the ids, separated by commas, of the run's launches whose end its supervisor has seen."""
LOCK_FILE = ".launch.lock"
"""Name of the lock file; not ``.lock``, which a sweep locks in its folder and in that of a run in an array job."""
RECORD_FILE = "lock.json"
BEAT_S = 5.0
STALE_S = 30.0
SETTLE_S = 5.0
"""Seconds that the holder of the lock may take to write its record, or to end."""
RACE_S = 2.0
"""Seconds after which, without flock, our record counts if nobody has replaced it."""
UNFINISHED_S = 86_400.0
"""Seconds since its last write after which a file that still has a temporary name is removed."""
LEARN_S = BEAT_S + RACE_S
"""Seconds that a replaced launch may take to notice it; it may write meanwhile."""
_ACL = "system.posix_acl_access"
"""Extended attribute with the access list (acl(5)): a version, then entries of a kind, rights and an id each."""
_ACL_HEAD, _ACL_ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _NAMED_GROUP, _MASK, _OTHERS, _NO_ID = 1, 2, 4, 8, 16, 32, 0xFFFFFFFF
WITHOUT_FLOCK = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})

Say = Callable[[str], None]


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder for its launch; the fields are named as in the file.

    Args:
        token: random text of one launch, the same on all its hosts.
        launch_id: id of the launch; None without ``megasdc launch``.
        host: name of the host.
        boot_id: id of the host kernel's boot; new at every boot.
        pid_namespace: PID namespace in which ``pid`` is valid.
        pid: process id.
        process_start_ticks: clock ticks from boot to the start of the process, since process ids are reused.
        since: time at which the folder was locked, in seconds since the epoch, for display only.
        beats: counter that is incremented while the process lives.
        silent: whether another process has watched the record for 30 s without a change.
    """

    token: str
    launch_id: str | None
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    process_start_ticks: int
    since: float
    beats: int = 0
    silent: bool = False

    @classmethod
    def this_process(cls, token: str, launch_id: str | None) -> Holder:
        """The record of this process."""
        start = start_ticks(os.getpid())
        assert start is not None, "this process lives"
        return cls(token, launch_id, *process_space(), os.getpid(), start, time.time())

    @property
    def is_here(self) -> bool:
        """Whether the holder is on this host and in this PID namespace, so that /proc shows it if it lives."""
        return (self.host, self.boot_id, self.pid_namespace) == process_space()

    @property
    def lives_here(self) -> bool:
        """Whether the holder lives, on this host and in this PID namespace."""
        return self.is_here and start_ticks(self.pid) == self.process_start_ticks

    @property
    def may_live(self) -> bool:
        """Whether the holder lives here, or is on another host and not marked silent."""
        return self.lives_here if self.is_here else not self.silent

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        launch = f"launch {self.launch_id}" if self.launch_id else "a launch"
        return f"{launch} (host {self.host}, process {self.pid}, since {since})"


class RunLock:
    """Lock of a folder that this process holds.

    Args:
        folder: the locked folder.
        holder: this process.
        file: the open lock file, with the kernel's lock where there is one.
        replaced: holder of a stale record that was replaced; None: there was none.
        watched: False if that holder was replaced without a wait for a sign of life, so that it may not know it yet.
    """

    def __init__(self, folder: Path, holder: Holder, file: IO[str], replaced: Holder | None, watched: bool) -> None:
        self.folder = folder
        self.replaced = replaced
        self._alone_at = time.monotonic() + (0.0 if watched else LEARN_S)
        self.taken_by: Holder | None = None
        self._holder = holder
        self._file = file
        self._mutex = threading.Lock()
        self._released = threading.Event()
        os.register_at_fork(after_in_child=file.close)  # a child that outlives this process must not hold it
        # In a thread: a file system that hangs must not block training.
        threading.Thread(target=self._beat, daemon=True, name=f"lock of {folder}").start()

    def wait_until_alone(self) -> None:
        """Wait until a replaced holder that may still live has noticed it, and writes nothing any more."""
        while (left := self._alone_at - time.monotonic()) > 0:
            time.sleep(left)

    def release(self) -> None:
        """Release the folder; idempotent."""
        self._released.set()
        if not self._mutex.acquire(timeout=1.0):
            return  # the file system hangs; the kernel's lock ends with this process
        try:
            with contextlib.suppress(OSError):
                if self.taken_by is None and not self._file.closed:
                    (self.folder / RECORD_FILE).unlink(missing_ok=True)
                self._file.close()
        finally:
            self._mutex.release()

    def _beat(self) -> None:
        failed = False
        while not self._released.wait(BEAT_S):
            with self._mutex:
                if self._released.is_set():
                    return
                try:
                    self._write_beat()
                    failed = False
                except OSError as error:
                    if not failed:
                        logger.warning("%s cannot be kept up to date: %s", self.folder / RECORD_FILE, error)
                    failed = True
            if self.taken_by is not None:
                return

    def _write_beat(self) -> None:
        found = read_holder(self.folder)
        if found is not None and found.token != self._holder.token:
            if self.replaced is None or found.token != self.replaced.token:
                self.taken_by = found
                return
            # The one that was replaced lives, and wrote after it had read, but before we wrote: it learns it now.
            self._alone_at = time.monotonic() + LEARN_S
        self._holder = replace(self._holder, beats=self._holder.beats + 1)
        _write(self.folder, self._holder)


class LockedFolders:
    """The locks that a rank holds for its launch, from the start until its end is recorded.

    Attributes:
        folder: the launch's run folder; None: not known yet.
        token: token of the launch; None: it has not requested its folders yet.
        origin: origin of this rank's events; without an id until the start is counted.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.token: str | None = None
        self.origin = Origin()
        self._locks: list[RunLock] = []

    def add(self, lock: RunLock) -> None:
        """Add a lock, to be released with the others."""
        self._locks.append(lock)

    def release(self) -> None:
        """Release all; from any thread, idempotent."""
        for lock in self._locks:
            lock.release()


def acquire_lock(folder: Path, holder: Holder, say: Say, ended: Collection[str] = ()) -> RunLock:
    """Lock a folder for a launch, and remove files that processes killed during a write have left there.

    Args:
        folder: the folder, which exists and is writable.
        holder: this process.
        say: function that gets messages for the user.
        ended: ids of launches whose holders on other hosts are not watched, but replaced.

    Returns:
        The lock, to be released; the system releases it too when this process ends.

    Raises:
        LaunchError: another launch is active there.
        OSError: the folder cannot be written.
    """
    file = open_lock_file(folder / LOCK_FILE)
    try:
        locked = _lock_or_refuse(folder, file, say)
        found = read_holder(folder)
        if (living := _living(folder, found, say, ended)) is not None:
            raise in_use(folder, living)
        if locked is False:
            file = _replace_lock_file(folder, file)
        _write(folder, holder)
        if not locked:
            time.sleep(RACE_S)
            if (now := read_holder(folder)) is not None and now.token != holder.token:
                raise in_use(folder, now)
    except BaseException:
        file.close()
        raise
    places = (".", "health", "health/incidents", "reports", "supervise")
    for place in (*(folder / name for name in places), *folder.glob("done/*/")):
        remove_unfinished(place, UNFINISHED_S)
    return RunLock(folder, holder, file, found, watched=not _is_replaced(found, ended))


def join_lock(folder: Path, holder: Holder, say: Say, ended: Collection[str] = ()) -> RunLock | None:
    """Lock a folder unless a rank of this launch holds it: with node-local storage, each host has its own folder.

    Args:
        folder: as in ``acquire_lock``.
        holder: this process, with the token of the launch.
        say, ended: as in ``acquire_lock``.

    Returns:
        The lock; None where another rank of the launch has it.

    Raises:
        LaunchError: another launch is active there.
        OSError: the folder cannot be written.
    """
    end = time.monotonic() + SETTLE_S
    while True:
        if (found := read_holder(folder)) is not None and found.token == holder.token:
            return None
        try:
            return acquire_lock(folder, holder, say, ended)
        except LaunchError:
            # Another rank of this launch may hold the lock and be about to write its record.
            now = read_holder(folder)
            if (now is None or now.token != holder.token) and time.monotonic() > end:
                raise
            time.sleep(0.1)


def check_free(folder: Path, say: Say, ended: Collection[str] = ()) -> None:
    """Refuse a folder in which a launch is active; takes no lock.

    Args:
        folder: the folder, which need not exist.
        say, ended: as in ``acquire_lock``.

    Raises:
        LaunchError: another launch is active there.
    """
    found = read_holder(folder)
    if (living := _living(folder, found, say, ended)) is not None:
        raise in_use(folder, living)
    if found is not None and not found.is_here and not found.silent and found.launch_id not in ended:
        with contextlib.suppress(OSError):
            _write(folder, replace(found, silent=True))  # so that nobody waits for it again


@contextlib.contextmanager
def launches_locked_out(folder: Path, token: str | None, say: Say) -> Iterator[bool]:
    """Prevent launches from starting in a folder while this process writes there.

    Args:
        folder: the folder, which exists.
        token: token of this process's launch, which may hold the folder; None: it holds none.
        say: function that gets a message if another launch is active.

    Yields:
        Whether this process may write there; False: another launch is active.

    Raises:
        OSError: the folder cannot be written.
    """
    with open_lock_file(folder / LOCK_FILE) as file:
        unlocked, found = _lock_shared(folder, file)
        ours = found is not None and found.token == token
        free = ours or (unlocked and (found is None or not found.may_live))
        if not free:
            say(f"{folder} is in use by {found or 'a process that left no record'}: nothing is written there")
        yield free


def _lock_shared(folder: Path, file: IO[str]) -> tuple[bool, Holder | None]:
    """Take a shared lock, waiting briefly for a holder that has no live record.

    Returns whether no launch holds the lock (True without flock), and the holder's record at that moment.
    """
    end = time.monotonic() + SETTLE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found = read_holder(folder)
            if (found is not None and found.may_live) or time.monotonic() > end:
                return False, found
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in WITHOUT_FLOCK:
                raise
            return True, read_holder(folder)
        else:
            return True, read_holder(folder)


def read_holder(folder: Path) -> Holder | None:
    """Holder recorded in a folder; None: there is no valid record."""
    try:
        return Holder(**parse_json((folder / RECORD_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def in_use(folder: Path, holder: Holder) -> LaunchError:
    """The error for a folder that another launch holds."""
    return LaunchError(
        f"{folder} is in use by {holder}; wait for its end or end it, or choose another folder: "
        "megasdc.logging.run_dir, megasdc.checkpoint.folder"
    )


def _is_replaced(found: Holder | None, ended: Collection[str]) -> bool:
    """Whether a holder is on another host and its launch is known to have ended."""
    return found is not None and not found.is_here and not found.silent and found.launch_id in ended


def _living(folder: Path, found: Holder | None, say: Say, ended: Collection[str]) -> Holder | None:
    """The active holder, judged by the record ``found``; waits up to ``STALE_S`` for a heartbeat of another host."""
    if found is None or found.silent or _is_replaced(found, ended):
        return None
    if found.is_here:
        return found if found.lives_here else None
    say(f"{folder}: its last record is of {found}; waiting up to {STALE_S:g} s to see whether it is alive")
    end = time.monotonic() + STALE_S
    while time.monotonic() < end:
        time.sleep(0.2)
        now = read_holder(folder)
        if now is None:
            return None
        if now != found:
            return now
    return None


def open_lock_file(path: Path) -> IO[str]:
    """Open a file for flock, created if absent, that only users who may write in its folder can lock.

    Whoever may read a file may lock it. So the file is readable and writable for exactly those who may write in its
    folder, by its mode or access list and whatever the umask: they can start what the lock guards.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC  # NFS needs both for the two kinds of locks
    try:
        found = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        try:
            found = os.open(path, flags)
        except FileNotFoundError:  # who had it has just removed it
            return open_lock_file(path)
    if os.fstat(found).st_uid == os.geteuid():
        _let_writers_lock(found, path.parent)
    return os.fdopen(found, "a+", encoding="utf-8")


def writers_may_lock_beside(path: Path) -> bool:
    """Whether all who may write a file, by its mode, may also lock a file of ``open_lock_file`` in the same folder.

    Raises:
        OSError: the file or its folder cannot be inspected.
    """
    seen, folder = path.stat(), path.parent.stat()
    owner_may = seen.st_uid == folder.st_uid or bool(folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    writers = stat.S_IMODE(seen.st_mode) & (stat.S_IWGRP | stat.S_IWOTH)
    return owner_may and not writers & ~_lock_mode(folder, seen.st_gid)


def _let_writers_lock(file: int, folder: Path) -> None:
    """Give this user's lock file the rights of its folder; if the system refuses, it keeps its own."""
    above = folder.stat()
    if above.st_mode & stat.S_IWGRP and os.fstat(file).st_gid != above.st_gid:
        with contextlib.suppress(OSError):  # this user need be no member of that group
            os.fchown(file, -1, above.st_gid)
    with contextlib.suppress(OSError):
        seen = os.fstat(file)
        if (listed := _acl(folder)) is not None:
            if _acl(file) != (wanted := _lock_acl(listed, above, seen.st_uid)):
                os.setxattr(file, _ACL, wanted)
        elif stat.S_IMODE(seen.st_mode) != (mode := _lock_mode(above, seen.st_gid)):
            os.fchmod(file, mode)


def _lock_mode(folder: os.stat_result, group: int) -> int:
    """Mode of a lock file of a group in a folder."""
    of_group = stat.S_IWGRP if group == folder.st_gid else stat.S_IWOTH
    return 0o600 | (0o060 if folder.st_mode & of_group else 0) | (0o006 if folder.st_mode & stat.S_IWOTH else 0)


def _acl(of: Path | int) -> bytes | None:
    """Access list of a file or a folder; None: it has only a mode, or the file system has no access lists."""
    try:
        return os.getxattr(of, _ACL)
    except OSError:
        return None


def _lock_acl(folder: bytes, above: os.stat_result, owner: int) -> bytes:
    """Access list of a lock file that exactly those who may write in its folder may read and write.

    Args:
        folder: access list of the folder.
        above: status of the folder, whose owner and group get entries of their own if they are not the file's.
        owner: user id of the file's owner.
    """
    entries = list(_ACL_ENTRY.iter_unpack(folder[_ACL_HEAD.size :]))
    mask = next((rights for kind, rights, _ in entries if kind == _MASK), 7)
    found = [(_OWNER, 6, _NO_ID), (_GROUP, 0, _NO_ID), (_MASK, 6, _NO_ID)]
    for kind, rights, who in entries:
        may = 6 if rights & (7 if kind in (_OWNER, _OTHERS) else mask) & 2 else 0
        if kind == _NAMED_GROUP or (kind == _USER and who != above.st_uid):
            found.append((kind, may, who))
        elif kind == _OTHERS:
            found.append((kind, may, _NO_ID))
        elif kind == _GROUP:
            found.append((_NAMED_GROUP, may, above.st_gid))
        elif kind == _OWNER and above.st_uid != owner:
            found.append((_USER, may, above.st_uid))
    return folder[: _ACL_HEAD.size] + b"".join(_ACL_ENTRY.pack(*one) for one in sorted(found))


def _is_locked_by_readers(folder: Path, file: IO[str]) -> bool:
    """Whether all holders of a lock are users who may not write in its folder; lock files of old versions let them.

    False where the system does not show it: a holder is on another host, in another PID namespace, or may be one of the
    users in the folder's access list.
    """
    try:
        seen = os.fstat(file.fileno())
        place = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
        lines = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        holders = [line[4] for line in lines if line[1] == "FLOCK" and line[5] == place]  # who waits has an arrow there
        return bool(holders) and not any(_may_write(pid, folder) for pid in holders)
    except (OSError, ValueError, LookupError):
        return False


def _may_write(pid: str, folder: Path) -> bool:
    """Whether the user who started a process (its real user id) may be allowed to write in a folder.

    Raises:
        OSError, ValueError, LookupError: the process has ended, or /proc has another format.
    """
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    status = dict(line.partition(":")[::2] for line in text.splitlines())
    above, user = folder.stat(), int(status["Uid"].split()[0])
    if user in (0, os.geteuid(), above.st_uid) or above.st_mode & stat.S_IWOTH:
        return True
    groups = {int(one) for one in (status["Gid"].split()[0], *status["Groups"].split())}
    return bool(above.st_mode & stat.S_IWGRP) and (above.st_gid in groups or _acl(folder) is not None)


def _lock_or_refuse(folder: Path, file: IO[str], say: Say) -> bool | None:
    """Take the lock; raises a LaunchError if a process of this host holds it.

    Returns True: the lock is taken; None: the file system has no flock; False: another host holds it, perhaps a lost
    one, or a user who may not write in the folder and left no record.
    """
    end = time.monotonic() + SETTLE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in WITHOUT_FLOCK:
                raise
            say(f"{folder}: its file system has no flock ({error.strerror}); {RECORD_FILE} alone guards it")
            return None
        else:
            return True
        found = read_holder(folder)
        if found is not None and found.lives_here:
            raise in_use(folder, found)
        if found is not None and not found.is_here:
            return False
        if time.monotonic() > end and _is_locked_by_readers(folder, file):
            say(f"{folder / LOCK_FILE} is locked by a user who may not write there, and left no record: replaced")
            return False
        if time.monotonic() > end:
            raise LaunchError(
                f"{folder} is in use by a process that holds {folder / LOCK_FILE} and left no record; find it with "
                f"`fuser {folder / LOCK_FILE}`, or choose another folder"
            )
        time.sleep(0.1)


def _replace_lock_file(folder: Path, old: IO[str]) -> IO[str]:
    """Replace a lock file that a lost host, or a user without the right to it, keeps locked by a new, locked one."""
    path = folder / f"{TEMPORARY_PREFIX}{LOCK_FILE}.{secrets.token_hex(16)}"
    file = open_lock_file(path)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(path, folder / LOCK_FILE)
    old.close()
    return file


def _write(folder: Path, holder: Holder) -> None:
    write_durably(folder / RECORD_FILE, json.dumps(asdict(holder)) + "\n")


def process_space() -> tuple[str, str, str]:
    """Host name, boot id and PID namespace, within which a process id is valid."""
    return socket.gethostname(), boot_id(), os.readlink("/proc/self/ns/pid")


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks after boot; None: no process with this id lives (proc_pid_stat(5))."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
