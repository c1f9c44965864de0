"""The writer of this rank, seen from the rank, which never waits for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from queue import SimpleQueue

from megasdc.checkpoint.snapshots.messages import Act, Join, Listen, StoreTask, TaskResult

Task = StoreTask | Act | Listen | Join
POLL_S = 0.01
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
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()

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
            OSError: it cannot be started.
        """
        self.start()
        self._tasks.put(task)

    def hurry(self) -> None:
        """Let it run from now on also where others want the processor: something had to wait for it."""
        if self._process is not None:
            with contextlib.suppress(OSError):  # it has ended, or the system does not allow it
                os.sched_setscheduler(self._process.pid, os.SCHED_OTHER, os.sched_param(0))

    def _start(self) -> None:
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-m", _MODULE, str(there.fileno()), str(os.getpid()), str(int(self._describes))]
            environment = {**os.environ, "DS_ACCELERATOR": "cpu"}  # it uses no device
            self._process = subprocess.Popen(
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._pipe, self._tasks = Connection(here.detach()), SimpleQueue()
        self._sender = threading.Thread(target=_pass_on, args=(self._tasks, self._pipe), name="writer", daemon=True)
        self._sender.start()

    def ask(self, task: Task) -> TaskResult:
        """Give it a task and wait for its end; for what takes no time.

        Raises:
            OSError: it cannot be started.
        """
        self.send(task)
        while (found := self.answer()) is None:
            time.sleep(POLL_S)
        return found

    def answer(self) -> TaskResult | None:
        """What the last task has come to; None: it is not done."""
        if self._process is None or self._pipe is None:
            return TaskResult("its writer does not run", is_storage=True)
        try:
            if self._pipe.poll():
                found: TaskResult = self._pipe.recv()
                return found
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return TaskResult(f"its writer (process {self._process.pid}) {how}", is_storage=True)
        return None

    def close(self) -> None:
        """End it, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._tasks.put(None)
            self._sender.join()
            self._pipe.close()
        self._process = self._pipe = None


def _pass_on(tasks: SimpleQueue[Task | None], pipe: Connection) -> None:
    """Send tasks, for which a rank would have to wait where the writer is busy and the pipe is full."""
    while (task := tasks.get()) is not None:
        try:
            pipe.send(task)
        except OSError:  # it has ended, which the answer tells
            return
