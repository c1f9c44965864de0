"""Recoveries, ``python -m tools.bench recoveries``: whether runs that were killed or damaged end as if nothing was.

Real ranks of this machine train a tiny model, save beside training, and keep snapshots in memory; hosts are processes
with host names of their own. A fault comes at a random moment, so that it hits a snapshot, its copy, a write or a
commit; then the run is started again until it ends. All losses and the last checkpoint must be those of a run without
a fault, bit for bit; each start must go on from the newest step that was whole; no checkpoint that was reported may be
lost unless the fault destroyed it; and nothing may be left in memory.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.common.run_lock import RECORD_FILE
from tools.bench.campaign import Campaign, CampaignLog, Layout, layout_text, median_and_most, tables
from tools.bench.checkpoints import recovery_faults
from tools.bench.checkpoints.options import RecoveryOptions
from tools.bench.checkpoints.recovery_checks import (
    End,
    check_holdings,
    check_start,
    clear,
    find_left,
    read_end,
    resumed_from,
    why_different,
)
from tools.bench.checkpoints.recovery_holdings import Holdings, find_holdings
from tools.bench.checkpoints.recovery_kinds import KINDS, SAVE_INTERVAL, STEPS, Drill, Resumed, Strike
from tools.bench.checkpoints.recovery_start import FOLLOW_S, Place, Start
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Report, Result
from tools.bench.small.drill import prepare_texts, write_drill

GIVE_UP_S = 120.0
MORE_STARTS = 2
"""Of a run that has failed without a fault."""
STEP_S = 0.04
"""Each step is slowed down by, so that writers have as much time as beside a larger model."""


@dataclass(frozen=True)
class RecoveryResult(Result):
    """All drills; ``left_out``: kinds that could not be brought about here, each with the reason."""

    drills: Sequence[Drill] = field(repr=False)
    left_out: dict[str, str]

    @property
    def passed(self) -> bool:
        """Whether all was right in all drills."""
        return all(one.right for one in self.drills)

    def report(self) -> Report:
        """Counts by kind and by layout, and what was not right."""
        columns = ("drills", "right", "memory", "partner", "disk", "start", "steps lost, median and most")
        keys = {"kind": lambda one: KINDS[one.strike.kind].title, "layout": layout_text}
        yield from tables("recoveries", self.drills, keys, columns, _row)
        for one in self.drills:
            for problem in one.problems:
                yield f"{layout_text(one)} {one.strike}: {problem}"
        for name, reason in self.left_out.items():
            yield f"{KINDS[name].title}: left out, {reason}"


def _row(drills: Sequence[Drill]) -> tuple[object, ...]:
    resumed = [one for drill in drills for one in drill.resumed]
    sources = [sum(one.source == source for one in resumed) for source in ("memory", "partner", "disk", "start")]
    return len(drills), sum(one.right for one in drills), *sources, median_and_most(one.lost_steps for one in resumed)


def bench_recoveries(
    options: RecoveryOptions, log: Path | None = None, on_progress: Progress = ignore_progress
) -> RecoveryResult:
    """Run the drills that are not in the log yet.

    Args:
        log: file that keeps finished drills; None: none does.

    Raises:
        MegasdcError: the log cannot be used.
    """
    machine, kept = describe_machine(), CampaignLog(log, options, Drill)
    chance = random.Random(options.seed)
    left_out = {
        name: "this user cannot rename hosts or mount file systems"
        for name in options.drawn
        if KINDS[name].needs_root and os.geteuid()
    }
    planned = _plan(options, left_out, chance)
    return RecoveryResult(machine, options, Campaign("drills", planned, _run, kept).finish(on_progress), left_out)


def _run(left: Sequence[tuple[int, tuple[Layout, Strike]]], keep: Callable[[Drill], None]) -> None:
    ends: dict[Layout, End] = {}
    with scratch_folder() as folder:
        data = prepare_texts(folder)
        for number, (layout, strike) in left:
            if layout not in ends:
                ends[layout] = _run_without_fault(folder / f"plain_{len(ends)}", data, layout)
            keep(_run_drill(folder / f"drill_{number}", data, layout, strike, ends[layout]))


def _plan(options: RecoveryOptions, left_out: dict[str, str], chance: random.Random) -> list[tuple[Layout, Strike]]:
    """Kinds in turn, each with the next layout that has enough hosts."""
    cells: dict[str, list[Layout]] = {}
    for name in options.drawn:
        fit = [one for one in options.sizes if _hosts_of(one) >= KINDS[name].least_hosts]
        if name not in left_out and not fit:
            left_out[name] = f"it needs a layout with {KINDS[name].least_hosts} hosts"
        elif name not in left_out:
            cells[name] = fit
    found = []
    for number in range(options.drills if cells else 0):
        turn, place = divmod(number, len(cells))
        name = list(cells)[place]
        layout = cells[name][(turn + place) % len(cells[name])]
        found.append((layout, KINDS[name].draw(name, math.prod(layout), chance)))
    return found


def _per_host(layout: Layout) -> int:
    """Ranks of a host: two where there are four, else one."""
    return 2 if math.prod(layout) == 4 else 1


def _hosts_of(layout: Layout) -> int:
    return math.prod(layout) // _per_host(layout)


def _config(place: Place, data: Path, layout: Layout, checkpoints: Path, memory: dict[str, Any]) -> None:
    sections: dict[str, Any] = {
        "parallel": {"timeout_s": GIVE_UP_S},
        "checkpoint": {
            "folder": str(checkpoints),
            "interval": SAVE_INTERVAL,
            "keep_last": 2,
            "writing": "async",
            "memory": {**memory, "linger_s": GIVE_UP_S} if memory["interval"] else {},
        },
        "health": {"enabled": True, "ping_interval": 0},
        "delay": [{"kind": "normal", "mean_s": STEP_S / 2, "std_s": 0.0}],
    }
    write_drill(place.config, data, layout, STEPS, sections)


def _run_without_fault(folder: Path, data: Path, layout: Layout) -> End:
    ranks = math.prod(layout)
    place = Place(folder, ranks, ranks)
    folder.mkdir()
    _config(place, data, layout, folder / "checkpoints", {"interval": 0})
    codes = Start(place, [""]).wait(time.monotonic() + GIVE_UP_S, FOLLOW_S)
    if any(codes):
        raise RuntimeError(f"a run without a fault ended with exit codes {codes}; see {folder}")
    return read_end(place.run, folder / "checkpoints")


def _run_drill(folder: Path, data: Path, layout: Layout, strike: Strike, right: End) -> Drill:
    started, kind, ranks = time.monotonic(), KINDS[strike.kind], math.prod(layout)
    folder.mkdir()
    place = Place(folder, ranks, _per_host(layout) if kind.has_hosts else ranks)
    hosts = [f"host{number}" if kind.has_hosts else "" for number in range(place.num_hosts)]
    run = recovery_faults.Run(place, folder / "disk" / "checkpoints", hosts, strike)
    memory = {"interval": strike.interval, "partners": kind.has_hosts}
    with ExitStack() as stack:
        if kind.needs_disk:
            stack.enter_context(recovery_faults.small_disk(folder / "disk"))
        _config(place, data, layout, run.checkpoints, memory)
        pids: list[int] = []
        resumed, problems = list[Resumed](), list[str]()
        for one, lines in _starts(run, pids):
            resumed += [one] if one is not None else []
            problems += lines
        if not problems:
            problems += why_different(read_end(place.run, run.checkpoints), right)
        problems += find_left(place, pids)
        clear(place)
    return Drill(strike, layout, tuple(resumed), tuple(problems), round(time.monotonic() - started, 1))


def _starts(run: recovery_faults.Run, pids: list[int]) -> Iterator[tuple[Resumed | None, list[str]]]:
    """Start a run until it ends; yields how each start went on, and what was not right.

    Args:
        pids: receives the process ids of all ranks.
    """
    place, kind, num_faults = run.place, KINDS[run.strike.kind], len(recovery_faults.FAULTS[run.strike.kind])
    expected: Holdings | None = None
    before = 0
    for number in range(num_faults + 1 + MORE_STARTS):
        since, start = time.time(), Start(place, run.hosts)
        pids += [process.pid for process in start.processes]
        if number < num_faults:
            recovery_faults.strike(run, start, number)
        codes = start.wait(time.monotonic() + GIVE_UP_S, FOLLOW_S)
        resumed = None if expected is None else resumed_from(place, since, before)
        problems = [] if resumed is None or expected is None else check_start(resumed, expected)
        if number >= num_faults and any(codes):
            problems.append(f"start {number + 1} ended with exit codes {codes}")
        if not any(codes):
            yield resumed, problems
            return
        (place.run / RECORD_FILE).unlink(missing_ok=True)  # all its ranks have ended, also those of a lost host
        found = find_holdings(place.run, run.checkpoints, run.hosts, place.ranks)
        yield resumed, problems + check_holdings(place, kind, found, expected, since)
        expected, before = found, place.last_step()
    yield None, ["it has not ended"]
