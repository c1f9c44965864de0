"""The kernel's log, read without waiting: hardware errors that the processor reports, and XIDs of NVIDIA's driver.

Source: Linux, ``Documentation/ABI/testing/dev-kmsg``: a record is ``PRIORITY,NUMBER,MICROSECONDS,FLAGS;TEXT``, and
lines that begin with a blank belong to the record before.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

RECORD = re.compile(r"\d+,(?P<number>\d+),(?P<microseconds>\d+),[^;]*;(?P<text>.*)")
XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9A-Fa-f:.]+)\): (?P<number>\d+)")
HARDWARE_ERROR = re.compile(r"\[Hardware Error\]|Machine check|EDAC \S+: \d+ [CU]E ")
_RECORD_BYTES = 16384


@dataclass(frozen=True)
class LogLines:
    """What the log said since the last look.

    Args:
        errors: lines about hardware errors.
        xids: (PCI address, number), oldest first.
        lost: records that were overwritten before they were read.
        problem: why the log cannot be read; empty: it can.
    """

    errors: list[str] = field(default_factory=list)
    xids: list[tuple[str, int]] = field(default_factory=list)
    lost: int = 0
    problem: str = ""


class KernelLog:
    """The log from a time on.

    Args:
        path: ``/dev/kmsg``, or a file like it.
        since: on ``time.monotonic``, from which the kernel's own stamps drift by seconds in months; earlier records are
            left out. None: only what is added from now on.
    """

    def __init__(self, path: Path, since: float | None) -> None:
        self._since = 0.0 if since is None else since
        self._next: int | None = None
        self._file, self._problem = -1, ""
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            if since is None:
                os.lseek(self._file, 0, os.SEEK_END)
        except OSError as error:
            self._problem = f"{path} cannot be read: {error.strerror}"

    def read(self) -> LogLines:
        """What has been added since the last look."""
        if self._problem:
            return LogLines(problem=self._problem)
        found = LogLines()
        lost = 0
        for line in self._new_text().splitlines():
            record = RECORD.match(line)
            if record is None:  # a line that belongs to the record before
                continue
            number = int(record["number"])
            if self._next is not None and number > self._next:
                lost += number - self._next
            self._next = number + 1
            if int(record["microseconds"]) / 1e6 < self._since:
                continue
            text = record["text"]
            if xid := XID.search(text):
                found.xids.append((xid["bus"], int(xid["number"])))
            elif HARDWARE_ERROR.search(text):
                found.errors.append(text)
        return LogLines(found.errors, found.xids, lost, self._problem)

    def _new_text(self) -> str:
        parts = []
        while True:
            try:
                part = os.read(self._file, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten; the next one is there
                continue
            except OSError as error:
                self._problem = f"the kernel's log cannot be read: {error.strerror}"
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts).decode(errors="replace")

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
