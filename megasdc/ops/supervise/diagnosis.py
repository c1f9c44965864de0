"""What went wrong in an attempt: from the exit code, the front's verdict, and what the run wrote of it; pure functions.

A diagnosis names hosts only where the evidence does. What a rank or an agent calls its host is turned into the name
that the hostfile has, by the rank.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from megasdc.common.errors import (
    CheckpointError,
    ConfigError,
    CorruptionError,
    DataError,
    HangError,
    LaunchError,
    NonFiniteError,
    StorageError,
    TraceError,
)
from megasdc.ops.health.incident_file import HangIncident
from megasdc.ops.launch.launch_verdict import HOST_MEMORY
from megasdc.ops.supervise.attempt_progress import AttemptProgress
from megasdc.sdc.incident import Incident

USAGE = 2
"""Exit code of a wrong command line."""
SIGNALS = 128
"""Exit codes above it are those of signals that the front received."""


@dataclass(frozen=True)
class DiagnosisKind:
    """A kind of diagnosis.

    Args:
        title: in words, as reports have it.
        names_hosts: whether it says which hosts are the cause.
    """

    title: str
    names_hosts: bool = False


MENDABLE = ("unfit", "no_room", "mended")
"""Kinds of what a host lacks, which say nothing of its hardware."""
LOST = "lost"
"""Kind of an attempt whose diagnosis is lost."""
KINDS = {
    "done": DiagnosisKind("all steps are done"),
    "stopped": DiagnosisKind("stopped on request"),
    "grown": DiagnosisKind("ended to go on with more hosts"),
    "preempted": DiagnosisKind("ended from outside: by a scheduler, or with its job"),
    "input": DiagnosisKind("configuration, data or command line are wrong"),
    "unfit": DiagnosisKind("a host is not fit for the run, and others are", names_hosts=True),
    "no_room": DiagnosisKind("the memory of a host has no room for snapshots", names_hosts=True),
    "mended": DiagnosisKind("ranks of one host alone had an error, and no check finds it now", names_hosts=True),
    "memory": DiagnosisKind("a rank got no memory"),
    "memory_of_host": DiagnosisKind(
        "a rank got no memory on a host where others took it, or that has less", names_hosts=True
    ),
    "checkpoint": DiagnosisKind("no checkpoint can be used"),
    "non_finite": DiagnosisKind("NaN or Inf more often than allowed"),
    "folder_full": DiagnosisKind("the run folder had no room for some time"),
    "storage": DiagnosisKind("a folder cannot be written, or the disk is full"),
    "corrupt_again": DiagnosisKind("a rank computes wrong results, again when it repeats them", names_hosts=True),
    "corrupt_once": DiagnosisKind("a rank has computed a wrong result once", names_hosts=True),
    "corrupt": DiagnosisKind("wrong results, and no rank is named"),
    "corrupt_one_of": DiagnosisKind("one of several ranks computes wrong results", names_hosts=True),
    "host_lost": DiagnosisKind("a host cannot be reached", names_hosts=True),
    "hang": DiagnosisKind("a rank was stuck", names_hosts=True),
    "link": DiagnosisKind("a connection between two hosts carried nothing", names_hosts=True),
    "stuck": DiagnosisKind("nothing moved, and who is the cause is not known"),
    "rank_lost": DiagnosisKind("a rank was killed", names_hosts=True),
    "ranks_lost": DiagnosisKind("ranks of several hosts were killed"),
    "rank_crashed": DiagnosisKind("a rank crashed", names_hosts=True),
    "rank_failed": DiagnosisKind("a rank failed with an error that is none of the documented ones", names_hosts=True),
    "launch": DiagnosisKind("the launch itself failed"),
    LOST: DiagnosisKind("how it ended is not known any more: the journal was damaged"),
}
"""All kinds."""
BY_CODE = {
    DataError.exit_code: "input",
    CheckpointError.exit_code: "checkpoint",
    NonFiniteError.exit_code: "non_finite",
    CorruptionError.exit_code: "corrupt",
    StorageError.exit_code: "storage",
    TraceError.exit_code: "input",
}
OF_VERDICT = {
    "persistent": "corrupt_again",
    "intermittent": "corrupt_again",
    "not_reproduced": "corrupt_once",
    "inconclusive": "corrupt_one_of",
}
"""Diagnosis of corruption, by the verdict of its incident."""
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
"""Signals that a process brings upon itself; others come from outside."""
OF_HOSTS = (
    ConfigError.exit_code,
    DataError.exit_code,
    StorageError.exit_code,
    LaunchError.exit_code,
    TraceError.exit_code,
)
"""Exit codes of what one host may have and others not: hosts are checked after them."""
MENDED = (DataError.exit_code, StorageError.exit_code, LaunchError.exit_code)
"""Those of them whose causes the check looks at as ranks do. Not what ranks of one host alone may refuse whatever host
it is: the memory of their stage or their device, their file of a golden trace."""
NO_MEMORY = "could not get the memory it asked for"
"""What a rank says that has run out of memory, under the exit code of a wrong configuration."""


@dataclass(frozen=True)
class RewindTarget:
    """Where a run can go back to.

    Args:
        at_most: newest step to go on from.
        skip: samples that are not trained on then, [first, end) of the training stream; None: none.
    """

    at_most: int
    skip: tuple[int, int] | None = None

    def __str__(self) -> str:
        skip = "" if self.skip is None else f", without samples {self.skip[0]} to {self.skip[1] - 1} of the stream"
        return f"on from step {self.at_most} at most{skip}"


@dataclass(frozen=True)
class UnfitHost:
    """Why a host is not fit.

    Args:
        code: exit code that a rank would end with there.
        text: in a sentence.
        snapshots: only snapshots in memory have no room.
    """

    host: str
    code: int
    text: str
    snapshots: bool = False


@dataclass(frozen=True)
class HostCheckResult:
    """Result of one check on several hosts.

    Args:
        unfit: what was found.
        fit: hosts on which nothing was found; those that gave no answer are neither.
        silent: why hosts gave none.
        given_up: it was not done to its end, as a stop was asked for meanwhile.
    """

    unfit: tuple[UnfitHost, ...] = ()
    fit: tuple[str, ...] = ()
    silent: dict[str, str] = field(default_factory=dict)
    given_up: bool = False


@dataclass(frozen=True)
class AttemptEvidence:
    """How an attempt ended.

    Args:
        exit_code: of the launch; None: its front was killed, and left no verdict.
        failed_rank: that failed first; None: not known.
        failed_host: its host, as in the hostfile; None: not known.
        lines: what the front said of the end, the cause first.
        host_of_rank: as in the hostfile; of the ranks that train at the end.
        unreachable: hosts that could not be reached afterwards.
        grows: it was asked to save and end, to go on with more hosts.
        interrupted: how it was ended from outside, in a sentence; empty: it was not.
        asked: who had asked it to stop for good: a signal to the launch, or the configuration; empty: nobody.
        hang: the incident of a standstill in this attempt; None: there was none.
        corruption: that of silent data corruption which has ended its last start; None: there was none.
        reached: last step that was reported; 0: none.
        steps: of the whole run.
        trained: what it has reported; None: no step.
        back: where the run can go back to; None: not known.
        left_out: hosts of ranks that were found wrong, and without whose replicas the run has gone on.
        ended_by: number of the signal that ended the rank that failed first; None: none, or not known.
        last: last step that the attempt itself did; 0: none, None: not known.
        checked: what the check of its hosts and those that wait has found, after one of ``OF_HOSTS``.
        failed_alike: hosts whose ranks have recorded that they ended with the exit code themselves.
        without_room: the supervisor has seen meanwhile that the run folder had no room.
        memory: whose want of memory ended the rank that failed first, as of
        ``megasdc.ops.launch.launch_verdict.LaunchVerdict``.
        by_time: an incident of an earlier version, which does not name its launch, was matched by its host's date.
    """

    exit_code: int | None
    failed_rank: int | None
    failed_host: str | None
    lines: Sequence[str]
    host_of_rank: Sequence[str]
    unreachable: Sequence[str] = ()
    grows: bool = False
    interrupted: str = ""
    asked: str = ""
    hang: HangIncident | None = None
    corruption: Incident | None = None
    reached: int = 0
    steps: int = 0
    trained: AttemptProgress | None = None
    back: RewindTarget | None = None
    left_out: Sequence[str] = ()
    ended_by: int | None = None
    last: int | None = None
    checked: HostCheckResult = field(default_factory=HostCheckResult)
    failed_alike: Sequence[str] = ()
    by_time: bool = False
    without_room: bool = False
    memory: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What went wrong.

    Args:
        kind: of ``KINDS``.
        hosts: that are the cause, or one of which is; as in the hostfile; empty where none is named.
        step: that was reached.
        text: the evidence in a sentence.
        incident: file of the evidence; None: there is none.
        back: where the run can go back to; None: not known, or it would not help.
    """

    kind: str
    hosts: tuple[str, ...]
    step: int
    text: str
    incident: str | None = None
    back: RewindTarget | None = None


def diagnose(evidence: AttemptEvidence) -> Diagnosis:
    """Say what went wrong; hosts that the run has gone on without are wrong for certain, however it has ended."""
    found = _diagnose(evidence)
    if not evidence.left_out or found.kind in ("done", "stopped", "input"):
        return found
    also = found.hosts if found.kind in ("host_lost", "corrupt_again", "corrupt_one_of") else ()
    hosts = tuple(dict.fromkeys((*evidence.left_out, *also)))
    text = f"the run has gone on without {', '.join(evidence.left_out)}, which computed wrong results; {found.text}"
    return replace(found, kind="corrupt_again", hosts=hosts, text=text)


def _cause(lines: Sequence[str]) -> str:
    """The first of the lines that the front said, with the problems that it lists, in one line."""
    head = lines[0] if lines else "nothing was said of it"
    listed = list(takewhile(lambda line: line.startswith("  - "), lines[1:])) if head.endswith(":") else []
    return " ".join(filter(None, (head, "; ".join(line.removeprefix("  - ") for line in listed))))


def _diagnose(evidence: AttemptEvidence) -> Diagnosis:
    """Say what has ended an attempt.

    What one host lacks and others have comes first, then what is wrong with the input; then a host that is gone, which
    explains what follows; then what was detected and named; what came from outside; and the exit code.
    """

    def found(kind: str, hosts: Sequence[str] = (), text: str = "", incident: str | None = None) -> Diagnosis:
        said = text or _cause(evidence.lines)
        if evidence.checked.given_up:
            said += "; a stop was asked for before it was known whether one host alone has it"
        named = tuple(dict.fromkeys(hosts)) if KINDS[kind].names_hosts else ()
        back = evidence.back if kind in ("checkpoint", "non_finite") else None
        return Diagnosis(kind, named, evidence.reached, said, incident, back)

    code = evidence.exit_code
    is_told_apart = evidence.steps or not evidence.interrupted  # a program's last step is not known
    if code == 0 and evidence.reached >= evidence.steps and is_told_apart:
        return found("done")
    if evidence.grows and (code is None or code == 0 or code > SIGNALS):  # None: before it had anything to end
        return found("grown", text="more hosts can be used")
    if code == StorageError.exit_code and evidence.without_room:
        return found("folder_full")
    if code in OF_HOSTS and (lacking := _of_one_host(evidence)):
        more = [one for one in lacking if not one.snapshots]  # the run cannot do without what these lack
        kind, lacking = ("unfit", more) if more else ("no_room", lacking)
        return found(kind, [one.host for one in lacking], "; ".join(dict.fromkeys(one.text for one in lacking)))
    if code in MENDED and (host := _mended(evidence)):
        return found("mended", [host], f"{evidence.lines[0]}; the check of all hosts finds nothing now")
    if evidence.checked.given_up and evidence.interrupted:  # the next start ends in the same way, and checks
        return found("preempted", text=evidence.interrupted)
    if code in (USAGE, ConfigError.exit_code):
        return found("memory" if NO_MEMORY in " ".join(evidence.lines) else "input")
    if evidence.unreachable:
        return found("host_lost", evidence.unreachable, f"{', '.join(evidence.unreachable)} cannot be reached")
    if evidence.corruption is not None and code == CorruptionError.exit_code:
        one = evidence.corruption
        return found(OF_VERDICT[one.verdict], _hosts_of(evidence, [rank.rank for rank in one.suspects]))
    if evidence.hang is not None and not evidence.hang.kind.endswith("/gone"):
        return _of_hang(evidence, evidence.hang)
    if code in BY_CODE:
        return found(BY_CODE[code])
    if evidence.interrupted:
        return found("preempted", text=evidence.interrupted)
    if code is None:
        return found("launch", text="the front of the launch was killed")
    if code == HangError.exit_code:
        return found("stuck")
    if evidence.asked and (code == 0 or code > SIGNALS):
        return found("stopped", text=evidence.asked)
    if code == 0:
        return found("launch", text="it ended with exit code 0 before its last step, and nobody had asked it to")
    failed = [evidence.failed_host] if evidence.failed_host is not None else []
    if evidence.memory is not None:
        return found("memory_of_host" if evidence.memory == HOST_MEMORY else "memory", failed)
    if code == 1:
        return found("rank_failed", failed)
    if evidence.failed_rank is None:  # of several hosts, where a signal is known
        is_killed = evidence.ended_by is not None and evidence.ended_by not in CRASHES
        return found("ranks_lost" if is_killed else "launch")
    return found("rank_crashed" if evidence.ended_by in CRASHES else "rank_lost", failed)


def _of_one_host(evidence: AttemptEvidence) -> list[UnfitHost]:
    """What hosts of the attempt lack that others have; empty where what has ended it is the same on all hosts.

    Room for snapshots is what a host lacks, though all do, once steps were taken with them.
    """
    unfit, asked = evidence.checked.unfit, {*evidence.checked.fit, *(one.host for one in evidence.checked.unfit)}
    having: dict[tuple[int, bool], set[str]] = {}
    for one in unfit:
        having.setdefault((one.code, one.snapshots), set()).add(one.host)
    shared = {key for key, hosts in having.items() if hosts == asked}
    if evidence.reached > 1:  # snapshots had room once: the run goes on without them where they have none any more
        shared = {(code, snapshots) for code, snapshots in shared if not snapshots}
    if any(code == evidence.exit_code for code, _ in shared):
        return []
    return [one for one in unfit if (one.code, one.snapshots) not in shared and one.host in evidence.host_of_rank]


def _mended(evidence: AttemptEvidence) -> str:
    """The one host of several whose ranks ended with an error that no host has any more; empty: it is not so."""
    hosts, told = {*evidence.host_of_rank}, {*evidence.failed_alike}
    only = told.pop() if len(told) == 1 else ""
    return only if len(hosts) > 1 and hosts <= {*evidence.checked.fit} else ""


def _of_hang(evidence: AttemptEvidence, hang: HangIncident) -> Diagnosis:
    by_rank = _hosts_of(evidence, hang.ranks)
    hosts = by_rank or [host for host in dict.fromkeys(evidence.host_of_rank) if host in hang.hosts]
    kind = "link" if hang.kind.endswith("/link") and hosts else "hang" if hosts else "stuck"
    return Diagnosis(kind, tuple(dict.fromkeys(hosts)), evidence.reached, hang.message, str(hang.path))


def _hosts_of(evidence: AttemptEvidence, ranks: Sequence[int]) -> list[str]:
    return [evidence.host_of_rank[rank] for rank in ranks if rank < len(evidence.host_of_rank)]
