"""The front ends a launcher that cannot go on, and passes signals on once."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil
import pytest

from megasdc.ops.launch import process as process_module
from megasdc.ops.launch.process import LauncherProcess

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PATIENT = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the records at every poll."""
    monkeypatch.setattr(process_module, "LOOK_S", 0.5)


def launched(program: str, said: list[str], stdout: IO[str] | None = None) -> LauncherProcess:
    return LauncherProcess([sys.executable, "-c", program], os.environ, stdout=stdout, say=said.append)


@pytest.mark.slow
def test_ranks_that_wait_for_a_failed_one_are_ended() -> None:
    """A rank that hangs on another host would otherwise keep the launcher for ever."""
    said: list[str] = []
    process = launched(PATIENT, said)
    assert process.wait(lambda: signal.SIGINT, failure_grace_s=0.5) == -signal.SIGINT
    assert process.stopped_by is None
    assert "others still run" in said[0]
    process.close()


@pytest.mark.slow
def test_ranks_that_may_save_are_asked_once_and_ended_after_a_failure(tmp_path: Path) -> None:
    """A launcher's end leaves ranks the time of a stop on request; a rank that fails meanwhile shortens it."""
    said: list[str] = []
    output = tmp_path / "output"
    with output.open("w") as file:
        process = launched(STUBBORN, said, file)
    found = [signal.SIGTERM] * 6 + [signal.SIGINT]

    def how_to_end() -> signal.Signals | None:
        return None if not output.read_text() else found.pop(0) if len(found) > 1 else found[0]

    assert process.wait(how_to_end, failure_grace_s=0.1) == -signal.SIGINT
    asked, *ended = [line.rpartition("; ")[2] for line in said]
    assert (asked, set(ended)) == ("asking them to save and end", {"ending them"})
    process.close()


def test_a_signal_after_the_end_kills_nothing() -> None:
    """While the front still waits for records: the launcher's number may be another process's by now."""
    said: list[str] = []
    process = launched("", said)
    assert process.wait(lambda: None, failure_grace_s=0.5) == 0
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert process.stopped_by == signal.SIGTERM and len(said) == 2
    process.close()


def test_a_front_that_hears_of_a_hangup_lets_ranks_save() -> None:
    """They are asked as by SIGTERM, however often it comes, and whether anybody can be told or not."""

    def say(_: str) -> None:
        raise OSError(errno.EIO, "the terminal has gone")

    own = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        process = LauncherProcess([sys.executable, "-c", PATIENT], os.environ, stdout=None, say=say)
        for _ in range(2):
            with contextlib.suppress(OSError):
                os.kill(os.getpid(), signal.SIGHUP)
        assert process.stopped_by == signal.SIGHUP
        assert process.wait(lambda: None, failure_grace_s=0.5) == -signal.SIGTERM
        process.close()
    finally:
        signal.signal(signal.SIGHUP, own)


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hangup_that_the_front_does_not_hear_of_stays_as_it_is(before: signal.Handlers) -> None:
    """It ends the front, and by that lets ranks save; or nothing, under ``nohup``."""
    own = signal.signal(signal.SIGHUP, before)
    try:
        process = launched("", [])
        assert signal.getsignal(signal.SIGHUP) == before
        process.close()
    finally:
        signal.signal(signal.SIGHUP, own)


@pytest.mark.slow
def test_second_signal_kills(tmp_path: Path) -> None:
    """The first is passed on to a launcher that ignores it, the second ends it; handlers are given back."""
    said: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    output = tmp_path / "output"
    with output.open("w") as file:
        process = launched(STUBBORN, said, file)

    def send() -> None:
        if output.read_text():
            os.kill(os.getpid(), signal.SIGTERM)

    assert process.wait(send, failure_grace_s=60) == -signal.SIGKILL
    assert process.stopped_by == signal.SIGTERM
    assert ["passed on" in said[0], "killing" in said[1]] == [True, True]
    process.close()
    assert signal.getsignal(signal.SIGTERM) is before


SUSPENDED = """
import os, sys, time
from megasdc.ops.launch import process
process.LOOK_S, process.PAUSE_S, process.LATE_S = 3600.0, 1.0, float(sys.argv[1])
launcher = process.LauncherProcess(["sleep", "3600"], os.environ, stdout=None, say=lambda line: print(line, flush=True))
print("ready", flush=True)
launcher.wait(lambda: None, 1.0)
print(launcher.stood_still_s, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [3600.0, 0.0], ids=["just before", "long ago"])
def test_a_front_notices_that_it_was_suspended(late_s: float) -> None:
    """As with its machine: for how long, as long as timeouts that ran out meanwhile may still be met."""
    with subprocess.Popen([sys.executable, "-c", SUSPENDED, str(late_s)], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None and front.stdout.readline() == "ready\n"
        (launcher,) = psutil.Process(front.pid).children()
        time.sleep(1.0)
        front.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        front.send_signal(signal.SIGCONT)
        assert re.fullmatch(r"this launch stood still for \d+ s: .* was suspended\n", front.stdout.readline())
        time.sleep(1.0)
        launcher.kill()
        assert (float(front.stdout.readline()) > 1.0) is (late_s > 0.0)
