"""The command behind ``tools/compare_traces.py``: compares runs, prints, and sets the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from megasdc.common.errors import MegasdcError, StorageError
from megasdc.common.program import at_home, echo, run
from megasdc.lab.traces.trace_page import trace_page
from megasdc.lab.traces.traces import TraceReport, compare_runs, load_traces
from megasdc.output.html import write_page
from megasdc.output.terminal import print_pages

SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)


@app.command(
    epilog="Example: python tools/compare_traces.py runs/a runs/b --picture difference.html",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="A B [C ...]", callback=at_home, help="Run folders, or folders of trace files."),
    ],
    cross_layout: Annotated[
        bool,
        typer.Option(
            "--cross-layout",
            help="Runs of different layouts: compare the results whose bits do not depend on it, of the first step "
            "that both have; its weights must be equal.",
        ),
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Divergences that are listed.")] = 20,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE.html", callback=at_home, help="Also write heat maps as one web page."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Say where runs that should be equal part first: rank, step, micro-batch, phase and submodule.

    Each run is compared with the first, over the steps that both have. Exit code 0: every checksum is equal; 1: some
    are not; 2: some runs could not be compared, the picture not written, or the command line is wrong.
    """
    if len(runs) < 2:
        raise typer.BadParameter("two or more runs are needed", param_hint="A B [C ...]")
    if picture is not None and picture.suffix != ".html":
        raise typer.BadParameter(f"{picture}: pictures are web pages, name a file that ends in .html")
    loaded: dict[Path, Any] = {}
    for path in track(runs, "reading traces", console=Console(stderr=True), transient=True, disable=_quiet(as_json)):
        loaded[path] = _attempt(load_traces, path)
    reports: list[TraceReport] = []
    problems = list(dict.fromkeys(str(one) for one in loaded.values() if isinstance(one, MegasdcError)))
    for path in runs[1:]:
        expected, got = loaded[runs[0]], loaded[path]
        if isinstance(expected, MegasdcError) or isinstance(got, MegasdcError):
            continue
        report = _attempt(compare_runs, expected, got, cross_layout)
        if isinstance(report, TraceReport):
            reports.append(report)
        else:
            problems.append(str(report))
    _show(reports, problems, limit, as_json)
    if picture is not None and reports:
        try:
            write_page(trace_page(reports, limit), picture, "--picture")
        except StorageError as error:
            problems = [f"{error}; what differs is printed above"]
            _show([], problems, limit, as_json=False)
    if problems:
        raise typer.Exit(NOT_COMPARED)
    raise typer.Exit(SAME if all(report.same for report in reports) else DIFFERENT)


def _attempt(function: Any, *args: Any) -> Any:
    """A function's result, or the MegasdcError that it raised: one unreadable run must not stop the others."""
    try:
        return function(*args)
    except MegasdcError as error:
        return error


def _quiet(as_json: bool) -> bool:
    return as_json or not sys.stderr.isatty()


def _show(reports: list[TraceReport], problems: list[str], limit: int, as_json: bool) -> None:
    if as_json:
        result = {"comparisons": [report.as_dict(limit) for report in reports], "not_compared": problems}
        echo(json.dumps(result, indent=2))
    else:
        print_pages(trace_page([report], limit) for report in reports)
    for problem in problems:
        echo(f"compare_traces: error: {problem}", err=True)


def main() -> None:
    """Runs the command line."""
    run(lambda: app(prog_name="compare_traces"), "compare_traces", unwritten=NOT_COMPARED)
