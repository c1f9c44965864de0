"""A supervised run as faults find it: hosts, processes, journal, and how it ends; over SSH."""

from __future__ import annotations

import json
import os
import random
import shutil
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

from megasdc.common.errors import LaunchError
from megasdc.ops.cluster import Cluster
from megasdc.ops.launch.command import NODE_MODULE
from megasdc.ops.supervise.journal import FOLDER, JOURNAL_FILE
from tools.clock import clock_library

ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
"""Of all processes on test hosts."""
SUPERVISOR = "-m megasdc supervise"
"""In the command line of supervisors, not in those of what they start."""
BACK_S = (4.0, 15.0)
"""After how many seconds a host that was powered off or unplugged is back."""
LONG_S = (45.0, 60.0)
"""The same, where the run is not to wait for it."""
SOON_S = 6.0
"""Most seconds between two faults of a kind that has two."""
LOCAL = "local"
"""Folder of the run's folder that each host has for itself."""
OWN_ENDS = "own_ends"
"""Folder beside the run's for what hosts had in it at the end."""
RUN_BYTES = 512 << 20
"""Size of the file system of a run's folder."""
SPARES = 1
"""Least hosts that a run has beside those that it needs."""


@dataclass
class Target(ABC):
    """A supervised run.

    Args:
        hosts: the first one is none of the run's.
        folder: of all that is the run's.
        num_hosts: that the run should have.
        slots: ranks of each of them.
        chance: of what a fault chooses itself.

    Attributes:
        job: that it runs in, once it is submitted; empty: there is none.
        back: what is undone later, and when, on ``time.monotonic``.
        problems: what a fault has shown not to be right, a line each.
        unfit: hosts with a condition that keeps the run from using them, until it is undone.
        blamed: hosts that a fault has struck, for kinds that say which may be blamed.
        told: what faults have done, a line each.
    """

    hosts: Cluster
    folder: Path
    num_hosts: int
    slots: int
    chance: random.Random
    job: str = ""
    back: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unfit: set[str] = field(default_factory=set)
    blamed: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)

    @abstractmethod
    def start(self) -> None:
        """Start the run, or its supervisor again."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """How the run has ended; None: it goes on."""

    @abstractmethod
    def power_on(self, host: str) -> None:
        """Start a host that was powered off."""

    def intrude(self) -> None:
        """Start another supervisor of the run, elsewhere, which must be refused."""
        raise NotImplementedError("only without a scheduler")

    def copy_data(self, data: Path) -> Path:
        """Path at which the hosts find the prepared data."""
        return data

    def data_of(self, host: str) -> Path:
        """Where this machine finds a host's own copy of the data."""
        raise NotImplementedError("only without a scheduler")

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
        found = []
        for line in lines:
            with suppress(ValueError):  # one that a fault has damaged, or that is being written
                found.append(json.loads(line))
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

    def launchers(self) -> list[psutil.Process]:
        """DeepSpeed's launchers of hosts, whose command lines have the launch's id instead of the run's folder."""
        launches = [one["launch_id"] for one in self.entries("planned")]
        found = []
        for one in psutil.process_iter(["cmdline"]):
            words = one.info["cmdline"] or [""]  # not of what brings the command to a host, which has the same words
            if "python" in words[0] and NODE_MODULE in words and any(launch in words for launch in launches):
                found.append(one)
        return found

    def spares(self) -> list[str]:
        """Hosts that the last attempt does not use and that are on."""
        return [one for one in self.hosts.names[1:] if one not in self.used() and self.hosts.is_on(one)]

    def on_host(self, host: str, script: str) -> None:
        """Run a shell script on a host that is on; one that fails there is a problem."""
        if self.hosts.is_on(host):
            with suppress(LaunchError):  # it has lost its power just now
                done = self.hosts.run(host, ["sh", "-ec", script])
                if done.returncode and self.hosts.is_on(host):
                    self.problems.append(f"{script!r} failed on {host}: {done.stderr[-300:]}")

    def condition(self, host: str, undo: Callable[[], object], seconds: tuple[float, float] = LONG_S) -> None:
        """A host has a condition from now on, which is undone after a while."""

        def fit_again() -> None:
            undo()
            self.unfit.discard(host)

        self.unfit.add(host)
        self.later(fit_again, seconds)

    def copy_own_checkpoints(self) -> None:
        """Copy what hosts have saved in folders of their own to where it stays once they have gone."""
        own, kept = self.folder / LOCAL, self.folder / OWN_ENDS
        for host in self.hosts.names[1:]:
            self.on_host(
                host, f"if ls -d {own}/step_* >/dev/null 2>&1; then mkdir -p {kept}; cp -r {own} {kept}/{host}; fi"
            )

    def last_words(self) -> str:
        """The last lines that the supervisor has printed."""
        path = self.folder / "supervisor.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return "\n".join(text.splitlines()[-30:])

    def kill(self, processes: Sequence[psutil.Process], number: int = signal.SIGKILL) -> None:
        """Send a signal to those that still run."""
        for one in processes:
            with suppress(psutil.Error):
                one.send_signal(number)

    def power_off(self, host: str, seconds: tuple[float, float] = BACK_S) -> None:
        """Power a host off for a while, between so many seconds; one that is off stays so until it is its time."""
        if self.hosts.is_on(host):
            self.hosts.power_off(host)
            self.later(lambda: self.power_on(host), seconds)

    def unplug(self, host: str) -> None:
        """Unplug a host for a while, if it is on."""
        if self.hosts.is_on(host):
            self.hosts.unplug(host)
            self.later(lambda: self.hosts.plug_in(host) if self.hosts.is_on(host) else None)

    def undo(self) -> None:
        """Undo what is due."""
        due = [one for one in self.back if time.monotonic() >= one[0]]
        self.back = [one for one in self.back if one not in due]
        for _, action in due:
            action()

    def later(self, action: Callable[[], None], seconds: tuple[float, float] = BACK_S) -> None:
        """Undo something after a while."""
        self.back.append((time.monotonic() + self.chance.uniform(*seconds), action))

    def soon(self) -> None:
        """Let some time pass."""
        time.sleep(self.chance.uniform(0.0, SOON_S))


@dataclass
class SshTarget(Target):
    """A run on the hosts of a hostfile, whose supervisor is a process on the first host."""

    _supervisors: list[subprocess.Popen[Any]] = field(default_factory=list)

    def start(self) -> None:
        """See ``Target``."""
        with open(self.folder / "supervisor.log", "ab") as said:
            first, cwd = self.hosts.names[0], str(self.folder)
            self._supervisors.append(self.hosts.popen(first, self._command, cwd=cwd, stdout=said, stderr=said))

    def exit_code(self) -> int | None:
        """See ``Target``."""
        return self._supervisors[-1].poll()

    def intrude(self) -> None:
        """See ``Target``."""
        while self.exit_code() is None and not any(map(self._holds_journal, self.processes(SUPERVISOR))):
            time.sleep(0.1)  # one that has just been started has not got it yet
        if self.exit_code() is not None:
            return
        host = next(one for one in reversed(self.hosts.names) if self.hosts.is_on(one))
        done = self.hosts.run(host, self._command, cwd=str(self.folder))
        if done.returncode != LaunchError.exit_code or "in use by another supervisor" not in done.stderr:
            self.problems.append(f"another supervisor ended with {done.returncode}, not refused: {done.stderr[-300:]}")

    def power_on(self, host: str) -> None:
        """See ``Target``."""
        self.hosts.boot(host)

    def copy_data(self, data: Path) -> Path:
        """See ``Target``; each host has its own copy."""
        for host in self.hosts.names:
            shutil.copytree(data, self.data_of(host), dirs_exist_ok=True)
        return self.hosts.private[0]

    def data_of(self, host: str) -> Path:
        """See ``Target``."""
        return self.hosts.private_dir(host, self.hosts.private[0])

    def _holds_journal(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return str(self.run / FOLDER / JOURNAL_FILE) in [one.path for one in process.open_files()]
        return False

    @property
    def _command(self) -> list[str]:
        hostfile = self.hosts.hostfile(self.hosts.names[1:], slots=self.slots)
        words = ["-m", "megasdc", "supervise", "--hostfile", str(hostfile), "--config", str(self.config)]
        return [sys.executable, *words]


@contextmanager
def over_ssh(folder: Path, num_hosts: int, spares: int, slots: int, chance: random.Random) -> Iterator[Target]:
    """Test hosts for a run, with spares, for the time of a ``with`` block; arguments as of ``Target``.

    The run's folder is a file system of its own; data, and a folder for files of one host, are each host's own.

    Raises:
        LaunchError: the library of clocks that are off cannot be built.
    """
    env = {**ENVIRONMENT, "LD_PRELOAD": str(clock_library(folder))}
    private = [folder / "data", folder / LOCAL]
    with _own_file_system(folder / "run"), Cluster(folder / "hosts", 1 + num_hosts + spares, env, private) as hosts:
        yield SshTarget(hosts, folder, num_hosts, slots, chance)


@contextmanager
def _own_file_system(folder: Path) -> Iterator[None]:
    """Mount one at a new folder, whose files lie in an ordinary folder of this name afterwards."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={RUN_BYTES}", "none", str(folder)], check=True)
    try:
        yield
    finally:
        kept = folder.with_name("kept")
        shutil.copytree(folder, kept, symlinks=True)
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()
        kept.rename(folder)
