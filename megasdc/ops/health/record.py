"""Progress record of a rank: a file in shared memory that a rank writes and its host's agent reads; no torch.

The record outlives the rank, and a rank that writes it never waits. Layout of its 4,096 bytes, little endian:

======  ==========================================================================================================
0       identity: JSON, padded with zeros; written before the file gets its name
1024    four progress lines, line n at 1024 + 56 (n mod 4): monotonic seconds (f64), step, micro-batch, phase (i64),
        name of a group (8 bytes, padded with zeros), number of the last collective in it (i64), n (i64)
1248    number of the agent's last request (u64), and of the last one that the rank has answered (u64)
1264    1: the rank must leave, as the file ``leave.json`` beside the record says (u64)
1280    durations: for each of 16 phases 44 counts (u32), a count for each factor of sqrt(2) from 1 ms on
======  ==========================================================================================================

Each number is written by one store, and n as the last of its line, while the other lines are not touched. So line n is
whole where its n is the largest, and has not changed while it was read if line n + 3 is not whole after that: the next
one would be written over it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import mmap
import os
import struct
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from megasdc.common.errors import ERRORS_BY_EXIT_CODE, HangError, StorageError
from megasdc.common.host import open_own, read_own_json
from megasdc.ops.health.phases import Phase

SIZE = 4096
BUCKETS = 44
FIRST_BUCKET_S = 1e-3
_LINE = struct.Struct("<dqqq8sqq")
_MOST = 2**32 - 1
"""Where a count stays."""
_LINES = 4
_LINES_AT, _ASKED_AT, _COUNTS_AT = tuple(1024 + _LINE.size * line for line in range(_LINES)), 1248, 1280
_ASKED, _ANSWERED, _LEAVE = range(3)
_NUMBER_WORDS = tuple((at + _LINE.size) // 8 - 1 for at in _LINES_AT)
"""Words of the record with the number of a line."""
_IDENTITY_BYTES = 1024
LEAVE_FILE = "leave.json"
_TRIES = 100


@dataclass(frozen=True)
class WatchedIdentity:
    """Identity of a rank: what an agent must know to watch it and to say who it is.

    Args:
        run: name of this start: id of the run, number of the start, a random part.
        node: index of its host among the hosts of the launch, in the order of ranks.
        started_at: of the process, seconds since boot, which tells it from a later one with its id.
    """

    run: str
    rank: int
    local_rank: int
    world_size: int
    pp_rank: int
    tp_rank: int
    dp_rank: int
    host: str
    node: int
    pid: int
    started_at: float


@dataclass(frozen=True)
class Progress:
    """Where a rank is.

    Args:
        number: of the change of phase, the first is 1; 0: none yet.
        time: of that change, on ``time.monotonic``, which all processes of a host share.
        step: optimizer step, the first is 1.
        micro_batch: the first of a step is 0; -1: none.
        group: whose collectives the phase has; empty: it has none.
        sequence: number of the last one in it that the rank had joined when the phase began; -1: no group.
    """

    number: int
    time: float
    step: int
    micro_batch: int
    phase: Phase
    group: str = ""
    sequence: int = -1


class PhaseRecorder(Protocol):
    """Records a change to a phase."""

    def __call__(self, step: int, micro_batch: int = -1, sequence: int = -1) -> None:
        """Record it, with what ``Progress`` has of them."""


def record_path(folder: Path, rank: int) -> Path:
    """File of a rank's record."""
    return folder / f"rank_{rank:05d}.record"


def bucket_of(seconds: float) -> int:
    """Index of the count for a duration: each is for durations up to sqrt(2) times those of the one before."""
    if seconds <= FIRST_BUCKET_S:
        return 0
    return min(BUCKETS - 1, math.ceil(2 * math.log2(seconds / FIRST_BUCKET_S)))


def bucket_limit_s(index: int) -> float:
    """Longest duration of a count; the last one has none."""
    return math.inf if index == BUCKETS - 1 else float(FIRST_BUCKET_S * 2 ** (index / 2))


class HeartbeatWriter:
    """The record of this rank.

    Raises:
        StorageError: shared memory cannot be written.
    """

    def __init__(self, folder: Path, identity: WatchedIdentity) -> None:
        content = json.dumps(asdict(identity)).encode()
        if len(content) > _IDENTITY_BYTES:
            raise StorageError(f"identity of rank {identity.rank} takes {len(content)} bytes, {_IDENTITY_BYTES} fit")
        path = record_path(folder, identity.rank)
        part = path.with_suffix(".part")
        try:
            part.unlink(missing_ok=True)  # of a start that was killed
            with open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "r+b") as file:
                file.write(content.ljust(SIZE, b"\0"))
                file.flush()
                self._map = mmap.mmap(file.fileno(), SIZE)
            os.replace(part, path)
        except OSError as error:
            raise StorageError(f"progress record {path} cannot be written: {error}") from error
        self._counts = memoryview(self._map)[_COUNTS_AT : _COUNTS_AT + 4 * BUCKETS * 16].cast("I")
        words, times = memoryview(self._map).cast("q"), memoryview(self._map).cast("d")
        self._requests = words[_ASKED_AT // 8 :]
        self._lines = [(words[at // 8 : (at + _LINE.size) // 8], times[at // 8 : at // 8 + 1]) for at in _LINES_AT]
        words.release()
        times.release()
        self.folder, self.rank = folder, identity.rank
        self._answered_at = -math.inf
        self._next_number = itertools.count(1).__next__
        self._begun: deque[tuple[int, float]] = deque([(Phase.START, time.monotonic())])
        """Phases and when they began, from the first whose duration is not counted yet."""

    def recorder(self, phase: int, group: bytes = b"") -> PhaseRecorder:
        """What records a change to a phase, given step, micro-batch and sequence; see ``Progress``.

        About a microsecond, and ten where the pass before has taken the processor's caches, for which all that does not
        change is prepared here.
        """
        lines, next_number, keep, now = self._lines, self._next_number, self._begun.append, time.monotonic
        phase, name = int(phase), int.from_bytes(group[:8].ljust(8, b"\0"), "little", signed=True)

        def enter(step: int, micro_batch: int = -1, sequence: int = -1) -> None:
            number, since = next_number(), now()
            line, times = lines[number % _LINES]
            times[0] = since
            line[1], line[2], line[3], line[4], line[5] = step, micro_batch, phase, name, sequence
            line[6] = number
            keep((phase, since))

        return enter

    def enter(self, phase: int, step: int, micro_batch: int = -1, group: bytes = b"", sequence: int = -1) -> None:
        """Record a change of phase once."""
        self.recorder(phase, group)(step, micro_batch, sequence)

    def count(self) -> None:
        """Count how long phases took that have ended; by one thread, which may be another than the one that enters."""
        begun, counts = self._begun, self._counts
        while len(begun) > 1:
            phase, since = begun.popleft()
            if since <= self._answered_at <= begun[0][1]:
                continue  # it was taken for stuck: were that learned, the next time would be noticed later
            place = phase * BUCKETS + bucket_of(begun[0][1] - since)
            counts[place] = min(counts[place] + 1, _MOST)

    @property
    def asked(self) -> int:
        """Number of the agent's last request."""
        return self._requests[_ASKED]

    def mark_answered(self, number: int) -> None:
        """Mark the agent's request as answered."""
        self._answered_at = time.monotonic()
        self._requests[_ANSWERED] = number

    @property
    def must_leave(self) -> bool:
        """Whether the agent has told this rank to end."""
        return bool(self._requests[_LEAVE])

    def close(self) -> None:
        """Release the mapping; the file stays for the agent."""
        for view in (self._counts, self._requests):
            view.release()
        for line, times in self._lines:
            line.release()
            times.release()
        self._map.close()


class RecordReader:
    """The record of a rank of this host, as its agent sees it.

    One that was cut off is not touched: that would kill who looks at it (SIGBUS).

    Raises:
        ValueError: the file is no whole record.
        OSError: it cannot be read, or is not this user's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(open_own(path, os.O_RDWR), "r+b")  # noqa: SIM115 - open as long as this lives
        try:
            self._check_size()
        except ValueError:
            self._file.close()
            raise
        self._map = mmap.mmap(self._file.fileno(), SIZE)
        self._words = memoryview(self._map).cast("q")
        self._requests = self._words[_ASKED_AT // 8 :]
        try:
            self.identity = _identity(json.loads(self._map[:_IDENTITY_BYTES].rstrip(b"\0")))
        except (ValueError, TypeError, RecursionError) as error:
            self.close()
            raise ValueError(f"{path} is no progress record: {error}") from error

    def _check_size(self) -> None:
        if (size := os.fstat(self._file.fileno()).st_size) != SIZE:
            raise ValueError(f"{self._path} is no progress record: {size:,} bytes, not {SIZE:,}")

    def read(self) -> Progress:
        """Where the rank is; ``ValueError`` where the record is damaged."""
        self._check_size()
        for _ in range(_TRIES):
            number, *before = sorted(self._numbers(), reverse=True)
            line = _LINE.unpack_from(self._map, _LINES_AT[number % _LINES])
            since, step, micro_batch, phase, group, sequence, last = line
            is_whole = last == number and before == [max(number - one, 0) for one in range(1, _LINES)]
            if is_whole and max(self._numbers()) < number + _LINES - 1:
                name = group.rstrip(b"\0").decode("ascii", "replace")
                return Progress(number, since, step, micro_batch, Phase(phase), name, sequence)
        raise ValueError(f"progress record of rank {self.identity.rank} is damaged: no whole line in {_TRIES} tries")

    def _numbers(self) -> list[int]:
        return [self._words[at] for at in _NUMBER_WORDS]

    def durations(self) -> dict[Phase, list[int]]:
        """Counts of durations by phase, [bucket]; ``ValueError`` where the record was cut off."""
        self._check_size()
        size = 4 * BUCKETS
        return {
            phase: list(struct.unpack_from(f"<{BUCKETS}I", self._map, _COUNTS_AT + phase * size)) for phase in Phase
        }

    def request_stacks(self) -> int:
        """Request the stacks of the rank; returns the number of the request. ``ValueError`` as ``durations``."""
        self._check_size()
        number = self._requests[_ASKED] + 1
        self._requests[_ASKED] = number
        return number

    @property
    def answered(self) -> int:
        """Number of the last request that the rank has answered; 0 where the record was cut off."""
        with contextlib.suppress(ValueError):
            self._check_size()
            return self._requests[_ANSWERED]
        return 0

    def request_exit(self) -> None:
        """Request that the rank end, after ``leave.json`` was written; one whose record was cut off is killed later."""
        with contextlib.suppress(ValueError):
            self._check_size()
            self._requests[_LEAVE] = 1

    def close(self) -> None:
        """Release the mapping."""
        self._requests.release()
        self._words.release()
        self._map.close()
        self._file.close()


def _identity(raw: dict[str, Any]) -> WatchedIdentity:
    """An identity as it was written; ValueError or TypeError where it cannot have been."""
    found = WatchedIdentity(**raw)
    kinds: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
    for field in fields(WatchedIdentity):
        value = getattr(found, field.name)
        if not isinstance(value, kinds[str(field.type)]) or isinstance(value, bool):
            raise TypeError(f"{field.name} is {value!r}")
    if found.pid < 1:
        raise ValueError(f"pid is {found.pid}")
    return found


def leave_message(folder: Path) -> tuple[int, str]:
    """Exit code with which the ranks of this host must leave, never 0, and why."""
    try:
        found = read_own_json(folder / LEAVE_FILE)
    except (OSError, ValueError) as error:
        return HangError.exit_code, f"the agent of this host has told the ranks to leave; why cannot be read: {error}"
    code, message = found.get("exit_code"), str(found.get("message"))
    return (code if type(code) is int and code in ERRORS_BY_EXIT_CODE else HangError.exit_code), message
