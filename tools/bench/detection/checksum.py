"""Checksums, ``python -m tools.bench checksum``: their speed against reading, and the faults that they miss.

Speed: the default algorithm of a device against the operation that reads the same tensor at the best rate there is:
``tensor.sum()`` on the host, a sum reduction (fp32) or a device copy (bf16) on a GPU, both by bytes of the tensor. The
bar is 0.8 of their rate, that is 1.25 of their time. Faults: `tools.bench.detection.checksum_trials`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from megasdc.errors import ConfigError
from megasdc.tensors.checksum import default_algorithm
from tools.bench.detection.checksum_trials import DTYPES, Trials, run_trials
from tools.bench.machine import describe_machine
from tools.bench.result import SLACK, Progress
from tools.bench.statistics import Block, Cost, Estimate, estimate_median, ratios, run_alternating

BAR = 1.25
"""Largest median of our time over the other operation's."""
GPU_LEAST_MIB = 64
"""Smallest tensor that has a bar on a GPU; the time of less is the time to start a kernel."""
_BLOCK_BYTES = {"cpu": 128 << 20, "cuda": 8 << 30}


@dataclass(frozen=True)
class ChecksumBenchOptions:
    """Sizes of a measurement.

    Args:
        blocks: blocks of each side, that is pairs; one pair before them does not count.
        sizes_mib: sizes of tensors, MiB.
        threads: CPU threads of ``tensor.sum()``; XXH3 always uses one.
        trials: faults of each kind in each type; with fewer than 100 the algorithms for comparison may miss none.
    """

    blocks: int = 40
    sizes_mib: tuple[int, ...] = (1, 4, 16, 64, 256)
    threads: int = 1
    trials: int = 4000

    def __post_init__(self) -> None:
        values = [("blocks", self.blocks, 1), ("threads", self.threads, 1), ("trials", self.trials, 100)]
        values += [("sizes", size, 1) for size in self.sizes_mib]
        problems = [f"--{name}: {value} must be at least {least}" for name, value, least in values if value < least]
        if problems:
            raise ConfigError(problems, source="the benchmark's options")


@dataclass(frozen=True)
class SpeedComparison:
    """The checksum of one tensor against an operation that reads it.

    Args:
        device: cpu or cuda.
        algorithm: name of the checksum.
        against: the other operation.
        dtype: fp32 or bf16.
        size_mib: of the tensor.
        bar: largest median ratio that passes; None where there is none.
        ratios: time of the checksum over the other's: ``wall``, on the host also ``cpu``.
        bytes_per_s: median over blocks, the checksum's and the other's.
        costs: (the checksum's, the other's) of each pair of blocks.
    """

    device: str
    algorithm: str
    against: str
    dtype: str
    size_mib: int
    bar: float | None
    ratios: dict[str, Estimate]
    bytes_per_s: tuple[float, float]
    costs: list[tuple[Cost, Cost]] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether all ratios are within the bar, if there is one."""
        return self.bar is None or all(ratio.passes(self.bar, SLACK) for ratio in self.ratios.values())


@dataclass(frozen=True)
class ChecksumBenchResult:
    """Everything that was measured.

    Args:
        machine: date, processor, versions, and the GPU's name where there is one.
        options: sizes.
        comparisons: one a device, type and size.
        trials: one an algorithm, type and kind of fault.
        not_run: what could not be measured here, and why.
    """

    machine: dict[str, Any]
    options: ChecksumBenchOptions
    comparisons: list[SpeedComparison]
    trials: list[Trials]
    not_run: list[str]

    @property
    def passed(self) -> bool:
        """Whether every comparison and every kind of trial that was run passed."""
        return all(one.passed for one in self.comparisons) and all(one.passed for one in self.trials)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it, with verdicts."""
        return {
            "passed": self.passed,
            "machine": self.machine,
            "options": asdict(self.options),
            "slack": SLACK,
            "comparisons": [{"passed": one.passed, **asdict(one)} for one in self.comparisons],
            "trials": [{"passed": one.passed, **asdict(one)} for one in self.trials],
            "not_run": self.not_run,
        }


def bench_checksum(
    options: ChecksumBenchOptions, on_progress: Progress = lambda what, done, total: None
) -> ChecksumBenchResult:
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
    with _threads(options.threads):
        found = [
            _compare(options, torch.device(device), dtype, size, on_progress)
            for device in devices
            for dtype in DTYPES
            for size in options.sizes_mib
        ]
        trials = run_trials(options.trials, on_progress=on_progress)
    return ChecksumBenchResult(machine, options, found, trials, not_run)


def _compare(
    options: ChecksumBenchOptions, device: torch.device, dtype_name: str, size_mib: int, on_progress: Progress
) -> SpeedComparison:
    """Run both sides in turn over one tensor, in blocks of enough repetitions to be timed."""
    dtype = DTYPES[dtype_name]
    tensor = torch.randn((size_mib << 20) // dtype.itemsize, device=device).to(dtype)
    chosen = default_algorithm(device)
    against, other = _baseline(tensor)
    repeats = max(1, _BLOCK_BYTES[device.type] // tensor.nbytes)
    what = f"{device.type} {dtype_name} {size_mib} MiB"

    def block(function: Callable[[], Any]) -> Block:
        def run() -> None:
            for _ in range(repeats):
                function()

        return run

    sides = block(lambda: chosen.start(tensor)), block(other)
    on_progress(what, 0, options.blocks)
    run_alternating(*sides, 1, _measure, lambda done: None)  # compiles kernels
    costs = run_alternating(*sides, options.blocks, _measure, lambda done: on_progress(what, done, options.blocks))
    rates = [repeats * tensor.nbytes / estimate_median([pair[side].wall_s for pair in costs]).median for side in (0, 1)]
    quantities = ("wall", "cpu") if device.type == "cpu" else ("wall",)
    return SpeedComparison(
        device=device.type,
        algorithm=chosen.name,
        against=against,
        dtype=dtype_name,
        size_mib=size_mib,
        bar=BAR if device.type == "cpu" or size_mib >= GPU_LEAST_MIB else None,
        ratios={name: ratio for name, ratio in ratios(costs).items() if name in quantities},
        bytes_per_s=(rates[0], rates[1]),
        costs=costs,
    )


def _baseline(tensor: Tensor) -> tuple[str, Callable[[], Any]]:
    if tensor.device.type == "cuda" and tensor.dtype == torch.bfloat16:
        target = torch.empty_like(tensor)
        return "device copy", lambda: target.copy_(tensor)
    return "tensor.sum()", tensor.sum


def _measure(run: Block) -> Cost:
    """Time a block until a GPU, if there is one, has done it."""
    _wait()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    _wait()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


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
