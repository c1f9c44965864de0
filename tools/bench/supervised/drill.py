"""One run of a campaign: what was done to it, what its supervisor made of that, and whether it ended right."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasdc.events import read_events
from megasdc.ops.supervise.goodput import PARTS, AttemptTime, goodput_of
from megasdc.ops.supervise.history import HOSTS, TESTED, JournalHistory
from megasdc.ops.supervise.journal import FOLDER, JournalEntry, read_journal, without_steps
from tools.bench.campaign import Layout
from tools.bench.supervised.faults import KINDS

MORE_ATTEMPTS = 3
"""Than faults, which a run may take: a fault may end two of them."""
SLACK_S = 20.0
"""Least seconds by which the divided time may differ from the measured one, which has the making of the hosts, too."""
_AFTER = ("deciding", "queued", "idle")
"""Parts of the time of an attempt that follow its end."""


@dataclass(frozen=True)
class Strike:
    """A fault that came.

    Args:
        kind: of ``KINDS``.
        at: seconds since the epoch.
    """

    kind: str
    at: float


@dataclass(frozen=True)
class Tried(AttemptTime):
    """An attempt.

    Args:
        source: where the state came from: memory, partner, disk; empty: it began anew, or came to no step.
    """

    source: str = ""

    @property
    def ended_at(self) -> float:
        """When it ended, seconds since the epoch."""
        return self.planned_at + self.seconds - sum(self.parts[part] for part in _AFTER)


@dataclass(frozen=True)
class Excluded:
    """A host that was not used for a while.

    Args:
        kind: of the diagnosis that it was replaced for; empty: of its use as a spare.
        seconds: until it had passed a test, or to the end of the run.
        returned: whether it had passed.
    """

    host: str
    kind: str
    seconds: float
    returned: bool


@dataclass(frozen=True)
class Drill:
    """A run.

    Args:
        kinds: of its faults, in turn.
        layout: tensor, pipeline, data.
        strikes: of those that came.
        attempts: in their order.
        excluded: hosts that were not used for a while.
        problems: what was not right, a line each.
        seconds: of the whole run.
        plain_s: of a run without a fault; None: it was not compared with one.
        truthful: the reason that it gave for an end for want of hosts; empty: it has ended otherwise.
        told: what faults have done, a line each.
    """

    kinds: tuple[str, ...]
    layout: Layout
    strikes: tuple[Strike, ...]
    attempts: tuple[Tried, ...]
    excluded: tuple[Excluded, ...]
    problems: tuple[str, ...]
    seconds: float
    plain_s: float | None = None
    truthful: str = ""
    told: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        """Whether all was."""
        return not self.problems

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of all attempts, see ``megasdc.ops.supervise.goodput``."""
        return {part: sum(one.parts[part] for one in self.attempts) for part in PARTS}

    @property
    def recoveries(self) -> list[Recovery]:
        """From the end of each attempt that was not the last to the first step of one after it."""
        found = []
        for number, ended in enumerate(self.attempts[:-1]):
            later = self.attempts[number + 1 :]
            count = next((count for count, one in enumerate(later) if one.resumed is not None), None)
            if count is not None:
                lost_s = sum(one.seconds for one in later[:count])
                found.append(Recovery(ended, later[count], lost_s))
        return found

    def struck(self, strike: Strike) -> Tried | None:
        """The attempt that a fault met, or that began after it; None: the run was over."""
        return next((one for one in self.attempts if strike.at < one.ended_at), None)


@dataclass(frozen=True)
class Recovery:
    """From the end of an attempt to the first step of the next that came to one.

    Args:
        lost_s: seconds of attempts between them, which came to none.
    """

    ended: Tried
    next: Tried
    lost_s: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by what they were for."""
        waited = {part: self.ended.parts[part] for part in _AFTER}
        return {
            **waited,
            "lost attempts": self.lost_s,
            **{one: self.next.parts[one] for one in ("starting", "loading")},
        }

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(self.parts.values())


def read_drill(kinds: Sequence[str], layout: Layout, run: Path, strikes: Sequence[Strike], seconds: float) -> Drill:
    """Read from the folder of a run how it went, with the problems that its journal shows."""
    entries = read_journal(run / FOLDER)
    history, goodput = JournalHistory.of(entries), goodput_of(run, time.time())
    attempts = [] if goodput is None else [_tried(run, one) for one in goodput.attempts]
    problems = []
    if len(attempts) > 1 + len(kinds) * 2 + MORE_ATTEMPTS:
        problems.append(f"it took {len(attempts)} attempts")
    came = tuple(sorted([*strikes, *_own_strikes(kinds, run)], key=lambda one: one.at))
    problems += used_up(kinds, attempts, came)
    passed = [host for host, one in history.replaced.items() if one.test is not None and one.test.passed]
    problems += [f"{host} is away, although its test has passed" for host in passed]
    problems += used_again(entries)
    if goodput is not None and abs(goodput.wall_s - seconds) > 0.3 * seconds + SLACK_S:
        problems.append(f"its time is divided as {goodput}, and it took {seconds:.1f} s")
    if goodput is not None and attempts[-1].last and not goodput.parts["productive"]:
        problems.append(f"no time made it get on: {goodput}")
    return Drill(tuple(kinds), layout, came, tuple(attempts), excluded(entries), tuple(problems), round(seconds, 1))


def _own_strikes(kinds: Sequence[str], run: Path) -> list[Strike]:
    """Faults that come by themselves: when the first event of theirs was."""
    found = []
    for kind, event in ((kind, KINDS[kind].event) for kind in kinds):
        if event is not None and (times := [one.time for one in read_events(run, kind=event[0], name=event[1])]):
            found.append(Strike(kind, min(times)))
    return found


def _tried(run: Path, attempt: AttemptTime) -> Tried:
    """An attempt, with where its state came from."""
    source, until = "disk" if attempt.resumed else "", attempt.planned_at + attempt.seconds
    for one in read_events(run, kind="resume", name="memory", rank=0):
        if attempt.resumed and attempt.planned_at <= one.time < until:
            source = "partner" if "partners" in one.fields["origin"] else "memory"
    return Tried(
        **{**vars(attempt), "parts": {part: round(one, 2) for part, one in attempt.parts.items()}}, source=source
    )


def excluded(entries: Sequence[JournalEntry]) -> tuple[Excluded, ...]:
    """Hosts that were replaced, for how long each, to the last entry at most."""
    away, found, kind = dict[str, tuple[str, float]](), list[Excluded](), ""
    for entry in (entries := without_steps(entries)):
        if entry.kind == "ended":
            kind = entry.fields["diagnosis"]["kind"]
        elif entry.kind == "decided":
            away |= dict.fromkeys(entry.fields["replaced"], (kind, entry.time))
        elif entry.kind == TESTED:
            host, passed = entry.fields["host"], entry.fields["exit_code"] == 0
            if passed and host in away:
                why, since = away.pop(host)
                found.append(Excluded(host, why, round(entry.time - since, 1), returned=True))
            elif not passed:
                away.setdefault(host, ("", entry.time))
    end = entries[-1].time if entries else 0.0
    left = [Excluded(host, why, round(end - since, 1), returned=False) for host, (why, since) in away.items()]
    return (*found, *left)


def blamed_wrongly(entries: Sequence[JournalEntry], struck: Collection[str]) -> list[str]:
    """Hosts that attempts' ends were put down to, or that were not used, and that no fault has struck."""
    found: list[str] = []
    for entry in entries:
        said = entry.fields
        if entry.kind == "ended":
            what, hosts = "blamed", said["diagnosis"]["hosts"]
        elif entry.kind == "decided":
            what, hosts = "replaced", said["replaced"]
        else:
            what, hosts = "found unfit", [said["host"]] if entry.kind == TESTED and said["exit_code"] else []
        found += [f"{host} is {what}, and no fault has struck it" for host in hosts if host not in struck]
    return list(dict.fromkeys(found))


def used_up(kinds: Sequence[str], attempts: Sequence[Tried], strikes: Sequence[Strike] = ()) -> list[str]:
    """Attempts that ended for faults that the run has to wait out: all, where it had no others.

    Ranks that another fault ends while the folder is full cannot write how they have ended, which is not for want of
    room.
    """
    alone = bool(kinds) and all(KINDS[kind].waited_out for kind in kinds)
    waited = any(KINDS[kind].waited_out for kind in kinds)
    others = [one.at for one in strikes if not KINDS[one.kind].waited_out]

    def gave_up(one: Tried) -> bool:
        return one.ended == "folder_full" and not any(one.planned_at <= at < one.ended_at for at in others)

    ended = [one for one in attempts if (waited and gave_up(one)) or (alone and one.ended != "done")]
    return [f"attempt {one.number} ended as {one.ended}, for a fault that is waited out" for one in ended]


def used_again(entries: Sequence[JournalEntry]) -> list[str]:
    """Hosts that computed wrong results and were used later, or were in an allocation that was to be without them."""
    wrong, away, ended = set[str](), set[str](), ""
    found: list[str] = []
    for entry in entries:
        said = entry.fields
        if entry.kind == "ended":
            ended = said["diagnosis"]["kind"]
        elif entry.kind == "decided" and ended == "corrupt_again":
            wrong |= set(said["replaced"])
        elif entry.kind == "left":
            away |= set(said["away"])
        elif entry.kind == HOSTS:
            found += [f"{host} is in a later allocation" for host in sorted(away & said["slots"].keys())]
        elif entry.kind == "planned":
            found += [f"{host} is used again" for host in sorted(wrong & said["slots"].keys())]
    return found
