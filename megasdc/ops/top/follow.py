"""A run folder read again and again: of files that grow only what is new, others only when they have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megasdc.common.durable import parse_json
from megasdc.events import Event, event_of, in_order
from megasdc.metrics.writer import METRICS_FILE, metrics_row
from megasdc.ops.health.hosts import FileClock
from megasdc.ops.health.incident_file import HangIncident, load_hangs
from megasdc.ops.run_folder.marks import FAULT, lane_of
from megasdc.ops.run_folder.record import CONFIG_FILE, Ending, RunRecord, load_config, load_ending, series_of
from megasdc.sdc.incidents.incident import Incident, load_incidents

KEPT_ROWS, KEPT_EVENTS = 200, 500
PACE_ROWS = 50
"""Last lines of metrics whose times give the pace of a run."""
T = TypeVar("T")


class GrowingLines:
    """Complete lines that were added to a file of JSON objects since the look before.

    Attributes:
        damaged: lines that could not be read.
    """

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], T]) -> None:
        self._path, self._parse = path, parse
        self._file_id: int | None = None
        self._offset = 0
        self.damaged = 0

    def read(self) -> tuple[list[Any], bool]:
        """The new rows, and whether they are all of another file that has taken this one's place."""
        try:
            with open(self._path, "rb") as file:
                status = self._path.stat()
                replaced = self._file_id is not None and (
                    status.st_ino != self._file_id or status.st_size < self._offset
                )
                if replaced:
                    self._offset = 0
                self._file_id = status.st_ino
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return [], False
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.splitlines() if (row := self._row(line)) is not None], replaced

    def _row(self, line: bytes) -> Any:
        try:
            return self._parse(parse_json(line))
        except (ValueError, TypeError, KeyError):
            self.damaged += 1
            return None


@dataclass(frozen=True)
class Look:
    """A run as its folder shows it now.

    Args:
        run: with its last metrics, and events that a report marks, injected faults left out.
        quiet_s: seconds since metrics or events were written, by the file system's clock; None: never.
        pace_s: seconds of a step of this start, evaluations and saves included; None: not known.
        rank_hosts: host of each rank that has written events.
    """

    run: RunRecord
    quiet_s: float | None
    pace_s: float | None
    rank_hosts: dict[int, str]


class RunFollower:
    """Reads one run folder repeatedly."""

    def __init__(self, folder: Path, clock: FileClock) -> None:
        self._folder, self._clock = folder, clock
        self._metrics = GrowingLines(folder / METRICS_FILE, metrics_row)
        self._rows: deque[dict[str, Any]] = deque(maxlen=KEPT_ROWS)
        self._evaluation: dict[str, Any] | None = None
        self._event_files: dict[Path, GrowingLines] = {}
        self._bounds: list[Event] = []
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._rank_hosts: dict[int, str] = {}
        self._made: dict[str, tuple[Hashable, Any]] = {}

    def look(self) -> Look:
        """Read what is new."""
        self._read_metrics()
        self._read_events()
        folder, notes = self._folder, self._damages()
        events = in_order(_by_file([*self._bounds, *self._events]))
        hangs, unreadable = self._hangs()
        evaluation = [self._evaluation] if self._evaluation else []
        rows = sorted([*evaluation, *self._rows], key=lambda one: one["step"])
        written = [self._rows[-1]["time"]] if self._rows else []
        ages = [self._clock.age_s(path) for path in (folder / METRICS_FILE, *self._event_files)]
        quiet_s = min((age for age in ages if age is not None), default=None)
        run = RunRecord(
            path=folder,
            config=self._if_changed("config", [folder / CONFIG_FILE], lambda: load_config(folder / CONFIG_FILE, [])),
            series=series_of(rows)[0],
            events=tuple(events),
            incidents=self._incidents(),
            hangs=hangs,
            ending=self._ending(events),
            written_at=max([*written, *(one.time for one in events[-1:])], default=None),
            notes=(*notes, *unreadable),
            quiet_s=quiet_s,
        )
        return Look(run, quiet_s, self._pace_s(), dict(self._rank_hosts))

    def _pace_s(self) -> float | None:
        starts = [one for one in self._bounds if (one.kind, one.rank) == ("start", 0)]  # rank 0 writes metrics
        last = max((one.attempt or 0 for one in starts), default=0)
        since = max((one.time for one in starts), default=0.0)
        rows = [
            one
            for one in self._rows
            if (one["attempt"] >= last if last and one.get("attempt") is not None else one["time"] >= since)
        ][-PACE_ROWS:]
        steps = rows[-1]["step"] - rows[0]["step"] if rows else 0
        clock = "monotonic" if all(one.get("monotonic") is not None for one in rows) else "time"  # the date may be set
        return (rows[-1][clock] - rows[0][clock]) / steps if steps else None

    def _read_metrics(self) -> None:
        rows, replaced = self._metrics.read()
        if replaced:
            self._rows.clear()
            self._evaluation = None
        self._rows.extend(row for row in rows if "train/loss" in row)
        for row in rows:
            self._evaluation = row if "eval/loss" in row else self._evaluation

    def _read_events(self) -> None:
        new: list[list[Event]] = []
        for path in (self._folder / "events").glob("rank_*.jsonl"):
            if path not in self._event_files:
                self._event_files[path] = GrowingLines(path, event_of)
            new.append(self._event_files[path].read()[0])
        for event in in_order(new):
            self._rank_hosts[event.rank] = event.host
            if (event.kind, event.name) == ("start", "metrics_set_aside"):
                self._forget_earlier_run()
            elif event.kind in ("start", "end"):
                self._bounds.append(event)
            elif lane_of(event) not in ("", FAULT):
                self._events.append(event)

    def _forget_earlier_run(self) -> None:
        """Of an earlier run in the same folder is what came before the last start, whose metrics were set aside."""
        last = next((one for one in reversed(self._bounds) if one.kind == "start"), None)
        if last is not None:
            self._bounds = [one for one in self._bounds if _is_since(one, last)]
            self._events = deque((one for one in self._events if _is_since(one, last)), KEPT_EVENTS)

    def _damages(self) -> list[str]:
        counts = {METRICS_FILE: self._metrics.damaged}
        counts["events/"] = sum(one.damaged for one in self._event_files.values())
        return [f"{name}: {count} damaged lines are left out" for name, count in counts.items() if count]

    def _hangs(self) -> tuple[tuple[HangIncident, ...], list[str]]:
        files = (self._folder / "health" / "incidents").glob("hang_*.json")
        return self._if_changed("hangs", files, lambda: load_hangs(self._folder))

    def _incidents(self) -> tuple[tuple[Path, Incident], ...]:
        folder = self._folder / "reports"
        files = folder.glob("incident_step_*.json")
        return self._if_changed("incidents", files, lambda: load_incidents(folder, []))

    def _ending(self, events: list[Event]) -> Ending | None:
        files = [*(self._folder / "done").glob("*"), self._folder / "lock.json"]
        return self._if_changed("ending", files, lambda: load_ending(self._folder, events, []), len(self._bounds))

    def _if_changed(self, what: str, files: Iterable[Path], make: Callable[[], T], count: int = 0) -> T:
        """What is made of files; made again where one of them, or an entry of a folder, or the count has changed."""
        stamp: list[tuple[Path | int, int]] = [(count, 0)]
        for path in sorted(files):
            try:
                stamp.append((path, path.stat().st_mtime_ns))
            except OSError:
                stamp.append((path, 0))
        if what not in self._made or self._made[what][0] != tuple(stamp):
            self._made[what] = tuple(stamp), make()
        made: T = self._made[what][1]
        return made


def _is_since(event: Event, start: Event) -> bool:
    """Whether an event is of a start, or of a later one; of earlier versions by its date."""
    if event.attempt is not None and start.attempt is not None:
        return event.attempt >= start.attempt
    return event.time >= start.time


def _by_file(events: Iterable[Event]) -> list[list[Event]]:
    """Events of each rank."""
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.rank, []).append(event)
    return list(found.values())
