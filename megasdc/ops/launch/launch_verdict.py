"""Verdict on a launch: how it ended, who failed first and why, from the ranks' records and the exit code; what it met.

What a run has met - faults and standstills, what was done about each, what a person should do - is one list for the
last lines of a launch and of a supervisor, for the summary, pages, live views and alerts: a run that has ended well
says it, too. What a supervisor has done is added by ``megasdc.ops.supervise.met``. No torch.
"""

from __future__ import annotations

import re
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from megasdc.common.durable import parse_json
from megasdc.common.errors import (
    ERRORS_BY_EXIT_CODE,
    CorruptionError,
    HangError,
    LaunchError,
    NonFiniteError,
    PeerError,
)
from megasdc.common.host import MemoryKill
from megasdc.common.origin import HostClock, first_moments
from megasdc.events import Event, event_of
from megasdc.ops.health.incident import STANDSTILL
from megasdc.ops.health.incident_file import HangIncident, load_hangs
from megasdc.ops.launch.records import DoneRecord, EndedRecord, LaunchRecords
from megasdc.sdc.incident import INJECTED, DisputedRank, FlaggedRank, Incident, load_incidents

MAX_RANKS_SHOWN = 8
AGREED = (CorruptionError.exit_code, HangError.exit_code, NonFiniteError.exit_code)
"""Exit codes of findings that ranks agree on, or are told by their agents."""
COLLECTIVE_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
BROKEN_COLLECTIVE = re.compile(
    r"DistBackendError|NCCL communicator|ncclRemoteError|ncclInternalError|gloo/transport|ollective operation timeout"
    r"|Connection (closed|reset) by peer"
)
HOST_MEMORY, RUN_MEMORY = "host", "run"
"""Whose want of memory it is: of one host, whose memory others take or that has less than others, or of the run."""
MEMORY_SHARE = 0.1
"""Of a host's memory: what others took meanwhile, or what it has less than other hosts, beyond that is its own."""
INTERRUPTED = KeyboardInterrupt.__name__
ABORTED = (
    "over NCCL PyTorch's watchdog ends a rank by SIGABRT, before it can report, when a collective was given up after "
    "megasdc.parallel.timeout_s or when CUDA has failed; the rank's last lines then say `Watchdog caught collective "
    "operation timeout` (which is exit code 75 elsewhere) or the CUDA error"
)
"""Possible causes of a rank's SIGABRT. Only the rank's output, which the front does not see, tells them apart.

Source: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`` (2.10 to 2.13), ``Watchdog::run``, which raises in a thread
of its own. ``TORCH_NCCL_BLOCKING_WAIT=1`` raises in the rank instead, but waits for the device at every collective."""
SHOWN = 8
"""Of a long list the last ones are shown, and how many there are in all."""
REPORTS = "reports"
"""Folder of incidents of corruption in the run folder."""
CORRUPTION, STUCK, REPLACED, REWOUND, RETURNED = "corruption", "standstill", "replaced", "rewound", "returned"
LEFT_OUT = "left out"
_OF_RANKS = (CORRUPTION, STUCK, LEFT_OUT)
WRONG, LATE = "wrong", "late"
"""Why a round of Local-SGD was made without a replica; late: or not there."""
_DONE = {
    "halted": "the run was halted",
    "isolated": "its replica was left out, and the others went on",
    "repaired": "the step was repaired",
    "committed": "nothing was done, as the policy says",
    "left out": "it took over what the others agreed on, and goes on",
}


TOLD_BY_RANK_0 = (CorruptionError.exit_code, NonFiniteError.exit_code)
"""Exit codes of findings that rank 0 prints for all that have agreed on them."""
_AGREED_LINE = re.compile(r"((?:all \d+ ranks|ranks? 0 on .*?) ended with exit code \d+ \(\w+\)): .*", re.DOTALL)


@dataclass(frozen=True)
class LaunchVerdict:
    """Verdict on how a launch ended.

    Attributes:
        exit_code: returned by the front; 0 only if every rank reported done with 0.
        failed_rank: the rank that failed first; None if there is none or it is not known.
        failed_host: its host, as in the hostfile; also set for a launcher that was killed.
        lines: the explanation, the cause first.
        stopped_by: number of the signal that the front received, where that ended the launch; None: none did.
        ended_by: number of the signal that ended the process of ``failed_rank``, None: not known, or none.
        memory: whose want of memory ended it: ``HOST_MEMORY`` or ``RUN_MEMORY``; None: none did.
    """

    exit_code: int
    failed_rank: int | None
    failed_host: str | None
    lines: list[str]
    stopped_by: int | None = None
    ended_by: int | None = None
    memory: str | None = None

    @property
    def console_lines(self) -> list[str]:
        """The explanation as the console has it: a finding that rank 0 has printed there is not printed once more."""
        if self.exit_code not in TOLD_BY_RANK_0:
            return self.lines
        return [_AGREED_LINE.sub(r"\1, as rank 0 has said", line) for line in self.lines]


def judge_launch(
    host_of_rank: Sequence[str],
    records: LaunchRecords,
    launcher_code: int,
    *,
    unreachable: Mapping[str, str] | None = None,
    stopped_by: int | None = None,
    outlived: bool = False,
    clocks: Mapping[str, HostClock] | None = None,
) -> LaunchVerdict:
    """Decide how a launch ended.

    Ranks that ended with PeerError or in a broken collective are consequences. A finding that ranks have agreed on is
    the cause, whoever has ended first: silent data corruption, a standstill, NaN and Inf. Else the earliest other
    failure is, where it is known which that was: hosts' dates are not compared (``megasdc.common.origin``). A rank
    without a done record was killed or its host was lost, and is the cause if no rank reported one; a documented exit
    code of the launcher is then kept, because a rank may end with one and be unable to write its record (a full disk).
    Success of
    every rank is success, also after a requested stop: the record is the last thing that a rank writes, and DeepSpeed's
    launcher returns 1 after every signal. But ranks whose launcher was killed save and end as after a requested stop:
    if no stop was requested, the launch has failed. So has one with a rank that ended with 0 while its training had not
    come to an end.

    Args:
        host_of_rank: host of each expected rank.
        launcher_code: exit code of DeepSpeed's launcher; negative: it was killed by that signal.
        unreachable: why a host's records could not be read, by host.
        stopped_by: number of the signal that the front received; None means none.
        outlived: whether processes of the launch still ran when DeepSpeed's launcher had ended.
        clocks: of hosts by their boot, as far as the front has measured them.
    """
    expected = range(len(host_of_rank))
    failed = sorted((done for done in records.done.values() if done.exit_code != 0), key=lambda done: done.rank)
    causes = [done for done in failed if not _is_consequence(done)]
    missing = [rank for rank in expected if rank not in records.done]
    notes = [*records.unreadable, *(unreachable or {}).values()]
    clocks = clocks or {}
    if agreed := _agreed(causes):
        return _ranks_agreed(agreed, host_of_rank, failed, missing, notes)
    if causes:
        first = _explaining(_first(causes, clocks))
        return _ranks_failed(first, host_of_rank, records, (missing, failed), notes)
    if early := [done for _, done in sorted(records.done.items()) if done.exit_code == 0 and not done.has_ended_well]:
        return _ended_early(early, host_of_rank, failed, missing, notes)
    interrupted = [done.rank for done in failed if done.error_class == INTERRUPTED]
    if stopped_by is not None and (missing or interrupted or not failed):
        return _stopped(stopped_by, host_of_rank, missing, interrupted, notes)
    if missing:
        return _ranks_missing(host_of_rank, records, (missing, failed), launcher_code, notes, clocks)
    if failed:
        return _ranks_failed(_first(failed, clocks), host_of_rank, records, (missing, failed), notes)
    if stopped_by is None and (outlived or launcher_killed(records, launcher_code)):
        return _abandoned(host_of_rank, records, launcher_code, notes)
    if launcher_code != 0:
        notes.insert(0, f"the launcher ended with {describe_code(launcher_code)}, after every rank reported success")
    stops = dict.fromkeys(done.end for _, done in sorted(records.done.items()) if (done.end or "").startswith("stop"))
    notes[:0] = [f"it {end}" for end in stops]
    return LaunchVerdict(0, None, None, [_all_done(len(expected)), *notes])


def after_suspension(verdict: LaunchVerdict, records: LaunchRecords, stood_still_s: float) -> LaunchVerdict:
    """The verdict on a launch that stood still shortly before: a timeout that ran out meanwhile is nobody's fault.

    Args:
        stood_still_s: for how long the front itself did not run; 0: it always did.
    """
    failed = [done for done in records.done.values() if done.exit_code != 0]
    timed_out = all(done.exit_code == HangError.exit_code or _is_consequence(done) for done in failed)
    if not stood_still_s or verdict.exit_code == 0 or not failed or not timed_out or _agreed(failed):
        return verdict  # agents, which have agreed on a standstill, do not count what was before it
    line = (
        f"this launch stood still for {stood_still_s:.0f} s, as where a machine is paused or a job suspended, and "
        "ranks that ran again found that their time was up: no rank and no host is the cause; start again"
    )
    return replace(verdict, failed_rank=None, failed_host=None, lines=[line, *verdict.lines])


def launcher_killed(records: LaunchRecords, launcher_code: int) -> bool:
    """Whether DeepSpeed's launcher was killed here, or, by a rank's record, on the rank's host."""
    return launcher_code == -signal.SIGKILL or any(done.launcher_gone for done in records.done.values())


def describe_code(code: int) -> str:
    """Text of an exit code of DeepSpeed's launcher; -n, 256 - n and, from a shell, 128 + n mean signal n."""
    number = _signal_number(code)
    if code == 255:
        return "exit code 255 (SSH connection or host lost)"
    if code < 0 or code > 128:
        try:
            return f"exit code {code} (a process was ended by {signal.Signals(number).name})"
        except ValueError:
            pass
    kind = ERRORS_BY_EXIT_CODE.get(code)
    return f"exit code {code}{f' ({kind.__name__})' if kind else ''}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"


def _signal_number(code: int) -> int:
    return -code if code < 0 else code - 128 if code <= 128 + signal.SIGRTMAX else 256 - code


def _signal_of_one(launcher_code: int) -> int | None:
    """Number of the signal that ended a rank, by its launcher's exit code; None: that says none."""
    if not 128 < launcher_code < 255:  # 255: SSH's own error; negative: the launcher itself was killed
        return None
    number = _signal_number(launcher_code)
    return number if number in signal.valid_signals() else None


def _is_consequence(done: DoneRecord) -> bool:
    """Whether a rank failed because another one had ended: by a PeerError or a broken collective.

    An interrupted rank was ended on request, or by the front because another had failed.
    """
    if done.error_class == INTERRUPTED:
        return True
    if done.exit_code == PeerError.exit_code or done.error_class == PeerError.__name__:
        return True
    if done.exit_code != 1:
        return False
    return done.error_class in COLLECTIVE_ERRORS or bool(BROKEN_COLLECTIVE.search(done.message or ""))


def _agreed(causes: Sequence[DoneRecord]) -> list[DoneRecord]:
    """Ranks that ended with a finding on which ranks agree; the one that explains most; empty: none did."""
    for code in AGREED:
        found = [done for done in causes if done.exit_code == code]
        if code == HangError.exit_code:  # a timeout of a collective is each rank's own
            found = [done for done in found if (done.message or "").startswith(STANDSTILL)]
        if found:
            return found
    return []


Record = TypeVar("Record", DoneRecord, EndedRecord)


def _first(records: Sequence[Record], clocks: Mapping[str, HostClock]) -> list[Record]:
    """The one that was first, or all that may have been; of one host the lowest rank."""
    found = first_moments({place: one.ended_at for place, one in enumerate(records)}, clocks)
    if len({records[place].host for place in found}) == 1:
        found = found[:1]
    return [records[place] for place in found]


def _explaining(first: list[DoneRecord]) -> list[DoneRecord]:
    """Of ranks that may have been first those that waited for nobody, if there are any: they explain the others."""
    found = [done for done in first if done.exit_code != HangError.exit_code] or first
    return found[:1] if len({done.host for done in found}) == 1 else found


def _ranks_agreed(
    agreed: list[DoneRecord],
    host_of_rank: Sequence[str],
    failed: list[DoneRecord],
    missing: list[int],
    notes: list[str],
) -> LaunchVerdict:
    """They have found it, and are not therefore the cause: no rank is named."""
    one = agreed[0]
    name, ranks = _name_of(one), [done.rank for done in agreed]
    who = f"all {len(ranks)} ranks" if 1 < len(ranks) == len(host_of_rank) else _ranks(ranks, host_of_rank)
    lines = [f"{who} ended with exit code {one.exit_code} ({name}): {one.message or 'without a message'}"]
    lines += _others([done.rank for done in failed if done.rank not in ranks], missing, host_of_rank, "with it")
    return LaunchVerdict(one.exit_code, None, None, [*lines, *notes])


def _ranks_failed(
    first: list[DoneRecord],
    host_of_rank: Sequence[str],
    records: LaunchRecords,
    ranks: tuple[list[int], list[DoneRecord]],
    notes: list[str],
) -> LaunchVerdict:
    """``first``: the rank that failed first, or all that may have; ``ranks``: as of ``_ranks_missing``."""
    missing, failed = ranks
    memory = _memory([done.rank for done in first], host_of_rank, records)
    others = [done.rank for done in failed if done not in first]
    if len(first) == 1:
        host, text = _failure(first[0], host_of_rank, "failed first")
        if memory is not None:
            short = _out_of_memory(records.ended[first[0].rank], host_of_rank, records)
            text += f"; the kernel had no memory for a worker of it: {short}"
        lines = [text, *_others(others, missing, host_of_rank, "after it")]
        return LaunchVerdict(first[0].exit_code, first[0].rank, host, [*lines, *notes], memory=memory)
    # One that says what is wrong, if there is one.
    code = min(first, key=lambda done: (done.exit_code not in ERRORS_BY_EXIT_CODE, done.rank)).exit_code
    shown = [_failure(done, host_of_rank, "failed")[1] for done in first[:MAX_RANKS_SHOWN]]
    lines = [f"{shown[0]}; {_unknown(first)}", *shown[1:]]
    if len(first) > len(shown):
        lines.append(f"and {len(first) - len(shown)} more ranks that may have been first")
    return LaunchVerdict(
        code, None, None, [*lines, *_others(others, missing, host_of_rank, "after them"), *notes], memory=memory
    )


def _ended_early(
    early: list[DoneRecord], host_of_rank: Sequence[str], failed: list[DoneRecord], missing: list[int], notes: list[str]
) -> LaunchVerdict:
    """Ranks that ended with 0, and not because their training had come to an end."""
    one, ranks = early[0], [done.rank for done in early]
    host = host_of_rank[one.rank] if one.rank < len(host_of_rank) else one.host
    line = (
        f"{_ranks(ranks, host_of_rank)} ended with exit code 0, and not at the last step, nor since it was to stop: "
        "something else has ended it"
    )
    lines = [line, *_others([done.rank for done in failed], missing, host_of_rank, "with it")]
    return LaunchVerdict(LaunchError.exit_code, one.rank, host, [*lines, *notes])


def _unknown(first: Sequence[object]) -> str:
    return f"which of {len(first)} ranks on several hosts was first is not known"


def _failure(done: DoneRecord, host_of_rank: Sequence[str], what: str) -> tuple[str, str]:
    """The host of a rank, and how it failed."""
    host = host_of_rank[done.rank] if done.rank < len(host_of_rank) else done.host
    shown = host if host == done.host else f"{host} ({done.host})"
    reason = done.message or "it gave no message"
    return host, f"rank {done.rank} on {shown} {what} with exit code {done.exit_code} ({_name_of(done)}): {reason}"


def _name_of(done: DoneRecord) -> str:
    kind = ERRORS_BY_EXIT_CODE.get(done.exit_code)
    return done.error_class or (kind.__name__ if kind else "no error class")


def _others(ranks: list[int], missing: list[int], host_of_rank: Sequence[str], when: str) -> list[str]:
    lines = [f"{when} failed: {_ranks(ranks, host_of_rank)}"] if ranks else []
    return [*lines, f"without a done record: {_ranks(missing, host_of_rank)}"] if missing else lines


def _ranks_missing(
    host_of_rank: Sequence[str],
    records: LaunchRecords,
    ranks: tuple[list[int], list[DoneRecord]],
    launcher_code: int,
    notes: list[str],
    clocks: Mapping[str, HostClock],
) -> LaunchVerdict:
    """``ranks``: those without a done record, and records of those that failed."""
    missing, failed = ranks
    # Those that ended first by themselves come first: their launchers have ended the others.
    ended = [records.ended[rank] for rank in missing if rank in records.ended]
    first = [one.rank for one in _first(ended, clocks)] or missing
    missing = sorted(missing, key=lambda rank: (rank not in first, rank not in records.ended, rank))
    hosts_of_first = {host_of_rank[rank] for rank in first}
    code = describe_code(launcher_code)
    kind = ERRORS_BY_EXIT_CODE.get(launcher_code)
    own_code = launcher_code if kind and kind is not PeerError else LaunchError.exit_code
    never = [rank for rank in missing if rank not in records.started]
    lines = []
    for rank in missing[:MAX_RANKS_SHOWN]:
        what = "never started" if rank in never else "killed or host lost"
        seen, own = records.ended.get(rank), ""
        if seen is not None and seen.exit_code < 0:
            what = f"killed by {_signal_name(-seen.exit_code)}"
        elif seen is not None:
            own = f"; it ended by itself, with {describe_code(seen.exit_code)}"
        if seen is not None and (short := _out_of_memory(seen, host_of_rank, records)):
            own += f", out of memory: {short}"
        lines.append(f"rank {rank} on {host_of_rank[rank]}: no done record ({what}; launcher said {code}{own})")
    if len(missing) > MAX_RANKS_SHOWN:
        lines.append(f"and {len(missing) - MAX_RANKS_SHOWN} more ranks without a done record")
    if len(hosts_of_first) > 1:
        lines[0] += f"; {_unknown(first)}"
    hosts = sorted(records.failed_hosts.values(), key=lambda host: host.host)
    for host in hosts:
        lines.append(f"the launcher of host {host.host} ended with {describe_code(host.exit_code)}")
    if signal.SIGABRT in map(_signal_number, [launcher_code, *(host.exit_code for host in hosts)]):
        lines.append(ABORTED)
    if failed:
        lines.append(f"as a consequence failed: {_ranks([done.rank for done in failed], host_of_rank)}")
    memory = _memory(first, host_of_rank, records)
    if len(hosts_of_first) > 1:
        # One code of all: their hosts were not told apart, what has ended them is.
        codes = {records.ended[rank].exit_code if rank in records.ended else 0 for rank in first}
        ended_by = -codes.pop() if len(codes) == 1 and min(codes) < 0 else None
        return LaunchVerdict(own_code, None, None, [*lines, *notes], ended_by=ended_by, memory=memory)
    one = records.ended.get(missing[0])
    ended_by = -one.exit_code if one is not None and one.exit_code < 0 else None
    if one is None and len(missing) == 1:  # of launchers that leave no such record, as SLURM's
        ended_by = _signal_of_one(launcher_code)
    named = host_of_rank[missing[0]]
    return LaunchVerdict(own_code, missing[0], named, [*lines, *notes], ended_by=ended_by, memory=memory)


def _memory(first: Sequence[int], host_of_rank: Sequence[str], records: LaunchRecords) -> str | None:
    """Whose want of memory has ended ranks, of which one was first; None: that of hosts which differ, or of none."""
    known = [records.ended[rank] for rank in first if rank in records.ended and rank < len(host_of_rank)]
    killed = [one for one in known if one.memory]
    if not killed or len(killed) < len(first):
        return None
    of_host = [bool(_why_of_host(one, host_of_rank, records)) for one in killed]
    if not any(of_host):
        return RUN_MEMORY
    return HOST_MEMORY if len(first) == 1 else None


def _out_of_memory(seen: EndedRecord, host_of_rank: Sequence[str], records: LaunchRecords) -> str:
    """Numbers of a rank's end for want of memory, and what to do; empty: it was not that."""
    if seen.memory is None:
        return ""
    kill = MemoryKill(**seen.memory)  # type: ignore[arg-type]
    had = "" if kill.process is None else f", of which it had {_gib(kill.process)}"
    if kill.total is None or kill.others is None or kill.before is None:
        return "how much there is, and who uses it, is not known"
    others = (
        f"other programs use {_gib(kill.others)} there, with files of theirs in /dev/shm, and used {_gib(kill.before)} "
        "at its start"
    )
    if kill.shared:
        others += f"; other shared memory and files in /dev/shm took {_gib(kill.shared)}, of whoever has made them"
    remedy = _why_of_host(seen, host_of_rank, records) or (
        "the run needs more than that: give ranks less to hold (smaller micro-batches, fewer ranks on a host, more "
        "ranks to a model), or hosts more memory"
    )
    return f"{_gib(kill.total)} for programs{had}; {others}; {remedy}"


def _why_of_host(seen: EndedRecord, host_of_rank: Sequence[str], records: LaunchRecords) -> str:
    """Why the host is the cause that a rank ran out of memory, and not the run; empty: it is not known to be."""
    kill = MemoryKill(**(seen.memory or {}))  # type: ignore[arg-type]
    if kill.total is None or kill.others is None or kill.before is None:
        return ""
    if kill.others - kill.before > MEMORY_SHARE * kill.total:
        return (
            "other programs have taken it meanwhile: end them, remove what they left in /dev/shm, or take another host"
        )
    own, ranks = host_of_rank[seen.rank], Counter(host_of_rank)
    elsewhere = [
        one.memory_bytes / ranks[host_of_rank[rank]]
        for rank, one in records.started.items()
        if rank < len(host_of_rank) and host_of_rank[rank] != own and one.memory_bytes is not None
    ]
    had = (kill.total - kill.before) / ranks[own]
    if elsewhere and had < (1.0 - MEMORY_SHARE) * statistics.median(elsewhere):
        return f"other hosts had {_gib(statistics.median(elsewhere))} left for each rank: this one had {_gib(had)}"
    return ""


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def _stopped(
    number: int, host_of_rank: Sequence[str], missing: list[int], interrupted: list[int], notes: list[str]
) -> LaunchVerdict:
    name = signal.Signals(number).name
    if missing or interrupted:
        line = f"stopped by {name}"
        line += f"; without a done record: {_ranks(missing, host_of_rank)}" if missing else ""
        line += f"; interrupted before it could save: {_ranks(interrupted, host_of_rank)}" if interrupted else ""
        return LaunchVerdict(128 + number, None, None, [line, *notes], number)
    lines = [f"stopped by {name}, {_all_done(len(host_of_rank), 'saved and ')}", *notes]
    return LaunchVerdict(0, None, None, lines, number)


def _abandoned(
    host_of_rank: Sequence[str], records: LaunchRecords, launcher_code: int, notes: list[str]
) -> LaunchVerdict:
    gone = [rank for rank, done in sorted(records.done.items()) if done.launcher_gone]
    of = f" of {_ranks(gone, host_of_rank)}" if gone else ""
    line = (
        f"the launcher{of} was killed, or ended before its ranks ({describe_code(launcher_code)}), without a "
        f"requested stop; {_all_done(len(host_of_rank), 'saved and ')}: start again to continue"
    )
    return LaunchVerdict(LaunchError.exit_code, None, host_of_rank[gone[0]] if gone else None, [line, *notes])


def _all_done(count: int, before: str = "") -> str:
    return f"the one rank {before}is done" if count == 1 else f"all {count} ranks {before}are done"


def _ranks(ranks: Sequence[int], host_of_rank: Sequence[str]) -> str:
    shown = [f"{rank} on {host_of_rank[rank]}" for rank in ranks[:MAX_RANKS_SHOWN] if rank < len(host_of_rank)]
    more = len(ranks) - len(shown)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{f' and {more} more' if more > 0 else ''}"


# --- what a run has met -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Met:
    """One of the things that a run has met.

    Args:
        attempt: number of the start in which it was, of what a supervisor did that of its attempt; 0: not known.
        step: optimizer step, the first is 1; 0: before it.
        time: ISO 8601, UTC, by the clock of the host that wrote it.
        kind: corruption, standstill, replaced (hosts), rewound (to an earlier save), returned (hosts), or left out (of
            rounds of Local-SGD, a replica).
        what: what was found, in a few words.
        hosts: that it is about, as the run names them.
        ranks: that it is about; empty where it is about hosts.
        devices: of these ranks, in their order.
        place: phase and submodule of the first wrong result; None: it has none.
        verdict: of an incident of corruption; None: of others.
        done: what was done about it.
        to_do: what a person should do; empty: nothing.
        page: file with the evidence; None: there is none.
        launch: id of the launch in which it was; None: not known.
    """

    attempt: int
    step: int
    time: str
    kind: str
    what: str
    hosts: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    place: str | None = None
    verdict: str | None = None
    done: str = ""
    to_do: str = ""
    page: str | None = None
    launch: str | None = None

    def __str__(self) -> str:
        number = f" of {'start' if self.kind in _OF_RANKS else 'attempt'} {self.attempt}" if self.attempt else ""
        when = f"step {self.step}{number}"
        parts = (f"{when}: {self.what}", self.done, f"to do: {self.to_do}" if self.to_do else "", self.page or "")
        return "; ".join(part for part in parts if part)


def read_met(run_dir: Path, wanted: Callable[[str | None], bool] = lambda launch: True) -> list[Met]:
    """What ranks and agents have reported in a run folder, oldest first by start, step and time.

    Files that cannot be read are left out, as in reports, which say so.

    Args:
        wanted: whether incidents of a launch are, by its id; None: of one without.
    """
    incidents = [pair for pair in load_incidents(run_dir / REPORTS, []) if wanted(pair[1].launch)]
    hangs = [one for one in load_hangs(run_dir)[0] if wanted(one.launch)]
    rounds = of_rounds([one for one in _round_events(run_dir) if wanted(one.launch)])
    return order_by_step([*(of_incident(*pair) for pair in incidents), *map(of_hang, hangs), *rounds])


def order_by_step(some: Sequence[Met], launches: Sequence[str] = ()) -> list[Met]:
    """By start and step, and only then by time.

    Args:
        launches: ids of a supervisor's, in order, which come after all others.
    """
    place = {launch: number for number, launch in enumerate(launches)}
    return sorted(
        some,
        key=lambda one: (
            place.get(one.launch or "", -1),
            0 if one.launch in place else one.attempt,
            one.step,
            one.time,
        ),
    )


def of_incident(page: Path, incident: Incident) -> Met:
    """What a report on corruption says."""
    suspects = incident.suspects
    named = ", ".join(f"rank {one.rank} on {one.host} ({one.device})" for one in suspects)
    verdict = incident.verdict.replace("_", " ")
    place = f"{suspects[0].first.phase.replace('_', ' ')} of {suspects[0].first.fqn}"
    who = named if incident.flagged else f"one of {named}"
    what = f"{who}: wrong {place}, {verdict}, found by {incident.tier}"
    if (of_round := incident.round) is not None:
        what = f"round {of_round.round} without replica {of_round.replica} ({named}): {of_round.reason}"
    return Met(
        attempt=incident.attempt or 0,
        step=incident.step,
        time=incident.time,
        kind=CORRUPTION,
        what=what,
        hosts=tuple(incident.hosts),
        ranks=tuple(one.rank for one in suspects),
        devices=tuple(one.device for one in suspects),
        place=place,
        verdict=incident.verdict,
        done=_DONE[incident.done],
        to_do=_to_do(incident, suspects),
        page=str(page),
        launch=incident.launch,
    )


def _to_do(incident: Incident, suspects: Sequence[FlaggedRank | DisputedRank]) -> str:
    hosts = " and ".join(dict.fromkeys(one.host for one in suspects))
    if incident.injected:
        return f"nothing: {INJECTED[0].lower()}{INJECTED[1:]} ({', '.join(incident.injected)})"
    if incident.round is not None or (incident.flagged and incident.verdict == "not_reproduced"):
        return f"watch {hosts}; if it is named again, {drain(hosts)}"
    return drain(hosts)


def drain(hosts: str) -> str:
    """What to do with hosts that may be wrong."""
    return f"drain {hosts}, test with `megasdc stress`, return what passes"


def of_hang(hang: HangIncident) -> Met:
    """What a report on a standstill says."""
    hosts = hang.hosts or tuple(dict.fromkeys(one.host for one in hang.named))
    return Met(
        attempt=hang.attempt,
        step=hang.step,
        time=hang.date.isoformat(timespec="seconds"),
        kind=STUCK,
        what=f"{hang.kind}: {hang.message}",
        hosts=hosts,
        ranks=hang.ranks,
        done="the launch was ended",
        to_do=f"look at {' and '.join(hosts)}; if it comes again, {drain('it')}" if hosts else "",
        page=str(hang.path),
        launch=hang.launch,
    )


def _round_events(run_dir: Path) -> list[Event]:
    """Events of Local-SGD on the first rank of a replica, as far as they can be read."""
    found: list[Event] = []
    try:
        if not run_dir.resolve().name.startswith("replica_"):
            return []
        lines = (run_dir / "events" / "rank_00000.jsonl").read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        if b'"local_sgd"' in line:
            try:
                found.append(event_of(parse_json(line)))
            except (ValueError, KeyError, TypeError):
                continue  # it is being written, or its writer was killed
    return [one for one in found if one.kind == "local_sgd"]


def of_rounds(events: Sequence[Event]) -> list[Met]:
    """What a replica has met in rounds of Local-SGD: others that were left out, and itself where it was late.

    That it was wrong itself is an incident.

    Args:
        events: of kind local_sgd, of its first rank, in order.
    """
    found: dict[int, list[tuple[Event, int, str, str]]] = {}
    for event in events:
        said = event.fields
        if event.name == "without":
            out = {int(one): (WRONG, str(reason)) for one, reason in said.get("left_out", {}).items()}
            out |= {int(one): (LATE, "it was late, or not there") for one in said.get("absent", ())}
            for replica, (kind, reason) in out.items():
                found.setdefault(replica, []).append((event, int(said["round"]), kind, reason))
        elif event.name == "left_out" and not said.get("wrong"):
            found.setdefault(-1, []).append((event, int(said["round"]), LATE, str(said.get("reason"))))
    made = {int(one.fields["round"]): set(one.fields.get("members", ())) for one in events if one.name == "round"}
    return [met for replica, some in found.items() for met in _of_replica(replica, some, made)]


def _of_replica(
    replica: int, some: Sequence[tuple[Event, int, str, str]], made: Mapping[int, set[int]]
) -> Iterator[Met]:
    """Rounds in a row that a replica was left out of are one; ``replica``: -1: the one that says it."""
    rows: list[list[tuple[Event, int, str, str]]] = []
    for one in some:
        is_next = rows and (rows[-1][-1][1], rows[-1][-1][2]) in ((one[1] - 1, one[2]), (one[1], one[2]))
        if is_next and rows[-1][0][0].attempt == one[0].attempt:
            rows[-1].append(one)
        else:
            rows.append([one])
    for row in rows:
        event, first, kind, reason = row[0]
        last = row[-1][1]
        who = "this replica" if replica < 0 else f"replica {replica}"
        rounds = f"round {first} was" if first == last else f"rounds {first} to {last} were"
        is_back = (number for number, members in sorted(made.items()) if number > last)
        back = next((one for one in is_back if replica < 0 or replica in made[one]), None)
        done = "it has not returned" if back is None else f"it took part again in round {back}"
        yield Met(
            attempt=event.attempt or 0,
            step=event.step or 0,
            time=datetime.fromtimestamp(event.time, UTC).isoformat(timespec="seconds"),
            kind=LEFT_OUT,
            what=f"{rounds} made without {who}, {kind}: {reason}",
            hosts=(),
            done=done,
            to_do="" if kind == LATE and back is not None else f"see the run folder of {who}",
            launch=event.launch,
        )


def lines_of(some: Sequence[Met]) -> list[str]:
    """For a terminal, a line each; empty where nothing was met."""
    if not some:
        return []
    more = f", the last {SHOWN}" if len(some) > SHOWN else ""
    return [f"the run met {len(some)} {'fault' if len(some) == 1 else 'faults'}{more}:", *map(str, some[-SHOWN:])]
