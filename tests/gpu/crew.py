"""Processes that become ranks: each has imported everything before it is asked for, does one job and ends.

Forking a process that has imported everything is no way on a GPU: CUDA does not survive it. So a crew starts processes
ahead of time; they import and wait at their standard input for the job. At its end they leave, so nothing is left
behind when the part is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.record import tail

STACK_SIGNAL = signal.SIGUSR2
IMPORTS_S = 90.0
GRACE_S = 8.0


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Args:
        rank: in its world.
        code: exit code of the process, negative: the signal; None: it was killed at the job's limit.
        value: what the job returned.
        tail: the end of its output.
    """

    rank: int
    code: int | None
    value: Any
    tail: str

    def __str__(self) -> str:
        said = "killed at the limit" if self.code is None else f"exit code {self.code}"
        return f"rank {self.rank}: {said}, {self.value}\n{self.tail}"


@dataclass(frozen=True)
class Job:
    """What one process does.

    Args:
        function: ``module:name``.
        arguments: of the function, plain values.
        environment: set before the function is imported.
    """

    function: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]


class Crew:
    """Starts processes ahead of time and gives them jobs.

    Args:
        folder: for their output.
        device: ``cuda`` or ``cpu``.
        ahead: processes that wait for a job at a time.
    """

    def __init__(self, folder: Path, device: str, ahead: int) -> None:
        self._folder, self._device, self._ahead = folder, device, ahead
        self._waiting: list[tuple[subprocess.Popen[bytes], Path]] = []
        self._lock = threading.Lock()
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)

    def warm(self, count: int | None = None) -> None:
        """Start processes until so many wait."""
        with self._lock:
            while len(self._waiting) < (self._ahead if count is None else count):
                self._waiting.append(self._start())

    def run(self, jobs: Sequence[Job], timeout_s: float, grace_s: float | None = None) -> list[Outcome]:
        """Run the jobs of one world side by side until all have ended.

        Args:
            jobs: one a rank.
            timeout_s: seconds for all.
            grace_s: seconds that the others have after the first has ended; None: the same limit.
        """
        with self._lock:
            while len(self._waiting) < len(jobs):
                self._waiting.append(self._start())
            taken = [self._waiting.pop(0) for _ in jobs]
        for (process, log), job in zip(taken, jobs, strict=True):
            line = {"function": job.function, "arguments": dict(job.arguments), "environment": dict(job.environment)}
            assert process.stdin is not None, "it was given a pipe"
            try:
                process.stdin.write((json.dumps({**line, "result": f"{log}.result"}) + "\n").encode())
                process.stdin.flush()
            except BrokenPipeError:
                pass  # it ended while it imported; its output says why
        end, left = time.monotonic() + IMPORTS_S + timeout_s, None
        while any(process.poll() is None for process, _ in taken) and time.monotonic() < end:
            if grace_s is not None and left is None and any(process.poll() is not None for process, _ in taken):
                left, end = time.monotonic(), min(end, time.monotonic() + grace_s)
            time.sleep(0.02)
        return [self._end(rank, *one) for rank, one in enumerate(taken)]

    def run_worlds(self, worlds: Mapping[str, Sequence[Job]], timeout_s: float, side: int) -> dict[str, list[Outcome]]:
        """Run several worlds, so many ranks side by side at most; by name."""
        at_once = max(1, side // max(len(jobs) for jobs in worlds.values()))
        with ThreadPoolExecutor(at_once) as pool:
            running = {name: pool.submit(self.run, jobs, timeout_s) for name, jobs in worlds.items()}
            return {name: one.result() for name, one in running.items()}

    def close(self) -> None:
        """End those that still wait."""
        with self._lock:
            for process, _ in self._waiting:
                process.kill()
                process.wait()
            self._waiting.clear()

    def _start(self) -> tuple[subprocess.Popen[bytes], Path]:
        self._number += 1
        log = self._folder / f"process_{self._number:03d}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "gpu.crew_member"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=rank_base(self._device),
            )
        return process, log

    def _end(self, rank: int, process: subprocess.Popen[bytes], log: Path) -> Outcome:
        code: int | None = process.poll()
        if code is None:
            os.kill(process.pid, STACK_SIGNAL)  # where it stands goes into its output
            time.sleep(0.7)
            process.kill()
            process.wait()
        result = Path(f"{log}.result")
        value = json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
        return Outcome(rank, code, value, tail(log))


def rank_base(device: str) -> dict[str, str]:
    """The environment of a process that becomes a rank."""
    from megasdc.parallel.local_ranks import base_environment

    chosen = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**base_environment(1), "PYTHONUNBUFFERED": "1", **chosen}


def world(function: str, ranks: int, place: Mapping[str, str], arguments: Mapping[str, Any]) -> list[Job]:
    """Jobs of ranks that meet in a folder of this process, each with what a launcher would set."""
    from megasdc.parallel.local_ranks import local_rank_environment

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", *place)
    jobs = []
    for rank in range(ranks):
        environment = local_rank_environment(rank, ranks, 1, place)
        jobs.append(Job(function, arguments, {name: environment[name] for name in names}))
    return jobs
