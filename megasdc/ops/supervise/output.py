"""Standard error of a supervisor, which outlives the terminal: where that has gone, what is said goes on to a file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from megasdc.common.room import lacks_room

LOG_FILE = "supervisor.log"
"""In the folder of the supervisor."""


class LastingStream:
    """A text stream for ``print``, on to a file from its first error; SIGHUP says the same of a terminal.

    Args:
        stream: of this process, whose descriptor the file takes: programs that are started write there too.
        path: of the file, to which is appended.
    """

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream, self._path, self._lasts, self._lost = stream, path, False, 0

    def write(self, text: str) -> int:
        """Write, where it can be written."""
        try:
            done = self._stream.write(text)
        except OSError as error:
            if lacks_room(error):
                self._lost += 1
                return len(text)
            self.go_on_in_file("it cannot be written to any more")
            return self._stream.write(text)
        if self._lost:
            lost, self._lost = self._lost, 0
            self.write(f"megasdc supervise: {lost} texts may be missing here: there was no room for them\n")
        return done

    def flush(self) -> None:
        """Write what is buffered; what the stream did not take goes to the file."""
        try:
            self._stream.flush()
        except OSError as error:
            if lacks_room(error):
                self._lost += 1
                return
            self.go_on_in_file("it cannot be written to any more")
            self._stream.flush()

    def go_on_in_file(self, why: str) -> None:
        """Append to the file from now on; a signal handler may call it within a write.

        Raises:
            OSError: that cannot be written either.
        """
        if self._lasts:
            return
        self._lasts = True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for descriptor in {self._stream.fileno(), sys.__stdout__.fileno() if sys.__stdout__ else 1}:
            os.dup2(file, descriptor)
        # Not by the stream, whose buffer may be half written when a signal comes.
        os.write(file, f"megasdc supervise: what was said before went to standard error: {why}\n".encode())
        os.close(file)


@contextmanager
def lasting_output(path: Path) -> Iterator[None]:
    """Let this process outlive its terminal: SIGHUP does not end it, and standard error goes on to a file.

    An ignored SIGHUP stays ignored, as ``nohup`` requires.
    """
    before, stream = sys.stderr, LastingStream(sys.stderr, path)

    def on_hangup(_number: int, _frame: FrameType | None) -> None:
        stream.go_on_in_file("its terminal has gone (SIGHUP)")

    handler = signal.getsignal(signal.SIGHUP)
    if handler != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, on_hangup)
    sys.stderr = stream  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = before
        if handler is not None:
            signal.signal(signal.SIGHUP, handler)
