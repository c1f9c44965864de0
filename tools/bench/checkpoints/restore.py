"""How fast checkpoints are restored, ``python -m tools.bench restore``: against reading their files, and by part.

Rate: in one process an engine is restored from the disk - find, verify, load, as in a resume - again and again, in turn
with ``cat`` of the same files, both with the files in the page cache and with none of them there. The bar is 0.8 of the
rate of ``cat`` from the disk.

Restarts: fresh processes train until a step is in memory and on the disk, fail, and start again from memory, from
partners, and from the disk, which is also slowed down by the system. Ranks have host names of their own, so that they
are each other's partners; a host is lost when its rank starts with another name. Times are of the slowest rank.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megasdc.common.errors import ConfigError
from megasdc.common.origin import IDENTITY_FILE
from tools.bench.checkpoints.options import TEXT, VOCAB, RestoreOptions
from tools.bench.checkpoints.recovery_holdings import clear_memory
from tools.bench.checkpoints.restore_rank import (
    FIND,
    LOAD,
    RESUME_PARTS,
    SAVED_STEP,
    VERIFY,
    restore_in_blocks,
    start_again,
    train_and_fail,
)
from tools.bench.checkpoints.slow_disk import drop_from_cache, slowed_disk
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, Told, interval, listing, table, verdict
from tools.bench.small.gpt import prepare_library
from tools.bench.statistics import Estimate, estimate_median

BAR = 0.8
WARM, COLD = "page cache", "disk"


@dataclass(frozen=True)
class Rate:
    """Restoring a model from one place.

    Args:
        read_s: of ``cat``, each time.
        parts_s: seconds of each part of a restore, each time; ``find`` includes ``verify``.
    """

    also = ("ratio", "passed")

    size: tuple[int, int]
    place: str
    size_bytes: int
    read_s: list[float]
    parts_s: list[dict[str, float]]

    @property
    def ratio(self) -> Estimate:
        """Rate of restoring over that of reading."""
        restored = [one[FIND] + one[LOAD] for one in self.parts_s]
        return estimate_median([read / one for read, one in zip(self.read_s, restored, strict=True)])

    @property
    def passed(self) -> bool:
        """Whether the bar is met; there is one for the disk alone."""
        return self.place == WARM or self.ratio.median >= BAR

    def rate(self, seconds: Sequence[float]) -> float:
        """GB/s."""
        return self.size_bytes / median(seconds) / 1e9


@dataclass(frozen=True)
class Restarts:
    """Restarts from one place; seconds by part in their order, of each restart."""

    place: str
    steps: list[int]
    parts_s: list[dict[str, float]]


@dataclass(frozen=True)
class RestoreResult(Result):
    """Rates by model and place, and restarts by place; ``lacking``: what could not be measured, and why."""

    judged = ("rates",)
    rates: Sequence[Rate]
    restarts: Sequence[Restarts]
    lacking: Sequence[str]

    def report(self) -> Report:
        """Rates, and parts of restarts."""
        yield listing(f"rate of restoring, one rank; bar: {BAR} from the disk", _RATES, self.rates, tight=True)
        if self.restarts:
            parts = dict.fromkeys(name for one in self.restarts for parts in one.parts_s for name in parts)
            times = [
                [name, *(f"{median(parts.get(name, 0.0) for parts in one.parts_s):.2f}" for one in self.restarts)]
                for name in parts
            ]
            times.append(["all", *(f"{median(sum(s.values()) for s in one.parts_s):.2f}" for one in self.restarts)])
            hidden, layers = self.options.sizes[-1]
            title = f"seconds of a restart of {hidden}x{layers} on {self.options.ranks} hosts, medians"
            yield table(title, ("part", *(one.place for one in self.restarts)), times, total=True)
        yield from (f"not measured: {line}" for line in self.lacking)


_RATES: Told = {
    "model": lambda one: f"{one.size[0]}x{one.size[1]}, {one.place}",
    "MB": lambda one: f"{one.size_bytes / 1e6:,.0f}",
    "cat, GB/s": lambda one: f"{one.rate(one.read_s):.2f}",
    "restore": lambda one: f"{one.rate([parts[FIND] + parts[LOAD] for parts in one.parts_s]):.2f}",
    "verify, s": lambda one: f"{median(parts[VERIFY] for parts in one.parts_s):.2f}",
    "find with it": lambda one: f"{median(parts[FIND] for parts in one.parts_s):.2f}",
    "load": lambda one: f"{median(parts[LOAD] for parts in one.parts_s):.2f}",
    "restore / cat": lambda one: interval(one.ratio, 2),
    "verdict": lambda one: "-" if one.place == WARM else verdict(one.passed),
}


def bench_restore(options: RestoreOptions, on_progress: Progress = ignore_progress) -> RestoreResult:
    """Measure on this machine.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    lacking: list[str] = []
    with scratch_folder(options.folder) as scratch:
        data = prepare_library(scratch / "data", VOCAB, TEXT)
        rates: list[Rate] = []
        for size in options.sizes:
            with scratch_folder(scratch) as folder:
                rates += _rates(options, size, data, folder, on_progress)
        restarts: list[Restarts] = []
        if options.restarts:
            restarts, lacking = _restarts(options, data, scratch / "restarts", on_progress)
    return RestoreResult(machine, options, rates, restarts, lacking)


def _rates(
    options: RestoreOptions, size: tuple[int, int], data: Path, folder: Path, on_progress: Progress
) -> list[Rate]:
    """Restore and read in turn; the first time of each place does not count."""
    what, restores = f"{size[0]}x{size[1]}, rate", 2 * (options.blocks + 1)
    checkpoints, reads = folder / "checkpoints", list[float]()
    parts: list[dict[str, float]] = []

    def on_message(message: dict[str, Any]) -> None:
        if "parts" in message:
            parts.append(message["parts"])
            on_progress(what, len(parts), restores)
            return
        files = [path for path in sorted(checkpoints.rglob("*")) if path.is_file()]
        cold = len(parts) % 2 == 1
        for _ in range(1 + cold):  # what is cold is read by ``cat``, and has to be dropped again
            if cold:
                drop_from_cache(files)
            if len(reads) == len(parts):
                reads.append(_cat(files))

    arguments = {"raw": options.config(size, folder / "run", {}, data), "folder": checkpoints, "restores": restores}
    run_in_ranks(restore_in_blocks, arguments, 1, folder, on_message)
    size_bytes = sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file())
    return [
        Rate(size, place, size_bytes, reads[first + 2 :: 2], parts[first + 2 :: 2])
        for first, place in enumerate((WARM, COLD))
    ]


def _cat(files: Sequence[Path]) -> float:
    began = time.perf_counter()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def _restarts(
    options: RestoreOptions, data: Path, folder: Path, on_progress: Progress
) -> tuple[list[Restarts], list[str]]:
    """Train once, and restart from each place in turn; returns also what cannot be done here."""
    folder.mkdir()
    many = options.ranks > 1
    hosts = [f"megasdc-bench-{rank}" if many else "" for rank in range(options.ranks)]
    kept = {"interval": 1, "partners": many, "linger_s": 0}
    first = _write(options, data, folder, "first", {"interval": SAVED_STEP, "writing": "sync", "memory": kept})
    configs = {
        "memory": _write(options, data, folder, "memory", {"interval": 0, "memory": kept}),
        "disk": _write(options, data, folder, "disk", {"interval": 0}),
    }
    slow, lacking = f"disk at {options.disk_mb_s:g} MB/s", list[str]()
    places = ["memory", *(["partner"] if many else []), WARM, COLD, slow]
    found = {place: Restarts(place, [], []) for place in places}
    trials = [(number, place) for number in range(options.restarts) for place in places]
    with _memory_removed(folder / "run"):
        run_in_ranks(train_and_fail, {"config": first, "hosts": hosts}, options.ranks, folder, fresh=True)
        files = [path for path in sorted((folder / "run" / "checkpoints").rglob("*")) if path.is_file()]
        for done, (number, place) in enumerate(trials):
            on_progress("restarts", done, len(trials))
            if place == "partner":
                hosts = [*hosts[:-1], f"{hosts[0]}-spare-{number}"]
            if place in (COLD, slow):
                drop_from_cache(files)
            config = configs["memory" if place in ("memory", "partner") else "disk"]
            try:
                with slowed_disk(folder, options.disk_mb_s * 1e6) if place == slow else nullcontext():
                    step, parts = _start_again({"config": config, "hosts": hosts}, options.ranks, folder)
            except ConfigError as error:
                lacking.append(str(error))
                continue
            found[place].steps.append(step)
            found[place].parts_s.append(parts)
    return [one for one in found.values() if one.steps], list(dict.fromkeys(lacking))


def _write(options: RestoreOptions, data: Path, folder: Path, name: str, checkpoint: dict[str, Any]) -> Path:
    """Write a configuration of the run that is restarted; they differ in what they keep."""
    path = folder / f"{name}.json"
    raw = options.config(options.sizes[-1], folder / "run", checkpoint, data)
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


def _start_again(arguments: dict[str, Any], ranks: int, folder: Path) -> tuple[int, dict[str, float]]:
    """Start the ranks again; returns the step from which they go on, and seconds by part of the slowest."""
    commanded_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    (told,) = run_in_ranks(start_again, arguments, ranks, folder, fresh=True)
    started_s, phases, parts, step = max(told["ranks"], key=lambda one: one[0] + sum(one[1].values()))
    return step, parts_of(max(0.0, started_s - commanded_s), phases, parts)  # the start is told in clock ticks


def parts_of(started_s: float, phases: dict[str, float], parts: dict[str, float]) -> dict[str, float]:
    """Seconds by part in their order, of a rank's phases and of the parts of its resume; they add up to the whole."""
    resume = {name: parts[name] for name in RESUME_PARTS.values() if name in parts}
    found = {"process": started_s}
    for name, seconds in phases.items():
        if name == "resume":
            found |= resume
            found["other of the resume"] = seconds - sum(resume.values())
        else:
            found[name] = seconds
    return found


@contextmanager
def _memory_removed(run: Path) -> Iterator[None]:
    """Context after which nothing of a run is left in shared memory."""
    try:
        yield
    finally:
        if (run / IDENTITY_FILE).exists():
            clear_memory(run)
