"""Telemetry of one host: its devices and the host itself, as an agent and a command use it."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from megasdc.ops.devices.host import Host
from megasdc.ops.devices.kernel_log import KernelLog
from megasdc.ops.devices.nvml import Nvml
from megasdc.ops.devices.reader import Judged, Reader
from megasdc.ops.devices.survey import Survey
from megasdc.ops.devices.verdict import Verdict, worst

KERNEL_LOG = "dev/kmsg"
INTERVAL_S = 10.0
ANSWER_S = 45.0
BETTER_S = 60.0
"""A better verdict is noted so long after the one before: some come and go."""
SHOWN = ("temperature_c", "power_w", "clock_reasons", "load_per_cpu", "memory_available_share", "disk_write_s")
"""Values that each line of an agent has."""


class Telemetry:
    """Reads the devices and the host from ``start`` on; nothing here waits for a reading.

    Args:
        folder: of the run, whose disk is looked at.
        root: below which ``proc``, ``sys`` and ``dev`` lie.
        look_back_s: how far back the kernel's log counts; with 0 XIDs come as events of the driver where it sends them.
        interval_s: between readings.
        answer_s: a reader that has not answered for so long is reported.
    """

    def __init__(
        self,
        folder: Path,
        root: Path = Path("/"),
        *,
        look_back_s: float = 0.0,
        interval_s: float = INTERVAL_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._root = root
        log, events = root / KERNEL_LOG, not look_back_s
        since = time.monotonic() - look_back_s if look_back_s else None
        self._readers = [
            Reader("devices", lambda: Nvml(KernelLog(log, since), events=events), interval_s, answer_s),
            Reader("host", lambda: Host(folder, KernelLog(log, since), root), interval_s, answer_s),
        ]
        self._noted: dict[str, tuple[Verdict, float]] = {}
        """Verdicts by name, and when they were noted."""

    def start(self) -> None:
        """Begin to read; threads do not survive a fork, so after it."""
        for reader in self._readers:
            reader.start()

    def wait_for_first(self, timeout_s: float) -> None:
        """Wait until each has answered once, at most so long."""
        until = time.monotonic() + timeout_s
        for reader in self._readers:
            reader.wait_for_first(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """End the readings, without waiting for them."""
        for reader in self._readers:
            reader.close()

    def survey(self) -> Survey:
        """All that is known."""
        nodes = sorted(path.name for path in (self._root / "dev").glob("nvidia[0-9]*"))
        return Survey(socket.gethostname(), [reader.look() for reader in self._readers], nodes)

    def as_dict(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        return self.survey().as_dict()

    def line(self) -> tuple[list[dict[str, Any]], str]:
        """What an agent writes of each device and the host, and a note of the verdicts that have changed."""
        survey = self.survey()
        values = {one.label: _short(one) for look in survey.looks for one in look.items}
        found, notes = [], []
        for name, reasons in survey.by_name().items():
            verdict, texts = worst(reasons), [one.text for one in reasons]
            if note := self._changed(name, verdict):
                notes.append(", ".join([note, *texts]))
            if name in values or verdict > Verdict.FIT:
                found.append({"name": name, "verdict": verdict.label, "text": "; ".join(texts), **values.get(name, {})})
        return found, "; ".join(notes)

    def _changed(self, name: str, verdict: Verdict) -> str:
        """What a verdict was and is; empty: nothing new. Better ones are new after a while, so that few are."""
        before, noted_at = self._noted.get(name, (Verdict.FIT, 0.0))
        now = time.monotonic()
        if verdict == before or (verdict < before and now < noted_at + BETTER_S):
            return ""
        self._noted[name] = verdict, now
        return f"{name}: {before.label} -> {verdict.label}"


def _short(one: Judged) -> dict[str, Any]:
    """Values that are always of interest, and the counters that have grown since the start."""
    known = one.history
    counted = {name: known[name] for name in ("since_start", "xid_counts") if known[name]}
    return {**{name: known["values"][name] for name in SHOWN if name in known["values"]}, **counted}
