"""What an attempt of a supervised run has reported: which steps it did, and how long training stood still in between.

It comes from the metrics and from rank 0's events, so it must be read before the next start drops the lines of steps
that are taken again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megasdc.common.origin import HostClock, Launch
from megasdc.events import Event, read_events
from megasdc.metrics.writer import read_metrics
from megasdc.ops.health.front.clocks import clocks_of

SLOW = 1.5
"""Steps are slow where they take more than so many times as long as the run's median."""
_SIGNS = ("train/loss", "time/eval_s", "checkpoint/save_s", "memory/step")
"""Metrics of lines that are written once their step is done; others may be written at the end of the run."""


@dataclass(frozen=True)
class AttemptProgress:
    """What an attempt has reported.

    Args:
        resumed: step that it went on from; 0: it began.
        began_at: when its first step began, seconds since the epoch, as the date of its launch's plan was.
        last: last step that was reported as done.
        last_at: when that was.
        loading_s: seconds before the first step in which a checkpoint was looked for, checked and loaded, and those in
            which the run began again in the same processes.
        evaluating_s: seconds of evaluations.
        saving_s: seconds that training stood still for saves, on the disk and in memory.
        stalled_s: seconds that slow steps took beyond the run's median.
        line_s: usual seconds from one line of metrics to the next; 0: not known yet.
    """

    resumed: int
    began_at: float
    last: int
    last_at: float
    loading_s: float = 0.0
    evaluating_s: float = 0.0
    saving_s: float = 0.0
    stalled_s: float = 0.0
    line_s: float = 0.0


def trained_in(run_dir: Path, launch: Launch) -> AttemptProgress | None:
    """What a launch has reported in a run's folder; None: no step.

    Where rank 0 left no event of its first step, that is taken to have begun at the first line, less its steps.
    """
    rows = read_metrics(run_dir) if run_dir.is_dir() else []
    events = list(read_events(run_dir, rank=0, launch=launch, broken=[]))
    clock = _Clock(launch, events, clocks_of(run_dir / "health"))
    starts = [one for one in events if (one.kind, one.name) == ("start", "phases")]
    start = starts[0] if starts else None
    first = events if start is None else events[: events.index(start)]
    resumed = max((one.step for one in first if one.kind == "resume" and one.step is not None), default=0)
    new = [row for row in metric_lines(rows, events, launch) if row["step"] > resumed]
    lines = [row for row in new if any(name in row for name in _SIGNS)]
    usual_s = median([row["speed/step_s"] for row in rows if "speed/step_s" in row] or [0.0])
    if start is not None and start.step is not None:
        began_at = clock.at(start.time, start.monotonic, start.attempt) - start.fields.get("step_s", 0.0)
        loading_s = start.fields["phases"].get("resume", 0.0)
        # Of later ones, which have left replicas out in the same processes, all but their first step stands still.
        loading_s += sum(sum(one.fields["phases"].values()) - one.fields.get("step_s", 0.0) for one in starts[1:])
        reported = (start.step, clock.at(start.time, start.monotonic, start.attempt))
    elif lines:
        began_at = clock.of(lines[0]) - (lines[0]["step"] - resumed) * usual_s
        loading_s, reported = 0.0, (resumed, began_at)
    else:
        return None
    last, last_at = (lines[-1]["step"], clock.of(lines[-1])) if lines else reported
    timed = [row for row in new if "speed/step_s" in row]
    between = [later - earlier for earlier, later in pairwise([resumed, *(row["step"] for row in timed)])]
    return AttemptProgress(
        resumed,
        max(launch.planned_at, began_at),
        last,
        last_at,
        loading_s=loading_s,
        evaluating_s=sum(row.get("time/eval_s", 0.0) for row in lines),
        saving_s=_saving_s(lines),
        stalled_s=_stalled_s(timed, usual_s, _known_slow(events)),
        line_s=median(between) * usual_s if between else 0.0,
    )


class _Clock:
    """The date of a launch's plan, and what has passed since then, at moments on rank 0's host.

    By the monotonic clocks of both hosts where these are one, or agents have measured how they differ; else by that of
    rank 0's host since its first event, whose date is believed.

    Args:
        events: of rank 0.
        clocks: of hosts, by boot, against the front, which runs on the host that planned the launch.
    """

    def __init__(self, launch: Launch, events: Sequence[Event], clocks: Mapping[str, HostClock]) -> None:
        self._bases: dict[int | None, float] = {}
        """By start: another may have rank 0 on another host, where replicas were left out."""
        for one in events:
            if one.monotonic is None or one.boot is None or one.attempt in self._bases:
                continue
            base = one.time - one.monotonic
            if launch.boot is not None and launch.monotonic is not None:
                planned = launch.planned_at - launch.monotonic
                if one.boot == launch.boot:
                    base = planned
                elif (found := clocks.get(one.boot)) is not None:
                    base = planned - found.monotonic_s
            self._bases[one.attempt] = base

    def at(self, time: float, monotonic: float | None, attempt: int | None) -> float:
        """Of something of a start with both times of rank 0's host."""
        base = self._bases.get(attempt)
        return time if base is None or monotonic is None else base + monotonic

    def of(self, row: Mapping[str, Any]) -> float:
        """Of a line of metrics."""
        return self.at(row["time"], row.get("monotonic"), row.get("attempt"))


def metric_lines(rows: Sequence[dict[str, Any]], events: Sequence[Event], launch: Launch) -> list[dict[str, Any]]:
    """Lines of metrics of a launch: of the starts that its events have; lines of earlier versions by their time.

    Args:
        events: of the launch.
    """
    attempts = {one.attempt for one in events}
    return [
        row
        for row in rows
        if (row["attempt"] in attempts if row.get("attempt") is not None else launch.wrote(None, row["time"]))
    ]


def _saving_s(lines: Sequence[dict[str, Any]]) -> float:
    found, skipped = 0.0, 0
    for row in lines:
        found += row.get("checkpoint/save_s", 0.0)
        if row.get("memory/skipped", skipped) == skipped:  # else its time is that of the snapshot before
            found += row.get("memory/stalled_s", 0.0)
        skipped = row.get("memory/skipped", skipped)
    return found


def _stalled_s(timed: Sequence[dict[str, Any]], usual_s: float, known: Sequence[tuple[float, float]]) -> float:
    """What steps took beyond the usual where they were slow, or a straggler was known.

    The first line is left out: the first step of a process compiles and allocates.
    """
    found = 0.0
    for before, row in pairwise(timed):
        step_s, first = row["speed/step_s"], before["step"] + 1
        is_known = any(first <= end and begin <= row["step"] for begin, end in known)
        if step_s > SLOW * usual_s or is_known:
            found += max(0.0, step_s - usual_s) * (row["step"] + 1 - first)
    return found


def _known_slow(events: Sequence[Event]) -> list[tuple[float, float]]:
    """First and last step of the times in which a straggler was known."""
    since: dict[tuple[Any, Any], float] = {}
    found: list[tuple[float, float]] = []
    for one in events:
        place = one.fields.get("replica"), one.fields.get("stage")
        if (one.kind, one.name) == ("health", "straggler"):
            since.setdefault(place, one.fields["since_step"])
        elif (one.kind, one.name) == ("health", "recovered") and place in since:
            found.append((since.pop(place), one.step or math.inf))
    return [*found, *((first, math.inf) for first in since.values())]
