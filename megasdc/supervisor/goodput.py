"""Goodput: which part of the time of a supervised run made it get on, and where the rest went.

All parts add up to the time from the first plan of an attempt to the end of the run. They come from the journal, whose
entries say when attempts were planned and ended, and what each reported in between:

============  =======================================================================================================
productive    training steps that no later attempt took again
recomputed    training steps that one did, since nothing newer could be gone on from
paused        evaluations and saves for which training stood still
starting      from the plan of an attempt to its first step: processes, imports, groups, loading
detecting     from the last step that was reported to the end of an attempt that failed
ending        the same of one that was done: its last save
deciding      from the end of an attempt to the next plan, with its pause
queued        from where the allocation was left to the next plan: the scheduler's queue
============  =======================================================================================================

Steps after the last line of metrics are not seen (``logging.interval``): their time counts as detecting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.events import read_events
from megasdc.metrics.writer import read_metrics
from megasdc.supervisor.journal import FOLDER, Entry, read_journal

PARTS = ("productive", "recomputed", "paused", "starting", "detecting", "ending", "deciding", "queued")
_STOOD_STILL = ("time/eval_s", "checkpoint/save_s")
_WELL = ("done", "stopped", "preempted")


@dataclass(frozen=True)
class Trained:
    """What an attempt has reported.

    Args:
        resumed: step that it went on from; 0: it began.
        began_at: when its first step began, seconds since the epoch.
        last: step of its last report.
        last_at: when that was.
        paused_s: seconds of evaluations and saves in between.
    """

    resumed: int
    began_at: float
    last: int
    last_at: float
    paused_s: float


@dataclass(frozen=True)
class Goodput:
    """Seconds of a run by part.

    Args:
        parts: by the names in ``PARTS``.
        attempts: that were planned.
    """

    parts: dict[str, float]
    attempts: int

    @property
    def wall_s(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())

    @property
    def share(self) -> float:
        """Effective training time ratio: the productive part of all; 0 where no time has passed."""
        return self.parts["productive"] / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        attempts = f"{self.attempts} attempt{'s' if self.attempts > 1 else ''}"
        parts = ", ".join(f"{name} {seconds:,.1f} s" for name, seconds in self.parts.items())
        return f"{self.share:.1%} of {self.wall_s:,.0f} s in {attempts}: {parts}"


def trained_since(run_dir: Path, since: float) -> Trained | None:
    """What was reported in a run's folder since a time, in seconds since the epoch; None: no step."""
    rows = [row for row in read_metrics(run_dir) if row["time"] >= since] if run_dir.is_dir() else []
    steps = [row for row in rows if "train/loss" in row]
    if not steps:
        return None
    first, last = steps[0], steps[-1]
    resumed = [one.step for one in read_events(run_dir, kind="resume", rank=0) if one.time >= since]
    start = max((step for step in resumed if step is not None), default=0)
    paused_s = sum(row.get(name, 0.0) for row in rows if row["time"] <= last["time"] for name in _STOOD_STILL)
    began_at = first["time"] - (first["step"] - start) * first.get("speed/step_s", 0.0)
    return Trained(start, max(since, began_at), last["step"], last["time"], paused_s)


def goodput_of(run_dir: Path, now: float) -> Goodput | None:
    """That of a run from its folder, also while it runs; None: it was not supervised.

    Raises:
        StorageError: the journal was changed, or cannot be read.
    """
    entries = read_journal(run_dir / FOLDER)
    planned = [one.time for one in entries if one.kind == "planned"]
    return goodput(entries, now, trained_since(run_dir, planned[-1])) if planned else None


def goodput(entries: Sequence[Entry], now: float, running: Trained | None = None) -> Goodput | None:
    """Divide the time of a run.

    Args:
        entries: of its journal, oldest first.
        now: seconds since the epoch, where the last attempt has not ended.
        running: what that has reported.

    Returns:
        None: no attempt was planned.
    """
    attempts = _attempts(entries, now, running)
    if not attempts:
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    for number, one in enumerate(attempts):
        resumed = [later.trained.resumed for later in attempts[number + 1 :] if later.trained is not None]
        parts["deciding"] += one.next_s
        parts["queued"] += one.queued_s
        if one.trained is None:
            parts["starting"] += one.ended_at - one.planned_at
            continue
        trained = one.trained
        parts["starting"] += trained.began_at - one.planned_at
        parts["ending" if one.ended_well else "detecting"] += one.ended_at - trained.last_at
        window_s = trained.last_at - trained.began_at
        paused_s = min(trained.paused_s, window_s)
        done = trained.last - trained.resumed
        again = trained.last - min([trained.last, *resumed])
        recomputed_s = (window_s - paused_s) * min(again, done) / max(done, 1)
        parts["paused"] += paused_s
        parts["recomputed"] += recomputed_s
        parts["productive"] += window_s - paused_s - recomputed_s
    return Goodput(parts, len(attempts))


@dataclass(frozen=True)
class _Attempt:
    planned_at: float
    ended_at: float
    next_s: float
    queued_s: float
    ended_well: bool
    trained: Trained | None


def _attempts(entries: Sequence[Entry], now: float, running: Trained | None) -> list[_Attempt]:
    found: list[_Attempt] = []
    turns = [one for one in entries if one.kind in ("planned", "ended", "left", "finished")]
    for number, entry in enumerate(turns):
        if entry.kind != "planned":
            continue
        end = turns[number + 1] if number + 1 < len(turns) else None
        if end is None or end.kind != "ended":
            found.append(_Attempt(entry.time, max(entry.time, now), 0.0, 0.0, True, running))
            continue
        said: dict[str, Any] | None = end.fields.get("trained")
        later = turns[number + 2 :]
        after = later[0].time if later else end.time
        again = next((one.time for one in later if one.kind != "left"), max(after, now))
        queued_s = again - after if later and later[0].kind == "left" else 0.0
        well = end.fields["diagnosis"]["kind"] in _WELL
        trained = None if said is None else Trained(**said)
        found.append(_Attempt(entry.time, end.time, after - end.time, queued_s, well, trained))
    return found
