"""Comparison of traces, and its page: the first divergence, those after it, and heat maps of what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from megasdc.common.addresses import REPLICA_PHASES
from megasdc.common.errors import MegasdcError
from megasdc.common.words import ranges
from megasdc.lab.traces.traces import TraceReport, compare_traces_of_runs, load_traces
from megasdc.output.figure import Figure, layout
from megasdc.output.page import Page, PageSection, Table

SHADES = " ░▒▓█"
"""Share of results that differ: none, below 1/3, below 2/3, below 1, all."""
MAX_ROWS, MAX_COLUMNS = 40, 60
"""Size of a heat map on a terminal."""
_COLUMNS: tuple[tuple[str, Callable[[int, int], int]], ...] = (
    ("step", lambda step, _: step),
    ("rank", lambda _, rank: rank),
)
"""What makes a column of a heat map."""


def trace_page(reports: Sequence[TraceReport], limit: int) -> Page:
    """The page of runs that were each compared with the first, with at most ``limit`` divergences on a terminal."""
    differ = [report for report in reports if not report.same]
    verdict = "Same: every checksum is equal" if not differ else f"Different: {_counts(differ)}"
    return Page(
        title="Comparison of traces",
        verdict=verdict,
        state="different" if differ else "same",
        sections=[one for place, report in enumerate(reports) for one in _sections(report, place, limit)],
    )


def _counts(reports: Sequence[TraceReport]) -> str:
    return "; ".join(
        f"{len(report.comparison.divergences):,} checksums of {report.got} on "
        + ", ".join(f"rank {rank} ({count:,})" for rank, count in report.comparison.counts.items())
        for report in reports
    )


def _sections(report: TraceReport, place: int, limit: int) -> list[PageSection]:
    steps = f"step{'s' if len(report.steps) > 1 else ''} {ranges(report.steps)}"
    said = [f"{report.comparison.compared:,} checksums of {steps} at {report.layout}"]
    if report.steps_left_out:
        said.append(f"not compared, because not both have them whole: steps {ranges(report.steps_left_out)}")
    said += [f"note: {note}" for note in report.notes]
    for one in map(report.describe, report.comparison.first):
        said += [f"first divergence: {_place_text(one)}", f"  expected {one['expected']}, got {one['got']}"]
        if report.layout.data > 1 and one["phase"] not in REPLICA_PHASES:
            said.append("  after replicas exchanged values: another rank may have caused it")
    if report.same:
        return [PageSection(f"{report.expected} and {report.got}", said)]
    names = ("rank", "dp", "pp", "tp", "step", "micro_batch", "phase", "submodule", "slot", "expected", "got")
    rows = [[one[name] for name in names] for one in map(report.describe, report.comparison.divergences)]
    headings = [name.replace("_", "-") for name in names]
    table = Table(f"divergences_{place}", headings, rows, ("rank", "phase"), listed=limit, complete="--json")
    figures = [_heat_map(report, place, what, column) for what, column in _COLUMNS]
    return [PageSection(f"{report.expected} and {report.got}", said, tables=[table], figures=figures)]


def _place_text(one: dict[str, Any]) -> str:
    """Place of a divergence in words; ``one`` is from ``TraceReport.describe``."""
    micro_batch = "" if one["micro_batch"] is None else f", micro-batch {one['micro_batch']}"
    return (
        f"rank {one['rank']} (dp {one['dp']}, pp {one['pp']}, tp {one['tp']}), step {one['step']}{micro_batch}, "
        f"{one['phase']} of {one['submodule']} ({one['slot']})"
    )


def _heat_map(report: TraceReport, place: int, what: str, column: Callable[[int, int], int]) -> Figure:
    shares = report.shares(column)
    columns = list(next(iter(shares.values())))
    trace = {
        "type": "heatmap",
        "x": columns,
        "y": list(shares),
        "z": [[own[one] for one in columns] for own in shares.values()],
        "zmin": 0,
        "zmax": 1,
        "colorscale": [[0, "var(--equal)"], [1e-6, "var(--low)"], [0.5, "var(--mid)"], [1, "var(--high)"]],
        "hovertemplate": "%{y}, %{x}: %{z:.3f}<extra></extra>",
    }
    axes: dict[str, Any] = {"xaxis": {"dtick": 1} if len(columns) < 30 else {}, "yaxis": {"autorange": "reversed"}}
    cells = [(name, one, share) for name, own in shares.items() for one, share in own.items()]
    numbers = {heading: [cell[at] for cell in cells] for at, heading in enumerate(("submodule", what, "share"))}
    title = f"Share of a submodule's results that differ, by {what}"
    drawn = layout(160 + 18 * len(shares), what, hovermode="closest", **axes)
    text = "" if what == "rank" and report.layout.world_size == 1 else _as_text(title, shares)
    return Figure(f"by_{what}_{place}", title, "", [trace], drawn, numbers, text=text)


def _as_text(title: str, shares: dict[str, dict[int, float]]) -> str:
    """One row per submodule; where columns exceed ``MAX_COLUMNS``, a character shows the largest of several."""
    columns = list(next(iter(shares.values())))
    width = -(-len(columns) // MAX_COLUMNS)
    bins = [columns[i : i + width] for i in range(0, len(columns), width)]
    legend = f"{SHADES[1]} below 1/3, {SHADES[2]} below 2/3, {SHADES[3]} below all, {SHADES[4]} all"
    lines = [f"{title} ({columns[0]} to {columns[-1]}, {width} a column; {legend})"]
    names = list(shares)[:MAX_ROWS]
    wide = max(map(len, names))
    for name in names:
        cells = "".join(shade(max(shares[name][column] for column in group)) for group in bins)
        lines.append(f"{name:>{wide}} |{cells}|")
    if len(shares) > MAX_ROWS:
        lines.append(f"... and {len(shares) - MAX_ROWS} more submodules")
    return "\n".join(lines)


def shade(share: float) -> str:
    """The character for a share in [0, 1]; blank only for 0, darkest only for 1."""
    if share in (0.0, 1.0):
        return SHADES[-1] if share else SHADES[0]
    return SHADES[1 + min(2, int(share * 3))]


@dataclass(frozen=True)
class RunComparison:
    """Runs that were each compared with the first, and what could not be read or compared."""

    reports: list[TraceReport]
    problems: list[str]

    @property
    def same(self) -> bool:
        """Whether all that was compared is equal."""
        return all(report.same for report in self.reports)

    def as_dict(self, limit: int) -> dict[str, Any]:
        """As JSON-compatible values, with at most ``limit`` divergences of each."""
        return {"comparisons": [report.as_dict(limit) for report in self.reports], "not_compared": self.problems}


def compare_runs(runs: Sequence[Path], *, cross_layout: bool = False, quiet: bool = True) -> RunComparison:
    """Compare the traces of runs with those of the first, over the steps that both have.

    Args:
        runs: two or more run folders, or folders of trace files; one that cannot be read stops no other.
        cross_layout: of different layouts, compare the results whose bits do not depend on it.
        quiet: whether no progress is shown.
    """
    loaded: dict[Path, Any] = {}
    for path in track(runs, "reading traces", console=Console(stderr=True), transient=True, disable=quiet):
        loaded[path] = _attempt(load_traces, path)
    reports: list[TraceReport] = []
    problems = list(dict.fromkeys(str(one) for one in loaded.values() if isinstance(one, MegasdcError)))
    for path in runs[1:]:
        expected, got = loaded[runs[0]], loaded[path]
        if isinstance(expected, MegasdcError) or isinstance(got, MegasdcError):
            continue
        report = _attempt(compare_traces_of_runs, expected, got, cross_layout)
        if isinstance(report, TraceReport):
            reports.append(report)
        else:
            problems.append(str(report))
    return RunComparison(reports, problems)


def _attempt(function: Any, *args: Any) -> Any:
    """A function's result, or the MegasdcError that it raised: one unreadable run must not stop the others."""
    try:
        return function(*args)
    except MegasdcError as error:
        return error
