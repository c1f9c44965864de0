"""Progress record of a rank: a file in shared memory that a rank writes and its host's agent reads; no torch.

The record outlives the rank, and a rank that writes it never waits. Layout of its 4,096 bytes, little endian:

======  ==========================================================================================================
0       identity: JSON, padded with zeros; written before the file gets its name
1024    number of the last progress line (u64); line n lies at 1032 + 64 (n mod 2)
1032    two progress lines: n (u64), monotonic seconds (f64), step (i64), micro-batch (i64), phase (u64), name of a
        group (8 bytes, padded with zeros), number of the last collective in it (i64), n again (u64)
1160    number of the agent's last request (u64), and of the last one that the rank has answered (u64)
1176    1: the rank must leave, as the file ``leave.json`` beside the record says (u64)
1184    durations: for each of 16 phases 44 counts (u32), a count for each factor of sqrt(2) from 1 ms on
======  ==========================================================================================================

Single numbers are written by one store each: ``Struct.pack_into`` would first fill them with zeros. A line is whole
when the numbers at its two ends are the one that the record names: a reader meets a line that is being written only if
two changes of phase happen while it reads, and then reads again.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.errors import StorageError
from megasdc.health.phases import Phase

SIZE = 4096
BUCKETS = 44
FIRST_BUCKET_S = 1e-3
_LINE = struct.Struct("<QdqqQ8sqQ")
_LINE_SIZE = _LINE.size
_AFTER_MICRO_BATCHES = int(Phase.REDUCTION)
"""First phase that is none of a micro-batch."""
_MOST = 2**32 - 1
"""Where a count stays."""
_NUMBER_AT, _LINES_AT, _ASKED_AT, _COUNTS_AT = 1024, 1032, 1160, 1184
_ASKED, _ANSWERED, _LEAVE = range(3)
_IDENTITY_BYTES = 1024
LEAVE_FILE = "leave.json"
_TRIES = 100


@dataclass(frozen=True)
class Identity:
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


class RecordWriter:
    """The record of this rank.

    Raises:
        StorageError: shared memory cannot be written.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        content = json.dumps(asdict(identity)).encode()
        if len(content) > _IDENTITY_BYTES:
            raise StorageError(f"identity of rank {identity.rank} takes {len(content)} bytes, {_IDENTITY_BYTES} fit")
        path = record_path(folder, identity.rank)
        part = path.with_suffix(".part")
        try:
            part.write_bytes(content.ljust(SIZE, b"\0"))
            os.replace(part, path)
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), SIZE)
        except OSError as error:
            raise StorageError(f"progress record {path} cannot be written: {error}") from error
        self._counts = memoryview(self._map)[_COUNTS_AT : _COUNTS_AT + 4 * BUCKETS * 16].cast("I")
        self._number_there, self._requests = _numbers(self._map)
        self.folder, self.rank = folder, identity.rank
        self._number, self._since, self._phase = 0, time.monotonic(), Phase.START
        self._past: list[Any] = []
        """Phases that have ended and their durations, in turn, which are not counted yet."""

    def enter(self, phase: Phase, step: int, micro_batch: int = -1, group: bytes = b"", sequence: int = -1) -> None:
        """Record a change of phase, and how long the one before took; ``group``, ``sequence``: see ``Progress``.

        About a microsecond, and twenty where the pass before has taken the processor's caches. Within micro-batches
        durations are only kept, and counted when what follows them begins.
        """
        now = time.monotonic()
        self._past += (self._phase, now - self._since)
        number = self._number = self._number + 1
        self._since, self._phase = now, phase
        where = _LINES_AT + _LINE_SIZE * (number & 1)
        _LINE.pack_into(self._map, where, number, now, step, micro_batch, phase, group, sequence, number)
        self._number_there[0] = number
        if phase >= _AFTER_MICRO_BATCHES:
            self._count()

    def _count(self) -> None:
        past, counts = self._past, self._counts
        for phase, seconds in zip(past[::2], past[1::2], strict=True):
            place = phase * BUCKETS + bucket_of(seconds)
            counts[place] = min(counts[place] + 1, _MOST)
        past.clear()

    @property
    def asked(self) -> int:
        """Number of the agent's last request."""
        return self._requests[_ASKED]

    def answer(self, number: int) -> None:
        """Tell the agent that its request is answered."""
        self._requests[_ANSWERED] = number

    @property
    def must_leave(self) -> bool:
        """Whether the agent has told this rank to end."""
        return bool(self._requests[_LEAVE])

    def close(self) -> None:
        """Release the mapping; the file stays for the agent."""
        for view in (self._counts, self._number_there, self._requests):
            view.release()
        self._map.close()


class RecordReader:
    """The record of a rank of this host, as its agent sees it.

    Raises:
        ValueError: the file is no whole record.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            if os.fstat(file.fileno()).st_size != SIZE:
                raise ValueError(f"{path} is no progress record: {os.fstat(file.fileno()).st_size} bytes, not {SIZE}")
            self._map = mmap.mmap(file.fileno(), SIZE)
        try:
            self.identity = Identity(**json.loads(self._map[:_IDENTITY_BYTES].rstrip(b"\0")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is no progress record: {error}") from error
        self._number_there, self._requests = _numbers(self._map)

    def read(self) -> Progress:
        """Where the rank is; ``ValueError`` where the record is damaged."""
        for _ in range(_TRIES):
            number = self._number_there[0]
            line = _LINE.unpack_from(self._map, _LINES_AT + _LINE.size * (number & 1))
            first, since, step, micro_batch, phase, group, sequence, last = line
            if number == first == last:
                name = group.rstrip(b"\0").decode("ascii", "replace")
                return Progress(number, since, step, micro_batch, Phase(phase), name, sequence)
        raise ValueError(f"progress record of rank {self.identity.rank} is damaged: no whole line in {_TRIES} tries")

    def durations(self) -> dict[Phase, list[int]]:
        """Counts of durations by phase, [bucket]."""
        size = 4 * BUCKETS
        return {
            phase: list(struct.unpack_from(f"<{BUCKETS}I", self._map, _COUNTS_AT + phase * size)) for phase in Phase
        }

    def ask(self) -> int:
        """Ask the rank for its stacks; returns the number of the request."""
        number = self._requests[_ASKED] + 1
        self._requests[_ASKED] = number
        return number

    @property
    def answered(self) -> int:
        """Number of the last request that the rank has answered."""
        return self._requests[_ANSWERED]

    def tell_to_leave(self) -> None:
        """Tell the rank to end, after ``leave.json`` was written."""
        self._requests[_LEAVE] = 1

    def close(self) -> None:
        """Release the mapping."""
        self._number_there.release()
        self._requests.release()
        self._map.close()


def _numbers(record: mmap.mmap) -> tuple[memoryview, memoryview]:
    """Views of the number of the last line, and of the requests."""
    view = memoryview(record)
    return view[_NUMBER_AT : _NUMBER_AT + 8].cast("Q"), view[_ASKED_AT : _ASKED_AT + 24].cast("Q")


def leave_message(folder: Path) -> dict[str, Any]:
    """Why the ranks of this host must leave: ``exit_code`` and ``message``."""
    found: dict[str, Any] = json.loads((folder / LEAVE_FILE).read_text(encoding="utf-8"))
    return found
