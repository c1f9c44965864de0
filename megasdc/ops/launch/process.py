"""DeepSpeed's launcher as a child process: supervision, forwarding of signals, and its end after a failure."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

import psutil

from megasdc.common.host import DISK_S, PAUSE_S, Waker

POLL_S = 0.2
LOOK_S = 2.0
STOPPED_S = 10.0
"""A launcher may be stopped by a signal for so long."""
LATE_S = 180.0
"""After a suspension timeouts that ran out meanwhile end ranks, and with them the launch, within that time."""
KILL_S = 10.0
"""A launcher that was killed has so long to end."""
SRUN = "srun"
STARTERS = frozenset({SRUN, "pdsh", "ssh", "mpirun"})
"""Programs by which a launcher starts ranks on other hosts."""
FORWARDED = {
    **{number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
    signal.SIGHUP: signal.SIGTERM,
}
"""Signals that are passed on to the launcher, each with what it gets."""

Say = Callable[[str], None]


class LauncherProcess:
    """DeepSpeed's launcher as a child process; ``stdout`` None: its output goes to that of this process.

    The first SIGINT, SIGTERM or SIGUSR1 that this process receives is forwarded, so that ranks can save; the second one
    kills. So is SIGHUP, where this process has a handler for it, and never kills: a terminal that goes sends several.
    Without one this process ends, of which the launcher learns by itself. ``say`` is called with messages about
    signals.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, stdout: IO[str] | None, say: Say) -> None:
        self.stopped_by: int | None = None
        self.stood_still_s = 0.0
        """For how long this process itself did not run, as where its host or its job is suspended; 0: it did not, or
        ``LATE_S`` ago, when timeouts that ran out meanwhile have been met."""
        self._say = say
        self._waker = Waker(STOPPED_S, DISK_S)
        # A session of its own: Ctrl-C in a terminal must reach it once, forwarded by us, not also directly.
        # In the background of a script this process ignores SIGINT, which a child would inherit: it
        # could not be ended with SIGINT. A signal with a handler here has its default action in the child.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self._process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            start_new_session=True,
        )
        heard = [one for one in FORWARDED if one is not signal.SIGHUP or callable(signal.getsignal(one))]
        self._previous = {number: signal.signal(number, self._on_signal) for number in heard}
        self._previous[signal.SIGINT] = before

    def wait(self, how_to_end: Callable[[], signal.Signals | None], failure_grace_s: float) -> int:
        """Wait for the launcher's end; returns its exit code, negative: ended by that signal, or told to and given up.

        ``how_to_end`` is called periodically; None: nothing has failed; SIGTERM: the other ranks may still save, with
        the full grace of a requested stop; SIGINT: they may wait forever. The launcher is sent that signal
        ``failure_grace_s`` seconds after a failure.
        """
        number: signal.Signals | None = None
        send_at = math.inf
        looked_at = resumed_at = time.monotonic()
        while self._process.poll() is None and self._process.pid not in self._waker.given_up:
            slept_at = time.monotonic()
            time.sleep(POLL_S)
            now = time.monotonic()
            if now - slept_at > PAUSE_S:  # what is done between sleeps may take its time, on a slow disk
                self.stood_still_s, resumed_at = now - slept_at, now
                self._say(f"this launch stood still for {self.stood_still_s:.0f} s: its host or its job was suspended")
            elif now - resumed_at > LATE_S:
                self.stood_still_s = 0.0
            if now - looked_at > LOOK_S:
                looked_at = now
                self._wake()
                found = how_to_end()  # also after a failure: what a signal has stopped is ended at the second look
                if number is not signal.SIGINT and found not in (None, number):
                    number, send_at = found, now + failure_grace_s
            if number is not None and self.stopped_by is None and now > send_at:
                what = "asking them to save and end" if number is signal.SIGTERM else "ending them"
                self._say(f"a part of the launch failed {failure_grace_s:g} s ago and others still run; {what}")
                self._forward(number)
                send_at = now + failure_grace_s if number is signal.SIGINT else math.inf
        code = self._process.poll()
        return -signal.SIGKILL if code is None else code

    def _wake(self) -> None:
        """Wake or end the launcher, and what it starts ranks on other hosts with, where they do not run.

        The launcher waits for those: where one cannot be ended, it is killed with the others.
        """
        started = [self._process.pid]
        with suppress(psutil.Error):
            below = psutil.Process(started[0]).children(recursive=True)  # pdsh starts ssh
            started += [one.pid for one in below if one.name() in STARTERS]
        for pid in started:
            if done := self._waker.check(pid):
                self._say(f"the launcher: {done}")
                if pid in self._waker.given_up:
                    self._kill()

    def close(self) -> None:
        """Restore signal handlers; kill the launcher if it still runs."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._process.poll() is None:
            self._kill()
            try:
                self._process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                self._say(f"the launcher was killed and does not end: process {self._process.pid}")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.stopped_by is None:  # told last, since nobody may take it any more
            self.stopped_by = number
            self._forward(FORWARDED[signal.Signals(number)])
            self._say(f"{name}: passed on to the launcher; once more kills it")
        elif number != signal.SIGHUP:
            self._kill()
            self._say(f"{name} again: killing the launcher")

    def _forward(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _kill(self) -> None:
        """Kill the launcher, if it still runs, and everything that it started on this host."""
        if self._process.poll() is not None:  # its number may be another process's by now
            return
        for child in psutil.Process(self._process.pid).children(recursive=True):
            try:
                end_launcher(child)
            except psutil.NoSuchProcess:
                continue
        self._process.kill()


def end_launcher(process: psutil.Process) -> None:
    """Kill a process that starts ranks; srun with SIGTERM, on which it kills its tasks, which else would outlive it.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    if process.name() == SRUN:
        process.terminate()
    else:
        process.kill()
