"""The parts of an agent, and of the hooks beside it, over a simulated time: whether memory and files stay bounded.

Readings, steps and measurements are made up; the parts that take them are the product's. Memory is that which Python
has allocated since a part was made, by ``tracemalloc``, in the middle and at the end of the time.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from megasdc.common.origin import Origin
from megasdc.ops.devices.readings import COUNTERS, DeviceHistory, DeviceReading
from megasdc.ops.devices.rules import judge_device
from megasdc.ops.health import agent
from megasdc.ops.health.agent import MAX_LINES_BYTES, AgentLog
from megasdc.ops.health.limits import Durations, load_durations, merged_counts, save_durations
from megasdc.ops.health.links.judgement import Direction, LinkFigures
from megasdc.ops.health.links.watch import LinkWatch
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.record import BUCKETS, HeartbeatWriter, RecordReader, WatchedIdentity, record_path
from megasdc.ops.health.slow.report import LARGEST_BYTES, SlowReport, Where
from megasdc.ops.health.slow.stragglers import LONG, Stragglers
from tools.bench.rank import Progress

WEEK_S = 7 * 86_400
READING_S = 10
STEPS = 2_000_000
"""Steps of a week."""
PING_STEPS = 200
GROWTH_BYTES = 32 << 10
"""Largest growth from the middle to the end: some caches fill late."""
RANKS = 8
LINE_BYTES = 64 << 10
"""More than a line has: by one line a file may be larger than its limit."""
Step = Callable[[int], object]


@dataclass(frozen=True)
class Growth:
    """What a part held in the middle and at the end, and its largest file; limit 0: it has none."""

    also = ("passed",)

    part: str
    count: int
    half_bytes: int
    end_bytes: int
    file_bytes: int = 0
    file_limit_bytes: int = 0

    @property
    def passed(self) -> bool:
        """Whether neither grows."""
        return self.end_bytes - self.half_bytes <= GROWTH_BYTES and self.file_bytes <= self.file_limit_bytes


def measure_growth(
    part: str, count: int, make: Callable[[], Step], file: tuple[Path, int] | None = None, every: int = 10
) -> Growth:
    """Make a part, call it so many times, and tell what it has grown.

    Args:
        make: returns what is called with the number of each call.
        file: that the part writes, and its limit, which a line may exceed.
        every: calls between two looks at the file.
    """
    gc.collect()
    tracemalloc.start()
    try:
        step, largest, half = make(), 0, 0
        for number in range(count):
            step(number)
            if number == count // 2:
                half = _allocated()
            if file is not None and number % every == 0 and file[0].exists():
                largest = max(largest, file[0].stat().st_size)
        return Growth(part, count, half, _allocated(), largest, 0 if file is None else file[1] + LINE_BYTES)
    finally:
        tracemalloc.stop()


def _allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def simulate_weeks(weeks: float, folder: Path, on_progress: Progress) -> list[Growth]:
    """All parts, each over so many weeks; ``folder`` gets their files. Empty: no time."""
    parts: list[tuple[Callable[[Path, int], Growth], float]] = [
        (journal_growth, WEEK_S),
        (telemetry_growth, WEEK_S / READING_S),
        (straggler_growth, STEPS),
        (link_growth, STEPS / PING_STEPS),
        (duration_growth, WEEK_S / READING_S),
    ]
    if not weeks:
        return []
    found = []
    for number, (grow, count) in enumerate(parts):
        on_progress("parts of an agent", number, len(parts))
        found.append(grow(folder, int(weeks * count)))
    on_progress("parts of an agent", len(parts), len(parts))
    return found


def journal_growth(folder: Path, seconds: int) -> Growth:
    """An agent's journal of a host with eight ranks and devices, a note now and then, each second."""
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = clock.time = lambda: clock.now
    health = folder / "journal"
    health.mkdir()
    devices = [{"name": f"GPU {one} (GPU-{one:032d})", "verdict": "fit", "text": ""} for one in range(RANKS)]

    def make() -> Step:
        written = AgentLog(health, "node_00000", "run", None)

        def second(number: int) -> None:
            clock.now += 1.0
            ranks = [{"rank": one, "step": number, "phase": "forward", "stuck_s": 0.5} for one in range(RANKS)]
            written.write(ranks, "host: fit -> degraded" * (number % 600 == 0), devices=devices)
            written.flush()

        return second

    with patch.object(agent, "time", clock):
        return measure_growth("journal, seconds", seconds, make, (health / "node_00000.jsonl", MAX_LINES_BYTES))


def telemetry_growth(_folder: Path, readings: int) -> Growth:
    """The history of a device whose counters grow, go back at resets, and that has events of every kind."""
    drawn = random.Random(1)

    def make() -> Step:
        history, counters = DeviceHistory(_reading(0, dict.fromkeys(COUNTERS, 0))), dict.fromkeys(COUNTERS, 0)

        def read(number: int) -> dict[str, Any]:
            for name in counters:
                counters[name] = 0 if number % 500 == 0 else counters[name] + drawn.randrange(2)
            history.add(_reading(number, counters))
            judge_device(history)
            return history.as_dict()

        return read

    return measure_growth("telemetry of a device, readings", readings, make)


def _reading(number: int, counters: dict[str, int]) -> DeviceReading:
    xids, lines = [number % 150], [f"[Hardware Error]: Corrected error, no action required, {number}"]
    values = {**counters, "temperature_c": 40 + number % 50, "clock_reasons": number % 256}
    return DeviceReading("GPU-0", "GPU 0", number * READING_S, values, {"power_w": "not supported"}, xids, lines)


def straggler_growth(folder: Path, steps: int) -> Growth:
    """Eight ranks' times in each step, one of them slow for a while in turn, with all files of rank 0."""
    drawn = np.random.default_rng(1)
    where = {(replica, 0): Where((replica,), f"host{replica}") for replica in range(RANKS)}
    run = folder / "stragglers"
    run.mkdir()

    def make() -> Step:
        stragglers = Stragglers(RANKS, 1, 1.05)
        report = SlowReport(run, 1.05, where, LONG, Origin("run", 1))

        def step(number: int) -> None:
            busy_s = 0.1 * np.exp(0.02 * drawn.standard_normal(RANKS))
            busy_s[number // 500 % RANKS] *= 1.3 if number // 100 % 5 == 0 else 1.0
            if stragglers.add(busy_s, 0.1 * busy_s * (number // 1000 % 2)):
                change = stragglers.judge(number)
                list(report.events(change, stragglers))
                report.write(change, stragglers, number)

        return step

    file = run / "health" / "slowness.jsonl"
    return measure_growth("stragglers, steps", steps, make, (file, LARGEST_BYTES))


def link_growth(_folder: Path, measurements: int) -> Growth:
    """A ring of eight hosts, one link of it slow for a while in turn."""
    drawn = random.Random(1)

    def make() -> Step:
        watch = LinkWatch()

        def measure(number: int) -> object:
            slow = number // 200 % RANKS if number // 50 % 4 == 0 else -1
            return watch.update([_link(one, drawn, 0.01 if one == slow else 0.0) for one in range(RANKS)])

        return measure

    return measure_growth("links, measurements", measurements, make)


def _link(one: int, drawn: random.Random, extra_s: float) -> LinkFigures:
    rtt_s = 1e-4 * (1 + drawn.random()) + extra_s
    way = Direction(1e-3 + rtt_s, 200, drawn.randrange(100) == 0)
    return LinkFigures(f"host{one}", f"host{(one + 1) % RANKS}", rtt_s, 0.0, 1 << 18, way, way)


def duration_growth(folder: Path, looks: int) -> Growth:
    """Changes of phase of a rank, counted in its record, read and added up by the agent, and kept."""
    records = folder / "durations"
    records.mkdir()
    kept_file = records / "durations.json"
    identity = WatchedIdentity("run", 0, 0, 1, 0, 0, 0, "host", 0, 1, 0.0)

    def make() -> Step:
        writer = HeartbeatWriter(records, identity)
        reader, kept = RecordReader(record_path(records, 0)), load_durations(kept_file)
        phases = [one for one in Phase if one is not Phase.DONE]

        def enter_phases(number: int) -> Durations:
            for one in range(10):
                writer.enter(phases[(number + one) % len(phases)], number, one)
            writer.count()
            found = merged_counts([kept, reader.durations()])
            if number % 1000 == 0:
                save_durations(kept_file, found)
            return found

        return enter_phases

    limit = 16 * len(Phase) * BUCKETS  # digits of a count, and what is between counts
    return measure_growth("durations, readings", looks, make, (kept_file, limit))
