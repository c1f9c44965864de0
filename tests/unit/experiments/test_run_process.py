"""Is it noticed that the processes of a run have ended, whenever they do?"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import wait

from megasdc.experiments.run_process import RunningRanks


def test_an_end_between_two_looks_is_not_missed() -> None:
    """A process that ends after one look at it is waited for no longer, and its exit code comes with the next look."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=sys.exit, args=(0,)), context.Process(target=input)]
    for process in processes:
        process.start()
    processes[0].join()
    processes[1].join()  # standard input is closed: it ends with an error
    running = RunningRanks(processes, [], None)
    assert len(wait(running.sentinels, timeout=30)) == 2
    codes = _settled(running)
    assert codes[0] == 0
    assert codes[1] != 0
    assert running.sentinels == []


def test_one_that_has_ended_is_not_waited_for_again() -> None:
    """While one rank goes on, the one that has ended does not make every wait return at once."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    processes = [context.Process(target=sys.exit, args=(0,)), context.Process(target=reading.recv)]
    for process in processes:
        process.start()
    running = RunningRanks(processes, [], None)
    processes[0].join()
    assert running.settle() is None
    assert running.sentinels == [processes[1].sentinel]
    writing.send("go")
    assert _settled(running) == [0, 0]


def _settled(running: RunningRanks) -> list[int]:
    """Exit codes, looked for as the runner does: a sentinel may be ready some moments before the exit code is."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        wait(running.sentinels, timeout=1)
        if (codes := running.settle()) is not None:
            return codes
    raise AssertionError("the processes have ended, yet no exit codes came")
