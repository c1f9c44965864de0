"""Is it noticed that the processes of a run have ended, whenever they do?"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from megasdc.lab.sweeps.run_process import RunningRanks
from megasdc.parallel.processes import Fork


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that waits for the end of its standard input and then ends with the exit code that it was given."""
    (tmp_path / "ends_with.py").write_text("import sys\nsys.stdin.read()\nsys.exit(int(sys.argv[1]))\n")
    monkeypatch.syspath_prepend(tmp_path)


def _start(code: int, stdin: int = subprocess.DEVNULL) -> Fork:
    streams = (stdin, subprocess.DEVNULL, subprocess.DEVNULL)
    return Fork(multiprocessing.get_context("spawn"), "ends_with", [str(code)], dict(os.environ), streams)


def test_an_end_between_two_looks_is_not_missed() -> None:
    """A process that ends after one look at it is waited for no longer, and its exit code comes with the next look."""
    processes = [_start(0), _start(5)]
    for process in processes:
        process.wait(60)
    running = RunningRanks(processes, None)
    assert len(wait(running.sentinels, timeout=30)) == 2
    assert _settled(running) == [0, 5]
    assert running.sentinels == []


def test_one_that_has_ended_is_not_waited_for_again() -> None:
    """While one rank goes on, the one that has ended does not make every wait return at once."""
    reading, writing = os.pipe()
    processes = [_start(0), _start(0, reading)]
    os.close(reading)
    running = RunningRanks(processes, None)
    processes[0].wait(60)
    assert running.settle() is None
    assert running.sentinels == [processes[1].sentinel]
    os.close(writing)
    assert _settled(running) == [0, 0]


def test_others_are_ended_after_a_failure() -> None:
    """Once a rank has failed, one that waits for it is killed, and both exit codes come."""
    reading, writing = os.pipe()
    processes = [_start(5), _start(0, reading)]
    os.close(reading)
    running = RunningRanks(processes, None)
    assert _settled(running) == [5, -9]
    os.close(writing)


def _settled(running: RunningRanks) -> list[int]:
    """Exit codes, looked for as the runner does: a sentinel may be ready some moments before the exit code is."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        wait(running.sentinels, timeout=1)
        if (codes := running.settle()) is not None:
            return codes
    raise AssertionError("the processes have ended, yet no exit codes came")
