"""Comparison of manifests as text."""

from __future__ import annotations

from rich.console import Console

from tools.bench.checkpoints.compare_manifests import BAR_BYTES, BAR_S, CompareManifestsResult


def render_compare_manifests(result: CompareManifestsResult, console: Console) -> None:
    """Print the result."""
    machine, options, wall = result.machine, result.options, result.wall_s
    lines = [
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before",
        f"two made-up manifests of {options.size_gb:,} GB by {options.ranks:,} ranks: {result.num_files:,} files, "
        f"{result.num_blocks:,} blocks; {result.manifest_bytes / 1e6:.1f} MB each, "
        f"{result.manifest_bytes / options.size_gb:,.0f} bytes a GB",
        f"time of the command {wall.median:.2f} s ({wall.low:.2f} to {wall.high:.2f}, {wall.count} runs); the bar is "
        f"{BAR_S:g} s: {'pass' if wall.median <= BAR_S else 'FAIL'}",
        f"peak memory {result.peak_bytes / 2**20:.0f} MiB; the bar is {BAR_BYTES / 2**20:.0f} MiB: "
        f"{'pass' if result.peak_bytes <= BAR_BYTES else 'FAIL'}",
        f"the one block that differs was named, and nothing else: {'pass' if result.found else 'FAIL'}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
