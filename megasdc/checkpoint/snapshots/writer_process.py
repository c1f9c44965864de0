"""The writer of this rank, seen from the rank, which never waits for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from megasdc.checkpoint.snapshots.messages import Act, Answer, Join, Listen, Store

Task = Store | Act | Listen | Join
_POLL_S = 0.01
_MODULE = "megasdc.checkpoint.snapshots.writer_main"


class WriterProcess:
    """A process of its own, since a thread would keep the rank's Python from running.

    Args:
        describes: it describes the content of the files that it writes, for which it loads torch at its start.
    """

    def __init__(self, *, describes: bool) -> None:
        self._describes = describes
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None: it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def lives(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it where it does not run.

        Raises:
            OSError: that is not possible.
        """
        if not self.lives:
            self.close()
            self._start()

    def send(self, task: Task) -> None:
        """Give it a task, which ``answer`` tells the end of; it is started first where it does not run.

        Raises:
            OSError: it cannot be started, or has just ended.
        """
        self.start()
        assert self._pipe is not None
        self._pipe.send(task)

    def _start(self) -> None:
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", _MODULE, str(there.fileno()), str(os.getpid()), str(int(self._describes))]
            environment = {**os.environ, "DS_ACCELERATOR": "cpu"}  # it uses no device
            self._process = subprocess.Popen(
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._pipe = Connection(here.detach())

    def ask(self, task: Task) -> Answer:
        """Give it a task and wait for its end; for what takes no time.

        Raises:
            OSError: it cannot be started.
        """
        self.send(task)
        while (found := self.answer()) is None:
            time.sleep(_POLL_S)
        return found

    def answer(self) -> Answer | None:
        """What the last task has come to; None: it is not done."""
        if self._process is None or self._pipe is None:
            return Answer("its writer does not run", is_storage=True)
        try:
            if self._pipe.poll():
                found: Answer = self._pipe.recv()
                return found
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return Answer(f"its writer (process {self._process.pid}) {how}", is_storage=True)
        return None

    def close(self) -> None:
        """End it, whatever it is doing."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._pipe = None
