"""Verdict on a launch: how it ended, who failed first and why, from the ranks' records and the exit code; pure."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megasdc.errors import ERRORS_BY_EXIT_CODE, LaunchError, PeerError
from megasdc.launcher.records import DoneRecord, LaunchRecords

MAX_RANKS_SHOWN = 8
COLLECTIVE_ERRORS = ("DistBackendError", "DistNetworkError", "DistStoreError")
BROKEN_COLLECTIVE = re.compile(
    r"DistBackendError|NCCL communicator|ncclRemoteError|ncclInternalError|gloo/transport|ollective operation timeout"
    r"|Connection (closed|reset) by peer"
)
INTERRUPTED = KeyboardInterrupt.__name__
ABORTED = (
    "over NCCL PyTorch's watchdog ends a rank by SIGABRT, before it can report, when a collective was given up after "
    "megasdc.parallel.timeout_s or when CUDA has failed; the rank's last lines then say `Watchdog caught collective "
    "operation timeout` (which is exit code 75 elsewhere) or the CUDA error"
)
"""Possible causes of a rank's SIGABRT. Only the rank's output, which the front does not see, tells them apart.

Source: ``torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`` (2.10 to 2.13), ``Watchdog::run``, which raises in a thread
of its own. ``TORCH_NCCL_BLOCKING_WAIT=1`` raises in the rank instead, but waits for the device at every collective."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on how a launch ended.

    Attributes:
        exit_code: returned by the front; 0 only if every rank reported done with 0.
        rank: the rank that failed first; None if there is none or it is not known.
        host: its host, as in the hostfile; also set for a launcher that was killed.
        lines: the explanation, the cause first.
        stopped_by: number of the signal that the front received, where that ended the launch; None: none did.
        ended_by: number of the signal that ended the process of ``rank``, None: not known, or none.
    """

    exit_code: int
    rank: int | None
    host: str | None
    lines: list[str]
    stopped_by: int | None = None
    ended_by: int | None = None


def judge(
    host_of_rank: Sequence[str],
    records: LaunchRecords,
    launcher_code: int,
    *,
    unreachable: Mapping[str, str] | None = None,
    stopped_by: int | None = None,
    outlived: bool = False,
) -> Verdict:
    """Decide how a launch ended.

    Ranks that ended with PeerError or in a broken collective are consequences; the earliest other failure is the cause.
    A rank without a done record was killed or its host was lost, and is the cause if no rank reported one; a documented
    exit code of the launcher is then kept, because a rank may end with one and be unable to write its record (a full
    disk). Success of every rank is success, also after a requested stop: the record is the last thing that a rank
    writes, and DeepSpeed's launcher returns 1 after every signal. But ranks whose launcher was killed save and end as
    after a requested stop: if no stop was requested, the launch has failed.

    Args:
        host_of_rank: host of each expected rank.
        launcher_code: exit code of DeepSpeed's launcher; negative: it was killed by that signal.
        unreachable: why a host's records could not be read, by host.
        stopped_by: number of the signal that the front received; None means none.
        outlived: whether processes of the launch still ran when DeepSpeed's launcher had ended.
    """
    expected = range(len(host_of_rank))
    failed = sorted((done for done in records.done.values() if done.exit_code != 0), key=lambda done: done.time)
    causes = [done for done in failed if not _is_consequence(done)]
    missing = [rank for rank in expected if rank not in records.done]
    # Those that ended first by themselves come first: their launchers have ended the others.
    missing.sort(key=lambda rank: records.ended[rank].time if rank in records.ended else math.inf)
    notes = [*records.unreadable, *(unreachable or {}).values()]
    if causes:
        return _rank_failed(causes[0], host_of_rank, failed, missing, notes)
    interrupted = [done.rank for done in failed if done.error_class == INTERRUPTED]
    if stopped_by is not None and (missing or interrupted or not failed):
        return _stopped(stopped_by, host_of_rank, missing, interrupted, notes)
    if missing:
        return _ranks_missing(host_of_rank, records, missing, failed, launcher_code, notes)
    if failed:
        return _rank_failed(failed[0], host_of_rank, failed, missing, notes)
    if stopped_by is None and (outlived or launcher_killed(records, launcher_code)):
        return _abandoned(host_of_rank, records, launcher_code, notes)
    if launcher_code != 0:
        notes.insert(0, f"the launcher ended with {describe_code(launcher_code)}, after every rank reported success")
    return Verdict(0, None, None, [f"all {len(expected)} ranks are done", *notes])


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


def _signal_number(code: int) -> int:
    return -code if code < 0 else code - 128 if code <= 128 + signal.SIGRTMAX else 256 - code


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


def _rank_failed(
    first: DoneRecord, host_of_rank: Sequence[str], failed: list[DoneRecord], missing: list[int], notes: list[str]
) -> Verdict:
    kind = ERRORS_BY_EXIT_CODE.get(first.exit_code)
    name = first.error_class or (kind.__name__ if kind else "no error class")
    host = host_of_rank[first.rank] if first.rank < len(host_of_rank) else first.host
    shown = host if host == first.host else f"{host} ({first.host})"
    reason = first.message or "it gave no message"
    lines = [f"rank {first.rank} on {shown} failed first with exit code {first.exit_code} ({name}): {reason}"]
    others = [done.rank for done in failed if done.rank != first.rank]
    if others:
        lines.append(f"after it failed: {_ranks(others, host_of_rank)}")
    if missing:
        lines.append(f"without a done record: {_ranks(missing, host_of_rank)}")
    return Verdict(first.exit_code, first.rank, host, [*lines, *notes])


def _ranks_missing(
    host_of_rank: Sequence[str],
    records: LaunchRecords,
    missing: list[int],
    failed: list[DoneRecord],
    launcher_code: int,
    notes: list[str],
) -> Verdict:
    code = describe_code(launcher_code)
    kind = ERRORS_BY_EXIT_CODE.get(launcher_code)
    own_code = launcher_code if kind and kind is not PeerError else LaunchError.exit_code
    never = [rank for rank in missing if rank not in records.started]
    lines = []
    for rank in missing[:MAX_RANKS_SHOWN]:
        what = "never started" if rank in never else "killed or host lost"
        ended = records.ended.get(rank)
        own = "" if ended is None else f"; the first of its host to end, with {describe_code(ended.exit_code)}"
        lines.append(f"rank {rank} on {host_of_rank[rank]}: no done record ({what}; launcher said {code}{own})")
    if len(missing) > MAX_RANKS_SHOWN:
        lines.append(f"and {len(missing) - MAX_RANKS_SHOWN} more ranks without a done record")
    hosts = sorted(records.failed_hosts.values(), key=lambda host: host.time)
    for host in hosts:
        lines.append(f"the launcher of host {host.host} ended with {describe_code(host.exit_code)}")
    if signal.SIGABRT in map(_signal_number, [launcher_code, *(host.exit_code for host in hosts)]):
        lines.append(ABORTED)
    if failed:
        lines.append(f"as a consequence failed: {_ranks([done.rank for done in failed], host_of_rank)}")
    first = records.ended.get(missing[0])
    ended_by = -first.exit_code if first is not None and first.exit_code < 0 else None
    return Verdict(own_code, missing[0], host_of_rank[missing[0]], [*lines, *notes], ended_by=ended_by)


def _stopped(
    number: int, host_of_rank: Sequence[str], missing: list[int], interrupted: list[int], notes: list[str]
) -> Verdict:
    name = signal.Signals(number).name
    if missing or interrupted:
        line = f"stopped by {name}"
        line += f"; without a done record: {_ranks(missing, host_of_rank)}" if missing else ""
        line += f"; interrupted before it could save: {_ranks(interrupted, host_of_rank)}" if interrupted else ""
        return Verdict(128 + number, None, None, [line, *notes], number)
    lines = [f"stopped by {name}, all {len(host_of_rank)} ranks saved and are done", *notes]
    return Verdict(0, None, None, lines, number)


def _abandoned(host_of_rank: Sequence[str], records: LaunchRecords, launcher_code: int, notes: list[str]) -> Verdict:
    gone = [rank for rank, done in sorted(records.done.items()) if done.launcher_gone]
    of = f" of {_ranks(gone, host_of_rank)}" if gone else ""
    line = (
        f"the launcher{of} was killed, or ended before its ranks ({describe_code(launcher_code)}), without a "
        f"requested stop; all {len(host_of_rank)} ranks saved and are done: start again to continue"
    )
    return Verdict(LaunchError.exit_code, None, host_of_rank[gone[0]] if gone else None, [line, *notes])


def _ranks(ranks: Sequence[int], host_of_rank: Sequence[str]) -> str:
    shown = [f"{rank} on {host_of_rank[rank]}" for rank in ranks[:MAX_RANKS_SHOWN] if rank < len(host_of_rank)]
    more = len(ranks) - len(shown)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{f' and {more} more' if more > 0 else ''}"
