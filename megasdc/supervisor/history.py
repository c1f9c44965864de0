"""What a journal says of a run: hosts, attempts, decisions. Each kind of entry changes it in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megasdc.supervisor.diagnosis import Diagnosis
from megasdc.supervisor.journal import Entry
from megasdc.supervisor.policy import Action, Decision, Failure


@dataclass(frozen=True)
class Process:
    """A front of a launch, on the host of the supervisor.

    Args:
        ticks: start of the process, since ids are reused; see ``megasdc.run_lock.start_ticks``.
    """

    pid: int
    ticks: int


ENDED = Process(0, 0)
"""A front that has ended before it was found."""


@dataclass(frozen=True)
class Attempt:
    """A start of the run.

    Args:
        number: the first is 1.
        slots: ranks of each host that it uses, in order of ranks.
        launch_id: of the launch, which its processes can be found by.
        planned_at: seconds since the epoch.
        process: None: not known to be started.
    """

    number: int
    slots: dict[str, int]
    launch_id: str
    planned_at: float
    process: Process | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts, in order of ranks."""
        return tuple(self.slots)


@dataclass
class History:
    """A run, as far as the journal goes.

    Attributes:
        stage: kind of the last entry that is a turn; empty: there is none.
        config: file of the run.
        slots: ranks of each host of the hostfile, in its order.
        replaced: hosts that are not used any more, each with the reason.
        attempt: the last one that was planned.
        failures: attempts that have ended, oldest first, the last one too where it is no failure.
        decision: the last one, and when it was made.
        exit_code: of the run, once it is finished.
    """

    stage: str = ""
    config: str = ""
    slots: dict[str, int] = field(default_factory=dict)
    num_hosts: int = 0
    replaced: dict[str, str] = field(default_factory=dict)
    attempt: Attempt | None = None
    failures: list[Failure] = field(default_factory=list)
    decision: Decision | None = None
    decided_at: float = 0.0
    exit_code: int | None = None

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> History:
        """The history that a journal tells."""
        found = cls()
        for entry in entries:
            found.add(entry)
        return found

    @property
    def usable(self) -> list[str]:
        """Hosts that may be used, in the order of the hostfile."""
        return [host for host in self.slots if host not in self.replaced]

    @property
    def chosen(self) -> dict[str, int]:
        """Ranks of the hosts of the next attempt: those of the last one that are left, then spares."""
        last = () if self.attempt is None else self.attempt.hosts
        kept = [host for host in last if host in self.usable]
        hosts = [*kept, *(host for host in self.usable if host not in kept)][: self.num_hosts]
        return {host: self.slots[host] for host in hosts}

    @property
    def num_spares(self) -> int:
        """Hosts that may be used and are not."""
        return max(0, len(self.usable) - self.num_hosts)

    def add(self, entry: Entry) -> None:
        """Take one more entry."""
        CHANGES[entry.kind](self, entry)
        if entry.kind != HOSTS:
            self.stage = entry.kind


def _opened(history: History, entry: Entry) -> None:
    history.config, history.exit_code = entry.fields["config"], None
    history.failures = []  # a person has looked at earlier ones


def _hosts(history: History, entry: Entry) -> None:
    history.slots, history.num_hosts = entry.fields["slots"], entry.fields["num_hosts"]


def _planned(history: History, entry: Entry) -> None:
    said = entry.fields
    history.attempt = Attempt(said["attempt"], said["slots"], said["launch_id"], entry.time)


def _started(history: History, entry: Entry) -> None:
    assert history.attempt is not None, "an attempt is planned before it is started"
    process = Process(entry.fields["pid"], entry.fields["ticks"])
    history.attempt = replace(history.attempt, process=process)


def _ended(history: History, entry: Entry) -> None:
    assert history.attempt is not None, "an attempt is planned before it ends"
    said: dict[str, Any] = entry.fields["diagnosis"]
    diagnosis = Diagnosis(**{**said, "hosts": tuple(said["hosts"])})
    history.failures.append(Failure(entry.time, history.attempt.hosts, entry.fields["exit_code"], diagnosis))


def _decided(history: History, entry: Entry) -> None:
    said = entry.fields
    hosts = tuple(said["replaced"])
    history.decision = Decision(Action(said["action"]), said["text"], hosts, said["pause_s"])
    history.decided_at = entry.time
    history.replaced |= dict.fromkeys(hosts, said["text"])


def _finished(history: History, entry: Entry) -> None:
    history.exit_code = entry.fields["exit_code"]


HOSTS = "hosts"
"""Kind of an entry that is no turn: what the hostfile has, at the start and where it was changed."""
CHANGES: dict[str, Callable[[History, Entry], None]] = {
    "opened": _opened,
    HOSTS: _hosts,
    "planned": _planned,
    "started": _started,
    "ended": _ended,
    "decided": _decided,
    "finished": _finished,
}
"""What each kind of entry changes."""
