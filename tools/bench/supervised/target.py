"""A supervised run as faults find it: hosts, processes, journal, and how it ends; over SSH."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megasdc.supervisor.journal import FOLDER, JOURNAL_FILE
from tools.hosts import Cluster

ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
"""Of all processes on test hosts."""
BACK_S = (4.0, 15.0)
"""After how many seconds a host that was powered off or unplugged is back."""
SOON_S = 6.0
"""Most seconds between two faults of a kind that has two."""
SPARES = 1


@dataclass
class Target(ABC):
    """A supervised run.

    Args:
        hosts: the first one is none of the run's.
        folder: of all that is the run's.
        num_hosts: that the run should have.
        slots: ranks of each of them.
        chance: of what a fault chooses itself.
    """

    hosts: Cluster
    folder: Path
    num_hosts: int
    slots: int
    chance: random.Random
    job: str = ""
    """That it runs in, once it is submitted; empty: there is none."""
    back: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """What is undone later, and when, on ``time.monotonic``."""

    @abstractmethod
    def start(self) -> None:
        """Start the run, or its supervisor again."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """How the run has ended; None: it goes on."""

    @abstractmethod
    def power_on(self, host: str) -> None:
        """Start a host that was powered off."""

    def scheduler(self, *words: str) -> str:
        """What a command of the run's scheduler prints; nothing where it fails."""
        raise NotImplementedError("only where there is one")

    @property
    def config(self) -> Path:
        """Configuration of the run."""
        return self.folder / "config.json"

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return self.folder / "run"

    @property
    def first(self) -> list[str]:
        """Hosts that the run begins with."""
        return self.hosts.names[1 : 1 + self.num_hosts]

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """Entries of the supervisor's journal of one kind."""
        path = self.run / FOLDER / JOURNAL_FILE
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [one["fields"] for one in found if one["kind"] == kind]

    def used(self) -> list[str]:
        """Hosts of the last attempt."""
        return list(self.entries("planned")[-1]["slots"])

    def ranks(self) -> dict[int, psutil.Process]:
        """Processes of ranks that run."""
        found = {}
        for one in self.processes("pretrain_gpt.py"):
            with suppress(psutil.Error, KeyError):
                found[int(one.environ()["RANK"])] = one  # launchers have none
        return found

    def a_rank(self) -> list[psutil.Process]:
        """A rank that runs; none where there is none at the moment."""
        ranks = self.ranks()
        return [ranks[self.chance.choice(sorted(ranks))]] if ranks else []

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes by words of their command lines, which have the run's folder in them, too."""
        found = []
        for one in psutil.process_iter(["cmdline"]):
            said = " ".join(one.info["cmdline"] or [])
            if all(word in said for word in words) and str(self.folder) in said:
                found.append(one)
        return found

    def kill(self, processes: Sequence[psutil.Process], number: int = signal.SIGKILL) -> None:
        """Send a signal to those that still run."""
        for one in processes:
            with suppress(psutil.Error):
                one.send_signal(number)

    def power_off(self, host: str) -> None:
        """Power a host off for a while; one that is off stays so until it is its time."""
        if self.hosts.is_on(host):
            self.hosts.power_off(host)
            self.later(lambda: self.power_on(host))

    def undo(self) -> None:
        """Undo what is due."""
        due = [one for one in self.back if time.monotonic() >= one[0]]
        self.back = [one for one in self.back if one not in due]
        for _, action in due:
            action()

    def later(self, action: Callable[[], None]) -> None:
        """Undo something after a while."""
        self.back.append((time.monotonic() + self.chance.uniform(*BACK_S), action))

    def soon(self) -> None:
        """Let some time pass."""
        time.sleep(self.chance.uniform(0.0, SOON_S))


@dataclass
class SshTarget(Target):
    """A run on the hosts of a hostfile, whose supervisor is a process on the first host."""

    _supervisors: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self) -> None:
        """See ``Target``."""
        hostfile = self.hosts.hostfile(self.hosts.names[1:], slots=self.slots)
        words = ["-m", "megasdc", "supervise", "--hostfile", str(hostfile), "--config", str(self.config)]
        with open(self.folder / "supervisor.log", "ab") as said:
            argv, cwd = [sys.executable, *words], str(self.folder)
            self._supervisors.append(self.hosts.popen(self.hosts.names[0], argv, cwd=cwd, stdout=said, stderr=said))

    def exit_code(self) -> int | None:
        """See ``Target``."""
        return self._supervisors[-1].poll()

    def power_on(self, host: str) -> None:
        """See ``Target``."""
        self.hosts.boot(host)


@contextmanager
def over_ssh(folder: Path, num_hosts: int, slots: int, chance: random.Random) -> Iterator[Target]:
    """Test hosts for a run, with a spare, for the time of a ``with`` block; arguments as of ``Target``."""
    with Cluster(folder / "hosts", 1 + num_hosts + SPARES, env=ENVIRONMENT) as hosts:
        yield SshTarget(hosts, folder, num_hosts, slots, chance)
