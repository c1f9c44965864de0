"""Locks of extensions that the ranks of a host compile, removed where their ranks were ended meanwhile.

PyTorch makes an empty file ``lock`` in the folder of an extension, and keeps it open until it has been compiled
(``torch.utils.file_baton``). Where its process is killed before, the file stays, and whoever needs the extension
afterwards waits without end: a run that is started again by itself would never train again. Only a file that one of
this host's ranks was seen to have open is removed, and only while it is still that file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class _Lock:
    """A file as it was seen, and its process; a file that is made anew may get the same number."""

    device: int
    inode: int
    made_ns: int
    pid: int

    @classmethod
    def of(cls, status: os.stat_result, pid: int) -> _Lock:
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns, pid)


class BuildLocks:
    """The locks in a folder of compiled extensions that processes have open.

    Args:
        folder: of the extensions; None: it is not known, and nothing is looked at.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).resolve()
        self._seen: dict[Path, _Lock] = {}

    def record_open(self, pids: Iterable[int]) -> None:
        """Note which locks these processes have open."""
        if self._folder is None:
            return
        for pid in pids:
            with suppress(OSError):  # it has ended
                for number in os.listdir(f"/proc/{pid}/fd"):
                    self._record_file(pid, number)

    def _record_file(self, pid: int, number: str) -> None:
        with suppress(OSError):  # it has just been closed
            path = Path(os.readlink(f"/proc/{pid}/fd/{number}"))
            if path.name == "lock" and path.parent.parent == self._folder:
                self._seen[path] = _Lock.of(os.stat(f"/proc/{pid}/fd/{number}"), pid)

    def remove_left(self, ours: Callable[[], Iterable[int]], say: Callable[[str], None]) -> None:
        """Remove those whose processes have ended; what these started to compile with is ended before.

        Args:
            ours: processes of the launch on this host that may be left.
            say: gets a sentence for each lock that is removed.
        """
        for path, lock in self._seen.items():
            with suppress(OSError):
                if _lives(lock.pid) or _Lock.of(path.stat(), lock.pid) != lock:
                    continue
                _end(pid for pid in ours() if _works_in(pid, path.parent))
                path.unlink()
                say(f"{path}: removed, since the rank that compiled there was ended; the next start compiles again")


def _lives(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _works_in(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd") == str(folder)
    return False


def _end(pids: Iterable[int]) -> None:
    found = []
    for pid in pids:
        with suppress(psutil.Error):
            found.append(process := psutil.Process(pid))
            process.kill()
    psutil.wait_procs(found, timeout=10.0)
