"""`python -m tools.bench ...` of checkpoints: speed and memory of comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, Out, output_folder, print_result
from tools.bench.commands.app import app


@app.command("compare", epilog="Example: python -m tools.bench compare --size 2048 --out compare.json")
def bench_comparing(
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of each side.")] = 15,
    size: Annotated[
        int, typer.Option("--size", help="MiB of each of two files; four times as much has to be free.")
    ] = 1024,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Threads that read; default: one per core.")] = None,
    folder: Annotated[Path, typer.Option("--folder", **output_folder(help="Where the files are written."))] = Path(
        "/dev/shm"
    ),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare two equal files of tensors in the page cache, against cat and cmp; exit code 1 if a bar is missed.

    At least 0.8 of the rate of cat, and at most 16 MiB more memory for four times the size. Run it on a machine that
    does nothing else.
    """
    from megasdc.progress import progress_bars
    from tools.bench.checkpoints.compare import CompareBenchOptions, bench_compare
    from tools.bench.checkpoints.compare_render import render_compare

    options = CompareBenchOptions(blocks, size, jobs, folder)
    with progress_bars() as on_progress:
        result = bench_compare(options, on_progress)
    print_result(result, render_compare, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@app.command("compare-manifests", epilog="Example: python -m tools.bench compare-manifests --size-gb 1000 --ranks 4096")
def bench_comparing_manifests(
    size_gb: Annotated[int, typer.Option("--size-gb", help="Size of the synthetic checkpoint, in 10^9 bytes.")] = 1000,
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks that wrote a shard each; a multiple of 8.")] = 4096,
    runs: Annotated[int, typer.Option("--runs", help="Runs of the command.")] = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare two synthetic manifests of a large checkpoint; exit code 1 if it takes more than 30 s or 1 GiB.

    The command that users call is run in a process of its own, its start with it, and must name the one block that
    differs.
    """
    from megasdc.progress import progress_bars
    from tools.bench.checkpoints.compare_manifests import CompareManifestsOptions, bench_compare_manifests
    from tools.bench.checkpoints.compare_manifests_render import render_compare_manifests

    options = CompareManifestsOptions(size_gb, ranks, runs)
    with progress_bars() as on_progress:
        result = bench_compare_manifests(options, on_progress)
    print_result(result, render_compare_manifests, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))
