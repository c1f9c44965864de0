"""What a journal says of a run: hosts, attempts, decisions. Each kind of entry changes it in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from megasdc.common.origin import Launch, Moment
from megasdc.ops.supervise.diagnosis import Diagnosis, RewindTarget
from megasdc.ops.supervise.host_tests import HostTest
from megasdc.ops.supervise.journal import DAMAGED, JournalEntry
from megasdc.ops.supervise.policy import Action, Decision, FailedAttempt


@dataclass(frozen=True)
class LaunchProcess:
    """A front of a launch, on the host of the supervisor.

    Args:
        ticks: start of the process, since ids are reused; see ``megasdc.common.run_lock.start_ticks``.
    """

    pid: int
    ticks: int


MOST_ENDED = 20
"""Attempts that an attempt knows of."""
ENDED = LaunchProcess(0, 0)
"""A front that has ended before it was found."""


@dataclass(frozen=True)
class Attempt:
    """A start of the run.

    Args:
        number: the first is 1.
        slots: ranks of each host that it uses, in order of ranks.
        launch_id: of the launch, which its processes can be found by.
        planned_at: seconds since the epoch, as the journal has it.
        monotonic: when that was on the monotonic clock of the supervisor's host; None: not known.
        boot: id of its kernel since it was booted; None: likewise.
        job: of a scheduler, that its hosts belong to; empty: none.
        process: None: not known to be started.
        at_most: newest step to go on from; None: the newest of all.
        skip: samples that are not trained on, ranges [first, end), besides those of the configuration.
        skips_snapshots: it goes on without snapshots in memory where they have no room.
        grows: it is asked to save and end, to go on with more hosts.
        ended: launch ids of the last attempts before.
    """

    number: int
    slots: dict[str, int]
    launch_id: str
    planned_at: float
    job: str = ""
    process: LaunchProcess | None = None
    at_most: int | None = None
    skip: tuple[tuple[int, int], ...] = ()
    skips_snapshots: bool = False
    grows: bool = False
    ended: tuple[str, ...] = ()
    monotonic: float | None = None
    boot: str | None = None

    @property
    def launch(self) -> Launch:
        """By which what it has written is found."""
        return Launch(self.launch_id, self.planned_at, self.monotonic, self.boot)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts, in order of ranks."""
        return tuple(self.slots)


@dataclass(frozen=True)
class Replaced:
    """A host that is not used.

    Args:
        text: why, in a sentence.
        kind: of the diagnosis that it was replaced for; None: of its use as a spare, or in other runs.
        tested_at: when its last test ended, seconds since the epoch; 0: it was not tested.
        test: how that ended; None: there was none.
    """

    text: str
    kind: str | None
    tested_at: float = 0.0
    test: HostTest | None = None


@dataclass
class JournalHistory:
    """A run, as far as the journal goes.

    Attributes:
        stage: kind of the last entry that is a turn; empty: there is none.
        config: file of the run.
        slots: ranks of each host of the hostfile, in its order.
        num_hosts: that the run should have.
        sizes: numbers of hosts that it can have.
        replaced: hosts that are not used.
        given_back: how often a host was, after a test.
        passed_at: when a spare has last passed a test, seconds since the epoch.
        attempt: the last one that was planned.
        attempt_at: when that was.
        failures: attempts that have ended, oldest first, the last one too where it is no failure.
        decision: the last one, and when it was made.
        left: the last job that was left for another allocation; empty: none was.
        exit_code: of the run, once it is finished.
        went_back: how often the run went back to an earlier checkpoint.
        at_most: newest step to go on from, until an attempt has done so; None: the newest of all.
        skip: samples that are not trained on from now on.
        skips_snapshots: attempts go on without snapshots in memory where they have no room.

    Times, but for that of a plan, are those of a clock that nobody sets (``journal.without_steps``); so is ``now``.
    """

    stage: str = ""
    config: str = ""
    slots: dict[str, int] = field(default_factory=dict)
    num_hosts: int = 0
    sizes: tuple[int, ...] = ()
    replaced: dict[str, Replaced] = field(default_factory=dict)
    given_back: dict[str, int] = field(default_factory=dict)
    passed_at: dict[str, float] = field(default_factory=dict)
    attempt: Attempt | None = None
    attempt_at: float = 0.0
    failures: list[FailedAttempt] = field(default_factory=list)
    decision: Decision | None = None
    decided_at: float = 0.0
    left: str = ""
    exit_code: int | None = None
    went_back: int = 0
    at_most: int | None = None
    skip: tuple[tuple[int, int], ...] = ()
    skips_snapshots: bool = False
    _last: JournalEntry | None = field(default=None, compare=False)
    _last_at: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, entries: Iterable[JournalEntry]) -> JournalHistory:
        """The history that a journal tells."""
        found = cls()
        for entry in entries:
            found.add(entry)
        return found

    @property
    def now(self) -> float:
        """Seconds since the epoch, by the clock of its times."""
        return self._last_at + (0.0 if self._last is None else self._last.seconds_to(Moment.now()))

    @property
    def usable(self) -> list[str]:
        """Hosts that may be used: in the order of the hostfile, those that were given back after all others."""
        usable = [host for host in self.slots if host not in self.replaced]
        return sorted(usable, key=lambda host: self.given_back.get(host, 0))

    @property
    def chosen(self) -> dict[str, int]:
        """Ranks of the hosts of the next attempt: those of the last one that are left, then spares."""
        last = () if self.attempt is None else self.attempt.hosts
        kept = [host for host in last if host in self.usable]
        hosts = [*kept, *(host for host in self.usable if host not in kept)][: self.size]
        return {host: self.slots[host] for host in hosts}

    @property
    def size(self) -> int:
        """Hosts that the run can have now: as many as there are, of those that are needed."""
        return max((size for size in self.sizes if size <= len(self.usable)), default=self.num_hosts)

    @property
    def waiting(self) -> list[str]:
        """Hosts that may be used, and that the last attempt does not use."""
        used = () if self.attempt is None else self.attempt.hosts
        return [host for host in self.usable if host not in used]

    @property
    def num_spares(self) -> int:
        """Hosts that may be used and are not."""
        return max(0, len(self.usable) - self.num_hosts)

    @property
    def num_dispensable(self) -> int:
        """Hosts that may be used, and that the run can do without."""
        return max(0, len(self.usable) - min(self.sizes))

    def add(self, entry: JournalEntry) -> None:
        """Take one more entry."""
        self._last_at = entry.time if self._last is None else self._last_at + self._last.seconds_to(entry)
        self._last = entry
        if entry.kind == "planned":
            self.attempt_at = self._last_at
            CHANGES[entry.kind](self, entry)  # its launch has this date
        else:
            CHANGES[entry.kind](self, replace(entry, time=self._last_at))
        if entry.kind not in NO_TURNS:
            self.stage = entry.kind


def _opened(history: JournalHistory, entry: JournalEntry) -> None:
    history.config, history.exit_code = entry.fields["config"], None
    history.failures = []  # a person has looked at earlier ones


def _hosts(history: JournalHistory, entry: JournalEntry) -> None:
    history.slots, history.num_hosts = entry.fields["slots"], entry.fields["num_hosts"]
    history.sizes = tuple(entry.fields.get("sizes", (history.num_hosts,)))


def _planned(history: JournalHistory, entry: JournalEntry) -> None:
    said = entry.fields
    skip = tuple((first, end) for first, end in said.get("skip", ()))
    last = history.attempt
    ended = () if last is None else (*last.ended, last.launch_id)[-MOST_ENDED:]
    attempt = Attempt(said["attempt"], said["slots"], said["launch_id"], entry.time, said.get("job", ""))
    skips_snapshots = said.get("skips_snapshots", False)
    attempt = replace(attempt, at_most=said.get("at_most"), skip=skip, ended=ended)
    attempt = replace(attempt, monotonic=entry.monotonic, boot=entry.boot)
    history.attempt = replace(attempt, skips_snapshots=skips_snapshots)


def _growing(history: JournalHistory, entry: JournalEntry) -> None:
    assert history.attempt is not None, "it runs"
    history.attempt = replace(history.attempt, grows=True)


def _started(history: JournalHistory, entry: JournalEntry) -> None:
    assert history.attempt is not None, "an attempt is planned before it is started"
    process = LaunchProcess(entry.fields["pid"], entry.fields["ticks"])
    history.attempt = replace(history.attempt, process=process)


def _ended(history: JournalHistory, entry: JournalEntry) -> None:
    assert history.attempt is not None, "an attempt is planned before it ends"
    said: dict[str, Any] = entry.fields["diagnosis"]
    diagnosis = Diagnosis(**{**said, "hosts": tuple(said["hosts"]), "back": _back(said)})
    trained = entry.fields.get("trained")
    if trained is not None and history.at_most is not None and trained["resumed"] <= history.at_most:
        history.at_most = None  # what is newer was moved away
    code, last = entry.fields["exit_code"], entry.fields.get("last")
    resumed = None if trained is None else trained["resumed"]
    history.failures.append(FailedAttempt(entry.time, history.attempt.hosts, code, diagnosis, last, resumed))


def _decided(history: JournalHistory, entry: JournalEntry) -> None:
    said = entry.fields
    hosts = tuple(said["replaced"])
    back = _back(said)
    history.decision = Decision(Action(said["action"]), said["text"], hosts, said["pause_s"], back=back)
    history.skips_snapshots |= said.get("skips_snapshots", False)
    if back is not None:
        history.went_back, history.at_most = history.went_back + 1, back.at_most
        history.skip += () if back.skip is None else (back.skip,)
    history.decided_at = entry.time
    kind = history.failures[-1].diagnosis.kind
    history.replaced |= dict.fromkeys(hosts, Replaced(said["text"], kind))


def _back(said: dict[str, Any]) -> RewindTarget | None:
    raw = said.get("back")
    return None if raw is None else RewindTarget(raw["at_most"], None if raw["skip"] is None else tuple(raw["skip"]))


def _tested(history: JournalHistory, entry: JournalEntry) -> None:
    test = HostTest(**{name: entry.fields[name] for name in ("host", "exit_code", "text")})
    before = history.replaced.pop(test.host, None)
    if not test.passed:
        first = Replaced(f"as a spare: {test.text}", None)
        history.replaced[test.host] = replace(before or first, tested_at=entry.time, test=test)
        return
    history.passed_at[test.host] = entry.time
    if before is not None and (before.kind is not None or (before.test is not None and before.test.is_conclusive)):
        history.given_back[test.host] = history.given_back.get(test.host, 0) + 1


def _suspected(history: JournalHistory, entry: JournalEntry) -> None:
    history.replaced |= {host: Replaced(text, None) for host, text in entry.fields["hosts"].items()}


def _left(history: JournalHistory, entry: JournalEntry) -> None:
    history.left = entry.fields["job"]


def _finished(history: JournalHistory, entry: JournalEntry) -> None:
    history.exit_code = entry.fields["exit_code"]


def _unchanged(history: JournalHistory, entry: JournalEntry) -> None:
    """The run is as it was."""


HOSTS, SUSPECTED, TESTED, GROWING, TAKEN_OVER = "hosts", "suspected", "tested", "growing", "taken_over"
NO_TURNS = (HOSTS, SUSPECTED, TESTED, GROWING, TAKEN_OVER, DAMAGED)
"""Kinds of entries that are no turns: which hosts there are, at the start and where that has changed; hosts that failed
often in other runs; ends of tests; an attempt is asked to end, since there are more hosts; a supervisor goes on where
an earlier one has stopped; the journal was written anew since lines of it were damaged."""
CHANGES: dict[str, Callable[[JournalHistory, JournalEntry], None]] = {
    "opened": _opened,
    HOSTS: _hosts,
    SUSPECTED: _suspected,
    TESTED: _tested,
    GROWING: _growing,
    TAKEN_OVER: _unchanged,
    DAMAGED: _unchanged,
    "planned": _planned,
    "started": _started,
    "ended": _ended,
    "decided": _decided,
    "left": _left,
    "finished": _finished,
}
"""What each kind of entry changes."""
