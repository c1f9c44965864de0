"""Readings of a device or a host, and what their counters did: since the run began, and lately."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HOST = "host"
"""Identifier of the host among UUIDs of devices."""
RECENT_S = 600.0
MAX_EVENTS = 50
COUNTERS = frozenset(
    {
        *("ecc_corrected_volatile", "ecc_uncorrected_volatile", "ecc_corrected_aggregate", "ecc_uncorrected_aggregate"),
        *("sram_uncorrected", "sram_corrected", "remapped_rows_corrected", "remapped_rows_uncorrected"),
        *("nvlink_flit_crc_errors", "nvlink_data_crc_errors", "nvlink_replays", "nvlink_recoveries", "pcie_replays"),
        *("thermal_violation_s", "power_violation_s"),
        *("edac_corrected", "edac_uncorrected", "mce_lines", "kernel_lines_lost"),
    }
)
"""Values that only grow, until a driver is loaded again, a device is reset, or the host reboots."""
FROM_ZERO = frozenset({"mce_lines", "kernel_lines_lost"})
"""Counters that begin when their reader does, so that the first reading counts too."""


@dataclass(frozen=True)
class DeviceReading:
    """What was read of a device or of the host at once.

    Args:
        id: UUID of the device, or ``HOST``.
        name: for people.
        time: on ``time.monotonic``.
        values: by name; None: not available.
        unavailable: why, by name of the value.
        xids: numbers of XID events since the reading before, oldest first.
        lines: of the kernel's log about hardware errors since the reading before.
    """

    id: str
    name: str
    time: float
    values: Mapping[str, float | None]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    xids: Sequence[int] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class XidEvent:
    """An XID of a device, when it was read (``time.monotonic``)."""

    number: int
    time: float


@dataclass(frozen=True)
class CounterReset:
    """A counter that went back, when that was read (``time.monotonic``)."""

    value: str
    before: float
    after: float
    time: float


class DeviceHistory:
    """What the counters and events of one device did.

    Counters that go back, at a reset or when a driver is loaded again, began at 0: what they show then has been added
    since, and the step back is kept in ``resets``.

    Args:
        first: reading; what is counted before it is not of this run.
        recent_s: how long ago is still recent.
    """

    def __init__(self, first: DeviceReading, recent_s: float = RECENT_S) -> None:
        self._recent_s = recent_s
        self._known: dict[str, float] = {}
        self._steps: deque[tuple[float, dict[str, float]]] = deque()
        self.began_at = first.time
        self.since_start: dict[str, float] = {}
        self.resets: deque[CounterReset] = deque(maxlen=MAX_EVENTS)
        self.xids: deque[XidEvent] = deque(maxlen=MAX_EVENTS)
        self.xid_counts: Counter[int] = Counter()
        self.lines: deque[str] = deque(maxlen=MAX_EVENTS)
        self.latest = first
        self.add(first)

    def add(self, reading: DeviceReading) -> None:
        """Take the next reading."""
        grown: dict[str, float] = {}
        for name in COUNTERS & reading.values.keys():
            value = reading.values[name]
            if value is None:
                continue
            before = self._known.get(name, 0 if name in FROM_ZERO else value)
            if value < before:
                self.resets.append(CounterReset(name, before, value, reading.time))
                before = 0
            if value > before:
                grown[name] = value - before
            self._known[name] = value
        _add(self.since_start, grown)
        self._steps.append((reading.time, grown))
        while self._steps[0][0] < reading.time - self._recent_s:
            self._steps.popleft()
        self.xids.extend(XidEvent(number, reading.time) for number in reading.xids)
        self.xid_counts.update(reading.xids)
        self.lines.extend(reading.lines)
        self.latest = reading

    @property
    def recent(self) -> dict[str, float]:
        """What the counters did lately; those that did nothing are not in it."""
        total: dict[str, float] = {}
        for _, grown in self._steps:
            _add(total, grown)
        return total

    @property
    def recent_xids(self) -> list[int]:
        """XIDs of lately, oldest first."""
        since = self.latest.time - self._recent_s
        return [one.number for one in self.xids if one.time >= since]

    def as_dict(self) -> dict[str, Any]:
        """As plain values; times are seconds before the latest reading."""
        now = self.latest
        return {
            "id": now.id,
            "name": now.name,
            "watched_s": round(now.time - self.began_at, 1),
            "values": dict(now.values),
            "unavailable": dict(now.unavailable),
            "since_start": dict(self.since_start),
            "recent": self.recent,
            "recent_s": self._recent_s,
            "resets": [
                {"value": one.value, "before": one.before, "after": one.after, "ago_s": round(now.time - one.time, 1)}
                for one in self.resets
            ],
            "xids": [{"xid": one.number, "ago_s": round(now.time - one.time, 1)} for one in self.xids],
            "xid_counts": {str(number): count for number, count in sorted(self.xid_counts.items())},
            "lines": list(self.lines),
        }


def _add(total: dict[str, float], grown: Mapping[str, float]) -> None:
    for name, value in grown.items():
        total[name] = total.get(name, 0) + value
