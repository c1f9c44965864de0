"""The ranks of a host, as its agent sees them: records, processes, and the answers to its questions.

TCP connections of a process as the kernel sees them: to whom it sends what is never acknowledged.

Source: proc_pid_net(5) and Documentation/networking/proc_net_tcp.rst of Linux: the columns of ``/proc/PID/net/tcp``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import write_durably
from megasdc.common.host import DISK, GONE, RUNNING, process_state, read_own_json
from megasdc.ops.health.incident import rank_state
from megasdc.ops.health.limits import PhaseLimits, merged_counts
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.rank_watch import answer_path
from megasdc.ops.health.record import LEAVE_FILE, Progress, RecordReader, WatchedIdentity, record_path

ESTABLISHED, RETRANSMIT_TIMER = 0x01, 0x01
LEAST_RETRANSMITS = 3
"""Unanswered repetitions in a row, about 1.5 s at the least, after which a peer counts as silent."""


@dataclass(frozen=True)
class Connection:
    """An established TCP connection.

    Args:
        local: address of this host.
        remote: address of the other one.
        retransmits: how often its oldest data were sent again without an answer; 0: nothing is overdue. A peer that
            takes no more data, since its program does not read, still answers.
    """

    local: str
    remote: str
    retransmits: int


def connections(pid: int) -> list[Connection]:
    """Established connections of a process to other hosts; empty where the process has gone or may not be looked at."""
    found: list[Connection] = []
    try:
        own = set(_inodes(Path(f"/proc/{pid}/fd")))
    except OSError:
        return []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):  # a kernel without IPv6 has no tcp6
            lines = Path(f"/proc/{pid}/net/{name}").read_text(encoding="ascii").splitlines()[1:]
            found += [one for line in lines if (one := _parse(line.split(), own)) is not None]
    return found


def silent_peers(found: list[Connection]) -> dict[str, int]:
    """Addresses that acknowledge nothing any more, with the largest number of repetitions."""
    peers: dict[str, int] = {}
    for one in found:
        if one.retransmits >= LEAST_RETRANSMITS:
            peers[one.remote] = max(one.retransmits, peers.get(one.remote, 0))
    return peers


def _inodes(folder: Path) -> Iterator[str]:
    for entry in os.listdir(folder):
        try:
            target = os.readlink(folder / entry)
        except OSError:
            continue  # it has just been closed
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _parse(fields: list[str], own: set[str]) -> Connection | None:
    local, remote, state, timer, retransmits, inode = *fields[1:4], fields[5], fields[6], fields[9]
    addresses = _address(local), _address(remote)
    if int(state, 16) != ESTABLISHED or inode not in own or addresses[1].is_loopback or addresses[0] == addresses[1]:
        return None
    overdue = int(timer.partition(":")[0], 16) == RETRANSMIT_TIMER
    return Connection(str(addresses[0]), str(addresses[1]), int(retransmits, 16) if overdue else 0)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: words of four bytes, each in the byte order of the host."""
    digits = text.partition(":")[0]
    words = [int(digits[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address


ANSWER_S = 3.0
"""Seconds that ranks have to answer."""
DISK_S = 0.3
"""A process that waits for a disk longer than this is told to."""
LEAVE_S, KILLED_S = 5.0, 2.0
"""Seconds that ranks have to leave before they are killed, and then to end."""


@dataclass
class WatchedRank:
    """A rank as its agent sees it.

    Args:
        first_step: of its process.
        state: of its process, at the last look.
        since: what came before this does not count (``time.monotonic``).
        damaged: what is wrong with its record; empty: nothing.
    """

    record: RecordReader
    first_step: int
    progress: Progress
    state: str = RUNNING
    since: float = 0.0
    damaged: str = ""

    @property
    def identity(self) -> WatchedIdentity:
        """Its identity."""
        return self.record.identity

    @property
    def ended(self) -> bool:
        """Whether it has finished, or its process is gone."""
        return self.state == GONE or self.progress.phase == Phase.DONE

    @property
    def stuck_s(self) -> float:
        """Seconds since its last change of phase, as far as they count."""
        return time.monotonic() - max(self.progress.time, self.since)

    def update(self) -> None:
        """Read where it is, and what its process does; with a damaged record it stays where it was last seen."""
        try:
            self.progress = self.record.read()
        except ValueError as error:
            self.damaged = str(error)
        self.state = process_state(self.identity.pid, self.identity.started_at)

    def position(self) -> dict[str, Any]:
        """Where it is, for people and programs."""
        return {
            "rank": self.identity.rank,
            "step": self.progress.step,
            "micro_batch": self.progress.micro_batch,
            "phase": self.progress.phase.label,
            "stuck_s": round(self.stuck_s, 3),
            "process": self.state,
            "group": self.progress.group,
            "sequence": self.progress.sequence,
        }


class WatchedRanks:
    """All ranks of this host.

    Args:
        folder: of the records.
        ranks: their numbers.
        first_steps: of their processes, by rank, as far as an earlier agent has kept them; else where they are now.

    Raises:
        OSError: a record is missing.
        ValueError: a record is damaged.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], first_steps: Mapping[int, int] | None = None) -> None:
        self._folder, self._first_steps = folder, first_steps or {}
        self._ranks = [self._open(rank) for rank in ranks]

    def _open(self, rank: int) -> WatchedRank:
        record = RecordReader(record_path(self._folder, rank))
        progress = record.read()
        return WatchedRank(record, self._first_steps.get(rank, max(progress.step, 1)), progress)

    def __iter__(self) -> Iterator[WatchedRank]:
        return iter(self._ranks)

    @property
    def run(self) -> str:
        """Name of this start of the run."""
        return self._ranks[0].identity.run

    @property
    def stuck_s(self) -> float:
        """Seconds since the last change of phase of any that has not ended."""
        return min((rank.stuck_s for rank in self._ranks if not rank.ended), default=0.0)

    @property
    def ended(self) -> bool:
        """Whether all have finished, or are gone."""
        return all(rank.ended for rank in self._ranks)

    def update(self) -> None:
        """Read where all are."""
        for rank in self._ranks:
            rank.update()

    def durations(self, kept: Mapping[Phase, Sequence[int]]) -> dict[Phase, list[int]]:
        """Counts of durations by phase, with those of earlier starts; none of a record that was cut off."""
        found = []
        for rank in self._ranks:
            with contextlib.suppress(ValueError):
                found.append(rank.record.durations())
        return merged_counts([kept, *found])

    def count_from_now(self) -> None:
        """What was before does not count: this whole host stood still."""
        for rank in self._ranks:
            rank.since = time.monotonic()

    def are_stuck(self, limits: PhaseLimits) -> bool:
        """Whether every rank that has not ended has been where it is for longer than it may."""
        waiting = [rank for rank in self._ranks if not rank.ended]
        return all(rank.stuck_s > limits.of(rank.progress, rank.first_step) for rank in waiting)

    def report(self, limits: PhaseLimits) -> dict[str, Any] | None:
        """Request of all their stacks and collectives, and return what is known of them: plain values, for other hosts.

        None: one has moved meanwhile.
        """
        before = {rank.identity.rank: (rank.progress.number, rank.state) for rank in self._ranks}
        asked: dict[int, int] = {}
        for rank in self._ranks:
            if rank.state in (RUNNING, DISK):
                with contextlib.suppress(ValueError):
                    asked[rank.identity.rank] = rank.record.request_stacks()
        now = time.monotonic()
        while time.monotonic() < now + (DISK_S if self._answered(asked) else ANSWER_S):
            time.sleep(0.05)
        self.update()
        if any(rank.progress.number != before[rank.identity.rank][0] for rank in self._ranks):
            return None
        states, stacks, addresses = [], {}, set()
        for rank in self._ranks:
            if rank.state == DISK and before[rank.identity.rank][1] != DISK:
                rank.state = RUNNING  # it has only just begun to wait for it
            answer = self._read_answer(rank, asked)
            stacks[str(rank.identity.rank)] = answer.get("stacks", {})
            limit_s = limits.of(rank.progress, rank.first_step)
            known = connections(rank.identity.pid)
            addresses |= {one.local for one in known}
            state = rank_state(rank.identity, rank.progress, limit_s, rank.state, answer, silent_peers(known))
            states.append(asdict(state))
        return {"run": self.run, "states": states, "stacks": stacks, "addresses": sorted(addresses)}

    def _answered(self, asked: Mapping[int, int]) -> bool:
        return all(rank.record.answered >= asked.get(rank.identity.rank, 0) for rank in self._ranks)

    def _read_answer(self, rank: WatchedRank, asked: Mapping[int, int]) -> dict[str, Any]:
        number = rank.identity.rank
        if number not in asked or rank.record.answered < asked[number]:
            return {}
        try:
            return read_own_json(answer_path(self._folder, number))
        except (OSError, ValueError):
            return {}

    def end(self, leave: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """Request that all leave, and kill those that do not.

        Args:
            leave: ``exit_code`` and ``message``.
            log: called with what had to be done.
        """
        try:
            write_durably(self._folder / LEAVE_FILE, json.dumps(leave) + "\n")
        except OSError as error:
            log(f"ranks cannot be told to leave, and are killed: {error}")
        else:
            for rank in self._ranks:
                rank.record.request_exit()
            self._wait_until_gone(LEAVE_S)
        for rank in self._ranks:
            rank.update()
            if rank.state != GONE:
                log(f"rank {rank.identity.rank} did not leave and was killed")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.identity.pid, signal.SIGKILL)
        self._wait_until_gone(KILLED_S)
        for rank in self._ranks:
            if rank.state != GONE:
                log(f"rank {rank.identity.rank} was killed and does not end: its process is {rank.state}")

    def _wait_until_gone(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while time.monotonic() < until and not all(rank.state == GONE for rank in self._ranks):
            time.sleep(0.1)
            self.update()
