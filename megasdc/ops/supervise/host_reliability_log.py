"""How often each host of a cluster has failed, over runs: a file that all supervisors of a cluster share; no torch.

A line for each attempt that has ended, and for each test of a host. Few hosts cause most failures (a few nodes of a
fleet caused more than half of all exclusions in published reports), so a host is judged by what it did in all runs.

A host fails at random with a constant rate, in failures per hour of use. The prior of that rate is exponential with the
mean of the other hosts of the ledger; after f failures in h hours the posterior is a gamma distribution of shape f + 1
and rate h + 1 / mean (conjugate to the Poisson distribution). A host is suspect where the posterior probability of a
rate more than twice that mean is at least 0.9.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megasdc.common.durable import END_S, lacks_room, limit_s, parse_json, wait_for_room
from megasdc.common.errors import StorageError
from megasdc.common.run_lock import open_lock_file, writers_may_lock_beside

RATIO, CERTAINTY = 2.0, 0.9
LOCK_S = 5.0
"""Seconds that another supervisor may write."""
HOUR_S, DAY_S = 3600.0, 86_400.0


@dataclass(frozen=True)
class HostUsage:
    """An attempt of a run on some hosts, or a test of one.

    Args:
        key: unique to it.
        time: of its end, seconds since the epoch.
        hours: that it took.
        hosts: that it used.
        failed: host that was named as the cause of its failure; None: none was, or one of several.
        text: why, in a sentence.
    """

    key: str
    time: float
    hours: float
    hosts: tuple[str, ...]
    failed: str | None = None
    text: str = ""


@dataclass(frozen=True)
class Judgement:
    """What a ledger says of a host.

    Args:
        failures: of the host.
        hours: of its use.
        fleet_per_hour: mean rate of the other hosts.
        probability: that its own rate is more than ``RATIO`` of that.
    """

    failures: int
    hours: float
    fleet_per_hour: float
    probability: float

    @property
    def is_suspect(self) -> bool:
        """Whether it should not be used where others can be."""
        return self.failures > 0 and self.probability >= CERTAINTY

    def __str__(self) -> str:
        expected = self.fleet_per_hour * self.hours
        return (
            f"{self.failures} failures in {self.hours:.3g} hours where {expected:.2g} would be expected; more than "
            f"{RATIO:g} times as likely to fail as the others with a probability of {self.probability:.0%}"
        )


class HostReliabilityLog:
    """A ledger in a file, which is made by the first use that is added.

    A use that has no room (``megasdc.common.durable``), or that another supervisor keeps out for too long, is kept and
    added with the next one, or by ``close``.

    Args:
        path: of the file, on storage that all supervisors see.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: list[HostUsage] = []

    def read(self) -> list[HostUsage]:
        """All uses, oldest first; a last line that is not whole is ignored.

        Raises:
            StorageError: it cannot be read, or is no ledger.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"the ledger {self.path} cannot be read: {error}") from error
        uses = []
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
            try:
                raw = parse_json(line)
                uses.append(HostUsage(**{**raw, "hosts": tuple(raw["hosts"])}))
            except (ValueError, TypeError, KeyError) as error:
                raise StorageError(
                    f"line {number} of the ledger {self.path} cannot be read: {error!r}; remove the line, or name "
                    "another file in megasdc.supervise.ledger"
                ) from error
        return uses

    def add(self, use: HostUsage) -> int:
        """Add a use, unless it is there already, and those that are kept; returns how many are kept then.

        Raises:
            StorageError: they cannot be written, now or later.
        """
        self._kept.append(use)
        try:
            self._write()
        except OSError as error:
            if not (lacks_room(error) or isinstance(error, BlockingIOError)) or not limit_s():
                raise self._lost(error) from error
        return len(self._kept)

    def close(self) -> None:
        """Add what is kept, for which is waited for ``room.END_S``.

        Raises:
            StorageError: it cannot be written, and is lost.
        """
        if not self._kept:
            return
        try:
            wait_for_room(self._write, self.path, at_most_s=END_S)
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> StorageError:
        lost, self._kept = len(self._kept), []
        return StorageError(f"the ledger {self.path} cannot be written: {error}; {lost} uses of hosts are lost")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as file, self._open_lock(file) as lock:
            _lock(lock.fileno())
            known = {one.key for one in self.read()}
            lines = [json.dumps(asdict(one)).encode() + b"\n" for one in self._kept if one.key not in known]
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # a supervisor was killed within a line, or it had no room
            left = b"".join(lines)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        self._kept.clear()

    def _open_lock(self, file: IO[bytes]) -> IO[Any]:
        """The file that is locked while the ledger is written: one beside it, since readers could lock the ledger.

        Where users may write the ledger who may make none beside it, it is the ledger itself, for all users alike.
        """
        if writers_may_lock_beside(self.path):
            return open_lock_file(self.path.with_name(f".{self.path.name}.lock"))
        return os.fdopen(os.dup(file.fileno()), "rb")


def _lock(descriptor: int) -> None:
    """Lock a file for this process alone.

    Raises:
        BlockingIOError: another process has it for ``LOCK_S``, as one that a signal has stopped.
    """
    end = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(LOCK_S / 100)
        else:
            return


def judge_host(uses: Sequence[HostUsage], host: str, now: float, days: float) -> Judgement:
    """Judge a host.

    Args:
        now: seconds since the epoch.
        days: older uses do not count.
    """
    recent = [one for one in uses if one.time > now - days * DAY_S]
    own = [one for one in recent if host in one.hosts]
    hours = sum(one.hours for one in own)
    others_hours = sum(one.hours * len(one.hosts) for one in recent) - hours
    failures = sum(one.failed == host for one in recent)
    others_failed = sum(one.failed is not None for one in recent) - failures
    mean = (others_failed + 0.5) / max(others_hours, 1.0)
    count = RATIO * (1.0 + mean * hours)
    probability = math.fsum(math.exp(-count + n * math.log(count) - math.lgamma(n + 1)) for n in range(failures + 1))
    return Judgement(failures, hours, mean, min(1.0, probability))
