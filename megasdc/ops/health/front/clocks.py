"""Clocks of a launch's hosts against that of its front, over the connections that agents have with it.

Each exchange of an agent with the front is also a measurement, as in NTP (RFC 5905): the agent takes its clocks before
it sends and after it has received, the front's answer has those of the front. The front's clock was read within the
round trip, so that the middle of it is right to half of it. What is kept is the sample of the shortest round trip of
late, and the agent tells the front what it has found.

The date (``time.time``) is only told, to people and in ``health/clocks.json``: nothing is decided by it. The distance
of monotonic clocks, which nobody sets, gives an order to what happened on several hosts (``megasdc.common.origin``).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.common.durable import parse_json, replacing
from megasdc.common.origin import HostClock, boot_id

TOLD_S = 1.0
"""Dates that differ by more are told, and steps of more."""
SAMPLES = 30
"""Exchanges of which the one of the shortest round trip is believed: one a second."""
CLOCKS_FILE = "clocks.json"


@dataclass(frozen=True)
class ClockReading:
    """Both clocks of a host, read at once."""

    date: float
    monotonic: float

    @classmethod
    def now(cls) -> ClockReading:
        """Of this host."""
        return cls(time.time(), time.monotonic())


class ClockMeasurement:
    """An agent's side: what exchanges with the front have shown."""

    def __init__(self) -> None:
        self._samples: deque[HostClock] = deque(maxlen=SAMPLES)

    def add_exchange(self, sent: ClockReading, answer: Mapping[str, Any], received: ClockReading) -> None:
        """Add one exchange; an answer without the front's clocks, of an earlier version, has no sample."""
        front = answer.get("clock")
        if not isinstance(front, list) or len(front) != 2 or not all(map(_is_number, front)):
            return
        trip_s = received.monotonic - sent.monotonic
        middle = sent.monotonic + trip_s / 2
        # By the date after it was received, so that a step of the clock shows at once.
        ahead_s = received.date - trip_s / 2 - front[0]
        sample = HostClock(boot_id(), middle - front[1], ahead_s, trip_s / 2, front[1])
        if self._samples and abs(self._samples[-1].ahead_s - ahead_s) > TOLD_S:
            self._samples.clear()  # one of the two dates was set: what was measured before is past
        self._samples.append(sample)

    @property
    def clock(self) -> dict[str, Any] | None:
        """The best sample, for the front; None: there is none."""
        best = min(self._samples, key=lambda one: one.uncertainty_s, default=None)
        return None if best is None else asdict(best)


class HostClocks:
    """The front's side: the clocks of all hosts, what is reported of them, and ``health/clocks.json``.

    Args:
        path: of the file; that of an earlier launch is removed.
        say: tells people.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._last = ClockReading.now()
        self._told: dict[str, float] = {}
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        self.of_host: dict[str, HostClock] = {}

    def check_own_date(self) -> None:
        """Check whether this host's own date was set; the others then seem to have been set the other way."""
        now = ClockReading.now()
        step_s = (now.date - self._last.date) - (now.monotonic - self._last.monotonic)
        self._last = now
        if abs(step_s) > TOLD_S:
            self._say(f"clocks: the date of this host, where the launch was started, was set by {step_s:+.1f} s")
            self._told = {host: ahead_s - step_s for host, ahead_s in self._told.items()}

    def update(self, host: str, raw: object) -> None:
        """Record what an agent has measured; what cannot be read is passed over: nothing depends on it."""
        clock = _read(raw)
        if clock is None:
            return
        self.of_host[host] = clock
        before, text = self._told.get(host), clock_text(clock)
        if before is None and abs(clock.ahead_s) <= TOLD_S + clock.uncertainty_s:
            self._told[host] = clock.ahead_s
            self._write()
            return
        if before is None:
            self._say(f"clocks: the date of {host} is {text}")
        elif abs(clock.ahead_s - before) > TOLD_S + clock.uncertainty_s:
            self._say(f"clocks: the date of {host} was set by {clock.ahead_s - before:+.1f} s: it is {text}")
        else:
            return
        self._told[host] = clock.ahead_s
        self._write()

    def _write(self) -> None:
        """Write the file; where that fails it is left: the lines were said."""
        content = {"time": time.time(), "hosts": {host: asdict(one) for host, one in self.of_host.items()}}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as file:
                json.dump(content, file)
        except OSError as error:
            self._say(f"clocks: {self._path} cannot be written: {error}")


def describe_differing_dates(health: Path) -> list[str]:
    """Hosts of a run's last launch whose dates differ from that of its front, a sentence each; empty: none is known.

    Args:
        health: folder of the run.
    """
    try:
        found = _load(health)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return [f"{health / CLOCKS_FILE} cannot be read: {error!r}"]
    return [f"the date of {host} is {clock_text(one)}" for host, one in found.items() if differs(one)]


def clocks_of(health: Path) -> dict[str, HostClock]:
    """Clocks of a run's last launch against that of its front, by boot; empty: none was measured, or it cannot be read.

    Args:
        health: folder of the run.
    """
    try:
        return {one.boot_id: one for one in _load(health).values()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def has_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the date of a host was set between two measurements, or the later one is twice as sharp."""
    moved_s = abs(now["ahead_s"] - before["ahead_s"]) - before["uncertainty_s"] - now["uncertainty_s"]
    return moved_s > TOLD_S or 2 * now["uncertainty_s"] < before["uncertainty_s"]


def differs(clock: HostClock) -> bool:
    """Whether the date of a host differs from that of the front by more than ``TOLD_S``, for certain."""
    return abs(clock.ahead_s) > TOLD_S + clock.uncertainty_s


def _load(health: Path) -> dict[str, HostClock]:
    """Clocks by the names of hosts, as the front's file has them; empty where there is none."""
    try:
        raw = parse_json((health / CLOCKS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    found = {str(host): _read(one) for host, one in raw["hosts"].items()}
    return {host: one for host, one in found.items() if one is not None}


def _read(raw: object) -> HostClock | None:
    if not isinstance(raw, Mapping):
        return None
    names = ("monotonic_s", "ahead_s", "uncertainty_s", "at")
    if not isinstance(raw.get("boot_id"), str) or not all(_is_number(raw.get(name)) for name in names):
        return None
    return HostClock(raw["boot_id"], *(float(raw[name]) for name in names))


def clock_text(clock: HostClock) -> str:
    """How the date of a host differs from that of the front."""
    way = "ahead of" if clock.ahead_s > 0 else "behind"
    if abs(clock.ahead_s) <= TOLD_S:
        return "that of the launch's front again"
    return f"{abs(clock.ahead_s):,.1f} s {way} that of the launch's front (+/- {clock.uncertainty_s:.3f} s)"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
