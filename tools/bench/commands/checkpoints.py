"""`python -m tools.bench ...` of checkpoints: speed and memory of comparisons, recoveries of runs that were killed."""

from __future__ import annotations

from typing import Any

from tools.bench.checkpoints.options import CompareBenchOptions, CompareManifestsOptions
from tools.bench.checkpoints.recovery_options import RecoveryOptions
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


@add_command(app, "recoveries", "--drills 14 --out recoveries.json")
def bench_recovering(on_progress: Any, options: RecoveryOptions) -> Any:
    """Kill and damage runs that save beside training, and start them again; exit code 1 if one does not end right.

    All losses and the last checkpoint as without a fault, each start from the newest step that was whole, no checkpoint
    lost that a fault did not destroy, nothing left in memory. Kinds with several hosts or a full disk need root.
    """
    from tools.bench.checkpoints.recoveries import bench_recoveries

    return bench_recoveries(options, on_progress)
