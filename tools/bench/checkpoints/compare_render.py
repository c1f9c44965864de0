"""Speed of comparing checkpoints as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tools.bench.checkpoints.compare import BAR, MEMORY_SLACK_MIB, CompareBenchResult
from tools.bench.render import render_machine
from tools.bench.result import SLACK


def render_compare(result: CompareBenchResult, console: Console) -> None:
    """Print a result.

    Args:
        result: what was measured.
        console: where.
    """
    options = result.options
    render_machine(result.machine, console)
    jobs = options.jobs or result.machine["cores"]
    console.print(
        f"two files of {options.size_mib} MiB in {options.folder}, {jobs} thread(s); "
        f"bar: time over that of cat: median <= {BAR}, upper end <= {BAR + SLACK:.2f}"
    )
    rates = Table(title=f"comparison against other programs, {options.blocks} pairs of blocks")
    for column in ("against", "time, ours / other", "GB/s, ours : other", "verdict"):
        rates.add_column(column)
    for one in result.comparisons:
        wall = one.ratios["wall"]
        ours, theirs = (rate / 1e9 for rate in one.bytes_per_s)
        verdict = "FAIL" if not one.passed else "-" if one.bar is None else "pass"
        times = f"{wall.median:.3f} ({wall.low:.3f} - {wall.high:.3f})"
        rates.add_row(one.against, times, f"{ours:.2f} : {theirs:.2f}", verdict)
    console.print(rates)
    for one in result.comparisons:
        if one.difference is not None:
            console.print(f"FAIL: against {one.against}: {one.difference}")
    memory = Table(title=f"most memory while comparing, above that before; bar: {MEMORY_SLACK_MIB:.0f} MiB more")
    for column in ("content", "sizes, MiB", "MiB", "verdict"):
        memory.add_column(column)
    for peak in result.memory:
        small, large = peak.growth_mib
        sizes = " : ".join(map(str, peak.size_mib))
        memory.add_row(peak.content, sizes, f"{small:.1f} : {large:.1f}", "pass" if peak.passed else "FAIL")
    console.print(memory)
