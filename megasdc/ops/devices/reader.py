"""A thread that reads devices, so that a driver or a disk that never answers stops nobody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from megasdc.ops.devices.device_verdict import DeviceVerdict, VerdictReason, worst
from megasdc.ops.devices.nvml import Unavailable
from megasdc.ops.devices.readings import DeviceHistory, DeviceReading
from megasdc.ops.devices.rules import OURS, judge_device

_WAIT_S = 0.5
"""Longest wait at once; also how long after an event the next reading is, so that many events are one reading."""


class ReadingSource(Protocol):
    """What can be read."""

    def read(self) -> list[DeviceReading]:
        """Read now."""

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for what comes between readings; whether something came."""

    def close(self) -> None:
        """Release it."""


@dataclass(frozen=True)
class Judged:
    """A device or a host: what its counters did, as plain values, and what follows."""

    id: str
    name: str
    reasons: list[VerdictReason]
    history: dict[str, Any]

    @property
    def label(self) -> str:
        """Name and ID, as people read them."""
        return self.name if self.name == self.id else f"{self.name} ({self.id})"

    @property
    def verdict(self) -> DeviceVerdict:
        """The worst of the reasons."""
        return worst(self.reasons)

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **self.history,
            "verdict": self.verdict.label,
            "reasons": [one.as_dict() for one in self.reasons],
        }


@dataclass(frozen=True)
class ReaderState:
    """What a reader has, at once.

    Args:
        absent: why there is nothing to read; empty: there is.
        failure: what ended the readings; empty: nothing did.
        age_s: since the last complete reading, or since the start.
        answer_s: age from which on it does not answer.
        answered: whether there was one.
    """

    name: str
    absent: str
    failure: str
    age_s: float
    answer_s: float
    answered: bool
    items: list[Judged]

    @property
    def reasons(self) -> list[VerdictReason]:
        """Why telemetry itself is not as it should be."""
        if self.failure:
            text = self.failure
        elif self.absent or self.age_s < self.answer_s:
            return []
        elif self.answered:
            text = f"telemetry does not answer: the last reading is {self.age_s:.0f} s old"
        else:
            text = f"telemetry does not answer: no reading in {self.age_s:.0f} s"
        return [
            VerdictReason(
                DeviceVerdict.DEGRADED, self.name, text, "look for a driver or a disk that hangs: dmesg", OURS
            )
        ]

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "of": self.name,
            "absent": self.absent,
            "age_s": round(self.age_s, 1),
            "answered": self.answered,
            "reasons": [one.as_dict() for one in self.reasons],
            "items": [one.as_dict() for one in self.items],
        }


class DeviceReader:
    """Reads in a thread, and keeps the histories.

    Args:
        name: of what is read.
        open_source: called in the thread; ``Unavailable``: there is nothing to read.
        interval_s: between readings.
        answer_s: what has not answered for so long is reported.
    """

    def __init__(self, name: str, open_source: Callable[[], ReadingSource], interval_s: float, answer_s: float) -> None:
        self.name = name
        self._open, self._interval_s, self._answer_s = open_source, interval_s, answer_s
        self._lock = threading.Lock()
        """Held while a reading is kept or looked at, never while one is made."""
        self._histories: dict[str, DeviceHistory] = {}
        self._absent = self._failure = ""
        self._began_at = time.monotonic()
        self._answered_at: float | None = None
        self._closed = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"telemetry {name}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._began_at = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """Ask the thread to end; it is not waited for, since it may hang."""
        self._closed.set()

    def wait_for_first(self, timeout_s: float) -> bool:
        """Wait until there is a reading or a problem; whether there is."""
        return self._first.wait(timeout_s)

    def latest_state(self) -> ReaderState:
        """What is known; never waits for a reading."""
        with self._lock:
            answered = self._answered_at is not None
            since = self._answered_at or self._began_at
            items = [
                Judged(key, history.latest.name, judge_device(history), history.as_dict())
                for key, history in self._histories.items()
            ]
            age = time.monotonic() - since
            return ReaderState(self.name, self._absent, self._failure, age, self._answer_s, answered, items)

    def _run(self) -> None:
        try:
            source = self._open()
            while not self._closed.is_set():
                self._record(source.read())
                self._first.set()
                self._wait(source)
            source.close()
        except Unavailable as error:
            self._absent = str(error)
        except Exception as error:  # a thread: what ended it is reported with its last reading
            self._failure = f"readings ended: {type(error).__name__}: {error}"
        self._first.set()

    def _wait(self, source: ReadingSource) -> None:
        until = time.monotonic() + self._interval_s
        while not self._closed.is_set() and (left := until - time.monotonic()) > 0:
            if source.wait(min(left, _WAIT_S)):
                until = min(until, time.monotonic() + _WAIT_S)

    def _record(self, readings: list[DeviceReading]) -> None:
        with self._lock:
            self._answered_at = time.monotonic()
            for reading in readings:
                if reading.id in self._histories:
                    self._histories[reading.id].add(reading)
                else:
                    self._histories[reading.id] = DeviceHistory(reading)
