"""``megasdc compare`` and ``megasdc compare-traces``, also as scripts of ``tools/``.

Exit code 0: all is equal; 1: something is not; 2: something could not be compared, or the command line is wrong. A
result that cannot be printed is no verdict: 77 as of every command, of the scripts 2.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megasdc.cli.app import Json, app, noted_as
from megasdc.cli.options import as_typer_takes_it, option
from megasdc.common.errors import CheckpointError, MegasdcError, StorageError
from megasdc.common.program import echo, run_program

if TYPE_CHECKING:
    from megasdc.lab.traces.trace_page import RunComparison

SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2


class NotComparedError(CheckpointError):
    """A file of what is compared cannot be read, or a result not be written: no verdict."""

    exit_code = NOT_COMPARED


_NOTED = noted_as(NotComparedError)


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison of checkpoints, see ``compare_paths`` of ``megasdc.lab.checkpoints.pages.comparison``."""

    only: tuple[str, ...] = option(
        (), "Tensors to compare, such as '*.mlp.*' or '*/exp_avg'; may be repeated.", metavar="PATTERN"
    )
    ignore: tuple[str, ...] = option((), "Tensors and values to skip; may be repeated.", metavar="PATTERN")
    weights_only: bool = option(False, "Compare weights alone.", "--weights-only")
    ulp: int = option(0, "Allowed difference of equal elements, in representable values.", min=0)
    rtol: float = option(0.0, "Allowed relative difference of equal elements.", min=0.0)
    extract: Path | None = option(
        None, "Write the blocks that differ, to be compared elsewhere.", metavar="DIR", **_NOTED
    )
    limit: int = option(40, "Findings that are listed.", min=0)
    jobs: int | None = option(None, "Threads that read; default: one per core.", min=1)
    drift: bool = option(
        False,
        "A B [C ...] are folders of checkpoints: how far are the parameters of B, C from A's at each step that both "
        "keep? Every bit counts, --ulp and --rtol do not.",
        "--drift",
    )
    html: Path | None = option(None, "Also write what was found as one web page.", metavar="FILE.html", **_NOTED)


@app.command("compare", epilog="Example: megasdc compare runs/a/checkpoints/step_00000100 runs/b/.../step_00000100")
def compare(
    context: typer.Context,
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="A B [C ...]",
            help="Checkpoints of any layout, universal ones, of DeepSpeed with ZeRO-1 or of torch DCP, Hugging Face "
            "models, .pt or .safetensors files; or manifests and extracts of them.",
            **_NOTED,
        ),
    ],
    options: CompareOptions,
    as_json: Json = False,
) -> None:
    """Say whether checkpoints hold the same bits, and if not: what differs, where, whose it was, what kind of damage.

    Exit code 0: all is equal; 1: something is not; 2: something could not be compared, or the command line is wrong.
    """
    # DeepSpeed would look for an accelerator, and print to standard output.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from megasdc.lab.checkpoints.digest_report import DigestReport
    from megasdc.lab.checkpoints.pages.comparison import compare_paths, usage_problem
    from megasdc.lab.checkpoints.report import Options
    from megasdc.output.html import write_page
    from megasdc.output.page import print_pages

    tolerance = Options(options.only, options.ignore, options.weights_only, options.ulp, options.rtol)
    how: dict[str, Any] = {"drift": options.drift, "extract": options.extract}
    if options.html is not None and options.html.suffix != ".html":
        raise typer.BadParameter(f"{options.html}: pages are web pages, name a file that ends in .html")
    if problem := usage_problem(checkpoints, tolerance, **how, page=options.html is not None):
        raise typer.BadParameter(problem)
    try:
        found = compare_paths(
            checkpoints, tolerance, **how, limit=options.limit, jobs=options.jobs, quiet=_quiet(as_json)
        )
        if options.html is not None:
            write_page(found.build(), options.html)
    except MegasdcError as error:
        _print_problems(context, [str(error)])
        if as_json:
            nothing = {"same": False, "runs" if options.drift else "findings": [], "not_compared": [str(error)]}
            echo(json.dumps(nothing, indent=2))
        raise typer.Exit(NOT_COMPARED) from error
    report = found.report
    if as_json:
        extracts = {"extracts": [str(path) for path in found.written]} if isinstance(report, DigestReport) else {}
        echo(json.dumps(report.as_dict() | extracts, indent=2))
    else:
        print_pages([found.build()])
        for path in found.written:
            echo(f"blocks that differ: {path}, {path.stat().st_size:,} bytes")
    sys.stdout.flush()  # so that a failed write is noticed
    _print_problems(context, report.problems)
    raise typer.Exit(NOT_COMPARED if report.problems else SAME if report.same else DIFFERENT)


@app.command("compare-traces", epilog="Example: megasdc compare-traces runs/a runs/b --picture difference.html")
def compare_traces_command(
    context: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="A B [C ...]", help="Run folders, or folders of trace files.", **_NOTED)
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
        typer.Option("--picture", metavar="FILE.html", help="Also write heat maps as one web page.", **_NOTED),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where runs that should be equal part first: rank, step, micro-batch, phase and submodule.

    Each run is compared with the first, over the steps that both have. Exit code 0: every checksum is equal; 1: some
    are not; 2: some runs could not be compared, the picture not written, or the command line is wrong.
    """
    from megasdc.lab.traces.trace_page import compare_runs, trace_page
    from megasdc.output.html import write_page

    if len(runs) < 2:
        raise typer.BadParameter("two or more runs are needed", param_hint="A B [C ...]")
    if picture is not None and picture.suffix != ".html":
        raise typer.BadParameter(f"{picture}: pictures are web pages, name a file that ends in .html")
    found = compare_runs(runs, cross_layout=cross_layout, quiet=_quiet(as_json))
    _print_traces(context, found, limit, as_json)
    problems = list(found.problems)
    if picture is not None and found.reports:
        try:
            write_page(trace_page(found.reports, limit), picture, "--picture")
        except StorageError as error:
            problems = [f"{error}; what differs is printed above"]
            _print_problems(context, problems)
    if problems:
        raise typer.Exit(NOT_COMPARED)
    raise typer.Exit(SAME if found.same else DIFFERENT)


def _print_traces(context: typer.Context, found: RunComparison, limit: int, as_json: bool) -> None:
    from megasdc.lab.traces.trace_page import trace_page
    from megasdc.output.page import print_pages

    if as_json:
        echo(json.dumps(found.as_dict(limit), indent=2))
    else:
        print_pages(trace_page([report], limit) for report in found.reports)
    _print_problems(context, found.problems)


def _quiet(as_json: bool) -> bool:
    return as_json or not sys.stderr.isatty()


def _print_problems(context: typer.Context, problems: list[str]) -> None:
    """Print them as errors of the program that was called."""
    for problem in problems:
        echo(f"{context.find_root().info_name}: error: {problem}", err=True)


def _script(command: Any, example: str) -> typer.Typer:
    """One command as a program of its own."""
    program = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    program.command(epilog=f"Example: {example}", context_settings=settings)(as_typer_takes_it(command))
    return program


checkpoints_script = _script(
    compare, "python tools/compare_checkpoints.py runs/a/checkpoints/step_00000100 runs/b/.../step_00000100"
)
traces_script = _script(
    compare_traces_command, "python tools/compare_traces.py runs/a runs/b --picture difference.html"
)


def compare_checkpoints_main() -> None:
    """Run ``tools/compare_checkpoints.py``."""
    run_program(lambda: checkpoints_script(prog_name="compare_checkpoints"), "compare_checkpoints", NOT_COMPARED)


def compare_traces_main() -> None:
    """Run ``tools/compare_traces.py``."""
    run_program(lambda: traces_script(prog_name="compare_traces"), "compare_traces", NOT_COMPARED)
