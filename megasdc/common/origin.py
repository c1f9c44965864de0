"""Origin of records that a process of a run writes: run, start, launch, device and moment.

A run has an id in its folder, which stays the same over restarts, and counts its starts. A launch is known by its id.

Which of two moments was before the other is never told by clocks that are set. The clock that tells the date is set by
people and services, and differs between hosts. So moments of one host are ordered by its monotonic clock, which all its
processes share from boot to boot; moments of several hosts only as far as the distances between these clocks are known,
which agents measure (``megasdc.ops.health.front.clocks``). A host is known by the id of its kernel since that was
booted: names of one host may be several, as a hostfile's and its own.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from megasdc.common.durable import parse_json, wait_for_room, write_durably
from megasdc.common.errors import StorageError

CONFIG_FILE = "resolved.json"
"""Complete configuration of a run, in its folder."""
LAUNCH_ID_VARIABLE = "MEGASDC_LAUNCH_ID"


@dataclass(frozen=True)
class Origin:
    """Origin of an event; a field is None where it is not known or there is none.

    Args:
        run: id of the run, the same over all its starts.
        attempt: number of this start of the run, the first is 1.
        device: UUID of the rank's device, as ``nvidia-smi -L`` shows it; None on a CPU.
    """

    run: str | None = None
    attempt: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class Launch:
    """A launch of a run; its records are found by its id, never by the clocks of its hosts.

    Args:
        id: id of the launch, which all its processes write.
        planned_at: time of its planning, in seconds since the epoch, by the clock of the host that planned it.
        monotonic: the same time on the monotonic clock of that host; None: not known.
        boot: boot id of that host's kernel; None: not known.
    """

    id: str
    planned_at: float
    monotonic: float | None = None
    boot: str | None = None

    def wrote(self, launch: str | None, time: float) -> bool:
        """Whether a record was written by this launch.

        Args:
            launch: launch id in the record; None: an earlier version wrote none, so that only its time can tell.
            time: time in the record, seconds since the epoch.
        """
        return time >= self.planned_at if launch is None else launch == self.id


def this_launch() -> str | None:
    """Id of the launch that this process belongs to; None: it was started without ``megasdc launch``."""
    return os.environ.get(LAUNCH_ID_VARIABLE) or None


IDENTITY_FILE = "run.json"
FORMAT = "megasdc.run.v1"


@dataclass(frozen=True)
class RunIdentity:
    """Content of ``run.json``.

    Args:
        run: id of the run, made at its first start.
        attempt: number of the last start, the first is 1.
    """

    run: str
    attempt: int


def read_identity(folder: Path | str) -> RunIdentity | None:
    """Identity of the run in a folder; None: it was never started, or by a version that kept none.

    Raises:
        StorageError: the file is damaged or cannot be read.
    """
    path = Path(folder) / IDENTITY_FILE
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT or not isinstance(raw["run"], str) or not isinstance(raw["attempt"], int):
            raise ValueError(f"it is not of format {FORMAT}")
        return RunIdentity(raw["run"], raw["attempt"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{path} cannot be used: {error}; delete it, then the next start gives the run a new id"
        ) from error


def count_start(folder: Path | str) -> RunIdentity:
    """Count this start of the run in a folder; the first one gives the run its id. Call on one rank.

    Raises:
        StorageError: the file is damaged, or cannot be written.
    """
    found = read_identity(folder)
    new = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    identity = RunIdentity(new, 1) if found is None else RunIdentity(found.run, found.attempt + 1)
    path = Path(folder) / IDENTITY_FILE
    try:
        text = json.dumps({"format": FORMAT, **asdict(identity)}) + "\n"
        wait_for_room(lambda: write_durably(path, text), path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror})") from error
    return identity


DRIFT = 1e-4
"""Largest drift of two monotonic clocks, seconds per second: they are not set, but slowed or hastened (adjtimex(2))."""
Key = TypeVar("Key")


@functools.cache
def boot_id() -> str:
    """Id of the host's kernel since it was booted."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class HostClock:
    """The clocks of a host against those of the launch's front.

    Args:
        boot_id: boot id of the host's kernel.
        monotonic_s: seconds by which the host's monotonic clock is ahead of the front's.
        ahead_s: seconds by which its date is ahead of the front's.
        uncertainty_s: uncertainty of both, half of the round trip in which they were measured.
        at: time of the measurement on the front's monotonic clock.
    """

    boot_id: str
    monotonic_s: float
    ahead_s: float
    uncertainty_s: float
    at: float


@dataclass(frozen=True)
class Moment:
    """Time of an event on a host.

    Args:
        host: name of the host.
        time: seconds since the epoch, by the host's clock.
        boot_id: boot id of its kernel; None: not known, as in records of earlier versions.
        monotonic: seconds on its monotonic clock; None: likewise.
    """

    host: str
    time: float
    boot_id: str | None = None
    monotonic: float | None = None

    @classmethod
    def now(cls) -> Moment:
        """The present time on this host."""
        return cls(socket.gethostname(), time.time(), boot_id(), time.monotonic())

    def was_before(self, other: Moment, clocks: Mapping[str, HostClock]) -> bool:
        """Whether this moment was certainly before another one; False: it was not, or the order is not known.

        Args:
            clocks: measured clocks of hosts, by boot id of their kernel.
        """
        if self.boot_id is None or other.boot_id is None or self.monotonic is None or other.monotonic is None:
            return self.host == other.host and self.time < other.time
        if self.boot_id == other.boot_id:
            return self.monotonic < other.monotonic
        own, others = self._span(clocks), other._span(clocks)
        return own is not None and others is not None and own[1] < others[0]

    def _span(self, clocks: Mapping[str, HostClock]) -> tuple[float, float] | None:
        """Earliest and latest possible time on the front's monotonic clock, in seconds; None: not known."""
        clock = clocks.get(self.boot_id or "")
        if clock is None or self.monotonic is None:
            return None
        there = self.monotonic - clock.monotonic_s
        within_s = clock.uncertainty_s + DRIFT * abs(there - clock.at)
        return there - within_s, there + within_s


def first_moments(moments: Mapping[Key, Moment], clocks: Mapping[str, HostClock]) -> list[Key]:
    """Moments that may have been the first: a single one if the order is known.

    Args:
        clocks: measured clocks of hosts, by boot id of their kernel.
    """
    return [key for key, one in moments.items() if not any(other.was_before(one, clocks) for other in moments.values())]
