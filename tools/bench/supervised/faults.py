"""Faults that a campaign brings about in a supervised run between test hosts, from outside of it."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megasdc.shared_memory import own_prefix
from megasdc.supervisor import front
from megasdc.supervisor.journal import FOLDER, JOURNAL_FILE
from tools.hosts import Cluster

BACK_S = (4.0, 15.0)
"""After how many seconds a host that was powered off or unplugged is back."""
SOON_S = 6.0
"""Most seconds between two faults of a kind that has two."""
_WRITER, _AGENT = "megasdc.checkpoint.snapshots.writer_main", "megasdc.health.agent"


@dataclass
class Target:
    """A supervised run, as faults find it.

    Args:
        head: host of the supervisor, which is none of the run's.
        chance: of what a fault chooses itself.
        supervise: starts the supervisor again.
    """

    hosts: Cluster
    head: str
    config: Path
    run: Path
    chance: random.Random
    supervise: Callable[[], None]
    back: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """What is undone later, and when, on ``time.monotonic``."""

    def entries(self, kind: str) -> list[dict[str, object]]:
        """Entries of the supervisor's journal of one kind."""
        path = self.run / FOLDER / JOURNAL_FILE
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [one["fields"] for one in found if one["kind"] == kind]

    def used(self) -> list[str]:
        """Hosts of the last attempt."""
        return list(self.entries("planned")[-1]["slots"])  # type: ignore[call-overload]

    def ranks(self) -> dict[int, psutil.Process]:
        """Processes of ranks that run."""
        found = {}
        for one in self.processes("pretrain_gpt.py"):
            with suppress(psutil.Error, KeyError):
                found[int(one.environ()["RANK"])] = one  # launchers have none
        return found

    def processes(self, *words: str) -> list[psutil.Process]:
        """Processes by words of their command lines, which have the run's folder in them, too."""
        found = []
        for one in psutil.process_iter(["cmdline"]):
            said = " ".join(one.info["cmdline"] or [])
            if all(word in said for word in words) and str(self.config.parent) in said:
                found.append(one)
        return found

    def kill(self, processes: Sequence[psutil.Process], number: int = signal.SIGKILL) -> None:
        """Send a signal to those that still run."""
        for one in processes:
            with suppress(psutil.Error):
                one.send_signal(number)

    def undo(self, *, all_of_it: bool = False) -> None:
        """Undo what is due."""
        due = [one for one in self.back if all_of_it or time.monotonic() >= one[0]]
        self.back = [one for one in self.back if one not in due]
        for _, action in due:
            action()

    def later(self, action: Callable[[], None]) -> None:
        """Undo something after a while."""
        self.back.append((time.monotonic() + self.chance.uniform(*BACK_S), action))

    def a_rank(self) -> list[psutil.Process]:
        """A rank that runs; none where there is none at the moment."""
        ranks = self.ranks()
        return [ranks[self.chance.choice(sorted(ranks))]] if ranks else []

    def soon(self) -> None:
        """Let some time pass."""
        time.sleep(self.chance.uniform(0.0, SOON_S))


def _rank_killed(run: Target) -> None:
    run.kill(run.a_rank())


def _rank_crashed(run: Target) -> None:
    run.kill(run.a_rank(), signal.SIGSEGV)


def _rank_stopped(run: Target) -> None:
    run.kill(run.a_rank(), signal.SIGSTOP)


def _two_ranks_killed(run: Target) -> None:
    _rank_killed(run)
    run.soon()
    _rank_killed(run)


def _host_off(run: Target) -> None:
    host = run.chance.choice(run.used())
    run.hosts.power_off(host)
    run.later(lambda: run.hosts.boot(host))


def _two_hosts_off(run: Target) -> None:
    for host in run.chance.sample(run.used(), 2):
        run.hosts.power_off(host)
        run.later(lambda host=host: run.hosts.boot(host))  # type: ignore[misc]
        run.soon()


def _unplugged(run: Target) -> None:
    host = run.chance.choice(run.used())
    run.hosts.unplug(host)
    run.later(lambda: run.hosts.plug_in(host))


def _supervisor_killed(run: Target) -> None:
    run.kill(run.processes("megasdc", "supervise", "--hostfile"))
    run.soon()
    run.supervise()


def _supervisor_and_rank_killed(run: Target) -> None:
    run.kill(run.processes("megasdc", "supervise", "--hostfile"))
    _rank_killed(run)
    run.soon()
    run.supervise()


def _front_killed(run: Target) -> None:
    run.kill(run.processes(front.MODULE))


def _launchers_killed(run: Target) -> None:
    run.kill(run.processes("deepspeed.launcher.launch")[:1])


def _agent_killed(run: Target) -> None:
    agents = run.processes(_AGENT)
    run.kill([run.chance.choice(agents)] if agents else [])
    run.soon()
    _rank_killed(run)


def _writers_killed(run: Target) -> None:
    ranks = run.a_rank()
    for one in ranks:
        with suppress(psutil.Error):
            run.kill([child for child in one.children() if _WRITER in " ".join(child.cmdline())])
    run.soon()
    run.kill(ranks)


def _memory_flipped(run: Target) -> None:
    """In one slot of a rank, seen through the root of its process; then that rank is killed."""
    for one in run.a_rank():
        with suppress(OSError):
            slots = sorted(Path(f"/proc/{one.pid}/root/dev/shm").glob(f"{own_prefix()}memory-*/*/*/*optim_states.pt"))
            if slots:
                _flip(run.chance.choice(slots), run.chance)
        run.kill([one])


def _file_flipped(run: Target) -> None:
    """In the newest checkpoint on the disk; then a rank is killed."""
    files = sorted(run.run.glob("checkpoints/step_*/*.pt"))
    if files:
        with suppress(OSError):
            _flip(run.chance.choice([one for one in files if one.parent == files[-1].parent]), run.chance)
    _rank_killed(run)


def _flip(path: Path, chance: random.Random) -> None:
    with open(path, "r+b") as file:
        at = chance.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
        os.fsync(file.fileno())


def _wrong_results(sections: dict[str, Any], hosts: Sequence[str], chance: random.Random) -> None:
    """From a random step on, on one of the hosts that the run begins with."""
    wrong = {"kind": "scale", "factor": 1.5, "elements": 3, "same_elements": True, "submodule": "*.linear_fc2"}
    sections.setdefault("faults", []).append(
        {**wrong, "host": chance.choice(hosts), "steps": [chance.randint(12, 45), None]}
    )


@dataclass(frozen=True)
class Kind:
    """A kind of fault, and what brings it about.

    Args:
        strike: at its moment; None: it comes by itself.
        prepare: in the configuration's sections, for the hosts that a run begins with; None: nothing.
        replicas: that a run needs at least.
    """

    title: str
    strike: Callable[[Target], None] | None
    prepare: Callable[[dict[str, Any], Sequence[str], random.Random], None] | None = None
    replicas: int = 1


KINDS = {
    "rank": Kind("a rank is killed", _rank_killed),
    "crash": Kind("a rank crashes (SIGSEGV)", _rank_crashed),
    "stuck": Kind("a rank stands still", _rank_stopped),
    "ranks": Kind("a rank is killed, and one soon after", _two_ranks_killed),
    "host": Kind("a host is powered off", _host_off),
    "hosts": Kind("two hosts are powered off, one soon after the other", _two_hosts_off),
    "cable": Kind("a host is unplugged", _unplugged),
    "supervisor": Kind("the supervisor is killed", _supervisor_killed),
    "both": Kind("the supervisor and a rank are killed", _supervisor_and_rank_killed),
    "front": Kind("the front of the launch is killed", _front_killed),
    "launcher": Kind("DeepSpeed's launcher of a host is killed", _launchers_killed),
    "agent": Kind("an agent is killed, then a rank", _agent_killed),
    "writers": Kind("the writers of a rank are killed, then the rank", _writers_killed),
    "memory": Kind("a bit flips in a host's memory, then a rank is killed", _memory_flipped),
    "file": Kind("a bit flips on the disk, then a rank is killed", _file_flipped),
    "wrong": Kind("a host computes wrong results from a step on", None, _wrong_results, replicas=3),
}
"""All kinds; where nothing of the sort runs at the moment, a fault does nothing."""
