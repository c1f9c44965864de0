"""A supervisor outlives its terminal: what it says goes on to a file, whether a signal or a write tells it first."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
from megasdc.ops.supervise.command import print_supervisor_message
from megasdc.ops.supervise.command import lasting_output
with lasting_output(Path(sys.argv[1])):
    print_supervisor_message("begins")
    while not Path(sys.argv[2]).exists():
        print_supervisor_message("goes on") if len(sys.argv) > 3 else None
        time.sleep(0.05)
    print_supervisor_message("ends")
    print_supervisor_message(f"stdout too {print('from print', flush=True)}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_goes_on_to_a_file(tmp_path: Path, terminal: bool, writes: bool) -> None:
    """The terminal of a login, or the pipe of a command over SSH without one, is closed while it runs."""
    log, end = tmp_path / "supervise" / "supervisor.log", tmp_path / "end"
    argv = [sys.executable, "-c", PROGRAM, str(log), str(end), *(["writes"] if writes else [])]
    if terminal:
        pid, reading = pty.fork()
        if pid == 0:
            os.execv(sys.executable, argv)
    else:
        reading, writing = os.pipe()
        pid = subprocess.Popen(argv, stdout=writing, stderr=writing).pid
        os.close(writing)
    said = b""
    while b"begins" not in said:
        said += os.read(reading, 1000)
    os.close(reading)
    time.sleep(0.5)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it still runs"
    end.touch()
    assert os.waitpid(pid, 0)[1] == 0
    assert "megasdc supervise: ends" in log.read_text() and "from print" in log.read_text()


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    """As ``nohup`` asks for, which has redirected what is said already."""
    log, end = tmp_path / "supervisor.log", tmp_path / "end"
    argv = [sys.executable, "-c", PROGRAM, str(log), str(end)]
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=ignore) as process:  # noqa: PLW1509
        assert process.stderr is not None and process.stderr.readline().endswith(b"begins\n")
        process.send_signal(signal.SIGHUP)
        end.touch()
        assert process.wait() == 0 and not log.exists()


@pytest.mark.slow
def test_a_hangup_within_a_write_ends_nothing(tmp_path: Path) -> None:
    """The terminal stands still with its buffer full, so that a signal comes while the stream is being written."""
    log = tmp_path / "supervisor.log"
    program = """
import os, signal, sys, threading, time
from pathlib import Path
from megasdc.ops.supervise.command import lasting_output
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what starts the tests may ignore it
with lasting_output(Path(sys.argv[1])):
    hang_up = lambda: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGHUP))
    threading.Thread(target=hang_up).start()
    print("x" * 300_000, file=sys.stderr, flush=True)
    print("ends", file=sys.stderr, flush=True)
"""
    reading, writing = os.pipe()  # 64 KiB, which nobody reads
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen([sys.executable, "-c", program, str(log)], stderr=writing, env=env) as process:
        os.close(writing)
        time.sleep(1.5)
        end = time.monotonic() + 30
        while not log.exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.close(reading)
        assert process.wait(30) == 0
    assert log.read_text().endswith("ends\n") and "SIGHUP" in log.read_text()
