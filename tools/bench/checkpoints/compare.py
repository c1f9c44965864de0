"""Speed of comparing checkpoints against ``cat``, in bounded memory: ``python -m tools.bench compare``.

Two files of equal tensors lie in the page cache. Ours is ``open_view`` and ``compare_checkpoints`` in a process that
runs already; the other side is ``cat A B`` with its output thrown away, and ``cmp A B``. The bar is 0.8 of the rate of
``cat``, that is 1.25 of its time; ``cmp`` has none. Memory: how much the most that a fresh process holds (VmHWM, all of
its resident pages) grows while it compares, at two sizes, of equal files and of files that differ everywhere. The bar
is that four times the size takes at most 16 MiB more.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megasdc.common.errors import ConfigError
from megasdc.lab.checkpoints.checkpoints import compare_checkpoints
from megasdc.lab.checkpoints.views.open import open_view
from tools.bench.checkpoints.options import TENSOR_MIB, CompareBenchOptions
from tools.bench.clocks import time_block
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress, scratch_folder
from tools.bench.result import Comparison, ComparisonResult, Report, interval, table, verdict
from tools.bench.statistics import SLACK, Block, Cost, median_walls, ratios, run_pairs

BAR = 1.25
"""Largest median of our time over that of ``cat``."""
MEMORY_SLACK_MIB = 16.0
"""Largest excess of the larger size's memory over the smaller one's."""
M_ARENA_MAX = -8
"""glibc's name for the number of heaps, mallopt(3)."""
_PROCESSES = 5
"""Most processes in which the larger size is compared; all must exceed the bar for it to be missed."""
_SMALL = 4
"""Small tensors of a file, such as norms, beside each large one."""


@dataclass(frozen=True)
class CompareComparison(Comparison):
    """The comparison against another program over the same two files; ``difference`` is None where it found none.

    ``bytes_per_s`` is of both files together, median over blocks, ours and the other's.
    """

    against: str
    bytes_per_s: tuple[float, float]


@dataclass(frozen=True)
class PeakMemory:
    """Memory growth of a comparison's process, by size of each file: the smaller and the larger."""

    also = ("passed",)

    content: str
    size_mib: tuple[int, int]
    growth_mib: tuple[float, float]

    @property
    def passed(self) -> bool:
        """Whether the larger size takes hardly more."""
        return self.growth_mib[1] <= self.growth_mib[0] + MEMORY_SLACK_MIB


@dataclass(frozen=True)
class CompareBenchResult(ComparisonResult):
    """Comparisons, one a program, and peak memory, one entry a kind of content."""

    judged = ("comparisons", "memory")
    comparisons: Sequence[CompareComparison]
    memory: list[PeakMemory]

    def report(self) -> Report:
        """Times over those of other programs, and memory by size."""
        options = self.options
        yield (
            f"two files of {options.size_mib} MiB in {options.folder}, {options.jobs or self.machine['cores']} "
            f"thread(s); bar: time over that of cat: median <= {BAR}, upper end <= {BAR + SLACK:.2f}"
        )
        rates = []
        for one in self.comparisons:
            ours, theirs = (rate / 1e9 for rate in one.bytes_per_s)
            times = interval(one.ratios["wall"], link=" - ")
            rates.append([one.against, times, f"{ours:.2f} : {theirs:.2f}", one.verdict])
        title = f"comparison against other programs, {options.blocks} pairs of blocks"
        yield table(title, ("against", "time, ours / other", "GB/s, ours : other", "verdict"), rates)
        for one in self.comparisons:
            if one.difference is not None:
                yield f"FAIL: against {one.against}: {one.difference}"
        rows = []
        for peak in self.memory:
            small, large = peak.growth_mib
            sizes = " : ".join(map(str, peak.size_mib))
            rows.append([peak.content, sizes, f"{small:.1f} : {large:.1f}", verdict(peak.passed)])
        title = f"most memory while comparing, above that before; bar: {MEMORY_SLACK_MIB:.0f} MiB more"
        yield table(title, ("content", "sizes, MiB", "MiB", "verdict"), rows)


def bench_compare(options: CompareBenchOptions, on_progress: Progress = ignore_progress) -> CompareBenchResult:
    """Measure on this machine; ConfigError if ``cat`` or ``cmp`` is not installed."""
    if lacking := [name for name in ("cat", "cmp") if shutil.which(name) is None]:
        raise ConfigError([f"{name} is not installed" for name in lacking], source="this machine")
    machine = describe_machine()
    with scratch_folder(options.folder) as folder:
        files = [write_checkpoint(folder / "one.pt", options.size_mib), folder / "other.pt"]
        shutil.copyfile(*files)  # torch.save puts a file's name into it
        found = [_compare(options, files, program, on_progress) for program in ("cat", "cmp")]
        on_progress("memory", 0, 4)
        memory = [
            _peak_memory(options, folder, files[0], content, lambda done: on_progress("memory", done, 4))
            for content in ("equal", "different")
        ]
    return CompareBenchResult(machine, options, found, memory)


def write_checkpoint(path: Path, size_mib: int, *, flipped: bool = False) -> Path:
    """Write a file of tensors: large ones, small ones beside each, the same values in every call.

    ``size_mib`` is that of the large ones together; ``flipped`` flips a bit of every element.
    """
    draw = torch.Generator().manual_seed(7)
    state: dict[str, torch.Tensor] = {}
    for number in range(size_mib // TENSOR_MIB):
        state[f"{number}.weight"] = torch.randn(TENSOR_MIB << 8, 1024, generator=draw)
        state |= {f"{number}.norm{one}": torch.randn(4096, generator=draw) for one in range(_SMALL)}
    for tensor in state.values() if flipped else ():
        tensor.view(torch.int32).bitwise_xor_(1 << 20)
    torch.save(state, path)
    return path


def _compare(options: CompareBenchOptions, files: list[Path], program: str, on_progress: Progress) -> CompareComparison:
    """Run ours and another program in turn over two files."""
    differences: list[str] = []

    def ours() -> None:
        report = compare_checkpoints([open_view(file) for file in files], jobs=options.jobs)
        if not report.same or report.problems:
            differences.append("; ".join(report.problems) or f"{len(report.findings)} findings in equal files")

    def theirs() -> None:
        subprocess.run([program, *map(str, files)], stdout=subprocess.DEVNULL, check=True)

    costs = run_pairs(program, (ours, theirs), options.blocks, _measure, on_progress)
    num_bytes = sum(file.stat().st_size for file in files)
    walls_s = median_walls(costs)
    return CompareComparison(
        bar=BAR if program == "cat" else None,
        ratios=ratios(costs, ("wall",)),
        difference=differences[0] if differences else None,
        costs=costs,
        against=program,
        bytes_per_s=(num_bytes / walls_s[0], num_bytes / walls_s[1]),
    )


def _measure(run: Block) -> Cost:
    """Time a block; processor time with that of programs it ran."""
    return time_block(run, lambda: sum(os.times()[:4]))


def _peak_memory(options: CompareBenchOptions, folder: Path, large: Path, content: str, on_progress: Any) -> PeakMemory:
    """Compare at a quarter of the size and at the whole, each in fresh processes: of the whole the least counts.

    Some processes hold up to 30 MiB more than others, at either size; memory that grows does so in each.
    """
    sizes = (options.size_mib // 4, options.size_mib)
    growth: list[float] = []
    for number, size in enumerate(sizes):
        one = large if size == options.size_mib else write_checkpoint(folder / "small.pt", size)
        other = one if content == "equal" else write_checkpoint(folder / "flipped.pt", size, flipped=True)
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            found: list[float] = []
            while len(found) < 2 or (growth and len(found) < _PROCESSES and min(found) > growth[0] + MEMORY_SLACK_MIB):
                found.append(pool.apply(_peak_growth, (one, other, options.jobs, content)))
            growth.append(min(found) if growth else max(found))  # what heaps keep by chance is no growth with the size
        on_progress(number + 1 + 2 * (content == "different"))
    return PeakMemory(content, sizes, (growth[0], growth[1]))


def _peak_growth(one: Path, other: Path, jobs: int | None, content: str) -> float:
    """MiB by which the most that this process holds exceeds what it holds before; tensors' files are not mapped.

    All threads share one heap: what heaps of their own happen to keep differs by up to 20 MiB between processes that do
    the same, whatever the size.
    """
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
    views = [open_view(file) for file in (one, other)]
    compare_checkpoints([open_view(one)] * 2, jobs=jobs)  # loads what is loaded at the first use
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew, proc(5)
    before = _status_mib("VmRSS")
    report = compare_checkpoints(views, jobs=jobs)
    assert report.same == (content == "equal"), f"{len(report.findings)} findings in {content} files"
    return max(0.0, _status_mib("VmHWM") - before)  # the kernel counts pages of threads a little later


def _status_mib(name: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None, f"/proc/self/status has no {name}"
    return int(found[1]) / 1024
