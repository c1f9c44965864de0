"""Event log: one JSON line per event, one file per rank; no torch.

An event line holds ``{"run", "attempt", "launch", "time", "monotonic", "boot", "rank", "host", "device", "step",
"micro_batch", "kind", "name", "fields"}``. ``launch`` is the id of the launch, null without ``megasdc launch``;
``time`` is seconds since the epoch, ``monotonic`` on a clock that is never set, which all processes of a host share
from one ``boot`` to the next; ``step`` and ``micro_batch`` are null where an event belongs to none. Lines of earlier
versions lack ``run``, ``attempt``, ``launch``, ``monotonic``, ``boot`` and ``device``.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any

from megasdc.common.credentials import without_credentials
from megasdc.common.durable import LineFile, parse_json
from megasdc.common.origin import Launch, Moment, Origin, this_launch

logger = logging.getLogger(__name__)

_LAST_SECOND = 253402300800.0
"""First second, since the epoch, after year 9999, which no calendar shows."""


@dataclass(frozen=True)
class Event:
    """One line of an event log; the fields are named and ordered as in the file."""

    run: str | None = field(default=None, kw_only=True)
    attempt: int | None = field(default=None, kw_only=True)
    launch: str | None = field(default=None, kw_only=True)
    time: float
    monotonic: float | None = field(default=None, kw_only=True)
    boot: str | None = field(default=None, kw_only=True)
    rank: int
    host: str
    device: str | None = field(default=None, kw_only=True)
    step: int | None
    micro_batch: int | None
    kind: str
    name: str
    fields: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """Appends events to ``events/rank_NNNNN.jsonl`` in the run folder and counts them by kind and name.

    Each event is one ``write`` of a complete line, flushed at once, so that a killed process leaves at most one
    incomplete last line. What has no room is written later, see ``megasdc.common.durable``.

    Args:
        run_dir: the run folder; created if absent.
        rank: global rank, named in the file and in every line.
        origin: run, attempt and device of this process.
    """

    def __init__(self, run_dir: Path | str, rank: int, origin: Origin = Origin()) -> None:
        folder = Path(run_dir) / "events"
        self.path = folder / f"rank_{rank:05d}.jsonl"
        self.rank = rank
        self.host = socket.gethostname()
        self.origin = origin
        self._launch = this_launch()
        self.counts: Counter[str] = Counter()
        self._file = LineFile(self.path)

    def emit(
        self, kind: str, name: str, *, step: int | None = None, micro_batch: int | None = None, **fields: Any
    ) -> Event:
        """Write one event.

        Args:
            kind: such as ``save``, ``resume``, ``skip``, ``warning``.
            name: within the kind, such as ``checkpoint`` or ``gradient_overflow``.
            step: optimizer step, first is 1.
            micro_batch: micro-batch in the step, first is 0.
            **fields: anything that JSON can hold; a dataclass becomes an object, other values become text.

        Returns:
            The event as written.
        """
        now = Moment.now()
        event = Event(
            now.time,
            self.rank,
            self.host,
            step,
            micro_batch,
            kind,
            name,
            fields,
            monotonic=now.monotonic,
            boot=now.boot_id,
            launch=self._launch,
            **vars(self.origin),
        )
        line = json.dumps(vars(event), default=_plain)  # no deep copy: drills write many
        self._file.write(without_credentials(line) + "\n")
        self.counts[f"{kind}/{name}"] += 1
        return event

    def emit_on_rank_0(self, kind: str, name: str, /, *, step: int | None = None, **fields: Any) -> None:
        """Write an event on rank 0, for what all ranks know; it is logged where it cannot be written.

        No error is raised then, since the other ranks go on, to collectives that wait for rank 0.
        """
        if self.rank != 0:
            return
        try:
            self.emit(kind, name, step=step, **fields)
        except OSError as error:
            logger.error("the event %s/%s of step %s is not written: %s: %s", kind, name, step, error, fields)

    def close(self) -> None:
        """Close the file; further events are an error."""
        self._file.close()


def _plain(value: Any) -> Any:
    """A value that JSON cannot hold: a dataclass as an object, anything else as text."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def read_events(
    run_dir: Path | str,
    *,
    kind: str | None = None,
    name: str | None = None,
    rank: int | None = None,
    launch: Launch | None = None,
    broken: list[str] | None = None,
) -> Iterator[Event]:
    """Yield the events of a run folder, file by file in rank order.

    An incomplete last line, left by a killed process, is ignored.

    Args:
        run_dir: the run folder.
        kind: only events of this kind; None means all.
        name: only events of this name; None means all.
        rank: only events of this rank, whose file alone is read; None means all.
        launch: only events of this launch; None means all.
        broken: receives a sentence for each line or file that would raise, which is then skipped; None: they raise.

    Raises:
        ValueError: a complete line is not an event; the message names file and line.
        OSError: a file cannot be read.
    """
    for path in sorted((Path(run_dir) / "events").glob("rank_*.jsonl" if rank is None else f"rank_{rank:05d}.jsonl")):
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            if broken is None:
                raise
            broken.append(f"{path} cannot be read: {error}")
            continue
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                continue
            try:
                event = event_of(parse_json(line))
            except (ValueError, TypeError) as error:
                message = f"{path}:{number} is not an event: {error}"
                if broken is None:
                    raise ValueError(message) from error
                broken.append(message)
                continue
            is_asked = (kind is None or event.kind == kind) and (name is None or event.name == name)
            if is_asked and (launch is None or launch.wrote(event.launch, event.time)):
                yield event


_TEXT, _NUMBER = (str, NoneType), (int, NoneType)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("kind", "name", "host"), (str,)),
    **dict.fromkeys(("run", "launch", "boot", "device"), _TEXT),
    **dict.fromkeys(("attempt", "step", "micro_batch"), _NUMBER),
    "rank": (int,),
    "monotonic": (int, float, NoneType),
}
"""Types of the values of a line, by name; ``time`` and ``fields`` are checked further."""


def event_of(raw: Mapping[str, Any]) -> Event:
    """The event that a line has given; ValueError or TypeError where it gives none."""
    event = Event(**raw)
    if not isinstance(event.time, int | float) or not 0 <= event.time < _LAST_SECOND:
        raise ValueError(f"time must be seconds since the epoch, got {event.time!r}")
    for name, kinds in _KINDS.items():
        value = getattr(event, name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{name} is {value!r}")
    if not isinstance(event.fields, dict):
        raise TypeError(f"fields must be an object, got {event.fields!r}")
    return event


def in_time_order(files: Iterable[Sequence[Event]]) -> list[Event]:
    """Events of a run in the order in which they were, whatever the dates on its hosts are.

    By the number of the start; of an event that has none, by that of its launch, else by that of the event before it in
    its file. Within a start by the monotonic clock of each host, and these clocks side by side as they were when each
    host had begun the run (``start/run``, once all ranks had met). What has no monotonic clock, of an earlier version,
    is put by its date.

    Args:
        files: events of each file, in the order of its lines.

    Returns:
        All events, each with the number of its start as far as that is known.
    """
    rows = [list(one) for one in files]
    numbers = starts_of(event for one in rows for event in one)
    found: list[Event] = []
    for one in rows:
        last = None
        for event in one:
            number = event.attempt if event.attempt is not None else numbers.get(event.launch or "", last)
            last = number
            found.append(event if number == event.attempt else replace(event, attempt=number))
    return sorted(found, key=_place_in(found))


def starts_of(events: Iterable[Event]) -> dict[str, int]:
    """Number of the last start that each launch made, by the launch's id; those that made none are absent."""
    found: dict[str, int] = {}
    for event in events:
        if event.launch is not None and event.attempt is not None:
            found[event.launch] = max(event.attempt, found.get(event.launch, 0))
    return found


def _place_in(events: Sequence[Event]) -> Callable[[Event], tuple[int, float]]:
    """A key by which events are in order: number of the start, and seconds on the clock of the host of rank 0."""
    met: dict[tuple[int | None, str | None, str], tuple[float, float]] = {}
    first: dict[tuple[int | None, str | None, str], tuple[float, float]] = {}
    origin: dict[int | None, float] = {}
    for event in events:
        if event.monotonic is not None:
            is_start = (event.kind, event.name) == ("start", "run")
            if is_start and event.rank == 0:
                origin.setdefault(event.attempt, event.time)
            (met if is_start else first).setdefault(_clock_of(event), (event.time, event.monotonic))

    def place(event: Event) -> tuple[int, float]:
        clock = _clock_of(event)
        if event.monotonic is None or (clock not in met and clock not in first):
            return event.attempt or 0, event.time
        date, monotonic = met.get(clock) or first[clock]
        base = origin.get(event.attempt, date) if clock in met else date
        return event.attempt or 0, base + event.monotonic - monotonic

    return place


def _clock_of(event: Event) -> tuple[int | None, str | None, str]:
    return event.attempt, event.boot, event.host
