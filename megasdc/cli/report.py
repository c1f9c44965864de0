"""`megasdc report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import (
    Json,
    app,
    input_argument,
    input_option,
    output_folder,
    output_option,
    print_result,
    stdout_to_stderr,
)
from megasdc.common.errors import DataError
from megasdc.common.program import echo


@app.command(
    "report",
    epilog="Example: megasdc report runs/healthy runs/node_10 runs/node_11 --out nodes.html --figures nodes_figures",
)
def report(
    paths: Annotated[
        list[Path],
        input_argument(
            DataError,
            metavar="PATH...",
            help="A run folder, or that of replicas; several, which are compared; a study; a sweep; results of "
            "DropCompute (JSON).",
        ),
    ],
    out: Annotated[
        Path | None,
        output_option(
            "--out",
            metavar="FILE.html",
            help="The page. Default: reports/report.html in the folder; of several runs or files report.html here.",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            metavar="DIR",
            **output_folder(
                help="Also write every figure as PNG and SVG (Chromium draws them), and its numbers as CSV."
            ),
        ),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="Title of the page.")] = None,
    healthy: Annotated[
        Path | None,
        input_option(
            "--healthy",
            reads=DataError,
            metavar="PATH",
            help="The run that others are compared with. Default: the first.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a run, several runs beside a healthy one, a study, a sweep or results of DropCompute as one HTML page that
    needs no network.

    Works during a run. Exit code 0: the page is written, and so is all that --figures asks for; 1: the page is,
    but PNG and SVG could not be drawn; 71: a path holds no run, study, sweep or result of DropCompute,
    or they do not go together; 77: the page cannot be written, or a sweep has no tables yet.
    """
    with stdout_to_stderr():
        from megasdc.lab.report.run_pages.command import render_report, write_report
    from megasdc.common.program import progress_bars

    with progress_bars(quiet=as_json) as on_progress:
        written = write_report(paths, out, figures, title, healthy, on_progress)
    print_result(written, render_report, out=None, as_json=as_json)
    if written.problem:
        echo(f"megasdc: warning: {written.problem}", err=True)
        raise typer.Exit(1)
