"""Telemetry of one host: its devices and the host itself, as an agent and a command use it.

Readings of the host: memory errors (EDAC), machine checks, load, memory, space and speed of disks.

Sources: Linux, ``Documentation/ABI/testing/sysfs-devices-edac`` and ``Documentation/filesystems/proc.rst``.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megasdc.ops.devices.device_verdict import DeviceVerdict, worst
from megasdc.ops.devices.kernel_log import KernelLog
from megasdc.ops.devices.nvml import Nvml
from megasdc.ops.devices.reader import DeviceReader, Judged
from megasdc.ops.devices.readings import HOST, DeviceReading
from megasdc.ops.devices.survey import Survey

PROBE_S = 60.0
"""Seconds between writes that measure a disk."""
_PROBE = b"\0" * 4096
_MEMORY = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", re.MULTILINE)


class Missing(Exception):
    """A value is not there, for this reason."""


def _edac(root: Path) -> dict[str, float]:
    controllers = sorted((root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))
    if not controllers:
        raise Missing("no memory controller reports errors (EDAC): not in this kernel, or a virtual machine")
    return {
        name: sum(int((one / file).read_text()) for one in controllers)
        for name, file in (("edac_corrected", "ce_count"), ("edac_uncorrected", "ue_count"))
    }


def _load(root: Path) -> dict[str, float]:
    load = float((root / "proc/loadavg").read_text().split()[0])
    cpus = sum(line.startswith("processor") for line in (root / "proc/cpuinfo").read_text().splitlines())
    return {"load_1min": load, "load_per_cpu": round(load / max(cpus, 1), 3)}


def _memory(root: Path) -> dict[str, float]:
    found = {name: 1024 * int(value) for name, value in _MEMORY.findall((root / "proc/meminfo").read_text())}
    if len(found) < 2:
        raise Missing("the kernel reports no available memory")
    return {
        "memory_available_bytes": found["MemAvailable"],
        "memory_available_share": round(found["MemAvailable"] / found["MemTotal"], 4),
    }


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def write_latency_s(folder: Path) -> float:
    """Seconds that a block of 4 KiB takes to the disk of a folder; the file has no name, or none afterwards."""
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.monotonic()
        file.write(_PROBE)
        file.flush()
        os.fsync(file.fileno())
        return time.monotonic() - began


class LocalHost:
    """This host.

    Args:
        folder: of the run, whose disk is looked at.
        log: kernel log.
        root: below which ``proc``, ``sys`` and ``dev`` lie.
    """

    def __init__(self, folder: Path, log: KernelLog, root: Path = Path("/")) -> None:
        self._folder, self._log, self._root = folder, log, root
        self._probe_at = 0.0
        self._latency: Mapping[str, float | None] = {}
        self._no_latency: Mapping[str, str] = {}
        self._totals = {"mce_lines": 0, "kernel_lines_lost": 0}

    def read(self) -> list[DeviceReading]:
        """Read all values."""
        root, values, unavailable = self._root, dict[str, float | None](), dict[str, str]()
        reads: list[tuple[tuple[str, ...], Callable[[], Mapping[str, float]]]] = [
            (("edac_corrected", "edac_uncorrected"), lambda: _edac(root)),
            (("load_1min", "load_per_cpu"), lambda: _load(root)),
            (("memory_available_bytes", "memory_available_share"), lambda: _memory(root)),
            (("disk_free_bytes",), lambda: {"disk_free_bytes": _free_bytes(self._folder)}),
            (("shared_memory_free_bytes",), lambda: {"shared_memory_free_bytes": _free_bytes(root / "dev/shm")}),
        ]
        for names, read in reads:
            values |= _tried(names, read, unavailable)
        if time.monotonic() >= self._probe_at:
            self._probe()
        values |= self._latency
        unavailable |= self._no_latency
        lines = self._read_log(values, unavailable)
        return [DeviceReading(HOST, "host", time.monotonic(), values, unavailable, lines=lines)]

    def _probe(self) -> None:
        self._probe_at = time.monotonic() + PROBE_S
        names, why = ("disk_write_s",), dict[str, str]()
        self._latency = _tried(names, lambda: {"disk_write_s": round(write_latency_s(self._folder), 6)}, why)
        self._no_latency = why

    def _read_log(self, values: dict[str, float | None], unavailable: dict[str, str]) -> list[str]:
        found = self._log.read()
        if found.problem:
            values |= dict.fromkeys(self._totals)
            unavailable |= dict.fromkeys(self._totals, found.problem)
            return []
        self._totals["mce_lines"] += len(found.errors)
        self._totals["kernel_lines_lost"] += found.lost
        values |= self._totals
        return found.errors

    def wait(self, seconds: float) -> bool:
        """Nothing comes between readings."""
        time.sleep(seconds)
        return False

    def close(self) -> None:
        """Release the log."""
        self._log.close()


def _tried(
    names: tuple[str, ...], read: Callable[[], Mapping[str, float]], unavailable: dict[str, str]
) -> Mapping[str, float | None]:
    """Values, each None with the reason in ``unavailable`` where they cannot be read."""
    try:
        return read()
    except (OSError, ValueError, Missing) as error:
        unavailable |= dict.fromkeys(names, str(error))
        return dict.fromkeys(names)


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
            DeviceReader("devices", lambda: Nvml(KernelLog(log, since), events=events), interval_s, answer_s),
            DeviceReader("host", lambda: LocalHost(folder, KernelLog(log, since), root), interval_s, answer_s),
        ]
        self._noted: dict[str, tuple[DeviceVerdict, float]] = {}
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
        return Survey(socket.gethostname(), [reader.latest_state() for reader in self._readers], nodes)

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
            if name in values or verdict > DeviceVerdict.FIT:
                found.append({"name": name, "verdict": verdict.label, "text": "; ".join(texts), **values.get(name, {})})
        return found, "; ".join(notes)

    def _changed(self, name: str, verdict: DeviceVerdict) -> str:
        """What a verdict was and is; empty: nothing new. Better ones are new after a while, so that few are."""
        before, noted_at = self._noted.get(name, (DeviceVerdict.FIT, 0.0))
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
