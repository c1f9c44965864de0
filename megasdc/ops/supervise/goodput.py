"""Goodput: which part of the time of a supervised run made it get on, and where the rest went.

All parts add up to the time from the first plan of an attempt to the end of the run: each attempt, up to the plan of
the next, is cut at moments that are in the records, and what lies between two of them belongs to one part. The moments
come from the journal; what an attempt reported in between is in its entry, see
``megasdc.ops.supervise.attempt_progress``.

============  =======================================================================================================
productive    training steps that no later attempt took again
recomputed    training steps that one did, since nothing newer could be gone on from
evaluating    evaluations
saving        training stood still for saves, on the disk and in memory
stalled       what slow steps took beyond the run's median: of lines whose steps took more than 1.5 times as long, or
              while a straggler was known; all since the last line of a running attempt that is silent
starting      from the plan of an attempt to its first step, but for loading: processes, imports, groups, model
loading       a checkpoint was looked for, checked and loaded, in an attempt that came to a first step
detecting     from the last step that was reported to the end of an attempt that failed
ending        the same of one that ended well
deciding      from the end of an attempt to the next plan, with its pause
idle          nobody went on: from the last entry of a supervisor that was killed to the next one, but while the attempt
              ran on; from the end of a run to the command that began it anew
queued        from where the allocation was left to the next plan: the scheduler's queue
============  =======================================================================================================

Steps after the last line of metrics are not seen (``logging.interval``): their time counts as detecting. Of an attempt
that runs it is productive so far, as long as it is not silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megasdc.common.origin import Launch, Moment
from megasdc.ops.supervise.attempt_process import attempt_file, load_result
from megasdc.ops.supervise.attempt_progress import AttemptProgress, trained_in
from megasdc.ops.supervise.history import TAKEN_OVER
from megasdc.ops.supervise.journal import FOLDER, JournalEntry, read_journal, without_steps

PARTS = (
    "productive",
    "recomputed",
    "evaluating",
    "saving",
    "stalled",
    "starting",
    "loading",
    "detecting",
    "ending",
    "deciding",
    "queued",
    "idle",
)
SILENT_S, SILENT_LINES = 120.0, 5
"""A running attempt is silent after so many seconds without a line of metrics, or so many times the usual."""
WELL = ("done", "stopped", "preempted")
"""Kinds of diagnosis of attempts that ended well."""


@dataclass(frozen=True)
class AttemptTime:
    """Where the time of an attempt went, up to the plan of the next.

    Args:
        number: the first is 1.
        hosts: that it used.
        planned_at: seconds since the epoch.
        resumed: step that it went on from; None: it came to no step.
        last: last step that it reported; None: likewise.
        ended: kind of its diagnosis; None: it runs.
        text: the evidence in a sentence; empty: it runs.
        decided: what was done then; empty: nothing yet.
        parts: seconds by the names in ``PARTS``.
        unreported_s: of the productive ones, those since its last line.
    """

    number: int
    hosts: tuple[str, ...]
    planned_at: float
    resumed: int | None
    last: int | None
    ended: str | None
    text: str
    decided: str
    parts: dict[str, float]
    unreported_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by part.

    Args:
        attempts: in their order, at least one.

    Attributes:
        parts: by the names in ``PARTS``.
        wall_s: of all parts.
        effective_ratio: effective training time ratio: the productive part of all; 0 where no time has passed.
    """

    attempts: tuple[AttemptTime, ...]
    parts: dict[str, float] = field(init=False)
    wall_s: float = field(init=False)
    effective_ratio: float = field(init=False)

    def __post_init__(self) -> None:
        parts = {part: sum(one.parts[part] for one in self.attempts) for part in PARTS}
        wall_s = sum(parts.values())
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "wall_s", wall_s)
        object.__setattr__(self, "effective_ratio", parts["productive"] / wall_s if wall_s else 0.0)

    @property
    def unreported_s(self) -> float:
        """Productive seconds of the attempt that runs since its last line: its steps are not reported yet."""
        return self.attempts[-1].unreported_s

    def __str__(self) -> str:
        count = len(self.attempts)
        parts = ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in self.parts.items() if seconds >= 0.05)
        open_s = self.unreported_s
        note = f" ({open_s:,.1f} s of the productive ones are not reported yet)" if open_s >= 0.05 else ""
        attempts = f"{count} attempt{'s' if count > 1 else ''}"
        return f"{self.effective_ratio:.1%} of {self.wall_s:,.0f} s in {attempts}: {parts}{note}"


def goodput_of(run_dir: Path, now: float) -> Goodput | None:
    """That of a run from its folder, also while it runs; None: it was not supervised.

    Args:
        now: seconds since the epoch; counts only where the journal's last entry was written on another host, or by an
            earlier version.

    Raises:
        StorageError: the journal was changed, or cannot be read.
    """
    folder = run_dir / FOLDER
    entries = read_journal(folder)
    planned = [one for one in entries if one.kind == "planned"]
    if not planned:
        return None
    fronts = {}
    for one in planned:
        path = attempt_file(folder, one.fields["attempt"], one.fields["launch_id"], "json")
        if (result := load_result(path)) is not None:
            own = Moment("", result.ended_at, result.boot, result.monotonic)
            is_known = one.boot is not None and one.boot == result.boot
            fronts[one.fields["attempt"]] = one.time + one.seconds_to(own) if is_known else result.ended_at
    last, plan = entries[-1], planned[-1]
    now = last.time + last.seconds_to(replace(Moment.now(), time=now))
    launch = Launch(plan.fields["launch_id"], plan.time, plan.monotonic, plan.boot)
    return goodput(entries, now, trained_in(run_dir, launch), fronts)


def goodput(
    entries: Sequence[JournalEntry],
    now: float,
    running: AttemptProgress | None = None,
    fronts: Mapping[int, float] | None = None,
) -> Goodput | None:
    """Divide the time of a run.

    Args:
        entries: of its journal, oldest first.
        now: seconds since the epoch, where the run is not finished; as the date of the last entry is.
        running: what the last attempt has reported, if it has not ended.
        fronts: when the front of an attempt ended, by number, as the date of its plan is; of those not killed.

    Returns:
        None: no attempt was planned.
    """
    turns = _turns(entries, running, fronts or {})
    if not turns:
        return None
    last = turns[-1]
    since_s = 0.0 if not entries else without_steps(entries)[-1].time - entries[-1].time
    end = now + since_s if last.finished_at is None or last.is_reopened else last.finished_at
    ends = [one.plan.time for one in turns[1:]] + [max(last.plan.time, end)]
    found = []
    for number, (turn, until) in enumerate(zip(turns, ends, strict=True)):
        later = [one.trained.resumed for one in turns[number + 1 :] if one.trained is not None]
        found.append(_divide(turn, until, later))
    return Goodput(tuple(found))


@dataclass
class _Turn:
    """What the journal has from the plan of an attempt to that of the next.

    Args:
        trained: what the attempt reported.
        front_at: when its front ended; None: it runs, or was killed.
        idle: spans in which there was no supervisor.
        left_at: when the job that the attempt ran in was left for another.
        is_reopened: the run was finished, and begun anew.
        by_s: by how many seconds its times are later than the date of its plan, which was set before.
    """

    plan: JournalEntry
    front_at: float | None
    trained: AttemptProgress | None = None
    ended: JournalEntry | None = None
    decided: JournalEntry | None = None
    finished_at: float | None = None
    idle: list[tuple[float, float]] = field(default_factory=list)
    left_at: float | None = None
    is_reopened: bool = False
    by_s: float = 0.0

    def record_progress(self, trained: AttemptProgress | None) -> None:
        """Record what the attempt has reported, whose times are as the date of its plan was."""
        if trained is not None:
            began_at, last_at = trained.began_at + self.by_s, trained.last_at + self.by_s
            self.trained = replace(trained, began_at=began_at, last_at=last_at)

    def add(self, entry: JournalEntry, before: JournalEntry) -> None:
        """Take one more entry, and the one before it."""
        match entry.kind:
            case "ended":
                self.ended, said = entry, entry.fields["trained"]
                self.record_progress(None if said is None else AttemptProgress(**said))
            case "decided":
                self.decided = entry
            case "left":
                self.left_at = entry.time
            case "finished":
                self.finished_at = entry.time
            case "opened" if self.finished_at is not None:
                self.idle.append((self.finished_at, entry.time))
                self.is_reopened = True
            case _ if entry.kind == TAKEN_OVER:
                self.idle.append((before.time, entry.time))


def _turns(
    entries: Sequence[JournalEntry], running: AttemptProgress | None, fronts: Mapping[int, float]
) -> list[_Turn]:
    """By the times of a clock that nobody sets; what the date of a plan was has to be known for what was reported."""
    found: list[_Turn] = []
    steady = without_steps(entries)
    for number, entry in enumerate(steady):
        if entry.kind == "planned":
            found.append(_Turn(entry, None, by_s=entry.time - entries[number].time))
            if (front_at := fronts.get(entry.fields["attempt"])) is not None:
                found[-1].front_at = front_at + found[-1].by_s
        elif found:
            found[-1].add(entry, steady[number - 1])
    if found and found[-1].ended is None:
        found[-1].record_progress(running)
    return found


class _Clock:
    """Hands out the time from one moment to another; a moment before the one that it has come to takes none."""

    def __init__(self, now: float, end: float) -> None:
        self._now, self._end = now, end
        self.parts = dict.fromkeys(PARTS, 0.0)

    def spend(self, part: str, until: float) -> None:
        """Give all time until a moment to a part."""
        until = max(self._now, min(until, self._end))
        self.parts[part] += until - self._now
        self._now = until

    def move(self, part: str, to: str, seconds: float) -> None:
        """Give seconds of a part to another, at most all of them."""
        moved = min(seconds, self.parts[part])
        self.parts[part] -= moved
        self.parts[to] += moved


def _divide(turn: _Turn, until: float, later: Sequence[int]) -> AttemptTime:
    """Divide the time of an attempt up to the plan of the next; ``later``: steps that later ones went on from."""
    clock, trained, ended = _Clock(turn.plan.time, until), turn.trained, turn.ended
    if trained is not None:
        clock.spend("starting", trained.began_at)
        clock.move("starting", "loading", trained.loading_s)
        _divide_steps(clock, trained, later)
    tail = _tail(turn, until)
    end = until if ended is None else ended.time
    over_at = _over_at(turn, end)
    idle = [*turn.idle, *([(over_at, until)] if ended is None and turn.front_at is not None else [])]
    for since, to in idle:
        if since < end:
            clock.spend(tail, max(since, over_at))
        else:
            clock.spend(tail, end)
            clock.spend("deciding", since)
        clock.spend("idle" if turn.left_at is None or to <= turn.left_at else "queued", to)
    clock.spend(tail, end)
    clock.spend("deciding", until if turn.left_at is None else turn.left_at)
    clock.spend("queued", until)
    diagnosis: dict[str, Any] = {"kind": None, "text": ""} if ended is None else ended.fields["diagnosis"]
    return AttemptTime(
        turn.plan.fields["attempt"],
        tuple(turn.plan.fields["slots"]),
        turn.plan.time,
        None if trained is None else trained.resumed,
        None if trained is None else trained.last,
        diagnosis["kind"],
        diagnosis["text"],
        "" if turn.decided is None else turn.decided.fields["action"],
        clock.parts,
        max(0.0, until - trained.last_at) if trained is not None and tail == "productive" else 0.0,
    )


def _over_at(turn: _Turn, end: float) -> float:
    """When the processes of an attempt had ended, as far as it is known: what runs without a supervisor is not idle."""
    if turn.front_at is not None:
        return min(turn.front_at, end)
    if turn.ended is None:
        return end
    return turn.plan.time if turn.trained is None else min(turn.trained.last_at, end)


def _divide_steps(clock: _Clock, trained: AttemptProgress, later: Sequence[int]) -> None:
    """Divide the time from the first step to the last report."""
    clock.spend("productive", trained.last_at)
    clock.move("productive", "evaluating", trained.evaluating_s)
    clock.move("productive", "saving", trained.saving_s)
    clock.move("productive", "stalled", trained.stalled_s)
    done = trained.last - trained.resumed
    again = min(done, trained.last - min([trained.last, *later]))
    clock.move("productive", "recomputed", clock.parts["productive"] * again / max(done, 1))


def _tail(turn: _Turn, until: float) -> str:
    """The part of the time between the last report and the end of an attempt."""
    if turn.trained is None:
        return "starting"
    if turn.ended is not None:
        return "ending" if turn.ended.fields["diagnosis"]["kind"] in WELL else "detecting"
    if turn.front_at is not None:
        return "detecting"
    silent = until - turn.trained.last_at > max(SILENT_S, SILENT_LINES * turn.trained.line_s)
    return "stalled" if silent else "productive"
