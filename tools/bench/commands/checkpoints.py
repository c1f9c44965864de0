"""`python -m tools.bench ...` of checkpoints: comparisons, the archive, costs of saves, restarts, recoveries."""

from __future__ import annotations

from typing import Any

from tools.bench.checkpoints.options import ArchiveBenchOptions, CompareBenchOptions, CompareManifestsOptions
from tools.bench.checkpoints.recovery_options import RecoveryOptions
from tools.bench.checkpoints.restore_options import RestoreOptions
from tools.bench.checkpoints.stall_options import StallOptions
from tools.bench.commands.app import app
from tools.bench.options import Log, add_command


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


@add_command(app, "save-stall", "--sizes 256x4,512x8 --ranks 1 --out save_stall.json")
def bench_stalling(on_progress: Any, options: StallOptions) -> Any:
    """Measure what saves cost training, on the disk and in memory; exit code 1 if a bar is missed.

    A save beside training stalls it for at most 5 % of one that waits, and but for the wait for its copy for 1 % of a
    step; micro-batches beside a copy or a writer take at most 1.03 of quiet ones, and steps of one rank that are all
    kept in memory 1.02. The sizes of the default take an hour on a machine that does nothing else.
    """
    from tools.bench.checkpoints.stall import bench_save_stall

    return bench_save_stall(options, on_progress)


@add_command(app, "restore", "--sizes 512x8 --restarts 1 --out restore.json")
def bench_restoring(on_progress: Any, options: RestoreOptions) -> Any:
    """Measure how fast checkpoints are restored, and the parts of restarts; exit code 1 if a bar is missed.

    At least 0.8 of the rate at which cat reads the same files from the disk. Restarts are from memory, from partners,
    and from the disk, which is also slowed down; for the last, and for partners, a user needs rights to limit disks and
    to name hosts, as root has them.
    """
    from tools.bench.checkpoints.restore import bench_restore

    return bench_restore(options, on_progress)


@add_command(app, "recoveries", "--drills 14 --log recoveries.jsonl --out recoveries.json")
def bench_recovering(on_progress: Any, options: RecoveryOptions, log: Log = None) -> Any:
    """Kill and damage runs that save beside training, and start them again; exit code 1 if one does not end right.

    All losses and the last checkpoint as without a fault, each start from the newest step that was whole, no checkpoint
    lost that a fault did not destroy, nothing left in memory. Kinds with several hosts or a full disk need root.
    """
    from tools.bench.checkpoints.recoveries import bench_recoveries

    return bench_recoveries(options, log, on_progress)
