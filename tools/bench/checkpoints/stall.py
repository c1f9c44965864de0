"""What saves cost training, ``python -m tools.bench save-stall``: time that it stands still, and time beside a writer.

Each model trains through the training program. In one process alternate steps with nothing beside them, saves for which
training waits, saves beside training, and steps of which each is kept in memory. Where several ranks train, the numbers
are of the rank that stands still longest.

The bars: a save beside training stalls it for 5 % of one that waits, and but for the wait for its copy for 1 % of a
step; micro-batches beside a copy or a writer take 1.03 of quiet ones; where each step is kept in memory, steps of one
rank take 1.02 of quiet ones, snapshots included.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megasdc.common.errors import MegasdcError
from tools.bench.checkpoints.options import TEXT, StallOptions
from tools.bench.checkpoints.stall_clock import ALLOCATE, CAPTURE, WAIT, Moved
from tools.bench.checkpoints.stall_rank import ASYNC, MEMORY, QUIET, SYNC, RankStall, StallStep, measure_rank
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, Told, interval, side_by_side
from tools.bench.small.gpt import SmallGpt, prepare_library
from tools.bench.statistics import Estimate, estimate_median

STALL_BAR, REST_BAR, BESIDE_BAR, MEMORY_BAR = 0.05, 0.01, 1.03, 1.02
MIB = 1 << 20


@dataclass(frozen=True)
class Stall:
    """What a rank's saves cost; times in seconds, ratios to the median of the quiet steps of the same round.

    Args:
        size_bytes: of a snapshot of the rank.
        quiet_s: of a step.
        sync_s: for which a save that waits stalls the rank, each one.
        async_s: for which one beside training does, each one, in all steps until it is done.
        waits_s: of it, for the copy.
        parts_s: medians of the other parts.
        duration_s: of a save beside training from its begin to its end, each one.
        copy, beside: micro-batches while the copy and while the writer ran; None: all were longer than that.
        memory: steps that were kept in memory.
        memory_stall: share of such a step inside the saver.
        copies, stores: by saver, of all snapshots.
        skipped: snapshots for memory that were not taken.
    """

    also = ("ratio", "rest", "passed")

    gpt: SmallGpt
    ranks: int
    rank: int
    size_bytes: int
    quiet_s: Estimate
    sync_s: list[float]
    async_s: list[float]
    waits_s: list[float]
    parts_s: dict[str, float]
    duration_s: list[float]
    copy: Estimate | None
    beside: Estimate | None
    memory: Estimate
    memory_stall: Estimate
    copies: list[Moved]
    stores: list[Moved]
    skipped: int

    @property
    def ratio(self) -> float:
        """Stall of a save beside training over that of one that waits, medians."""
        return median(self.async_s) / median(self.sync_s)

    @property
    def rest(self) -> float:
        """Stall but for the wait for the copy, over a quiet step, medians."""
        return median(map(float.__sub__, self.async_s, self.waits_s)) / self.quiet_s.median

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """Whether each bar is met; None: it is none of this run's."""
        return {
            "ratio": self.ratio <= STALL_BAR,
            "rest": self.rest <= REST_BAR,
            "copy": None if self.copy is None else self.copy.passes(BESIDE_BAR),
            "beside": None if self.beside is None else self.beside.passes(BESIDE_BAR),
            "memory": self.memory.passes(MEMORY_BAR) and not self.skipped if self.ranks == 1 else None,
        }

    @property
    def passed(self) -> bool:
        """Whether all bars are met."""
        return False not in self.verdicts.values()

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.gpt.hidden}x{self.gpt.layers}, {self.ranks} rank{'s' if self.ranks > 1 else ''}"


@dataclass(frozen=True)
class StallResult(Result):
    """Stalls by size and number of ranks."""

    judged = ("stalls",)
    stalls: Sequence[Stall]

    def report(self) -> Report:
        """Stalls, steps beside savers, and rates."""
        yield str(self.options.gpt(self.options.sizes[-1])) + f"; {self.options.rounds} rounds"
        yield side_by_side("seconds that training stands still for a save", "", self.stalls, _STALLS)
        yield "of the rest: " + "; ".join(f"{one.name}: {_parts(one)}" for one in self.stalls)
        title = "micro-batches beside a save, and steps kept in memory, over quiet ones"
        yield side_by_side(title, "", self.stalls, _STEPS)
        yield side_by_side("snapshots, GB/s", "", self.stalls, _RATES)


_STALLS: Told = {
    "MiB of a rank": lambda one: f"{one.size_bytes / MIB:,.1f}",
    "quiet step, s": lambda one: f"{one.quiet_s.median:.3f}",
    "save that waits": lambda one: _spread(one.sync_s),
    "save beside training": lambda one: _spread(one.async_s),
    "of it waiting for the copy": lambda one: _spread(one.waits_s),
    f"beside / waits, %, bar {100 * STALL_BAR:g}": lambda one: f"{100 * one.ratio:.2f} {_verdict(one, 'ratio')}",
    f"rest / step, %, bar {100 * REST_BAR:g}": lambda one: f"{100 * one.rest:.3f} {_verdict(one, 'rest')}",
    "begin to end of a save beside training": lambda one: _spread(one.duration_s),
}
_STEPS: Told = {
    f"while the copy runs, bar {BESIDE_BAR:g}": lambda one: _estimate(one.copy, _verdict(one, "copy")),
    f"while the writer runs, bar {BESIDE_BAR:g}": lambda one: _estimate(one.beside, _verdict(one, "beside")),
    f"each step kept in memory, bar {MEMORY_BAR:g} of one rank": lambda one: _estimate(
        one.memory, _verdict(one, "memory")
    ),
    "of it inside the saver": lambda one: _estimate(one.memory_stall, ""),
    "snapshots that were skipped": lambda one: one.skipped,
}
_RATES: Told = {
    "checksum and copy, for the disk": lambda one: _rate(one.copies, ASYNC),
    "check, seal, write, read again": lambda one: _rate(one.stores, ASYNC),
    "checksum and copy, for memory": lambda one: _rate(one.copies, MEMORY),
    "check, seal, digest": lambda one: _rate(one.stores, MEMORY),
}


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _estimate(value: Estimate | None, verdict: str) -> str:
    return "none was so short" if value is None else f"{interval(value)} {verdict}"


def _verdict(one: Stall, bar: str) -> str:
    return {None: "", True: "pass", False: "FAIL"}[one.verdicts[bar]]


def _parts(one: Stall) -> str:
    return ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in one.parts_s.items())


def _rate(moved: Sequence[Moved], saver: str) -> str:
    rates = [one.size_bytes / one.seconds / 1e9 for one in moved if one.saver == saver]
    return f"{median(rates):.2f}" if rates else "-"


def bench_save_stall(options: StallOptions, on_progress: Progress = ignore_progress) -> StallResult:
    """Measure, with all ranks on this machine.

    Raises:
        MegasdcError: a rank failed, or a writer did not come to an end.
    """
    machine = describe_machine()
    stalls = []
    with scratch_folder(options.folder) as scratch:
        data = prepare_library(scratch / "data", options.gpt(options.sizes[0]).vocab, TEXT)
        for size in options.sizes:
            for ranks in options.ranks:
                with scratch_folder(scratch) as folder:
                    found = _train(options, size, ranks, data, folder, on_progress)
                stalls.append(_worst([stall_of(options.gpt(size), one, ranks) for one in found]))
    return StallResult(machine, options, stalls)


def _train(
    options: StallOptions, size: tuple[int, int], ranks: int, data: Path, folder: Path, on_progress: Progress
) -> list[RankStall]:
    """Train once, and return what the ranks measured."""
    config = folder / "config.json"
    config.write_text(json.dumps(options.config(size, data, folder / "run")), encoding="utf-8")
    arguments = {name: getattr(options, name) for name in ("rounds", "quiet", "snapshots")}
    arguments |= {"config": config, "name": f"{size[0]}x{size[1]}, {ranks} rank(s)"}
    (found,) = run_in_ranks(measure_rank, arguments, ranks, folder, on_progress=on_progress)
    if not found["finished"]:
        raise MegasdcError(
            f"{size[0]}x{size[1]}: a writer was not done at the end of the run's steps; take more micro-batches"
        )
    measured: list[RankStall] = found["ranks"]
    return measured


def _worst(stalls: Sequence[Stall]) -> Stall:
    return max(stalls, key=lambda one: median(one.async_s))


def stall_of(gpt: SmallGpt, found: RankStall, ranks: int) -> Stall:
    """What the saves of a rank cost."""
    saves = _saves(found.steps)
    names = (f"{ASYNC}/{CAPTURE}", f"{ASYNC}/{ALLOCATE}")
    parts = {name.partition("/")[2]: median(_sum(save, name) for save in saves) for name in names}
    waits = [_sum(save, f"{ASYNC}/{WAIT}") for save in saves]
    stalls = [_sum(save, ASYNC) for save in saves]
    others = [
        stall - wait - sum(_sum(save, name) for name in names)
        for stall, wait, save in zip(stalls, waits, saves, strict=True)
    ]
    quiet = [one.wall_s - one.stalled_s for one in found.steps if one.kind == QUIET]
    memory = [one for one in found.steps if one.kind == MEMORY]
    if not memory:
        raise MegasdcError("no step was kept in memory together with the one before")
    return Stall(
        gpt,
        ranks,
        found.rank,
        found.copies[0].size_bytes,
        estimate_median(quiet),
        [one.parts[SYNC] for one in found.steps if one.due == SYNC],
        stalls,
        waits,
        {**parts, "agreement and all else": median(others)},
        [sum(one.wall_s for one in save[1:]) + save[0].parts[ASYNC] for save in saves],
        _estimate_any(beside_ratios(found, [one for one in found.copies if one.saver == ASYNC])),
        _estimate_any(beside_ratios(found, [one for one in found.stores if one.saver == ASYNC])),
        estimate_median(memory_ratios(found.steps)),
        estimate_median([one.stalled_s / one.wall_s for one in memory]),
        found.copies,
        found.stores,
        found.skipped,
    )


def _saves(steps: Sequence[StallStep]) -> list[list[StallStep]]:
    """The steps of each save beside training, from the one at whose end it began to the one that had its last part."""
    saves: list[list[StallStep]] = []
    for step in steps:
        if step.due == ASYNC:
            saves.append([step])
        elif ASYNC in step.parts and saves and any(step is not one for one in saves[-1]):
            saves[-1].append(step)
    return saves


def _sum(save: Sequence[StallStep], name: str) -> float:
    return sum(one.parts.get(name, 0.0) for one in save)


def memory_ratios(steps: Sequence[StallStep]) -> list[float]:
    """Steps that were kept in memory, stalls included, over the median of the quiet ones of their round.

    A round begins with the step after one at whose end training waited for a save.
    """
    by_round: dict[int, list[StallStep]] = {}
    number = 0
    for step in steps:
        by_round.setdefault(number, []).append(step)
        number += step.due == SYNC
    found = []
    for those in by_round.values():
        quiet = [one.wall_s - one.stalled_s for one in those if one.kind == QUIET]
        found += [one.wall_s / median(quiet) for one in those if one.kind == MEMORY]
    return found


def beside_ratios(found: RankStall, moved: Sequence[Moved]) -> list[float]:
    """Micro-batches that ran wholly beside one of some copies or stores, over the median quiet one of their round."""
    spans = [(one.began, one.began + one.seconds) for one in (*found.copies, *found.stores)]
    wanted = [(one.began, one.began + one.seconds) for one in moved]
    quiet: dict[int, list[float]] = {}
    for number, began, ended in found.micro_batches:
        if not any(start < ended and began < stop for start, stop in spans):
            quiet.setdefault(number, []).append(ended - began)
    return [
        (ended - began) / median(quiet[number])
        for number, began, ended in found.micro_batches
        if number in quiet and any(start <= began and ended <= stop for start, stop in wanted)
    ]


def _estimate_any(values: Sequence[float]) -> Estimate | None:
    return estimate_median(values) if values else None
