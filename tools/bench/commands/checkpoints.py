"""`python -m tools.bench ...` of checkpoints: speed and memory of comparisons, size and rates of the archive."""

from __future__ import annotations

from typing import Any

from tools.bench.checkpoints.options import ArchiveBenchOptions, CompareBenchOptions, CompareManifestsOptions
from tools.bench.commands.app import app
from tools.bench.options import add_command


@add_command(app, "compare", "--size 2048 --out compare.json")
def bench_comparing(on_progress: Any, options: CompareBenchOptions) -> Any:
    """Compare two equal files of tensors in the page cache, against cat and cmp; exit code 1 if a bar is missed.

    At least 0.8 of the rate of cat, and at most 16 MiB more memory for four times the size. Run it on a machine that
    does nothing else.
    """
    from tools.bench.checkpoints.compare import bench_compare

    return bench_compare(options, on_progress)


@add_command(app, "compare-manifests", "--size-gb 1000 --ranks 4096")
def bench_comparing_manifests(on_progress: Any, options: CompareManifestsOptions) -> Any:
    """Compare two synthetic manifests of a large checkpoint; exit code 1 if it takes more than 30 s or 1 GiB.

    The command that users call is run in a process of its own, its start with it, and must name the one block that
    differs.
    """
    from tools.bench.checkpoints.compare_manifests import bench_compare_manifests

    return bench_compare_manifests(options, on_progress)


@add_command(app, "archive", "--steps 200 --precisions fp32,bf16")
def bench_archiving(on_progress: Any, options: ArchiveBenchOptions) -> Any:
    """Train small models, archive two successive checkpoints of each, and resume from quantized moments; no bar.

    Size against raw and against zstd alone, by kind of tensor; rates of pushing and pulling; the share that the second
    checkpoint has in common with the first; losses after a resume from moments of 8 bits.
    """
    from tools.bench.checkpoints.archive import bench_archive

    return bench_archive(options, on_progress)
