"""Cost of gradient bounds, ``python -m tools.bench bounds``, by size of a rank's shard.

One pass bounds the elements and sums the squares for the norm. Its bar is 1.25 of the time to read the gradient g and
the second moment V once, in fp32 and one thread. Reading once is measured twice, and the bar holds for each: a compiled
loop that adds both up (`read_both.c`), and ``g.sum()`` and ``V.sum()``, whichever is faster. On a GPU there are only
the latter. Without a bar: the pass with one of 10,000 elements to bound; and as part of the optimizer's step, which is
what a user waits for: torch's AdamW, DeepSpeed's CPU Adam; and against the formula in torch's operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megasdc.errors import ConfigError
from megasdc.tensors.bound import bound_, implementation
from megasdc.tensors.bound_limits import SUMS
from tools.bench.bounds.cost_others import LIMITS, Other, others
from tools.bench.machine import describe_machine
from tools.bench.result import BenchResult, Comparison, Progress
from tools.bench.statistics import Block, Cost, estimate_median, ratios, run_alternating

BAR = 1.25
"""Largest median of the pass's time over that of reading g and V once."""
GPU_LEAST_MILLION = 16
"""Smallest shard that has a bar on a GPU; the time of less is the time to start a kernel."""
SHARE = 1e-4
"""Of elements to bound in the case that has some."""
_BLOCK_MILLION = {"cpu": 16, "cuda": 1024}
MILLION = 1 << 20


@dataclass(frozen=True)
class BoundsBenchOptions:
    """Sizes of a measurement.

    Args:
        blocks: blocks of each side, that is pairs; one pair before them does not count.
        sizes_million: elements of a shard, in units of 2^20.
        threads: CPU threads of torch's operations and of optimizers; the pass itself has one.
    """

    blocks: int = 30
    sizes_million: tuple[int, ...] = (1, 4, 16, 64)
    threads: int = 1

    def __post_init__(self) -> None:
        values = [("blocks", self.blocks), ("threads", self.threads), *(("sizes", size) for size in self.sizes_million)]
        problems = [f"--{name}: {value} must be at least 1" for name, value in values if value < 1]
        if problems:
            raise ConfigError(problems, source="the benchmark's options")


@dataclass(frozen=True)
class BoundsComparison(Comparison):
    """The pass over one shard against something else over the same shard; ``difference`` says if it bounded wrongly.

    Args:
        device: cpu or cuda.
        size_million: elements, in units of 2^20.
        bounded: how many of them a pass bounds.
        against: the other operation.
        pass_s: median seconds of the pass, and of the other operation.
    """

    device: str
    size_million: int
    bounded: int
    against: str
    pass_s: tuple[float, float]


@dataclass(frozen=True)
class BoundsBenchResult(BenchResult):
    """Everything that was measured.

    Args:
        comparisons: one a device, size, case and other operation.
        implementations: which one ran, by device.
        not_run: what could not be measured here, and why.
    """

    comparisons: Sequence[BoundsComparison]
    implementations: dict[str, str]
    not_run: list[str]


class Shard:
    """A gradient and a second moment as training has them, and some elements far too large.

    Args:
        count: elements.
        device: where.
    """

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
        """What is wrong with the sums of all passes since the last call, each of which had so many to bound."""
        sums, passes = dict(zip(SUMS, self.sums.tolist(), strict=True)), self.passes
        self.sums.zero_()
        self.passes = 0
        found = sums["by_absolute"] + sums["by_spike"]
        return None if found == bounded * passes else f"{found} bounded in {passes} passes, not {bounded} in each"


class _Clock:
    """Time inside marked calls, until a GPU, if there is one, has done them."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def block(self, run: Callable[[], Any], before: Callable[[], Any], repeats: int) -> Block:
        """A block of calls that count, each after one that does not."""

        def block() -> None:
            for _ in range(repeats):
                before()
                _wait()
                wall, cpu = time.perf_counter(), time.process_time()
                run()
                _wait()
                self.cpu_s += time.process_time() - cpu
                self.wall_s += time.perf_counter() - wall

        return block

    def measure(self, block: Block) -> Cost:
        """What a block's calls took."""
        self.wall_s = self.cpu_s = 0.0
        block()
        return Cost(self.wall_s, self.cpu_s)


def bench_bounds(
    options: BoundsBenchOptions, on_progress: Progress = lambda what, done, total: None
) -> BoundsBenchResult:
    """Measure on this machine.

    Args:
        options: sizes.
        on_progress: told what is measured, how much is done, and of how much.
    """
    machine = describe_machine()
    devices, not_run = ["cpu"], []
    if torch.cuda.is_available():
        devices.append("cuda")
        machine["gpu"] = torch.cuda.get_device_name()
    else:
        not_run.append("speed of the kernel on a GPU: there is no CUDA device")
    found: list[BoundsComparison] = []
    with _threads(options.threads):
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
        clock, bounded = _Clock(), len(shard.places) if outliers else 0

        def before(shard: Shard = shard, outliers: bool = outliers) -> None:
            if outliers:
                shard.set_outliers(True)

        pair = clock.block(shard.bound, before, repeats), clock.block(run, before, repeats)
        what = f"{device.type} {size} M, {side.name}{', some to bound' if outliers else ''}"
        on_progress(what, 0, options.blocks)
        run_alternating(*pair, 1, clock.measure)  # compiles kernels, makes an optimizer's state
        costs = run_alternating(*pair, options.blocks, clock.measure, partial(_tell, on_progress, what, options.blocks))
        times = [estimate_median([pair[i].wall_s / repeats for pair in costs]).median for i in (0, 1)]
        wanted = ("wall", "cpu") if device.type == "cpu" else ("wall",)
        yield BoundsComparison(
            bar=BAR if side.reads_once and has_bar and not outliers else None,
            ratios={name: ratio for name, ratio in ratios(costs).items() if name in wanted},
            difference=shard.difference(bounded),
            costs=costs,
            device=device.type,
            size_million=size,
            bounded=bounded,
            against=side.name,
            pass_s=(times[0], times[1]),
        )


def _tell(on_progress: Progress, what: str, blocks: int, done: int) -> None:
    on_progress(what, done, blocks)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
