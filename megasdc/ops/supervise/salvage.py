"""A journal that lost lines is completed: from the records of attempts beside it, and from the lines that are left.

An entry that its successors cannot do without is made again: the plan of an attempt from its hostfile, its end from
its result, a decision from the hosts and settings that the next attempt has. What none of these tells is not made up:
an attempt whose diagnosis is lost has ended in a kind of its own, and a test of a host is done again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import LaunchError
from megasdc.ops.launch.hosts import read_hostfile
from megasdc.ops.supervise.attempt_process import file_of, load_result
from megasdc.ops.supervise.diagnosis import LOST, Diagnosis
from megasdc.ops.supervise.history import GROWING, NO_TURNS, History
from megasdc.ops.supervise.journal import Entry
from megasdc.ops.supervise.policy import Action, Decision

_HOSTFILE = re.compile(r"attempt_(\d+)_(.+)\.hosts")
_TEXT = "the line of the journal that said it was damaged"


def complete(folder: Path, name: str, job: str, kept: Sequence[Entry]) -> list[Entry]:
    """The entries of whole lines, and those that had to be made again between and behind them.

    Args:
        folder: of the supervisor, with the records of attempts.
        name: of what is run.
        job: that the hosts belong to now.
        kept: entries of whole lines.
    """
    found = _Completed(folder, name, job)
    for entry in kept:
        found.take(entry)
    found.plan_until(None, at=kept[-1].time if kept else 0.0)
    return found.entries


@dataclass(frozen=True)
class _Record:
    """What the hostfile of an attempt says; ``time``: when it was written, just after the attempt was planned."""

    launch_id: str
    slots: dict[str, int]
    time: float


class _Completed:
    """Entries in the order of turns; ``history``: what they tell."""

    def __init__(self, folder: Path, name: str, job: str) -> None:
        self._folder, self._name, self._job = folder, name, job
        self._records: dict[int, _Record] = {}
        for path in sorted(folder.glob("attempt_*.hosts"), key=lambda one: one.stat().st_mtime):
            if match := _HOSTFILE.fullmatch(path.name):
                with suppress(LaunchError):  # the record is damaged, too
                    self._records[int(match[1])] = _Record(match[2], read_hostfile(path), path.stat().st_mtime)
        self.entries: list[Entry] = []
        self.history = History()

    def take(self, entry: Entry) -> None:
        """Add an entry of the journal, and before it what it follows from; not one whose attempt is not known."""
        kind, at = entry.kind, entry.time
        if not self.history.stage and kind not in ("opened", *NO_TURNS):
            self._add("opened", at, config=self._name)
        if kind == "planned":
            self.plan_until(entry.fields["attempt"], at)
            self._decide_for(entry)
        needed = {"started": "planned", GROWING: "planned", "ended": "started", "decided": "ended"}.get(kind)
        if needed is not None and not self._bring_to(needed, at):
            return
        if kind in ("opened", "left", "finished") and self.history.stage in ("planned", "started"):
            self._bring_to("ended", at)
        self._append(entry)

    def plan_until(self, number: int | None, at: float) -> None:
        """Add attempts that have a record and no plan: all before a number, or all there are."""
        last = 0 if self.history.attempt is None else self.history.attempt.number
        since = self._records[last].time if last in self._records else 0.0  # older ones are of another journal
        for missing, record in sorted(self._records.items()):
            if missing > last and record.time >= since and (number is None or missing < number):
                self._plan(missing, at)
        if number is not None and self.history.stage in ("planned", "started"):
            self._bring_to("ended", at)

    def _bring_to(self, stage: str, at: float) -> bool:
        """Add the turns that lead to a stage of the next or the present attempt; whether that could be done."""
        order = ["planned", "started", "ended"]
        if self.history.stage not in order[: order.index(stage) + 1]:
            number = 1 if self.history.attempt is None else self.history.attempt.number + 1
            if number not in self._records:
                return False
            self._plan(number, at)
        if self.history.stage == stage:
            return True
        if self.history.stage == "planned" and stage != "planned":
            self._add("started", at, pid=0, ticks=0)
        if self.history.stage == "started" and stage == "ended":
            self._end(at)
        return self.history.stage == stage

    def _plan(self, number: int, at: float) -> None:
        if not self.history.stage:
            self._add("opened", at, config=self._name)
        if self.history.stage in ("planned", "started"):
            self._bring_to("ended", at)
        record = self._records[number]
        planned = {"attempt": number, "slots": record.slots, "launch_id": record.launch_id, "job": self._job}
        planned["skips_snapshots"] = self.history.skips_snapshots
        entry = Entry(
            0, record.time, "planned", {**planned, "at_most": self.history.at_most, "skip": self.history.skip}
        )
        self._decide_for(entry)
        self._append(entry)

    def _end(self, at: float) -> None:
        attempt = self.history.attempt
        assert attempt is not None, "it was planned"
        result = load_result(file_of(self._folder, attempt.number, attempt.launch_id, "json"))
        code = None if result is None else result.exit_code
        step = self.history.failures[-1].diagnosis.step if self.history.failures else 0
        diagnosis = asdict(Diagnosis(LOST, (), step, _TEXT))
        self._add("ended", at, exit_code=code, diagnosis=diagnosis, trained=None)

    def _decide_for(self, planned: Entry) -> None:
        """Add the decision that a plan shows, where that is lost: hosts that it does without, where it goes back to."""
        history = self.history
        if history.stage != "ended" or history.attempt is None:
            return
        named = history.failures[-1].diagnosis
        away = [host for host in history.attempt.hosts if host not in planned.fields["slots"]]
        replaced = away if named.kind == LOST else [host for host in away if host in named.hosts]
        skip = [one for one in map(tuple, planned.fields.get("skip", ())) if one not in history.skip]
        at_most = planned.fields.get("at_most")
        back = None if not skip and at_most in (None, history.at_most) else {"at_most": at_most, "skip": None}
        action = Action.BACK if back else Action.REPLACE if replaced else Action.AGAIN
        skips = planned.fields.get("skips_snapshots", False)
        decision = asdict(Decision(action, _TEXT, tuple(replaced), skips_snapshots=skips))
        if back is not None:
            back["skip"] = skip[0] if skip else None
        self._add("decided", planned.time, **{**decision, "action": action.value, "back": back})

    def _add(self, kind: str, at: float, **fields: Any) -> None:
        self._append(Entry(0, at, kind, json.loads(json.dumps(fields))))

    def _append(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.history.add(entry)
