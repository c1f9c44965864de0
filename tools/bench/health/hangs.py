"""Hangs, ``python -m tools.bench hangs``: whether the right rank is named, nobody else ever, and the run ended in time.

Real ranks of this machine train a tiny model; in each drill some rank is stopped, loops, waits for data or a disk,
skips a collective, takes two in the wrong order, or is killed. The rank must be named in 99 % of the hangs, no other
one in any drill, and all ranks must have ended ten seconds after the limit of their phases. Then runs without a hang,
with evaluations, saves, resumes, DropCompute, collections of garbage and other load on the machine: no alarm may come.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.ops.health.shared_folder_heartbeat import node_name
from tools.bench.campaign import Campaign, CampaignLog, Layout, layout_text, median_and_most, tables
from tools.bench.health.hang_kinds import KINDS, SAVE_INTERVAL, Drill, Strike
from tools.bench.health.hang_rank import train_and_hang
from tools.bench.health.options import HangOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Report, Result
from tools.bench.small.drill import DrillRanks, prepare_texts, write_drill

FLOOR_S, SLOW_FLOOR_S = 3.0, 8.0
GIVE_UP_S = 150.0
CLEAN_PART = 500
"""Steps of a run without a hang; each goes on from the one before."""
LEAST_RIGHT = 0.99


@dataclass(frozen=True)
class HangResult(Result):
    """All drills, and the steps without a hang with the alarms in them."""

    drills: Sequence[Drill] = field(repr=False)
    clean_steps: int
    clean_alarms: int
    clean_failures: list[str]

    @property
    def passed(self) -> bool:
        """Whether the bars are met."""
        hangs = [one for one in self.drills if KINDS[one.strike.kind].is_hang]
        return (
            not self.clean_alarms
            and not self.clean_failures
            and all(one.happened for one in self.drills)
            and all(one.in_time and not one.wrong for one in self.drills)
            and sum(one.right for one in hangs) >= LEAST_RIGHT * len(hangs)
        )

    def report(self) -> Report:
        """Counts by kind and by layout, the drills that went wrong, and what came of the runs without a hang.

        Drills whose hang never began are counted nowhere.
        """
        drills = [one for one in self.drills if one.happened]
        columns = ("drills", "right", "a wrong name", "in time", "seconds, median and longest")
        keys = {"kind": lambda one: KINDS[one.strike.kind].title, "layout": layout_text}
        yield from tables("hangs", drills, keys, columns, _row)
        for one in self.drills:
            if not one.happened:
                yield f"{layout_text(one)} {one.strike}: the drill failed: its hang never began; exit codes {one.codes}"
            elif not one.right or not one.in_time:
                told = f"{one.found or 'nothing'} {one.named}"
                yield f"{layout_text(one)} {one.strike}: told {told} after {one.seconds} s, exit codes {one.codes}"
        yield f"{self.clean_steps:,} steps without a hang: {self.clean_alarms} alarms"
        yield from self.clean_failures


def _row(drills: Sequence[Drill]) -> tuple[object, ...]:
    times = median_and_most((one.seconds for one in drills if one.seconds is not None), ".1f")
    counts = (sum(one.right for one in drills), sum(one.wrong for one in drills), sum(one.in_time for one in drills))
    return len(drills), *counts, times


def bench_hangs(options: HangOptions, log: Path | None = None, on_progress: Progress = ignore_progress) -> HangResult:
    """Run the drills that are not in the log yet, then the runs without a hang.

    Args:
        log: file that keeps finished drills; None: none does.

    Raises:
        MegasdcError: the log cannot be used.
    """
    machine, kept = describe_machine(), CampaignLog(log, options, Drill)
    chance = random.Random(options.seed)
    cells = [(kind, layout) for kind in options.drawn for layout in options.sizes]
    planned = [cells[number % len(cells)] for number in range(options.drills)]
    drawn = [(layout, KINDS[kind].draw(kind, layout, chance)) for kind, layout in planned]
    with scratch_folder() as folder:
        data = prepare_texts(folder)

        def run(left: Sequence[tuple[int, tuple[Layout, Strike]]], keep: Callable[[Drill], None]) -> None:
            for number, (layout, strike) in left:
                keep(_run_drill(folder / f"drill_{number}", data, layout, strike))

        drills = Campaign("drills", drawn, run, kept).finish(on_progress)
        steps, alarms, failures = _run_clean(folder / "clean", data, options, on_progress)
    return HangResult(machine, options, drills, steps, alarms, failures)


def _config(folder: Path, data: Path, layout: Layout, steps: int, **sections: Any) -> Path:
    """Configuration of a run, with limits of some seconds."""
    checkpoint = {"interval": SAVE_INTERVAL, "keep_last": 1, **sections.pop("checkpoint", {})}
    common = {
        "parallel": {"timeout_s": 2 * GIVE_UP_S},
        "checkpoint": checkpoint,
        "logging": {"interval": 10},
        "health": {"enabled": True, "hang_floor_s": FLOOR_S, "slow_floor_s": SLOW_FLOOR_S},
    }
    folder.mkdir()
    return write_drill(folder / "config.json", data, layout, steps, {**common, **sections})


def _start(config: Path, ranks: int, strike: Strike | None, *overrides: str) -> DrillRanks:
    folder = config.parent
    arguments = {"config": config, "strike": strike, "struck": folder / "struck", "overrides": overrides}
    return DrillRanks(train_and_hang, [arguments] * ranks, folder, lambda _: {"TORCH_FR_BUFFER_SIZE": "2000"})


def _run_drill(folder: Path, data: Path, layout: Layout, strike: Strike) -> Drill:
    config = _config(folder, data, layout, steps=10_000)
    ranks = _start(config, math.prod(layout), strike)
    codes = tuple(ranks.wait(time.monotonic() + GIVE_UP_S))
    now, struck = time.time(), folder / "struck"
    happened = struck.exists()
    seconds = now - float(struck.read_text(encoding="utf-8")) if happened and not ranks.killed else None
    _wait_for_agent(folder)
    incident = next(iter(_incidents(folder)), {})
    limits = [one["limit_s"] for one in incident.get("states", [])]
    found, named = incident.get("kind", ""), tuple(incident.get("ranks", ()))
    return Drill(strike, layout, happened, found, named, max(limits, default=FLOOR_S), seconds, codes)


def _wait_for_agent(folder: Path) -> None:
    """Wait until this host's agent has ended, which writes into the folder until then."""
    until, now = time.monotonic() + 30, folder / "run" / "health" / f"{node_name(0)}.now"
    while now.exists() and time.monotonic() < until:
        time.sleep(0.1)


def _incidents(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "run" / "health" / "incidents").glob("hang_*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _run_clean(folder: Path, data: Path, options: HangOptions, on_progress: Progress) -> tuple[int, int, list[str]]:
    """Train without a hang, in parts that go on from each other, under other load; returns steps, alarms, failures."""
    if not options.clean_steps:
        return 0, 0, []
    total = math.ceil(options.clean_steps / CLEAN_PART) * CLEAN_PART
    config = _config(
        folder,
        data,
        (1, 2, 2),
        total,
        training={"eval_interval": 50, "eval_samples": 4, "garbage_collection": "managed"},
        checkpoint={"interval": 100},
        drop_compute={"enabled": True, "threshold": 30.0},
    )
    load = subprocess.Popen(["python3", "-c", "while True: sum(range(10**6))"])
    failures = []
    try:
        for reached in range(0, total, CLEAN_PART):
            on_progress("steps without a hang", reached, total)
            stop = f"megasdc.training.stop_step={reached + CLEAN_PART}"
            ranks = _start(config, 4, None, *([stop] if reached + CLEAN_PART < total else []))
            codes = ranks.wait(time.monotonic() + 1200)
            _wait_for_agent(folder)
            if any(codes):
                failures.append(f"steps {reached} to {reached + CLEAN_PART}: exit codes {codes}")
    finally:
        load.kill()
        load.wait()
    on_progress("steps without a hang", total, total)
    withdrawn = _withdrawn(folder)
    return total, len(_incidents(folder)) + withdrawn, failures


def _withdrawn(folder: Path) -> int:
    """Standstills that were told and taken back."""
    path = folder / "run" / "health" / f"{node_name(0)}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sum("moved again" in json.loads(line)["note"] for line in lines)
