"""The command behind ``tools/compare_checkpoints.py``: compares, prints, and sets the exit code."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megasdc.checkpoint.views.view import Slot, with_derived_weights
from megasdc.common.errors import MegasdcError
from megasdc.common.program import at_home, echo, run
from megasdc.common.progress import bytes_bar
from megasdc.lab.checkpoints.checkpoints import Options, Report, compare_checkpoints, tensors_to_compare
from megasdc.lab.checkpoints.extract_views import is_extract, open_extract_views
from megasdc.lab.checkpoints.pages.checkpoint_page import comparison_page
from megasdc.lab.checkpoints.pages.digest_command import compare_by_digest, goes_by_digest
from megasdc.lab.checkpoints.pages.drift_command import compare_runs
from megasdc.lab.checkpoints.views.open import open_view
from megasdc.output.html import write_page
from megasdc.output.terminal import print_pages

SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2

Extract = Annotated[
    Path | None,
    typer.Option(
        "--extract", metavar="DIR", callback=at_home, help="Write the blocks that differ, to be compared elsewhere."
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html", callback=at_home, help="Also write what was found as one web page."),
]

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)


@app.command(
    epilog="Example: python tools/compare_checkpoints.py runs/a/checkpoints/step_00000100 runs/b/.../step_00000100",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def compare(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B [C ...]",
            callback=at_home,
            help="Checkpoints of any layout, universal ones, of DeepSpeed with ZeRO-1 or of torch DCP, Hugging Face "
            "models, .pt or .safetensors files; or manifests and extracts of them.",
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Tensors to compare, such as '*.mlp.*' or '*/exp_avg'."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option("--ignore", metavar="PATTERN", help="Tensors and values to skip.")
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Compare weights alone.")] = False,
    ulp: Annotated[
        int, typer.Option("--ulp", min=0, help="Allowed difference of equal elements, in representable values.")
    ] = 0,
    rtol: Annotated[
        float, typer.Option("--rtol", min=0.0, help="Allowed relative difference of equal elements.")
    ] = 0.0,
    extract: Extract = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Findings that are listed.")] = 40,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Threads that read; default: one per core.")] = None,
    drift: Annotated[
        bool,
        typer.Option(
            "--drift",
            help="A B [C ...] are folders of checkpoints: how far are the parameters of B, C from A's at each step "
            "that both keep? Every bit counts, --ulp and --rtol do not.",
        ),
    ] = False,
    html: Html = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Say whether checkpoints hold the same bits, and if not: what differs, where, whose it was, what kind of damage.

    Exit code 0: all is equal; 1: something is not; 2: something could not be compared, or the command line is wrong.
    """
    if len(checkpoints) < 2:
        raise typer.BadParameter("two or more checkpoints are needed", param_hint="A B [C ...]")
    if html is not None and html.suffix != ".html":
        raise typer.BadParameter(f"{html}: pages are web pages, name a file that ends in .html")
    options = Options(tuple(only or ()), tuple(ignore or ()), weights_only, ulp, rtol)
    if drift:
        if ulp or rtol or extract is not None:
            raise typer.BadParameter("--drift measures differences: remove --ulp, --rtol and --extract")
        found = compare_runs(checkpoints, options, html, as_json)
        sys.stdout.flush()
        raise typer.Exit(NOT_COMPARED if found is None or found.problems else SAME if found.same else DIFFERENT)
    try:
        if goes_by_digest(checkpoints, extract):
            if options != Options() or html is not None:
                raise typer.BadParameter(
                    "--only, --ignore, --weights-only, --ulp, --rtol and --html need the tensors themselves"
                )
            _leave(compare_by_digest(checkpoints, extract=extract, as_json=as_json, limit=limit), [])
        report, keys = _compare(checkpoints, options, jobs, quiet=as_json or not sys.stderr.isatty())
        build = partial(comparison_page, report, keys, options, limit)
        if html is not None:
            write_page(build(), html)
    except MegasdcError as error:
        echo(f"compare_checkpoints: error: {error}", err=True)
        if as_json:
            echo(json.dumps({"same": False, "findings": [], "not_compared": [str(error)]}, indent=2))
        raise typer.Exit(NOT_COMPARED) from error
    if as_json:
        echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_pages([build()])
    _leave(report.same, report.problems)


def _leave(same: bool, problems: list[str]) -> None:
    """Exits with the code of the result; flushes first, so that a failed write is noticed."""
    sys.stdout.flush()
    for problem in problems:
        echo(f"compare_checkpoints: error: {problem}", err=True)
    if problems:
        raise typer.Exit(NOT_COMPARED)
    raise typer.Exit(SAME if same else DIFFERENT)


def _compare(
    paths: list[Path], options: Options, jobs: int | None, quiet: bool
) -> tuple[Report, list[tuple[str, Slot]]]:
    """Compares, with a progress bar in bytes unless quiet; also what was compared."""
    views = open_extract_views(paths) if any(map(is_extract, paths)) else [open_view(path) for path in paths]
    views = with_derived_weights(views)
    keys = tensors_to_compare(views, options)
    total = sum(view.entries[key].num_bytes for view in views for key in keys if key in view.entries)
    with bytes_bar("comparing", total, quiet=quiet) as advance:
        return compare_checkpoints(views, options, advance, jobs), keys


def main() -> None:
    """Runs the command line on the CPU: DeepSpeed would look for an accelerator, and print to standard output.

    A result that cannot be written is no verdict: the exit code is then NOT_COMPARED.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run(lambda: app(prog_name="compare_checkpoints"), "compare_checkpoints", unwritten=NOT_COMPARED)
