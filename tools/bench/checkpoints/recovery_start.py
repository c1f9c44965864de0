"""One start of a drill's run: its ranks on hosts with names of their own, and the processes that belong to them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megasdc.common.run_lock import start_ticks
from megasdc.metrics.writer import METRICS_FILE, read_metrics
from tools.bench.small.drill import POLL_S, DrillRanks, last_step, train_and_leave

FOLLOW_S = 10.0
"""Seconds that ranks have to end after another one did, before they are ended as a launcher does."""
_WRITER, _AGENT = "checkpoint.writer_main", "megasdc.ops.health.agent"


@dataclass(frozen=True)
class Place:
    """Where a drill runs.

    Args:
        folder: of the drill.
        per_host: ranks of each host.
    """

    folder: Path
    ranks: int
    per_host: int

    @property
    def config(self) -> Path:
        """Configuration."""
        return self.folder / "config.json"

    @property
    def run(self) -> Path:
        """Run folder."""
        return self.folder / "run"

    @property
    def num_hosts(self) -> int:
        """Of all hosts."""
        return self.ranks // self.per_host

    def host_of(self, rank: int) -> int:
        """Index of a rank's host."""
        return rank // self.per_host

    def ranks_of(self, host: int) -> range:
        """Ranks of a host."""
        return range(host * self.per_host, (host + 1) * self.per_host)

    def last_step(self) -> int:
        """Last step of which a metric was written; 0: there is none."""
        return last_step(self.run)

    def last_step_since(self, since: float) -> int:
        """Last step that was done since a time, in seconds since the epoch; 0: there is none."""
        lines = read_metrics(self.run) if (self.run / METRICS_FILE).exists() else []
        return max((line["step"] for line in lines if line["time"] >= since), default=0)


class Start(DrillRanks):
    """Ranks that train.

    Args:
        hosts: names of the hosts by index; an empty one is this machine's own.
    """

    def __init__(self, place: Place, hosts: Sequence[str]) -> None:
        self._place = place
        arguments = [{"config": place.config, "host": hosts[place.host_of(rank)]} for rank in range(place.ranks)]
        super().__init__(train_and_leave, arguments, place.folder, self._environment)

    def _environment(self, rank: int) -> dict[str, str]:
        return {"LOCAL_RANK": str(rank % self._place.per_host), "GLOO_SOCKET_IFNAME": "lo"}

    def wait_for_step(self, step: int, until: float) -> bool:
        """Wait until a step was done; whether that was so before a rank has ended, or the time."""
        while self._place.last_step() < step:
            if time.monotonic() > until or any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(POLL_S)
        return True

    def writers(self, rank: int) -> list[int]:
        """Processes that write for a rank; the one of its memory first."""
        return _find(_WRITER, last=str(self.processes[rank].pid))


def agents(place: Place) -> list[int]:
    """Agents of a drill's hosts."""
    return _find(_AGENT, str(place.run.resolve()))


def agent_of(place: Place, host: int) -> list[int]:
    """The agent of a host; none where it has ended."""
    return _find(_AGENT, f'{place.run.resolve()}", "node": {host},')


def writers_of(pids: Sequence[int]) -> list[int]:
    """Writers of ranks by process id, of which some may have ended."""
    return [writer for pid in pids for writer in _find(_WRITER, last=str(pid))]


def send(pids: Sequence[int], number: int) -> None:
    """Send a signal to those that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _find(*words: str, last: str = "") -> list[int]:
    """Processes by words of their command line, and its last part, in the order in which they were started."""
    found: list[tuple[int, int]] = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parts = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if all(any(word in part for part in parts) for word in words) and (not last or parts[-1] == last):
                started = start_ticks(int(path.name))
                found += [] if started is None else [(started, int(path.name))]
    return [pid for _, pid in sorted(found)]
