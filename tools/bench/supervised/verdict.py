"""Result of a campaign of supervised runs, and its tables: what was found, what was decided, where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from megasdc.ops.supervise.diagnosis import KINDS as DIAGNOSES
from megasdc.ops.supervise.goodput import PARTS
from tools.bench.campaign import layout_text, tables
from tools.bench.result import Report, Result, table
from tools.bench.supervised.drill import Drill, Recovery, Strike
from tools.bench.supervised.faults import KINDS


@dataclass(frozen=True)
class SupervisedResult(Result):
    """All runs."""

    drills: Sequence[Drill] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether all was right in all of them."""
        return all(one.right for one in self.drills)

    def report(self) -> Report:
        """Counts by layout and by kind of fault, what was diagnosed, how long it took, and what was not right."""
        columns = ("runs", "right", "attempts, median and most", "seconds, median and longest")
        yield from tables("runs", self.drills, {"layout": layout_text}, columns, _row)
        seconds = ("s to its end", "s to a step", "s longer")
        titles = ("kind", "faults", "runs", "right", "the attempt ended as", "decided", *seconds)
        yield table("faults by kind", titles, self._by_kind())
        ended = Counter(one.ended or "" for drill in self.drills for one in drill.attempts)
        rows = [(DIAGNOSES[kind].title, str(count)) for kind, count in sorted(ended.items()) if kind]
        yield table("attempts by how they ended", ("diagnosis", "attempts"), rows)
        yield table("seconds from the end of an attempt to the next step, by what that goes on from", *self._recovery())
        yield table("hosts that were not used for a while", *self._excluded())
        parts = {part: sum(one.parts[part] for one in self.drills) for part in PARTS}
        whole = max(sum(parts.values()), 1e-9)
        shares = [(part, f"{one:,.0f}", f"{one / whole:.1%}") for part, one in parts.items()]
        yield table("where the time went", ("part", "seconds", "share"), shares)
        for number, one in enumerate(self.drills):
            for problem in one.problems:
                yield f"run {number}, {'x'.join(map(str, one.layout))}, {', '.join(one.kinds)}: {problem}"

    def _by_kind(self) -> list[tuple[str, ...]]:
        rows = []
        for name, kind in KINDS.items():
            runs = [one for one in self.drills if name in one.kinds]
            strikes = [(drill, one) for drill in runs for one in drill.strikes if one.kind == name]
            if runs:
                rows.append((kind.title, str(len(strikes)), *_counts(runs), *_found(strikes), _longer(runs)))
        count = sum(len(one.strikes) for one in self.drills)
        return [*rows, ("all", str(count), *_counts(self.drills), "", "", "", "", _longer(self.drills))]

    def _recovery(self) -> tuple[Sequence[str], list[tuple[str, ...]]]:
        recoveries = [one for drill in self.drills for one in drill.recoveries]
        parts = ("deciding", "queued", "idle", "lost attempts", "starting", "loading")
        rows = []
        for source in ("memory", "partner", "disk", ""):
            found = [one for one in recoveries if one.next.source == source]
            if found:
                rows.append((source or "the beginning", *_times(found, parts)))
        if recoveries:
            rows.append(("all", *_times(recoveries, parts)))
        return ("from", "times", "median", "longest", *(f"{part}, median" for part in parts)), rows

    def _excluded(self) -> tuple[Sequence[str], list[tuple[str, ...]]]:
        excluded = [one for drill in self.drills for one in drill.excluded]
        rows = list[tuple[str, ...]]()
        for kind in sorted({one.kind for one in excluded}):
            found = [one for one in excluded if one.kind == kind]
            title = DIAGNOSES[kind].title if kind else "a spare failed its test"
            minutes = sum(one.seconds for one in found) / 60
            rows.append((title, str(len(found)), str(sum(one.returned for one in found)), f"{minutes:.1f}"))
        return ("why", "hosts", "given back", "host-minutes"), rows


def _found(strikes: Sequence[tuple[Drill, Strike]]) -> tuple[str, str, str, str]:
    """How the attempts that faults met have ended, what was decided, and medians of times."""
    met = [(drill, strike, drill.struck(strike)) for drill, strike in strikes]
    whole = [(drill, strike, tried) for drill, strike, tried in met if tried is not None and tried.ended]
    ended_s = [tried.ended_at - max(strike.at, tried.planned_at) for _, strike, tried in whole if tried.ended != "done"]
    next_s = [one.seconds for drill, _, tried in whole for one in drill.recoveries if one.ended == tried]
    tries = [tried for _, _, tried in whole]
    return (
        _listed(one.ended or "" for one in tries),
        _listed(one.decided for one in tries),
        _median(ended_s),
        _median(next_s),
    )


def _longer(runs: Sequence[Drill]) -> str:
    """Median of the seconds that runs took longer than without a fault."""
    return _median([one.seconds - one.plain_s for one in runs if one.plain_s is not None])


def _listed(names: Iterable[str]) -> str:
    """``stuck 3, done 1``, the most frequent one first."""
    return ", ".join(f"{name} {count}" for name, count in Counter(names).most_common())


def _times(found: Sequence[Recovery], parts: Sequence[str]) -> tuple[str, ...]:
    seconds = [one.seconds for one in found]
    medians = (f"{median(one.parts[part] for one in found):.1f}" for part in parts)
    return str(len(found)), f"{median(seconds):.1f}", f"{max(seconds):.1f}", *medians


def _median(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f}" if seconds else "-"


def _row(drills: Sequence[Drill]) -> tuple[str, ...]:
    attempts, seconds = [len(one.attempts) for one in drills], [one.seconds for one in drills]
    return (
        *_counts(drills),
        f"{median(attempts):g}, {max(attempts)}",
        f"{median(seconds):.0f}, {max(seconds):.0f}",
    )


def _counts(drills: Sequence[Drill]) -> tuple[str, str]:
    return str(len(drills)), str(sum(one.right for one in drills))
