"""What a live view of a run shows: progress, hosts and ranks, who is slow, devices, incidents, when it will be done.

The run folder is read again and again: of files that grow only what is new, others only when they have changed.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from megasdc.common.durable import PROBE_BYTES, parse_json
from megasdc.common.errors import DataError, StorageError
from megasdc.common.run_lock import read_holder
from megasdc.common.words import clock
from megasdc.events import Event, event_of, in_time_order, starts_of
from megasdc.metrics.writer import METRICS_FILE, metrics_row
from megasdc.ops.health.front.clocks import describe_differing_dates
from megasdc.ops.health.hosts import FileClock, HostPosition, read_hosts
from megasdc.ops.health.incident_file import HangIncident, load_hangs
from megasdc.ops.health.links.judgement import places_of
from megasdc.ops.health.shared_folder_heartbeat import LOST_S
from megasdc.ops.launch.launch_verdict import Met, read_met
from megasdc.ops.run_folder.marks import FAULT, details, lane_of
from megasdc.ops.run_folder.record import (
    CONFIG_FILE,
    LAUNCH_FILE,
    LaunchEnding,
    LineReader,
    RunRecord,
    is_run,
    load_ending,
    load_recorded_config,
    series_of,
    since_begun_anew,
)
from megasdc.ops.run_folder.replicas import RoundsFollower, RoundsSummary
from megasdc.ops.run_folder.status import SILENT_S, GuardStatus, RunStatus, guard_of, status_of
from megasdc.ops.run_folder.study_log import STUDY_FOLDER
from megasdc.ops.supervise.goodput import goodput_of
from megasdc.ops.supervise.met import all_met
from megasdc.output.page import plain_values
from megasdc.sdc.incident import Incident, headline, load_incidents

KEPT_ROWS, KEPT_EVENTS = 200, 500
FRONTS = "health/front_*.json"
"""What a launch leaves first in its run folder, until all hosts have read it (``front_path``)."""
PACE_ROWS = 50
"""Last lines of metrics whose times give the pace of a run."""
T = TypeVar("T")


def added_rows(reader: LineReader[T]) -> tuple[list[T], bool]:
    """See ``LineReader.read``; nothing while the file is not there.

    Raises:
        DataError: this user may not read the file, so that the run would look empty.
    """
    try:
        return reader.read()
    except PermissionError as error:
        problem = f"{reader.path}: cannot be read: {error.strerror}; ask its owner for the right to"
        raise DataError(problem) from error
    except OSError:
        return [], False


@dataclass(frozen=True)
class FolderView:
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
        self._metrics = LineReader(folder / METRICS_FILE, metrics_row)
        self._rows: deque[dict[str, Any]] = deque(maxlen=KEPT_ROWS)
        self._evaluation: dict[str, Any] | None = None
        self._event_files: dict[Path, LineReader[Event]] = {}
        self._bounds: list[Event] = []
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._rank_hosts: dict[int, str] = {}
        self._made: dict[str, tuple[Hashable, Any]] = {}

    def read(self) -> FolderView:
        """Read what is new."""
        self._read_metrics()
        self._read_events()
        folder, notes = self._folder, self._damages()
        events = since_begun_anew(in_time_order(_by_file([*self._bounds, *self._events])))
        hangs, unreadable = self._hangs()
        evaluation = [self._evaluation] if self._evaluation else []
        rows = sorted([*evaluation, *self._rows], key=lambda one: one["step"])
        written = [self._rows[-1]["time"]] if self._rows else []
        ages = [self._clock.age_s(path) for path in (folder / METRICS_FILE, *self._event_files)]
        quiet_s = min((age for age in ages if age is not None), default=None)
        run = RunRecord(
            path=folder,
            config=self._if_changed(
                "config", [folder / CONFIG_FILE], lambda: load_recorded_config(folder / CONFIG_FILE, [])
            ),
            series=series_of(rows)[0],
            events=tuple(events),
            incidents=self._incidents(),
            hangs=hangs,
            ending=self._ending(events),
            written_at=max([*written, *(one.time for one in events[-1:])], default=None),
            notes=(*notes, *unreadable),
            quiet_s=quiet_s,
        )
        return FolderView(run, quiet_s, self._pace_s(events), dict(self._rank_hosts))

    def _pace_s(self, events: Sequence[Event]) -> float | None:
        starts = [one for one in events if (one.kind, one.rank) == ("start", 0)]  # rank 0 writes metrics
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
        rows, replaced = added_rows(self._metrics)
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
                self._event_files[path] = LineReader(path, event_of)
            new.append(added_rows(self._event_files[path])[0])
        for event in in_time_order(new):
            self._rank_hosts[event.rank] = event.host
            of_guard = event.kind == "guard" or (event.kind == "audit" and not (self._folder / CONFIG_FILE).exists())
            if event.kind in ("start", "end") or of_guard:
                self._bounds.append(event)
            elif lane_of(event) not in ("", FAULT):
                self._events.append(event)

    def _damages(self) -> list[str]:
        counts = {METRICS_FILE: len(self._metrics.damaged)}
        counts["events/"] = sum(len(one.damaged) for one in self._event_files.values())
        return [f"{name}: {count} damaged lines are left out" for name, count in counts.items() if count]

    def _hangs(self) -> tuple[tuple[HangIncident, ...], list[str]]:
        files = (self._folder / "health" / "incidents").glob("hang_*.json")
        return self._if_changed("hangs", files, lambda: load_hangs(self._folder))

    def _incidents(self) -> tuple[tuple[Path, Incident], ...]:
        folder = self._folder / "reports"
        files = folder.glob("incident_step_*.json")
        return self._if_changed("incidents", files, lambda: load_incidents(folder, []))

    def _ending(self, events: list[Event]) -> LaunchEnding | None:
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


def _by_file(events: Iterable[Event]) -> list[list[Event]]:
    """Events of each rank."""
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.rank, []).append(event)
    return list(found.values())


SHOWN_EVENTS = 5
GOODPUT_S = 30.0
"""Seconds between two divisions of a supervised run's time, for which all of its metrics are read."""
OVER = ("done", "stopped", "failed", "gone")
"""States of a run in which nothing more comes."""


@dataclass(frozen=True)
class LastIncident:
    """The newest incident; ``kind``: ``sdc`` or as ``hang/behind``; ``time``: UTC, by the clock of its host."""

    kind: str
    time: str
    text: str
    path: str


@dataclass(frozen=True)
class RunView:
    """A run at one moment.

    Args:
        state: starting, running, stuck, silent, done, stopped, failed; ending: all ranks have ended; gone: so they have
            for long, and no end was recorded.
        over: whether nothing more is expected.
        step: last one that was reported, or that by health all ranks have done.
        planned: None: not known.
        step_s: seconds of a step without evaluations and saves.
        eta_s: seconds until all steps are done; None: not known, or the run is not running.
        effective_ratio: effective training time ratio of a supervised run, at most ``GOODPUT_S`` old; None: it is none.
        quiet_s: seconds since metrics or events were written.
        health: whether agents watch the run (section ``health``).
        slow: of ``health/suspects.json``: host, ranks, ratio, since_step.
        slow_links: what is slow, by the two hosts.
        incidents: number by kind: ``sdc``, ``hang``.
        met: faults, standstills, hosts that were replaced and steps back of all starts, oldest first.
        events: the last ones, oldest first.
        local_clock: ages are by this host's clock, since no file could be made in the run folder.
        notes: what was left out, clocks that differ, and a folder without room, a sentence each.
        guard: what the guard of a training has done; None: it has none.
        rounds: of Local-SGD; None: the run is none of that.
        of_replicas: of a launch of replicas, each one's view, in order; hosts are in these.
    """

    run_dir: str
    state: str
    text: str
    over: bool
    step: int
    planned: int | None
    loss: float | None
    eval_loss: float | None
    step_s: float | None
    tokens_per_s: float | None
    eta_s: float | None
    effective_ratio: float | None
    quiet_s: float | None
    health: bool
    hosts: tuple[HostPosition, ...]
    slow: tuple[dict[str, Any], ...]
    slow_links: dict[str, str]
    incidents: dict[str, int]
    last_incident: LastIncident | None
    met: tuple[Met, ...]
    events: tuple[str, ...]
    local_clock: bool
    notes: tuple[str, ...]
    guard: GuardStatus | None = None
    rounds: RoundsSummary | None = None
    of_replicas: tuple[RunView, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        return plain_values(asdict(self))

    def slow_ratio(self, rank: int) -> float | None:
        """How many times as long as its peers a rank takes; None: it is not slow."""
        return next((float(one["ratio"]) for one in self.slow if rank in one["ranks"]), None)


class RunWatcher:
    """Views of one run folder, one after the other.

    Raises:
        DataError: the folder holds no run, or a study.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / STUDY_FOLDER).is_dir():
            raise DataError(f"{folder} holds a study; give one of its folders replica_K")
        if not is_run(folder) and not any(folder.glob(FRONTS)):
            raise DataError(
                f"{folder} {'' if folder.is_dir() else 'is no folder, and '}holds no run ({CONFIG_FILE}, "
                f"{METRICS_FILE} or events/); give the folder that megasdc.logging.run_dir names, once the run has "
                "started"
            )
        self._folder = folder
        health = folder / "health"
        self._clock = FileClock(health if health.is_dir() else folder)
        self._follower = RunFollower(folder, self._clock)
        self._rounds = RoundsFollower(folder.resolve().parent)
        self._divided_at: float = -math.inf
        self._effective_ratio: float | None = None

    def read(self) -> RunView:
        """The run now."""
        look = self._follower.read()
        run, notes = look.run, list(look.run.notes)
        hosts: tuple[HostPosition, ...] = ()
        if run.setting("megasdc.health.enabled") is not False:
            hosts, left_out = read_hosts(self._folder, self._clock, look.rank_hosts)
            notes += left_out
            notes += describe_differing_dates(self._folder / "health")
        notes += _without_room(self._folder, run.setting("megasdc.logging.wait_for_room_s"))
        state, status = _state_of(look, hosts)
        text = status.text if state == status.state and state in OVER else None
        if state in OVER and self._is_starting_again(run):
            state, text = "starting", f"starting; of the start before: {status.text}"
        step, planned = max(status.step, _done_by_all(hosts)), status.planned
        last = {name: float(one.values[-1]) for name, one in run.series.items()}
        holder = read_holder(self._folder)
        return RunView(
            run_dir=str(self._folder),
            state=state,
            text=_text_of(state, step, planned, look) if text is None else text,
            over=state in OVER and not (holder is not None and holder.lives_here),
            step=step,
            planned=planned,
            loss=last.get("train/loss"),
            eval_loss=last.get("eval/loss"),
            step_s=last.get("speed/step_s"),
            tokens_per_s=last.get("speed/tokens_per_s"),
            eta_s=_eta_s(look, step, planned) if state == "running" else None,
            effective_ratio=self._effective(notes),
            quiet_s=look.quiet_s,
            health=bool(hosts),
            hosts=hosts,
            slow=_slow(self._folder / "health" / "suspects.json", notes) if hosts else (),
            slow_links=_slow_links(run),
            incidents={"sdc": len(run.incidents), "hang": len(run.hangs)},
            last_incident=_last_incident(run),
            met=self._met(notes),
            events=_last_events(run),
            local_clock=self._clock.is_local,
            notes=tuple(notes),
            guard=guard_of(run),
            rounds=self._rounds.read(),
        )

    def _is_starting_again(self, run: RunRecord) -> bool:
        """Whether a launch has begun since the one that is over, and no rank has reported it yet."""
        told = {one.launch for one in run.events} | ({run.ending.launch} if run.ending is not None else set())
        begun = {path.stem.removeprefix("front_").partition(".")[0]: path for path in self._folder.glob(FRONTS)}
        begun |= {path.name: path for path in self._folder.glob("done/*") if not (path / LAUNCH_FILE).exists()}
        holder = read_holder(self._folder)
        if holder is not None and holder.launch_id is not None and holder.may_live and holder.launch_id not in told:
            return True
        ages = [self._clock.age_s(path) for launch, path in begun.items() if launch not in told]
        return any(age is not None and age <= SILENT_S for age in ages)  # else its front was killed

    def _met(self, notes: list[str]) -> tuple[Met, ...]:
        try:
            return tuple(all_met(self._folder))
        except StorageError as error:
            notes.append(f"what a supervisor did is left out: {error}")
            return tuple(read_met(self._folder))

    def _effective(self, notes: list[str]) -> float | None:
        """Effective training time ratio; None: the run is not supervised, or its journal cannot be used."""
        if time.monotonic() - self._divided_at >= GOODPUT_S:
            try:
                found = goodput_of(self._folder, time.time())
            except StorageError as error:
                notes.append(f"the effective training time is left out: {error}")
                return None
            self._divided_at, self._effective_ratio = time.monotonic(), None if found is None else found.effective_ratio
        return self._effective_ratio


def _state_of(look: FolderView, hosts: Sequence[HostPosition]) -> tuple[str, RunStatus]:
    """State of a run: what its agents see now counts, else what was recorded, else when it last wrote something."""
    run, quiet_s = look.run, look.quiet_s or 0.0
    status = status_of(run)
    live = [one for one in hosts if one.state in ("watched", "stuck")]
    if live:
        return ("stuck" if all(one.state == "stuck" for one in live) else "running"), status
    if status.state in OVER:
        return status.state, status
    ended = [one.age_s for one in hosts if one.state == "ended"]
    if ended and len(ended) == len(hosts) and min(ended) < quiet_s + LOST_S:  # else they are of the start before
        return ("gone" if quiet_s > LOST_S else "ending"), status
    if run.written_at is None or not (run.series or guard_of(run)):
        return ("starting" if quiet_s <= SILENT_S else "silent"), status
    return status.state, status


def _done_by_all(hosts: Sequence[HostPosition]) -> int:
    """Last step that no rank is in any more; 0: none."""
    return min((rank.step for host in hosts for rank in host.ranks), default=1) - 1


def _eta_s(look: FolderView, step: int, planned: int | None) -> float | None:
    return None if planned is None or look.pace_s is None else max(0, planned - step) * look.pace_s


def _text_of(state: str, step: int, planned: int | None, look: FolderView) -> str:
    at = f"step {step:,}" + (f" of {planned:,}" if planned is not None else "")
    quiet = "nothing was written yet" if look.quiet_s is None else f"nothing was written for {look.quiet_s:.0f} s"
    return {
        "starting": "starting, no step was reported yet",
        "running": f"running, {at}",
        "stuck": f"no rank has moved for longer than it may, at {at}",
        "silent": f"{quiet}, at {at}; it hangs, or was killed",
        "ending": f"all ranks have ended at {at}, how is not recorded yet",
        "gone": f"all ranks have ended at {at}, and no end was recorded: they were killed",
    }[state]


def _without_room(folder: Path, limit_s: object) -> list[str]:
    """That the file system of a run's folder is full or read-only, as this host sees it; a quota is not seen."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free > PROBE_BYTES and not found.f_flag & os.ST_RDONLY:
        return []
    why = "is read-only" if found.f_flag & os.ST_RDONLY else f"has {free} bytes left"
    waits = f": the run waits up to {limit_s} s for room, and tells its progress then" if limit_s else ""
    return [f"the file system of {folder} {why}{waits}"]


def _slow(path: Path, notes: list[str]) -> tuple[dict[str, Any], ...]:
    """Slow ranks that health names; empty: none, or nobody looks for them."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))["suspects"]
        return tuple(
            {
                "host": str(one["host"]),
                "ranks": [int(rank) for rank in one["ranks"]],
                "ratio": float(one["ratio"]),
                "since_step": int(one["since_step"]),
            }
            for one in found
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        notes.append(f"health/{path.name} is left out: {error!r}")
        return ()


def _slow_links(run: RunRecord) -> dict[str, str]:
    """Links that this start has reported as slow, and since then neither as recovered nor as no longer measured."""
    found: dict[str, str] = {}
    for event in run.events:
        match event.kind, event.name:
            case "start", "run" if event.rank == 0:
                found = {}
            case "health", "slow_link":
                found.update({one["place"]: one["text"] for one in event.fields["pairs"]})
            case "health", "link_recovered":
                found.pop(event.fields["place"], None)
            case "health", "link_unmeasured":
                for place in places_of(*event.fields["hosts"]):
                    found.pop(place, None)
    return found


def _last_incident(run: RunRecord) -> LastIncident | None:
    starts, found = starts_of(run.events), list[tuple[int, int, float, LastIncident]]()
    for hang in run.hangs[-1:]:
        number = starts.get(hang.launch or "") or hang.attempt
        shown = LastIncident(hang.kind, clock(hang.time), hang.message, str(hang.path))
        found.append((number, hang.step, hang.time, shown))
    for page, one in run.incidents:
        number = starts.get(one.launch or "") or one.attempt or 0
        shown = LastIncident("sdc", one.time.replace("T", " ")[:19] + " UTC", headline(one), str(page))
        found.append((number, one.step, one.found_at, shown))
    is_numbered = all(number for number, *_ in found)  # else of an earlier version: by the dates of hosts
    last = max(found, key=lambda one: one[:3] if is_numbered else one[2:3], default=None)
    return None if last is None else last[3]


def _last_events(run: RunRecord) -> tuple[str, ...]:
    """Last events that a report marks; those of one kind and step of a start are one line, by whoever was the first."""
    found: dict[tuple[Any, ...], list[Event]] = {}
    for event in run.events:
        if lane_of(event):
            found.setdefault((event.attempt, event.kind, event.name, event.step), []).append(event)
    return tuple(_event_text(one) for one in [*found.values()][-SHOWN_EVENTS:])


def _event_text(events: Sequence[Event]) -> str:
    first, others = events[0], len({one.rank for one in events}) - 1
    who = f"rank {first.rank}" + (f" and {others} more" if others else "")
    step = "" if first.step is None else f"step {first.step}"
    parts = (clock(first.time)[11:19], who, first.kind, first.name.replace("_", " "), step, details(first))
    return " ".join(filter(None, parts))
