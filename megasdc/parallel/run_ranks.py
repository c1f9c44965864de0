"""Ranks of a benchmark or a check: one process each, rank 0 on a terminal, messages through a pipe.

Rank 0 gets a pseudo-terminal as its standard error, so that our loop shows the progress bar that it shows to a user,
and pays for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasdc.common.errors import MegasdcError, error_of_rank
from megasdc.parallel.local_ranks import LocalMeeting, local_rank_environment
from megasdc.parallel.processes import Descriptor, Process, start_module

GRACE_S = 5.0
TAIL_CHARACTERS = 3000


class ReportChannel:
    """Sends JSON lines to the process that started the ranks.

    Args:
        descriptor: file descriptor to write to; None sends nothing, as on all ranks but the first.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._file = None if descriptor is None else os.fdopen(descriptor, "w", encoding="utf-8")

    def send(self, **message: Any) -> None:
        """Send one message."""
        if self._file is not None:
            self._file.write(json.dumps(message) + "\n")
            self._file.flush()

    def send_and_wait(self, **message: Any) -> None:
        """Send one message and wait until it has been handled; other ranks do not wait.

        Raises:
            MegasdcError: the process that started the ranks is gone.
        """
        self.send(waits=True, **message)
        if self._file is not None and not sys.stdin.readline():
            raise MegasdcError("the process that started this benchmark is gone")


def run_ranks(
    module: str,
    request: dict[str, Any],
    ranks: int,
    threads: int,
    folder: Path,
    on_message: Callable[[dict[str, Any]], None],
    fresh: bool = False,
) -> None:
    """Start the ranks on this machine and wait until all have ended well.

    Args:
        module: run with ``python -m``.
        request: its first argument, as JSON.
        ranks: their number.
        threads: CPU threads of each.
        folder: gets their output.
        on_message: called with each message of rank 0, which waits for its return if it asked.
        fresh: see ``start_module``; for ranks whose memory or time from the start on is measured.

    Raises:
        MegasdcError: a rank failed, with the end of its output; of the class of its exit code, else a LaunchError.
    """
    meeting = LocalMeeting()
    master, terminal = os.openpty()
    reading, writing = os.pipe()
    asked, answers = os.pipe()
    processes: list[Process] = []
    log = folder / "rank_0.log"
    drain = threading.Thread(target=_drain, args=(master, log), daemon=True)
    try:
        for rank in range(ranks):
            arguments: list[str | Descriptor] = [json.dumps(request), *([Descriptor(writing)] if rank == 0 else [])]
            environment = _bench_environment(rank, ranks, threads, meeting)
            with open(folder / f"rank_{rank}.log", "wb") as output:
                stream = terminal if rank == 0 else output.fileno()
                stdin = asked if rank == 0 else subprocess.DEVNULL
                processes.append(start_module(module, arguments, environment, stdin, stream, stream, fresh))
        for descriptor in (terminal, writing, asked):
            os.close(descriptor)
        drain.start()
        threading.Thread(target=_end_all_after_failure, args=(processes,), daemon=True).start()
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                waits = message.pop("waits", False)
                on_message(message)
                if waits:
                    _answer(answers)
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        os.close(answers)
    drain.join(GRACE_S)
    _raise_if_failed(codes, folder)


def _answer(answers: int) -> None:
    """Let a rank that asked go on; one that has ended needs no answer."""
    with contextlib.suppress(BrokenPipeError):
        os.write(answers, b"\n")


def _bench_environment(rank: int, ranks: int, threads: int, meeting: LocalMeeting) -> dict[str, str]:
    """A rank's environment, with a terminal that shows a progress bar."""
    return {
        **local_rank_environment(rank, ranks, threads, meeting.environment),
        "TERM": "xterm",
        "COLUMNS": "120",
    }


def _drain(master: int, log: Path) -> None:
    """Copy what rank 0 writes to its terminal into a file until the terminal is closed."""
    with open(log, "wb") as file:
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:  # Linux reports the last writer's leaving as EIO
                break
            if not data:
                break
            file.write(data)
            file.flush()
    os.close(master)


def _end_all_after_failure(processes: list[Process]) -> None:
    """Once a rank has failed, give the others a moment and end them, so that none waits forever."""
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(GRACE_S)
            for process in processes:
                if process.poll() is None:
                    process.kill()
            return
        time.sleep(0.2)


def _raise_if_failed(codes: list[int], folder: Path) -> None:
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return
    # A rank that was ended from here, or lost its peer, says less than the one that failed by itself.
    first = next((rank for rank in failed if codes[rank] > 0), failed[0])
    text = (folder / f"rank_{first}.log").read_text(encoding="utf-8", errors="replace")[-TAIL_CHARACTERS:]
    raise error_of_rank(codes[first])(f"rank {first} ended with exit code {codes[first]} (all: {codes}):\n{text}")
