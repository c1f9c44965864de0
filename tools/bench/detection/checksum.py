"""Checksums, ``python -m tools.bench checksum``: their speed against reading, and the faults that they miss.

Speed: the default algorithm of a device against the operation that reads as many bytes from memory at the best rate
there is: ``tensor.sum()`` on the host, a sum reduction (fp32) or a device copy (bf16) on a GPU. The bar is 0.8 of
their rate, that is 1.25 of their time. On the host a tensor that fits a cache is read from there by the checksum, as
in a run, and also compared with ``tensor.sum()`` of the same tensor, without a bar. What a check does with one result
of 1 MiB on the host - a checksum that is recorded, a look for NaN and Inf - may take 1.3 of the time to read it.
Faults: `tools.bench.detection.checksum_trials`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from megasdc.common.addresses import FORWARD, Address
from megasdc.config.sections import TraceSection
from megasdc.sdc.nonfinite import FiniteRecorder
from megasdc.sdc.tracer import Tracer
from megasdc.tensors.checksum import default_algorithm
from tools.bench.clocks import devices_here, time_block
from tools.bench.detection.checksum_trials import BLIND_TO, DTYPES, FAULTS, Trials, run_trials
from tools.bench.detection.options import ChecksumBenchOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress
from tools.bench.result import Comparison, ComparisonResult, Report, table
from tools.bench.statistics import Block, median_walls, ratios, run_pairs
from tools.trainings.numerics import cpu_threads

BAR = 1.25
"""Largest median of our time over the other operation's."""
LOOK_BAR, LOOK_MIB = 1.3, 1
"""The same of what a check does with one result of so many MiB."""
GPU_LEAST_MIB = 64
"""Smallest tensor that has a bar on a GPU; the time of less is the time to start a kernel."""
MEMORY_BYTES = 1 << 29
"""So much is read in turn where a sum reads from memory: more than caches hold."""
_BLOCK_BYTES = {"cpu": 128 << 20, "cuda": 8 << 30}


@dataclass(frozen=True)
class SpeedComparison(Comparison):
    """A check's work on one tensor against an operation that reads it.

    ``algorithm`` is the checksum's name, or what else is done; ``bytes_per_s`` is the median over blocks, that of the
    check and the other's.
    """

    device: str
    algorithm: str
    against: str
    dtype: str
    size_mib: int
    bytes_per_s: tuple[float, float]


@dataclass(frozen=True)
class ChecksumBenchResult(ComparisonResult):
    """Comparisons by device, type and size; trials by algorithm, type and fault; what could not run, and why."""

    judged = ("comparisons", "trials")
    comparisons: list[SpeedComparison]
    trials: list[Trials]
    not_run: list[str]

    def report(self) -> Report:
        """Ratios and rates of each tensor, and the faults that were missed."""
        yield (
            f"GPU: {self.machine.get('gpu', 'none')}; on the host XXH3 in 1 thread, tensor.sum() in "
            f"{self.options.threads}; a rate of at least {1 / BAR:.2f} of the other's is a time of at most {BAR} of its"
        )
        for one in self.comparisons:
            yield one.ratio_table(
                f"{one.algorithm} against {one.against}, {one.device}, {one.dtype}, {one.size_mib} MiB"
            )
            ours, theirs = (rate / 1e9 for rate in one.bytes_per_s)
            yield f"GB/s {ours:.1f} : {theirs:.1f} (medians)"
        yield self._misses()
        for reason in self.not_run:
            yield f"NOT RUN: {reason}"

    def _misses(self) -> Table:
        of = {(one.algorithm, one.fault, one.dtype): one for one in self.trials}
        algorithms = list(dict.fromkeys(one.algorithm for one in self.trials))
        rows = [
            [
                fault,
                *(
                    ", ".join(
                        f"{one.misses:,}" + ("" if one.passed else " FAIL")
                        for one in (of[algorithm, fault, dtype] for dtype in DTYPES)
                    )
                    for algorithm in algorithms
                ),
            ]
            for fault in FAULTS
        ]
        columns = [name + (" (for comparison)" if name in BLIND_TO else "") for name in algorithms]
        title = f"faults missed, of {self.options.trials:,} of each kind: " + ", ".join(DTYPES)
        return table(title, ("fault", *columns), rows)


def bench_checksum(options: ChecksumBenchOptions, on_progress: Progress = ignore_progress) -> ChecksumBenchResult:
    """Measure on this machine."""
    machine = describe_machine()
    devices, not_run = devices_here(machine)
    with cpu_threads(options.threads):
        found = [
            one
            for device in devices
            for dtype in DTYPES
            for size in options.sizes_mib
            for one in _compare(options, torch.device(device), dtype, size, on_progress)
        ]
        found += [one for dtype in DTYPES for one in _compare_looks(options, dtype, on_progress)]
        trials = run_trials(options.trials, on_progress=on_progress)
    return ChecksumBenchResult(machine, options, found, trials, not_run)


def _compare(
    options: ChecksumBenchOptions, device: torch.device, dtype_name: str, size_mib: int, on_progress: Progress
) -> Iterator[SpeedComparison]:
    """The checksum of one tensor against reading as much from memory, and on the host against reading the same."""
    tensor = _tensor(device, dtype_name, size_mib)
    chosen = default_algorithm(device)
    own = chosen.name, lambda: chosen.start(tensor)
    if device.type != "cpu":
        yield _time(options, own, _reading(tensor), tensor, BAR if size_mib >= GPU_LEAST_MIB else None, on_progress)
        return
    yield _time(options, own, _reading_memory(tensor), tensor, BAR, on_progress)
    yield _time(options, own, _reading(tensor), tensor, None, on_progress)


def _compare_looks(options: ChecksumBenchOptions, dtype_name: str, on_progress: Progress) -> list[SpeedComparison]:
    """What checks do with one result, against reading it."""
    tensor = _tensor(torch.device("cpu"), dtype_name, LOOK_MIB)
    address = Address(1, 0, FORWARD, "loss", "output")
    tracer, finite = Tracer(default_algorithm(tensor.device), TraceSection()), FiniteRecorder()
    looks = {
        "a recorded checksum": lambda: tracer(address, tensor),
        "a look for NaN and Inf": lambda: finite(address, tensor),
    }
    return [_time(options, one, _reading(tensor), tensor, LOOK_BAR, on_progress) for one in looks.items()]


def _tensor(device: torch.device, dtype_name: str, size_mib: int) -> Tensor:
    dtype = DTYPES[dtype_name]
    return torch.randn((size_mib << 20) // dtype.itemsize, device=device).to(dtype)


def _time(
    options: ChecksumBenchOptions,
    ours: tuple[str, Callable[[], Any]],
    theirs: tuple[str, Callable[[], Any]],
    tensor: Tensor,
    bar: float | None,
    on_progress: Progress,
) -> SpeedComparison:
    """Run both sides in turn, named, over one tensor, in blocks of enough repetitions to be timed."""
    device = tensor.device
    (name, call), (against, other) = ours, theirs
    repeats = max(1, _BLOCK_BYTES[device.type] // tensor.nbytes)
    dtype_name = next(name for name, dtype in DTYPES.items() if dtype == tensor.dtype)
    size_mib = tensor.nbytes >> 20

    def block(function: Callable[[], Any]) -> Block:
        def run() -> None:
            for _ in range(repeats):
                function()

        return run

    what = f"{device.type} {dtype_name} {size_mib} MiB"
    costs = run_pairs(what, (block(call), block(other)), options.blocks, time_block, on_progress)
    rates = [repeats * tensor.nbytes / wall_s for wall_s in median_walls(costs)]
    return SpeedComparison(
        device=device.type,
        algorithm=name,
        against=against,
        dtype=dtype_name,
        size_mib=size_mib,
        difference=None,
        bar=bar,
        ratios=ratios(costs, ("wall", "cpu") if device.type == "cpu" else ("wall",)),
        bytes_per_s=(rates[0], rates[1]),
        costs=costs,
    )


def _reading(tensor: Tensor) -> tuple[str, Callable[[], Any]]:
    """What reads a tensor at the best rate, with its name."""
    if tensor.device.type == "cuda" and tensor.dtype == torch.bfloat16:
        target = torch.empty_like(tensor)
        return "device copy", lambda: target.copy_(tensor)
    return "tensor.sum()", tensor.sum


def _reading_memory(tensor: Tensor) -> tuple[str, Callable[[], Any]]:
    """What reads as much from memory: one tensor after the other, of more than caches hold."""
    others = cycle([tensor.clone() for _ in range(max(2, MEMORY_BYTES // tensor.nbytes))])
    return "tensor.sum() from memory", lambda: next(others).sum()
