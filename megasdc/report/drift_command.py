"""``tools/compare_checkpoints.py --drift``: how far runs diverge, over the checkpoints that they keep."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TotalFileSizeColumn
from rich.table import Table

from megasdc.checkpoint.compare.drift import measure_drift
from megasdc.checkpoint.compare.drift_report import DriftReport, StepDrift, divergent
from megasdc.checkpoint.compare.report import Options
from megasdc.errors import MegasdcError
from megasdc.report.pages import write_page
from megasdc.tensors.distance import Distance

GROUPS = ("embedding", "attention", "mlp", "norm", "head", "other")
"""Kinds of submodules, in the order of columns and curves."""
LISTED = 4
"""Maximum of submodules named in a sentence."""


def compare_runs(folders: Sequence[Path], options: Options, html: Path | None, as_json: bool) -> DriftReport | None:
    """Measure, print, and write the page where ``html`` is given.

    Returns:
        The report; None where nothing could be compared or the page not be written, after an error message.
    """
    quiet = as_json or not sys.stderr.isatty()
    columns = (SpinnerColumn(), TextColumn("comparing"), TotalFileSizeColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
            task = bar.add_task("comparing", total=0)
            seen = 0

            def advance(count: int) -> None:
                nonlocal seen
                seen += count
                bar.update(task, total=seen, completed=seen)

            report = measure_drift(folders, options, advance)
        if html is not None:
            write_drift(report, html)
    except MegasdcError as error:
        typer.echo(f"compare_checkpoints: error: {error}", err=True)
        if as_json:
            typer.echo(json.dumps({"same": False, "runs": [], "not_compared": [str(error)]}, indent=2))
        return None
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        render_drift(report, Console() if sys.stdout.isatty() else Console(width=160))
    for problem in report.problems:
        typer.echo(f"compare_checkpoints: error: {problem}", err=True)
    return report


def render_drift(report: DriftReport, console: Console) -> None:
    """Print a verdict and a table of each run.

    Args:
        report: of the measurement.
        console: to print on.
    """

    def say(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    say(f"reference: {report.reference}; ||theta - theta_ref|| / ||theta_ref||, equal: every bit is")
    for line in told(report):
        say(f"note: {line}")
    for run in report.runs:
        say("")
        say(verdict(report, run))
        if not report.of(run):
            continue
        groups = [name for name in GROUPS if any(name in one.groups for one in report.of(run))]
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("step", "whole", *groups, "elements that differ"):
            table.add_column(name, justify="right")
        for one in report.of(run):
            found = one.groups
            cells = [_number(found[name]) if name in found else "-" for name in groups]
            whole = one.whole
            share = f"{whole.num_different:,} of {whole.numel:,}"
            table.add_row(str(one.step), _number(whole), *cells, f"{share}, copies differ" if one.torn else share)
        console.print(table)


def told(report: DriftReport) -> list[str]:
    """Notes of a report, including steps that a folder lacks."""
    return [
        *(f"{folder} does not keep step {', '.join(map(str, steps))}" for folder, steps in report.lacking.items()),
        *report.notes,
    ]


def verdict(report: DriftReport, run: str) -> str:
    """The verdict on one run, in a sentence or two."""
    steps, first = report.of(run), report.first_divergent(run)
    if not steps:
        return f"{run}: no step could be compared."
    if first is None:
        count = f"all {len(steps)} steps" if len(steps) > 1 else f"step {steps[0].step}, the only one"
        return f"{run}: equal in every bit at {count} that could be compared."
    before = report.last_equal_before(run)
    since = f"; step {before} is equal in every bit" if before is not None else "; it is the first that both keep"
    names = divergent(first)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    where = f"in {', '.join(names[:LISTED])}{more}"
    last = steps[-1]
    later = "" if last is first else f" At step {last.step}: {_words(last)}."
    return f"{run}: first divergent step {first.step}, {_words(first)}, {where}{since}.{later}"


def _words(one: StepDrift) -> str:
    whole = one.whole
    if one.equal:
        return "equal in every bit"
    if whole.equal:
        return "copies within one checkpoint differ"
    return f"relative difference {whole.relative:.3g}"


def _number(one: Distance) -> str:
    return "equal" if one.equal else f"{one.relative:.3g}"


def write_drift(report: DriftReport, path: Path) -> None:
    """Write curves of all runs as one HTML page that needs no network.

    Args:
        report: of the measurement.
        path: the file; replaced.

    Raises:
        StorageError: it cannot be written.
    """
    sentences = [verdict(report, run) for run in report.runs]
    groups = [name for name in GROUPS if any(name in one.groups for one in report.steps)]
    submodules = list(dict.fromkeys(name for one in report.steps for name in one.submodules))
    names = ["whole", *groups, *submodules]
    curves = []
    for run in report.runs:
        lines: dict[str, list[float | None]] = {name: [] for name in names}
        for one in report.of(run):
            found = {"whole": one.whole, **one.groups, **one.submodules}
            for name in names:
                lines[name].append(found[name].relative if name in found and _drawn(found[name]) else None)
        curves.append({"run": run, "steps": [one.step for one in report.of(run)], "lines": lines})
    same = report.same and not report.problems
    write_page(
        "drift.html",
        path,
        title="Drift of checkpoints",
        state="same" if same else "different" if not report.same else "unsure",
        verdict=sentences[0] if len(sentences) == 1 else _headline(report),
        sentences=sentences if len(sentences) > 1 else [],
        reference=report.reference,
        notes=told(report),
        problems=report.problems,
        groups=groups,
        submodules=submodules,
        tables=[
            {
                "run": run,
                "rows": [
                    {
                        "step": one.step,
                        "cells": [_number(found) for found in (one.whole, *(one.groups[name] for name in groups))],
                        "share": f"{one.whole.num_different:,} of {one.whole.numel:,}",
                        "torn": one.torn,
                    }
                    for one in report.of(run)
                ],
            }
            for run in report.runs
        ],
        data={"curves": curves, "groups": groups},
    )


def _drawn(one: Distance) -> bool:
    """Whether a value is finite; the page draws zero below its logarithmic axis."""
    return one.relative >= 0 and one.relative != float("inf")


def _headline(report: DriftReport) -> str:
    apart = {run: first.step for run in report.runs if (first := report.first_divergent(run)) is not None}
    if not apart:
        return (
            f"All {len(report.runs)} runs are equal to {report.reference} in every bit at every step that was compared."
        )
    run = min(apart, key=lambda name: apart[name])
    return f"{len(apart)} of {len(report.runs)} runs part from {report.reference}, {run} first, by step {apart[run]}."
