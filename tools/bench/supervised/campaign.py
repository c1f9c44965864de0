"""Supervised runs, ``python -m tools.bench supervised``: whether runs with faults end by themselves, as without them.

Real ranks train a tiny model between test hosts, over real SSH, under ``megasdc supervise`` on a host of its own; there
is one spare. Faults come at random moments, also while a start recovers from the one before. Nobody does anything, but
for the command of a supervisor that was killed, and for hosts that get their power or their cable back. Each run must
end with exit code 0, with the losses, the last checkpoint and the place in the data of a run without a fault, bit for
bit, with few attempts, and with no healthy host away whose test has passed.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from megasdc.errors import LaunchError
from megasdc.supervisor.diagnosis import KINDS as DIAGNOSES
from megasdc.supervisor.goodput import PARTS, goodput_of
from megasdc.supervisor.history import HOSTS, History
from megasdc.supervisor.journal import FOLDER, Entry, read_journal
from tools.bench.checkpoints.recovery_checks import End, read_end, why_different
from tools.bench.drills import Layout, tables
from tools.bench.health.hangs import prepare_texts
from tools.bench.log import RunLog
from tools.bench.machine import describe_machine
from tools.bench.rank import scratch_folder
from tools.bench.result import Progress, Report, Result, table
from tools.bench.supervised.config import STEP_S, STEPS, write_config
from tools.bench.supervised.faults import KINDS
from tools.bench.supervised.options import SupervisedOptions
from tools.bench.supervised.slurm import in_slurm
from tools.bench.supervised.target import Target, over_ssh
from tools.hosts import unavailable_reason
from tools.slurm_hosts import slurm_unavailable_reason

Engine = Callable[[Path, int, int, random.Random], AbstractContextManager[Target]]
"""Makes hosts for a run."""

PROGRESS = (3, 12)
"""Steps between two faults, least and most; or the next one comes while a start recovers."""
IN_RECOVERY = 0.3
"""Share of faults that do not wait for a step."""
GIVE_UP_S = 600.0
MORE_ATTEMPTS = 3
"""Than faults, which a run may take: a fault may end two of them."""
_POLL_S = 0.3


@dataclass(frozen=True)
class Drill:
    """A run.

    Args:
        kinds: of its faults, in turn.
        layout: tensor, pipeline, data.
        attempts: diagnosis and hosts of each.
        problems: what was not right, a line each.
        seconds: of the whole run.
        away: hosts that were not used at the end.
        parts: seconds of the run, see ``megasdc.supervisor.goodput``.
        recoveries: what ended an attempt, and seconds from its end to the first step of the next one that had a step.
    """

    kinds: tuple[str, ...]
    layout: Layout
    attempts: tuple[tuple[str, tuple[str, ...]], ...]
    problems: tuple[str, ...]
    seconds: float
    away: tuple[str, ...]
    parts: dict[str, float]
    recoveries: tuple[tuple[str, float], ...]

    @property
    def right(self) -> bool:
        """Whether all was."""
        return not self.problems


@dataclass(frozen=True)
class SupervisedResult(Result):
    """All runs."""

    drills: Sequence[Drill] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether all was right in all of them."""
        return all(one.right for one in self.drills)

    def report(self) -> Report:
        """Counts by kind of fault and by layout, what was diagnosed, and what was not right."""
        columns = ("runs", "right", "attempts, median and most", "seconds, median and longest")
        _, by_layout = tables("runs", self.drills, lambda one: ", ".join(one.kinds), _row, columns)
        yield by_layout
        with_kind = {name: [one for one in self.drills if name in one.kinds] for name in KINDS}
        counted = [(KINDS[name].title, *_counts(drills)) for name, drills in with_kind.items() if drills]
        yield table("runs by a kind of fault that they had", ("kind", "runs", "right"), counted)
        found: dict[str, int] = {}
        for kind, _ in (attempt for one in self.drills for attempt in one.attempts):
            found[kind] = found.get(kind, 0) + 1
        rows = [(DIAGNOSES[kind].title, str(count), self._recovery(kind)) for kind, count in sorted(found.items())]
        titles = ("diagnosis", "attempts", "seconds to the next step, median and longest")
        yield table("attempts by how they ended", titles, rows)
        seconds = {part: sum(one.parts.get(part, 0.0) for one in self.drills) for part in PARTS}
        shares = [
            (part, f"{one:,.0f}", f"{one / max(sum(seconds.values()), 1e-9):.1%}") for part, one in seconds.items()
        ]
        yield table("where the time went", ("part", "seconds", "share"), shares)
        for number, one in enumerate(self.drills):
            for problem in one.problems:
                yield f"run {number}, {'x'.join(map(str, one.layout))}, {', '.join(one.kinds)}: {problem}"

    def _recovery(self, kind: str) -> str:
        seconds = sorted(one for drill in self.drills for found, one in drill.recoveries if found == kind)
        return f"{seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f}" if seconds else "-"


def _row(name: str, drills: Sequence[Drill]) -> tuple[str, ...]:
    attempts, seconds = sorted(len(one.attempts) for one in drills), sorted(one.seconds for one in drills)
    middle = len(drills) // 2
    return (
        name,
        *_counts(drills),
        f"{attempts[middle]}, {attempts[-1]}",
        f"{seconds[middle]:.0f}, {seconds[-1]:.0f}",
    )


def _counts(drills: Sequence[Drill]) -> tuple[str, str]:
    return str(len(drills)), str(sum(one.right for one in drills))


def bench_supervised(
    options: SupervisedOptions, log: Path | None = None, on_progress: Progress = lambda what, done, total: None
) -> SupervisedResult:
    """Do the runs that are not in the log yet.

    Args:
        log: file that keeps finished runs; None: none does.

    Raises:
        LaunchError: this machine cannot make test hosts.
        MegasdcError: the log cannot be used.
    """
    if (reason := unavailable_reason() or (slurm_unavailable_reason() if options.slurm else None)) is not None:
        raise LaunchError(f"supervised runs need test hosts: {reason}")
    engine: Engine = in_slurm if options.slurm else over_ssh
    machine, kept, chance = describe_machine(), RunLog(log, options, Drill), random.Random(options.seed)
    planned = _plan(options, chance)
    with scratch_folder() as folder:
        data, ends = prepare_texts(folder), dict[Layout, End]()
        for number, (layout, kinds, seed) in enumerate(planned):
            on_progress("runs", number, len(planned))
            if number < len(kept.runs):
                continue
            if layout not in ends:
                drill, end = _run(engine, folder / f"plain_{len(ends)}", data, layout, (), 0, None)
                if end is None:
                    raise LaunchError(f"a run without a fault has failed: {'; '.join(drill.problems)}")
                ends[layout] = end
            kept.add(_run(engine, folder / f"run_{number}", data, layout, kinds, seed, ends[layout])[0])
        on_progress("runs", len(planned), len(planned))
    return SupervisedResult(machine, options, kept.runs)


def _plan(options: SupervisedOptions, chance: random.Random) -> list[tuple[Layout, tuple[str, ...], int]]:
    """Kinds in turn, in another order each time; one that needs more replicas waits for a run that has them.

    Raises:
        LaunchError: no layout has as many replicas as a kind needs.
    """
    most = max(layout[2] for layout in options.sizes)
    if lacking := [name for name in options.drawn if KINDS[name].replicas > most]:
        raise LaunchError(f"{', '.join(lacking)} need {KINDS[lacking[0]].replicas} replicas: add a layout")
    names: list[str] = []
    found = []
    for number in range(options.drills):
        layout, kinds = options.sizes[number % len(options.sizes)], list[str]()
        while len(kinds) < options.faults:
            possible = [name for name in names if KINDS[name].replicas <= layout[2]]
            if possible:
                kinds.append(possible[0])
                names.remove(possible[0])
            else:
                names += chance.sample(options.drawn, len(options.drawn))
        found.append((layout, tuple(kinds), chance.randrange(1 << 30)))
    return found


def _slots(layout: Layout) -> int:
    """Ranks of a host: two where there are four, else one."""
    return 2 if math.prod(layout) == 4 else 1


def _run(
    engine: Engine, folder: Path, data: Path, layout: Layout, kinds: Sequence[str], seed: int, right: End | None
) -> tuple[Drill, End | None]:
    """Run once, with faults; returns also how it has ended, None: it has not."""
    started = time.monotonic()
    folder.mkdir()
    problems: list[str] = []
    with engine(folder, math.prod(layout) // _slots(layout), _slots(layout), random.Random(seed)) as target:
        write_config(target, data, layout, kinds)
        target.start()
        until = time.monotonic() + GIVE_UP_S
        for kind in kinds:
            strike = KINDS[kind].strike
            if strike is not None and _wait_for_moment(target, until):
                strike(target)
        while (code := target.exit_code()) is None and time.monotonic() < until:
            target.undo()
            time.sleep(_POLL_S)
        run = target.run
    if code is None:
        problems.append(f"it has not ended in {GIVE_UP_S:g} s")
    elif code:
        problems.append(f"it has ended with exit code {code}")
    end = read_end(run, run / "checkpoints") if code == 0 else None
    if end is not None and right is not None:
        problems += why_different(end, right)
    return _drill(kinds, layout, run, problems, time.monotonic() - started), end


def _wait_for_moment(target: Target, until: float) -> bool:
    """Wait for the moment of the next fault; whether it may come: the run still goes on."""
    chance = target.chance
    steps, attempts = _last_step(target.run), len(target.entries("started"))
    in_recovery = attempts > 0 and chance.random() < IN_RECOVERY
    if in_recovery:
        time.sleep(chance.uniform(0.0, 10.0))
        return target.exit_code() is None
    wanted = max(steps, 4) + chance.randint(*PROGRESS)
    while _last_step(target.run) < min(wanted, STEPS - 5):
        if target.exit_code() is not None or time.monotonic() > until:
            return False
        target.undo()
        time.sleep(_POLL_S)
    time.sleep(chance.uniform(0.0, 3 * STEP_S))
    return target.exit_code() is None


def _last_step(run: Path) -> int:
    """Last step that is in the metrics; 0: none."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[-3:] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def _drill(kinds: Sequence[str], layout: Layout, run: Path, problems: list[str], seconds: float) -> Drill:
    entries = read_journal(run / FOLDER)
    history = History.of(entries)
    attempts = _attempts(entries)
    if len(attempts) > 1 + len(kinds) * 2 + MORE_ATTEMPTS:
        problems.append(f"it took {len(attempts)} attempts")
    away = tuple(history.replaced)
    problems += [f"{host} is away, although its test has passed" for host in away if _has_passed(history, host)]
    problems += used_again(entries)
    found = goodput_of(run, time.time())
    parts = {} if found is None else {part: round(one, 1) for part, one in found.parts.items()}
    recoveries = _recoveries(entries)
    return Drill(tuple(kinds), layout, attempts, tuple(problems), round(seconds, 1), away, parts, recoveries)


def _attempts(entries: Sequence[Entry]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found, hosts = list[tuple[str, tuple[str, ...]]](), tuple[str, ...]()
    for entry in entries:
        if entry.kind == "planned":
            hosts = tuple(entry.fields["slots"])
        elif entry.kind == "ended":
            found.append((entry.fields["diagnosis"]["kind"], hosts))
    return tuple(found)


def used_again(entries: Sequence[Entry]) -> list[str]:
    """Hosts that computed wrong results and were used later, or were in an allocation that was to be without them."""
    wrong, excluded, ended = set[str](), set[str](), ""
    found: list[str] = []
    for entry in entries:
        said = entry.fields
        if entry.kind == "ended":
            ended = said["diagnosis"]["kind"]
        elif entry.kind == "decided" and ended == "corrupt_again":
            wrong |= set(said["replaced"])
        elif entry.kind == "left":
            excluded |= set(said["away"])
        elif entry.kind == HOSTS:
            found += [f"{host} is in a later allocation" for host in sorted(excluded & said["slots"].keys())]
        elif entry.kind == "planned":
            found += [f"{host} is used again" for host in sorted(wrong & said["slots"].keys())]
    return found


def _recoveries(entries: Sequence[Entry]) -> tuple[tuple[str, float], ...]:
    found, failed = list[tuple[str, float]](), list[Entry]()
    for entry in (one for one in entries if one.kind == "ended"):
        if (trained := entry.fields["trained"]) is not None:
            found += [(one.fields["diagnosis"]["kind"], round(trained["began_at"] - one.time, 1)) for one in failed]
            failed.clear()
        failed.append(entry)
    return tuple(found)


def _has_passed(history: History, host: str) -> bool:
    test = history.replaced[host].test
    return test is not None and test.exit_code == 0
