"""Is a process that outlives SIGKILL left after a while, and told?"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megasdc.lab.sweeps.run_process import RunningRanks
from megasdc.ops.preflight import commands
from megasdc.parallel import processes
from megasdc.parallel.local_ranks import LocalMeeting
from megasdc.parallel.processes import kill_all

SLEEPER = """
import ctypes, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER: anybody
print("ready", flush=True)
time.sleep(600)
"""
TRACER = """
import ctypes, sys
if ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None):  # PTRACE_SEIZE
    sys.exit(1)
print("traced", flush=True)
sys.stdin.read()
"""
"""Until it ends, a process that it traces and that is killed is not gone for the one that has started that."""


@contextlib.contextmanager
def _outlives_a_kill() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a kill does not end, as one that waits for a disk."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SLEEPER], **pipes) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == b"ready\n"
            with subprocess.Popen([sys.executable, "-c", TRACER, str(process.pid)], **pipes) as tracer:  # type: ignore[call-overload]
                if tracer.stdout.readline() != b"traced\n":
                    pytest.skip("no process may trace another here")
                try:
                    yield process
                finally:
                    tracer.kill()
        finally:
            process.kill()


def test_a_process_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """With its id; one that does end is not named."""
    monkeypatch.setattr(processes, "KILLED_S", 0.5)
    with _outlives_a_kill() as stuck, subprocess.Popen([sys.executable, "-c", SLEEPER]) as other:
        with caplog.at_level(logging.WARNING):
            assert kill_all([stuck, other]) == [stuck.pid]
        assert f"(pid {stuck.pid})" in caplog.text and other.returncode == -signal.SIGKILL
    assert stuck.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_with_such_a_rank_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once another rank has failed it counts as killed; a sweep went on waiting for it."""
    monkeypatch.setattr(processes, "KILLED_S", 0.5)
    with _outlives_a_kill() as stuck, subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as failed:
        failed.wait()
        assert RunningRanks([failed, stuck], LocalMeeting()).settle() == [3, -signal.SIGKILL]  # type: ignore[list-item]


def test_a_command_of_a_preflight_that_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That it is waited for is told, and no error of Python's hides why it had to end."""
    monkeypatch.setattr(commands, "TOLD_S", 0.2)
    monkeypatch.setattr(commands, "GRACE_S", 0.3)
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with caplog.at_level(logging.WARNING):
            commands._end(process)
        assert process.returncode == -signal.SIGKILL and f"(pid {process.pid})" in caplog.text
