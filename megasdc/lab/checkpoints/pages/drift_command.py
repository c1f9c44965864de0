"""``tools/compare_checkpoints.py --drift``: how far runs diverge, over the checkpoints that they keep.

Drift of runs over the checkpoints that they keep, as a page: verdicts, curves, a table of each run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TotalFileSizeColumn

from megasdc.common.errors import MegasdcError
from megasdc.common.program import echo
from megasdc.lab.checkpoints.drift import measure_drift
from megasdc.lab.checkpoints.drift_report import DriftReport, StepDrift, divergent
from megasdc.lab.checkpoints.report import Options
from megasdc.output.figure import COLOURS, DASHES, Figure, Version, layout, scatter
from megasdc.output.html import write_page
from megasdc.output.page import Page, Section
from megasdc.output.table import Cell, Table, number
from megasdc.output.terminal import print_pages
from megasdc.tensors.distance import Distance

GROUPS = ("embedding", "attention", "mlp", "norm", "head", "other")
"""Kinds of submodules, in the order of columns and curves."""
LISTED = 4
"""Maximum of submodules named in a sentence."""
WHOLE = "the whole model and kinds of submodules"

Lines = Mapping[str, Sequence[float | None]]
"""By name of a submodule or a kind: relative difference at each step; None: none that is finite."""


def drift_page(report: DriftReport) -> Page:
    """The page of a measurement."""
    verdicts = [verdict(report, run) for run in report.runs]
    unsure = report.same and bool(report.problems)
    definition = (
        f"Reference: {report.reference}. A run's parameter difference at a step is ||theta - theta_ref|| / "
        '||theta_ref||, Euclidean, as Ma et al. 2025 (arXiv 2502.12340) follow it. "equal": every bit is.'
    )
    return Page(
        title="Drift of checkpoints",
        verdict=verdicts[0] if len(verdicts) == 1 else _headline(report),
        state="unsure" if unsure else "same" if report.same else "different",
        sentences=[definition, *(verdicts if len(verdicts) > 1 else [])],
        notes=told(report),
        sections=[
            *([Section("Not compared", items=report.problems)] if report.problems else []),
            Section("Over the steps", figures=[_curves(report)]),
            *(
                Section(run, tables=[_table(report, run, place)])
                for place, run in enumerate(report.runs)
                if report.of(run)
            ),
        ],
    )


def _table(report: DriftReport, run: str, place: int) -> Table:
    groups = [name for name in GROUPS if any(name in one.groups for one in report.of(run))]
    rows = []
    for one in report.of(run):
        found = [one.whole, *(one.groups.get(name) for name in groups)]
        share = number(
            one.whole.num_different, ",d", more=f" of {one.whole.numel:,}{', copies differ' * bool(one.torn)}"
        )
        torn = (f"copies differ: {', '.join(one.torn)}",) if one.torn else ()
        rows.append((one.step, *map(_cell, found), Cell(share.text, share.value, more=torn)))
    return Table(f"drift_{place}", ("step", "whole", *groups, "elements that differ"), rows, searched=False)


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


def _cell(one: Distance | None) -> Cell:
    if one is None:
        return Cell("-")
    return Cell("equal", 0.0) if one.equal else number(one.relative, ".3g")


def _curves(report: DriftReport) -> Figure:
    groups = [name for name in GROUPS if any(name in one.groups for one in report.steps)]
    submodules = list(dict.fromkeys(name for one in report.steps for name in one.submodules))
    drawn: dict[str, tuple[list[int], Lines]] = {}
    for run in report.runs:
        found = [{"whole": one.whole, **one.groups, **one.submodules} for one in report.of(run)]
        lines = {
            name: [_drawn(one[name]) if name in one else None for one in found]
            for name in ("whole", *groups, *submodules)
        }
        drawn[run] = [one.step for one in report.of(run)], lines
    versions = [_version(WHOLE, ["whole", *groups], drawn), *(_version(name, [name], drawn) for name in submodules)]
    caption = (
        "Logarithmic. A triangle at the foot: equal in every bit, or a difference of zeros of both signs; a gap: NaN "
        "or infinities, or nothing to compare."
    )
    points = [
        (run, name, step, value)
        for run, (steps, lines) in drawn.items()
        for name, own in lines.items()
        for step, value in zip(steps, own, strict=True)
    ]
    headings = ("run", "of", "step", "relative_difference")
    columns = {heading: [point[place] for point in points] for place, heading in enumerate(headings)}
    first = versions[0]
    title = "Parameter difference"
    return Figure("curves", title, caption, first.traces, first.layout, columns, False, ("Of",), versions)


def _version(chosen: str, names: Sequence[str], drawn: Mapping[str, tuple[list[int], Lines]]) -> Version:
    """Curves of some names, of all runs: by kind in colours, and where only one is shown by run."""
    values = [value for _, lines in drawn.values() for name in names for value in lines[name] if value]
    low = math.floor(math.log10(min(values))) - 1 if values else -8
    high = math.ceil(math.log10(max(values)) + 0.2) if values else 0
    traces: list[dict[str, Any]] = []
    for run, (steps, lines) in enumerate(drawn.values()):
        for place, name in enumerate(names):
            label = f"{name}, run {run + 1}" if len(drawn) > 1 else name
            colour = COLOURS[(place if len(names) > 1 else run) % len(COLOURS)]
            line = {"dash": DASHES[run % len(DASHES)], "width": 3 if name == "whole" else 1.5}
            own, mode = lines[name], "lines+markers"
            shown = [value or None for value in own]
            hover = "step %{x}: %{y:.3g}"
            traces.append(scatter(label, steps, shown, colour, hover, mode=mode, line=line, legendgroup=label))
            equal = [step for step, value in zip(steps, own, strict=True) if value == 0]
            marks = {"marker": {"symbol": "triangle-down", "size": 10}, "mode": "markers", "cliponaxis": False}
            foot = scatter(label, equal, [10.0**low] * len(equal), colour, "step %{x}: equal", **marks)
            traces.append({**foot, "legendgroup": label, "showlegend": False})
    yaxis = {"type": "log", "range": [low, high], "exponentformat": "power", "dtick": 1}
    num_steps = len({step for steps, _ in drawn.values() for step in steps})
    xaxis = {"tickformat": ",d", "nticks": min(12, 1 + num_steps)}
    return Version((chosen,), traces, layout(460, "step", "relative difference", legend=True, xaxis=xaxis, yaxis=yaxis))


def _drawn(one: Distance) -> float | None:
    """A relative difference, or None where it is not finite."""
    return one.relative if math.isfinite(one.relative) else None


def _headline(report: DriftReport) -> str:
    apart = {run: first.step for run in report.runs if (first := report.first_divergent(run)) is not None}
    if not apart:
        return (
            f"All {len(report.runs)} runs are equal to {report.reference} in every bit at every step that was compared."
        )
    run = min(apart, key=lambda name: apart[name])
    return f"{len(apart)} of {len(report.runs)} runs part from {report.reference}, {run} first, by step {apart[run]}."


def compare_runs(folders: Sequence[Path], options: Options, html: Path | None, as_json: bool) -> DriftReport | None:
    """Measures, prints, and writes the page where ``html`` is given.

    None, after an error message, where nothing could be compared or the page not be written.
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
            write_page(drift_page(report), html)
    except MegasdcError as error:
        echo(f"compare_checkpoints: error: {error}", err=True)
        if as_json:
            echo(json.dumps({"same": False, "runs": [], "not_compared": [str(error)]}, indent=2))
        return None
    if as_json:
        echo(json.dumps(report.as_dict(), indent=2))
    else:
        print_pages([drift_page(report)])
    for problem in report.problems:
        echo(f"compare_checkpoints: error: {problem}", err=True)
    return report
