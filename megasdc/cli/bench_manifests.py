"""`megasdc bench ...` of manifests of checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from megasdc.cli.app import Json, Out, bench_app, print_result


@bench_app.command("compare-manifests", epilog="Example: megasdc bench compare-manifests --size-gb 1000 --ranks 4096")
def bench_comparing_manifests(
    size_gb: Annotated[int, typer.Option("--size-gb", help="Of the made-up checkpoint, 10^9 bytes.")] = 1000,
    ranks: Annotated[int, typer.Option("--ranks", help="That wrote a shard each; a multiple of 8.")] = 4096,
    runs: Annotated[int, typer.Option("--runs", help="Of the command.")] = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare two made-up manifests of a large checkpoint; exit code 1 if it takes more than 30 s or 1 GiB.

    The command that users call is run in a process of its own, its start with it, and must name the one block that
    differs.
    """
    from rich.console import Console

    from megasdc.bench.compare_manifests import CompareManifestsOptions, bench_compare_manifests
    from megasdc.bench.compare_manifests_render import render_compare_manifests
    from megasdc.bench.render import progress_bar

    options = CompareManifestsOptions(size_gb, ranks, runs)
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_compare_manifests(options, on_progress)
    print_result(result, render_compare_manifests, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))
