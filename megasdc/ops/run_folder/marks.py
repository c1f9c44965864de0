"""Events of a run as marks on the axis of steps, and as rows of a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megasdc.common.words import clock
from megasdc.events import Event
from megasdc.ops.run_folder.record import RunRecord

FINDING, INCIDENT, FAULT, NOT_FINITE, SKIP = "finding", "incident", "fault injected", "not finite", "skipped step"
HANG = "hang"
WARNING, DROPS, SAVE, RESUME, START = "warning", "drop decision", "save", "resume", "start, stop"
LANES = (INCIDENT, HANG, FINDING, NOT_FINITE, SKIP, FAULT, WARNING, DROPS, SAVE, RESUME, START)
"""Kinds of marks, the most severe first."""
LINED = (INCIDENT, HANG, SKIP, RESUME)
"""Kinds that are drawn as lines through every figure."""
_LANE_OF = {
    ("sdc", "verdict"): INCIDENT,
    ("sdc", "finding"): FINDING,
    ("sdc", "warning"): WARNING,
    ("nonfinite", "first"): NOT_FINITE,
    ("bounds", "non_finite"): NOT_FINITE,
    ("bounds", "warning"): WARNING,
    ("bounds", "copies_differ"): WARNING,
    ("fault", "injected"): FAULT,
    ("fault", "process"): FAULT,
    ("skip", "optimizer_step"): SKIP,
    ("health", "straggler"): WARNING,
    ("health", "recovered"): WARNING,
    ("health", "slow_link"): WARNING,
    ("health", "link_recovered"): WARNING,
    ("health", "link_unmeasured"): WARNING,
    ("health", "imbalance"): WARNING,
    ("health", "garbage"): WARNING,
    ("health", "unwatched"): WARNING,
    ("health", "agent_restarted"): WARNING,
    ("health", "agent_stopped"): WARNING,
    ("health", "unwritten"): WARNING,
    ("health", "alert_failed"): WARNING,
    ("metrics", "sink_failed"): WARNING,
    ("clock", "differs"): WARNING,
    ("local_sgd", "without"): WARNING,
    ("local_sgd", "left_out"): WARNING,
    ("local_sgd", "threshold"): DROPS,
    ("drop", "threshold"): DROPS,
    ("drop", "limit"): DROPS,
    ("drop", "slow_replica"): DROPS,
    ("save", "checkpoint"): SAVE,
    ("resume", "checkpoint"): RESUME,
    ("resume", "universal"): RESUME,
    ("resume", "changed"): RESUME,
    ("resume", "quantized_moments"): WARNING,
    ("archive", "failed"): WARNING,
    ("archive", "skipped"): WARNING,
    ("archive", "pushed"): SAVE,
    ("start", "run"): START,
    ("stop", "requested"): START,
    ("end", "run"): START,
}
_WHOLE = {SKIP, NOT_FINITE}
"""Kinds that every rank reports, counted once per step."""
LONGEST = 240
"""Maximum of characters of an event's fields in a table."""
LISTED = 4
"""Maximum of values of a list in them."""


@dataclass(frozen=True)
class EventMark:
    """Events of one kind of ``LANES`` at one step, 0: before the first; ``text`` is of the first event."""

    lane: str
    step: int
    count: int
    text: str


@dataclass(frozen=True)
class EventRow:
    """Events of one kind, name, step and rank; time, host and details are those of the first.

    ``step``: None where they belong to none; ``what``: kind and name; ``lane``: kind of mark, empty: they make none.
    """

    time: str
    step: int | None
    rank: int
    host: str
    what: str
    lane: str
    count: int
    details: str


def lane_of(event: Event) -> str:
    """The kind of mark that an event makes; empty where it makes none."""
    if event.kind in ("error", "warning"):
        return WARNING
    return _LANE_OF.get((event.kind, event.name), "")


def marks_of(run: RunRecord) -> list[EventMark]:
    """Marks of a run, by lane and step; reports of several ranks on the same skipped step count once."""
    found: dict[tuple[str, int], list[Event]] = {}
    for event in run.events:
        if lane := lane_of(event):
            found.setdefault((lane, event.step or 0), []).append(event)
    marks = [
        EventMark(
            lane, step, 1 if lane in _WHOLE else len(events), f"{events[0].kind} {events[0].name}: {details(events[0])}"
        )
        for (lane, step), events in found.items()
    ]
    marks += [EventMark(HANG, one.step, 1, one.message) for one in run.hangs]
    loss = run.series.get("train/loss")
    if loss is not None:
        told = {mark.step for mark in marks if mark.lane == NOT_FINITE}
        broken = loss.steps[~(abs(loss.values) < float("inf"))].tolist()
        marks += [EventMark(NOT_FINITE, step, 1, "loss reported as NaN or Inf") for step in broken if step not in told]
    return sorted(marks, key=lambda one: (LANES.index(one.lane), one.step))


def counts_of(marks: Sequence[EventMark]) -> dict[str, int]:
    """Number of events of each lane."""
    counts: Counter[str] = Counter()
    for mark in marks:
        counts[mark.lane] += mark.count
    return {lane: counts[lane] for lane in LANES if counts[lane]}


def event_rows(events: Sequence[Event]) -> list[EventRow]:
    """Events as rows of a table; those of one kind, name, step and rank are one row."""
    found: dict[tuple[object, ...], list[Event]] = {}
    for event in events:
        found.setdefault((event.kind, event.name, event.step, event.rank), []).append(event)
    return [
        EventRow(
            clock(group[0].time),
            group[0].step,
            group[0].rank,
            group[0].host,
            f"{group[0].kind} {group[0].name}",
            lane_of(group[0]),
            len(group),
            details(group[0]),
        )
        for group in found.values()
    ]


def details(event: Event) -> str:
    """An event's fields in words, at most ``LONGEST`` characters."""
    parts = [f"micro-batch {event.micro_batch}"] if event.micro_batch is not None else []
    said = {name: value for name, value in event.fields.items() if value is not None}
    ordered = sorted(said.items(), key=lambda item: isinstance(item[1], list | dict))  # short ones first
    parts += [f"{name} {_plain(value)}" for name, value in ordered]
    text = ", ".join(parts)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and len(value) > LISTED:
        return f"[{', '.join(map(_plain, value[:LISTED]))}, … {len(value)} in all]"
    return value if isinstance(value, str) else json.dumps(value, default=str)
