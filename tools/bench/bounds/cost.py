"""Cost of gradient bounds, ``python -m tools.bench bounds``, by size of a rank's shard.

One pass bounds the elements and sums the squares for the norm. Its bar is 1.25 of the time to read the gradient g and
the second moment V once, in fp32 and one thread. Reading once is measured twice, and the bar holds for each: a compiled
loop that adds both up (`read_both.c`), and ``g.sum()`` and ``V.sum()``, whichever is faster. On a GPU there are only
the latter. Without a bar: the pass with one of 10,000 elements to bound; and as part of the optimizer's step, which is
what a user waits for: torch's AdamW, DeepSpeed's CPU Adam; and against the formula in torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megasdc.tensors.bound import bound_, implementation
from megasdc.tensors.bound_limits import SUMS
from tools.bench.bounds.cost_others import LIMITS, Other, others
from tools.bench.bounds.options import BoundsBenchOptions
from tools.bench.clocks import devices_here, time_block
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress
from tools.bench.result import Comparison, ComparisonResult, Report, interval, table
from tools.bench.statistics import SLACK, Cost, cost_of, median_walls, ratios, run_pairs
from tools.trainings.numerics import cpu_threads

BAR = 1.25
"""Largest median of the pass's time over that of reading g and V once."""
GPU_LEAST_MILLION = 16
"""Smallest shard that has a bar on a GPU; the time of less is the time to start a kernel."""
SHARE = 1e-4
"""Share of elements to bound in the case that has some."""
_BLOCK_MILLION = {"cpu": 16, "cuda": 1024}
MILLION = 1 << 20


@dataclass(frozen=True)
class BoundsComparison(Comparison):
    """The pass over one shard against something else over the same shard; ``difference`` is None if it bounded rightly.

    ``size_million`` is the shard's size in units of 2^20 elements, ``bounded`` how many of them a pass bounds, and
    ``pass_s`` the median seconds of the pass and of the other operation.
    """

    device: str
    size_million: int
    bounded: int
    against: str
    pass_s: tuple[float, float]


@dataclass(frozen=True)
class BoundsBenchResult(ComparisonResult):
    """Comparisons by device, size, case and other operation; implementations by device; what could not run, and why."""

    comparisons: Sequence[BoundsComparison]
    implementations: dict[str, str]
    not_run: list[str]

    def report(self) -> Report:
        """A table for each device and size."""
        options = self.options
        yield (
            f"GPU: {self.machine.get('gpu', 'none')}; g and V in fp32; torch's operations in {options.threads} "
            f"thread(s), the pass on the host in 1; bar: median <= {BAR}, upper end <= {BAR + SLACK:.2f}, wall and CPU "
            "time"
        )
        for device, name in self.implementations.items():
            yield f"gradient bounds on {device}: {name}"
        for device, size in dict.fromkeys((one.device, one.size_million) for one in self.comparisons):
            found = [one for one in self.comparisons if (one.device, one.size_million) == (device, size)]
            title = f"bound + norm, {device}, {size} M elements, {options.blocks} pairs of blocks"
            yield table(title, ("pass / other", "to bound", "wall", "CPU", "ms", "verdict"), map(_row, found))
        for one in self.comparisons:
            if one.difference is not None:
                yield f"FAIL: {one.device}, {one.size_million} M, against {one.against}: {one.difference}"
        for reason in self.not_run:
            yield f"NOT RUN: {reason}"


def _row(one: BoundsComparison) -> list[str]:
    wall, cpu = (
        "-" if ratio is None else interval(ratio, link=" - ")
        for ratio in (one.ratios.get("wall"), one.ratios.get("cpu"))
    )
    ours, theirs = (1e3 * seconds for seconds in one.pass_s)
    return [one.against, f"{one.bounded:,}", wall, cpu, f"{ours:.3f} : {theirs:.3f}", one.verdict]


class Shard:
    """A gradient and a second moment as training has them, and some elements far too large."""

    def __init__(self, count: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(count)
        width = torch.randn(count, device=device, generator=generator).exp_().mul_(1e-3)
        self.second_moment = width.square()
        self.gradient = torch.randn(count, device=device, generator=generator).mul_(width)
        del width
        places = torch.randint(count, (max(1, round(SHARE * count)),), device=device, generator=generator)
        self.places = places.unique()
        self.small = self.gradient[self.places].clamp(-0.5, 0.5)
        self.large = torch.sign(self.small + 0.25) * 10.0
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.passes = 0

    def set_outliers(self, wanted: bool) -> None:
        """Put elements to bound where they belong, or take them away."""
        self.gradient[self.places] = self.large if wanted else self.small

    def bound(self) -> None:
        """Bound and sum once."""
        bound_(self.gradient, self.second_moment, LIMITS, self.sums)
        self.passes += 1

    def difference(self, bounded: int) -> str | None:
        """The error in the sums of all passes since the last call, each with ``bounded`` elements to bound; or None."""
        sums, passes = dict(zip(SUMS, self.sums.tolist(), strict=True)), self.passes
        self.sums.zero_()
        self.passes = 0
        found = sums["by_absolute"] + sums["by_spike"]
        return None if found == bounded * passes else f"{found} bounded in {passes} passes, not {bounded} in each"


def _timed(call: Callable[[], Any], before: Callable[[], Any], repeats: int) -> Callable[[], Cost]:
    """A block of calls that count, each after one that does not; it returns its cost."""

    def block() -> Cost:
        total = Cost(0.0, 0.0)
        for _ in range(repeats):
            before()
            total += time_block(call)
        return total

    return block


def bench_bounds(options: BoundsBenchOptions, on_progress: Progress = ignore_progress) -> BoundsBenchResult:
    """Measure on this machine."""
    machine = describe_machine()
    devices, not_run = devices_here(machine)
    found: list[BoundsComparison] = []
    with cpu_threads(options.threads):
        implementations = {device: implementation(torch.device(device)) for device in devices}
        for device in devices:
            on_progress(f"{device}: preparing", 0, 1)
            sides, problems = others(device)
            not_run += problems
            for size in options.sizes_million:
                found += _compare(options, torch.device(device), size, sides, on_progress)
    return BoundsBenchResult(
        machine=machine, options=options, comparisons=found, implementations=implementations, not_run=not_run
    )


def _compare(
    options: BoundsBenchOptions, device: torch.device, size: int, sides: list[Other], on_progress: Progress
) -> Iterator[BoundsComparison]:
    """Run the pass and each other operation in turn over one shard."""
    shard = Shard(size * MILLION, device)
    repeats = max(1, _BLOCK_MILLION[device.type] // size)
    has_bar = device.type == "cpu" or size >= GPU_LEAST_MILLION
    cases = [(side, False) for side in sides] + [(side, True) for side in sides if side.reads_once][:1]
    for side, outliers in cases:
        shard.set_outliers(outliers)
        run = side.build(shard.gradient, shard.second_moment)
        bounded = len(shard.places) if outliers else 0

        def before(shard: Shard = shard, outliers: bool = outliers) -> None:
            if outliers:
                shard.set_outliers(True)

        pair = _timed(shard.bound, before, repeats), _timed(run, before, repeats)
        what = f"{device.type} {size} M, {side.name}{', some to bound' if outliers else ''}"
        costs = run_pairs(what, pair, options.blocks, cost_of, on_progress)
        ours, theirs = (wall_s / repeats for wall_s in median_walls(costs))
        yield BoundsComparison(
            bar=BAR if side.reads_once and has_bar and not outliers else None,
            ratios=ratios(costs, ("wall", "cpu") if device.type == "cpu" else ("wall",)),
            difference=shard.difference(bounded),
            costs=costs,
            device=device.type,
            size_million=size,
            bounded=bounded,
            against=side.name,
            pass_s=(ours, theirs),
        )
