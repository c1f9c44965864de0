"""Moments on several hosts, and which of them was before which: never by clocks that are set.

The clock that tells the date is set by people and services, and differs between hosts. So moments of one host are
ordered by its monotonic clock, which all its processes share from boot to boot; moments of several hosts only as far as
the distances between these clocks are known, which agents measure (``megasdc.ops.health.front.clocks``). A host is
known by
the id of its kernel since that was booted: names of one host may be several, as a hostfile's and its own.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

DRIFT = 1e-4
"""Most that two monotonic clocks drift apart, a second: they are not set, but slowed and hastened (adjtimex(2))."""
Key = TypeVar("Key")


@functools.cache
def boot_id() -> str:
    """Id of the host's kernel since it was booted."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


@dataclass(frozen=True)
class HostClock:
    """The clocks of a host against those of the launch's front.

    Args:
        boot_id: of the host's kernel.
        monotonic_s: seconds that the host's monotonic clock shows more than the front's.
        ahead_s: seconds by which its date is ahead of the front's.
        uncertainty_s: of both: half of the round trip in which they were measured.
        at: when, on the front's monotonic clock.
    """

    boot_id: str
    monotonic_s: float
    ahead_s: float
    uncertainty_s: float
    at: float


@dataclass(frozen=True)
class Moment:
    """When something happened.

    Args:
        host: on which.
        time: seconds since the epoch, by its clock.
        boot_id: of its kernel; None: not known, as in what earlier versions wrote.
        monotonic: seconds on its monotonic clock; None: likewise.
    """

    host: str
    time: float
    boot_id: str | None = None
    monotonic: float | None = None

    @classmethod
    def now(cls) -> Moment:
        """Now, on this host."""
        return cls(socket.gethostname(), time.time(), boot_id(), time.monotonic())

    def was_before(self, other: Moment, clocks: Mapping[str, HostClock]) -> bool:
        """Whether this was certainly before another one; False: it was not, or that is not known.

        Args:
            clocks: of hosts, by the id of their kernel since it was booted, as far as they were measured.
        """
        if self.boot_id is None or other.boot_id is None or self.monotonic is None or other.monotonic is None:
            return self.host == other.host and self.time < other.time
        if self.boot_id == other.boot_id:
            return self.monotonic < other.monotonic
        own, others = self._span(clocks), other._span(clocks)
        return own is not None and others is not None and own[1] < others[0]

    def _span(self, clocks: Mapping[str, HostClock]) -> tuple[float, float] | None:
        """First and last second in which it may have been, on the front's monotonic clock; None: not known."""
        clock = clocks.get(self.boot_id or "")
        if clock is None or self.monotonic is None:
            return None
        there = self.monotonic - clock.monotonic_s
        within_s = clock.uncertainty_s + DRIFT * abs(there - clock.at)
        return there - within_s, there + within_s


def first_moments(moments: Mapping[Key, Moment], clocks: Mapping[str, HostClock]) -> list[Key]:
    """Those that no other one was before: one where it is known which was first, else all that may have been.

    Args:
        clocks: of hosts, by the id of their kernel since it was booted, as far as they were measured.
    """
    return [key for key, one in moments.items() if not any(other.was_before(one, clocks) for other in moments.values())]
