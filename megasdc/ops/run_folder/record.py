"""Contents of a run folder: metrics by name, events, incidents, ends of launches; also of a run in progress.

Times of ranks over those of their peers, as rank 0 of a run wrote them.

Reader of JSON lines that may be damaged or still be written: every complete line; the others are counted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megasdc.common.durable import parse_json
from megasdc.common.errors import DataError, PeerError, StorageError
from megasdc.common.origin import CONFIG_FILE, first_moments
from megasdc.common.run_lock import read_holder
from megasdc.events import Event, event_of, in_time_order, starts_of
from megasdc.metrics.writer import METRICS_FILE, PLACE, metrics_row
from megasdc.ops.health.hosts import FileClock
from megasdc.ops.health.incident_file import HangIncident, load_hangs
from megasdc.ops.health.slow.report import HEALTH_FOLDER, SLOWNESS_FILE
from megasdc.ops.launch.records import collect
from megasdc.ops.supervise.journal import FOLDER, read_journal
from megasdc.output.figure import Series
from megasdc.sdc.incident import Incident, load_incidents

T = TypeVar("T")


class LineReader(Generic[T]):
    """Complete lines of a file of JSON objects; of a file that grows each call reads those that were added.

    A line is damaged where ``parse``, which makes a row of an object, raises ``ValueError``, ``TypeError`` or
    ``KeyError``.

    Attributes:
        total: number of complete lines so far.
        damaged: numbers of those that cannot be read, the first line is 1.
        torn: whether the last line is incomplete; it is not in ``total``.
    """

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], T]) -> None:
        self.path, self._parse = path, parse
        self._file_id: int | None = None
        self._offset = self.total = 0
        self.damaged: list[int] = []
        self.torn = False

    def read(self) -> tuple[list[T], bool]:
        """The new rows, and whether they are all of another file that has taken this one's place.

        Raises:
            OSError: it cannot be read.
        """
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            replaced = self._file_id is not None and (status.st_ino != self._file_id or status.st_size < self._offset)
            self._file_id = status.st_ino
            file.seek(0 if replaced else self._offset)
            *lines, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        self.torn, rows = bool(rest), []
        for line in lines:
            self.total += 1
            try:
                value = parse_json(line)
                if not isinstance(value, dict):
                    raise TypeError("no object")
                rows.append(self._parse(value))
            except (ValueError, TypeError, KeyError):
                self.damaged.append(self.total)
        return rows, replaced

    @property
    def notes(self) -> list[str]:
        """What was ignored, a sentence each."""
        found, name = [], self.path.name
        if self.damaged:
            more = f", the first is line {self.damaged[0]}" if len(self.damaged) > 1 else f": line {self.damaged[0]}"
            found.append(f"{name}: {len(self.damaged)} of {self.total} lines cannot be read and are left out{more}")
        if self.torn:
            found.append(
                f"{name}: the last line has no end and is left out; it is being written, or its writer was killed"
            )
        return found


def read_lines(path: Path, parse: Callable[[dict[str, Any]], T], notes: list[str], folder: str = "") -> list[T]:
    """Rows of a whole file, see ``LineReader``; what was ignored is noted, with the ``folder`` before the name.

    Raises:
        DataError: it cannot be read at all.
    """
    reader = LineReader(path, parse)
    try:
        rows, _ = reader.read()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; look at its permissions, or copy it again"
        ) from error
    notes.extend(f"{folder}{note}" for note in reader.notes)
    return rows


def load_slowness(run: Path, notes: list[str]) -> dict[int, Series]:
    """Ratio to the peers by rank, the first tensor rank of a stage; empty where nothing was compared.

    A resumed run goes on in the same file: its lines replace those of the same and later steps.
    """
    path = run / HEALTH_FOLDER / SLOWNESS_FILE
    if not path.exists():
        return {}
    kept: list[tuple[int, dict[int, float]]] = []
    for step, ratios in read_lines(path, _row, notes):
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, ratios))
    found = {}
    for rank in sorted({rank for _, ratios in kept for rank in ratios}):
        points = [(step, ratios[rank]) for step, ratios in kept if rank in ratios]
        steps, values = zip(*points, strict=True)
        found[rank] = Series(np.array(steps), np.array(values))
    return found


def _row(line: dict[str, Any]) -> tuple[int, dict[int, float]]:
    return int(line["step"]), {int(rank): float(ratio) for rank, ratio in line.get("ratios", {}).items()}


OnProgress = Callable[[str, int, int], None]
LAUNCH_FILE = "launch.json"


@dataclass(frozen=True)
class LaunchEnding:
    """How a launch ended; exit code 0: done. ``time`` in seconds since the epoch.

    ``text``: the known facts, the cause first; ``rank`` and ``host``: that failed first, None: none did, or it is not
    known; ``launch``: its id, None: not known; ``attempt``: number of its last start, None: it made none.
    """

    time: float
    exit_code: int
    text: str
    rank: int | None = None
    host: str | None = None
    launch: str | None = None
    attempt: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run folder; ``config`` is empty where it cannot be read, ``incidents`` are with the page of each;
    ``hangs``: oldest first.

    ``ending``: of the last launch, None where neither the launcher nor a rank recorded one; ``written_at``: time of the
    last line, seconds since the epoch by the clock of its host, None where there is none; ``quiet_s``: seconds since
    then, by the clock of the file system; ``notes``: what was ignored, a sentence each;
    ``slowness``: time over that of the peers by rank, empty where nothing was compared.
    """

    path: Path
    config: dict[str, Any]
    series: dict[str, Series]
    events: tuple[Event, ...]
    incidents: tuple[tuple[Path, Incident], ...]
    hangs: tuple[HangIncident, ...]
    ending: LaunchEnding | None
    written_at: float | None
    notes: tuple[str, ...]
    slowness: dict[int, Series] = field(default_factory=dict)
    quiet_s: float | None = None

    @property
    def name(self) -> str:
        """Name of the run folder."""
        return self.path.resolve().name

    def setting(self, path: str) -> Any:
        """One value of the configuration by dotted path, such as ``megasdc.training.steps``; None: there is none."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def of(self, kind: str, *names: str) -> list[Event]:
        """Events of a kind; where names are given, only those."""
        return [one for one in self.events if one.kind == kind and (not names or one.name in names)]

    @property
    def started_at(self) -> float | None:
        """Time of the last start, by the clock of its host; None where none was recorded."""
        return next((one.time for one in reversed(self.of("start", "run"))), None)

    @property
    def attempt(self) -> int:
        """Number of the last start; 0: starts are not numbered, as of an earlier version."""
        return max((one.attempt or 0 for one in self.events), default=0)

    def is_of_last_start(self, attempt: int | None, launch: str | None, time: float) -> bool:
        """Whether something belongs to the last start: by its number or its launch, never by the dates of hosts.

        Args:
            attempt: number of the start that it names; None: none.
            launch: id of the launch that it names; None: none.
            time: that it has, seconds since the epoch, by which alone what names neither can be told.
        """
        number = starts_of(self.events).get(launch or "") or attempt
        if self.attempt and number:
            return number >= self.attempt
        return time >= (self.started_at or 0.0)

    def since_last_start(self, events: Iterable[Event]) -> list[Event]:
        """Those of the last start."""
        starts, last, since = starts_of(self.events), self.attempt, self.started_at or 0.0
        return [
            one
            for one in events
            if ((one.attempt or starts.get(one.launch or "", 0)) >= last if last else one.time >= since)
        ]

    @property
    def last_step(self) -> int:
        """Last step of any metric, or of an event since the last start; 0: none.

        Audits do not count, and of a guard only its end: all else is of a step before it is taken.
        """
        told = [
            one.step - (not self.config and one.kind != "guard")
            for one in self.since_last_start(self.events)
            if one.step is not None and (one.kind != "audit" or not self.config)
        ]
        return max([*told, *(int(one.steps[-1]) for one in self.series.values())], default=0)


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return any((path / name).exists() for name in (CONFIG_FILE, METRICS_FILE, "events", "done"))


def load_run(path: Path, on_progress: OnProgress | None = None) -> RunRecord:
    """Reads a run folder; incomplete or damaged lines are ignored, counted and noted.

    ``on_progress`` receives the activity, the files read and their total. Raises ``DataError`` where a file cannot be
    read at all.
    """
    notes: list[str] = []
    events = _of_this_run(_load_events(path, notes, on_progress), notes)
    of_user = any((one.kind, one.name) == ("guard", "attached") for one in events)  # a guard writes events alone
    config = load_recorded_config(path / CONFIG_FILE, notes, needed=not of_user)
    series, last_line = _load_series(path, notes, needed=not of_user)
    slowness = load_slowness(path, notes)
    times = [events[-1].time] if events else []
    hangs, unreadable = load_hangs(path)
    notes += unreadable
    clock = FileClock(path)
    ages = [clock.age_s(one) for one in (path / METRICS_FILE, *(path / "events").glob("rank_*.jsonl"))]
    return RunRecord(
        path=path,
        config=config,
        series=series,
        events=tuple(events),
        incidents=load_incidents(path / "reports", notes),
        hangs=hangs,
        ending=load_ending(path, events, notes),
        written_at=max([*times, *last_line], default=None),
        notes=tuple(notes),
        slowness=slowness,
        quiet_s=min((age for age in ages if age is not None), default=None),
    )


def load_recorded_config(path: Path, notes: list[str], *, needed: bool = True) -> dict[str, Any]:
    """A run's configuration; empty where it cannot be read, which is noted, as its absence is where it is needed."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        notes.append(f"{path.name} holds no configuration and is left out")
    except FileNotFoundError:
        if needed:
            notes.append(f"{path.name} is missing: what was configured is not known")
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read and is left out: {error}")
    return {}


def _load_series(folder: Path, notes: list[str], *, needed: bool) -> tuple[dict[str, Series], list[float]]:
    """Metrics by name, and the time of the last line; ``needed``: their absence is noted."""
    for old in sorted(folder.glob("metrics.until_*.jsonl")):
        notes.append(f"{old.name}, of an earlier run in the same folder, is not shown")
    if not (folder / METRICS_FILE).exists():
        notes += [f"{METRICS_FILE} is missing: no number was reported yet"] if needed else []
        return {}, []
    rows = read_lines(folder / METRICS_FILE, metrics_row, notes)
    series, twice = series_of(rows)
    if twice:
        notes.append(f"{METRICS_FILE}: {twice} numbers were reported twice for a step; the later is shown")
    return series, [row["time"] for row in rows[-1:]]


def series_of(rows: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Series], int]:
    """Metrics by name, of rows in order; and how many numbers came twice for a step, of which the later is taken."""
    values: dict[str, dict[int, float]] = {}
    twice = 0
    for row in rows:
        for name, value in row.items():
            if name not in PLACE:
                own = values.setdefault(name, {})
                twice += row["step"] in own
                own[row["step"]] = math.nan if value is None else float(value)
    series = {}
    for name, own in values.items():
        steps = np.array(sorted(own), dtype=np.int64)
        series[name] = Series(steps, np.array([own[step] for step in steps.tolist()], dtype=np.float64))
    return series, twice


def _load_events(folder: Path, notes: list[str], on_progress: OnProgress | None) -> list[Event]:
    paths = sorted((folder / "events").glob("rank_*.jsonl"))
    if not paths:
        notes.append("events/ holds no file of a rank: what happened is not known")
    events: list[list[Event]] = []
    for number, path in enumerate(paths, 1):
        events.append(read_lines(path, event_of, notes, "events/"))
        if on_progress is not None:
            on_progress(f"reading {folder.name}", number, len(paths))
    return in_time_order(events)


def since_begun_anew(events: Sequence[Event]) -> list[Event]:
    """Without the events of an earlier run in the same folder whose metrics were set aside.

    Args:
        events: in order.
    """
    anew = [place for place, one in enumerate(events) if (one.kind, one.name) == ("start", "metrics_set_aside")]
    before = events[: anew[-1]] if anew else []
    starts = [place for place, one in enumerate(before) if (one.kind, one.name) == ("start", "run")]
    if not starts:
        return list(events)
    number = events[anew[-1]].attempt
    first = next((place for place in starts if number is not None and events[place].attempt == number), starts[-1])
    return list(events[first:])


def _of_this_run(events: list[Event], notes: list[str]) -> list[Event]:
    kept = since_begun_anew(events)
    if len(kept) < len(events):
        notes.append(f"{len(events) - len(kept)} events of an earlier run in the same folder are not shown")
    return kept


def load_ending(folder: Path, events: Sequence[Event], notes: list[str]) -> LaunchEnding | None:
    """How the last launch ended, from the launcher's record, else from those of its ranks."""
    launches = [one for one in sorted((folder / "done").glob("*")) if one.is_dir()]
    holder = read_holder(folder)
    if holder is not None and holder.may_live:  # other launches ended before it began, or were refused
        launches = [one for one in launches if one.name == holder.launch_id]
    starts = starts_of(events)
    found = [_ending_of(launch, folder, starts.get(launch.name), notes) for launch in launches]
    planned = _planned(folder, notes)
    last = _last_of([one for one in found if one is not None], planned)
    told = _reported_ending(events)
    if told is None or last is None:
        return told or last
    if told.launch is None:  # of an earlier version
        return told if told.time > last.time else last
    if told.launch == last.launch:
        return last
    # Its launcher has left no record, or not yet. What its ranks have left has the file system's time, as all records.
    left = [path.stat().st_mtime for path in (folder / "done" / told.launch).glob("*")]
    return _last_of([last, replace(told, time=max(left, default=math.inf))], planned)


def _planned(folder: Path, notes: list[str]) -> dict[str, int]:
    """Places of launches in the order in which a supervisor has planned them, by launch id."""
    try:
        entries = read_journal(folder / FOLDER)
    except StorageError as error:
        notes.append(str(error))
        return {}
    return {str(one.fields["launch_id"]): one.number for one in entries if one.kind == "planned"}


def _last_of(endings: Sequence[LaunchEnding], planned: Mapping[str, int]) -> LaunchEnding | None:
    """That of the launch that began last: ranks of an earlier one may have ended after it, when their host was back.

    By the order in which a supervisor has planned them, or by the numbers of starts; a launch that made none, and that
    a person has started, comes by the file system's clock, by which all records are.
    """

    def is_later(one: LaunchEnding, other: LaunchEnding) -> bool:
        places = planned.get(one.launch or ""), planned.get(other.launch or "")
        for of_one, of_other in (places, (one.attempt, other.attempt)):
            if of_one is not None and of_other is not None and of_one != of_other:
                return of_one > of_other
        return one.time > other.time

    last: LaunchEnding | None = None
    for one in sorted(endings, key=lambda one: (one.attempt is None, one.attempt or 0)):
        last = one if last is None or is_later(one, last) else last
    return last


def _reported_ending(events: Sequence[Event]) -> LaunchEnding | None:
    """How the ranks of the last start ended, by their own events; None: none failed since.

    Args:
        events: in order.
    """
    numbers = [one.attempt for one in events if (one.kind, one.name) == ("start", "run")]
    attempt = max((one for one in numbers if one is not None), default=None)
    begun = [place for place, one in enumerate(events) if (one.kind, one.name) == ("start", "run")]
    ends = [(place, one) for place, one in enumerate(events) if (one.kind, one.name) == ("end", "failed")]
    # A rank of an earlier start may end after the last one has, when its host is back or it is woken.
    ends = [(place, one) for place, one in ends if attempt is None or one.attempt is None or one.attempt >= attempt]
    if not ends:
        return None
    place, last = ends[-1]
    if not last.attempt and begun and place < begun[-1]:
        return None
    if last.attempt is not None:
        failed = [one for _, one in ends if (one.attempt, one.launch) == (last.attempt, last.launch)]
    else:  # Ranks of the same start ended after this rank's process had begun; a rank may fail before all have joined.
        since = last.fields.get("process_started", events[begun[-1]].time if begun else 0.0)
        failed = [one for _, one in ends if one.time >= since]
    # The cause is the first rank that failed by itself; a rank with PeerError only lost another one.
    first = min(failed, key=lambda one: one.fields.get("exit_code") == PeerError.exit_code)
    text = f"rank {first.rank} on {first.host}: {first.fields.get('message')}"
    code = int(first.fields.get("exit_code", 1))
    return LaunchEnding(last.time, code, text, first.rank, first.host, last.launch, last.attempt)


def _ending_of(launch: Path, folder: Path, attempt: int | None, notes: list[str]) -> LaunchEnding | None:
    """How it ended, with the file system's time of that; None: it is not recorded."""
    try:
        records = collect(folder, launch.name)
        path = launch / LAUNCH_FILE
        if path.exists():
            found = parse_json(path.read_text(encoding="utf-8"))
            ended_at, lines = path.stat().st_mtime, "; ".join(found["lines"])
            rank, host = found.get("failed_rank"), found.get("failed_host")
            return LaunchEnding(ended_at, int(found["exit_code"]), lines, rank, host, launch.name, attempt)
        failed = {one.rank: one for one in records.done.values() if one.exit_code}
        written = [(launch / f"rank_{rank:05d}.json").stat().st_mtime for rank in failed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        notes.append(f"done/{launch.name} is left out: {error}")
        return None
    notes.extend(f"done/{launch.name}: {line}" for line in records.unreadable)
    if not failed:
        return None
    moments = {rank: one.ended_at for rank, one in failed.items()}
    by_itself = {rank: at for rank, at in moments.items() if failed[rank].exit_code != PeerError.exit_code}
    first = failed[min(first_moments(by_itself or moments, {}))]
    text = f"rank {first.rank} on {first.host}: {first.first_line}"
    return LaunchEnding(max(written), first.exit_code, text, first.rank, first.host, launch.name, attempt)
