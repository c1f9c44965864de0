"""Processes of a run: forks of a server that has imported everything; each trains as any rank does.

A rank ends when the process that started it is gone: nobody would read its results, and a later sweep would write to
the same folder.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megasdc.parallel.local_ranks import hold_store, rank_environment
from megasdc.parallel.processes import leave_with_the_starter

LOG_FOLDER = "logs"


def warm_up(context: Any) -> None:
    """Wait until the server has imported everything, so that a measurement does not include it."""
    process = context.Process(target=os.getpid)
    process.start()
    process.join()


@dataclass
class RunningRanks:
    """The processes of one run.

    Args:
        processes: by rank.
        lifelines: pipes; a rank ends when its pipe is closed.
        store: the rendezvous; hosted here, so that no port must be chosen in advance.
    """

    processes: list[Any]
    lifelines: list[Connection]
    store: Any

    def __post_init__(self) -> None:
        self._codes: list[int | None] = [None] * len(self.processes)

    @property
    def sentinels(self) -> list[int]:
        """Sentinels to wait on, of the processes that had not ended at the last ``settle``."""
        return [process.sentinel for process, code in zip(self.processes, self._codes, strict=True) if code is None]

    def settle(self) -> list[int] | None:
        """Exit codes, negative for signals, once all have ended; None before.

        When one rank has failed, the others are killed: they would wait for it until their timeout.
        """
        self._codes = [process.exitcode for process in self.processes]
        if any(self._codes):
            for process in self.processes:
                process.join(0.5)
            self.end()
            self._codes = [
                code if code is not None else process.exitcode
                for code, process in zip(self._codes, self.processes, strict=True)
            ]
        codes = [code for code in self._codes if code is not None]
        return codes if len(codes) == len(self.processes) else None

    def end(self) -> None:
        """Kill all processes and wait for them."""
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        for process in self.processes:
            process.join()
        for lifeline in self.lifelines:
            lifeline.close()


def start_ranks(context: Any, config: Path, folder: Path, ranks: int, slot: int) -> RunningRanks:
    """Start the ranks of a run.

    Args:
        context: from ``megasdc.parallel.processes.fork_server``.
        config: configuration file of the run.
        folder: of the run; output of the ranks goes to ``logs`` in it.
        ranks: number of ranks.
        slot: index among the concurrent runs; selects the GPUs.
    """
    store = hold_store()
    logs = folder / LOG_FOLDER
    logs.mkdir(parents=True, exist_ok=True)
    devices = ",".join(str(slot * ranks + rank) for rank in range(ranks))
    processes, lifelines = [], []
    for rank in range(ranks):
        settings = rank_environment(rank, ranks, 0, "127.0.0.1", store.port) | {
            "CUDA_VISIBLE_DEVICES": _visible(devices),
        }
        ours, theirs = context.Pipe()
        arguments = (theirs, settings, str(config), str(logs / f"rank_{rank}.log"))
        process = context.Process(target=_rank_main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        lifelines.append(ours)
    return RunningRanks(processes, lifelines, store)


def _visible(devices: str) -> str:
    """CUDA_VISIBLE_DEVICES for devices numbered among those that this process may use."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not own:
        return devices
    names = own.split(",")
    return ",".join(names[int(device)] for device in devices.split(",") if int(device) < len(names))


def _rank_main(lifeline: Connection, settings: dict[str, str], config: str, log: str) -> None:
    """Body of a rank: train as the entry script does, and end with its exit code."""
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(settings)
    leave_with_the_starter(lifeline)
    from megasdc.train.main import pretrain

    code, _ = pretrain(config, [])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's shutdown takes as long as some steps
