"""Processes of a run: forks of a server that has imported everything; each trains as any rank does.

A rank ends when the process that started it is gone: nobody would read its results, and a later sweep would write to
the same folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.parallel.local_ranks import LocalMeeting, local_rank_environment
from megasdc.parallel.processes import Fork, kill_all

LOG_FOLDER = "logs"
LAST_WORDS_S = 0.5
"""Seconds that the others get to end by themselves once a rank has failed."""


def warm_up(context: Any) -> None:
    """Waits until the server has imported everything, so that a measurement does not include it."""
    process = context.Process(target=os.getpid)
    process.start()
    process.join()


@dataclass
class RunningRanks:
    """The processes of one run, by rank.

    The folder in which they meet is held here, so that no port must be chosen.
    """

    processes: Sequence[Fork]
    meeting: LocalMeeting

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
        self._codes = [process.poll() for process in self.processes]
        if any(self._codes):
            for process in self.processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS_S)
            self.end()
            found = [process.poll() for process in self.processes]
            killed = -int(signal.SIGKILL)  # also what is left of those that do not end
            self._codes = [
                next((one for one in (before, after) if one is not None), killed)
                for before, after in zip(self._codes, found, strict=True)
            ]
        codes = [code for code in self._codes if code is not None]
        return codes if len(codes) == len(self.processes) else None

    def end(self) -> None:
        """Kills all processes and waits for them, see ``kill_all``."""
        kill_all(self.processes)


def start_ranks(context: Any, config: Path, folder: Path, ranks: int, slot: int) -> RunningRanks:
    """Starts the ranks of a run; ``context`` is from ``megasdc.parallel.processes.fork_server``.

    Their output goes to ``logs`` in the folder; ``slot``: index among the concurrent runs, which selects the GPUs.
    """
    meeting = LocalMeeting()
    logs = folder / LOG_FOLDER
    logs.mkdir(parents=True, exist_ok=True)
    devices = ",".join(str(slot * ranks + rank) for rank in range(ranks))
    processes = []
    for rank in range(ranks):
        environment = local_rank_environment(rank, ranks, 0, meeting.environment) | {
            "CUDA_VISIBLE_DEVICES": _visible(devices),
        }
        with open(logs / f"rank_{rank}.log", "ab") as log:
            streams = (subprocess.DEVNULL, log.fileno(), log.fileno())
            processes.append(Fork(context, "megasdc.pretrain", [str(config)], environment, streams))
    return RunningRanks(processes, meeting)


def _visible(devices: str) -> str:
    """CUDA_VISIBLE_DEVICES for devices numbered among those that this process may use."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not own:
        return devices
    names = own.split(",")
    return ",".join(names[int(device)] for device in devices.split(",") if int(device) < len(names))
