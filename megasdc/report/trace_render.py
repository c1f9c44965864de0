"""Comparison of traces as text and heat maps for a terminal, and as a page with interactive heat maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from megasdc.addresses import REPLICA_PHASES
from megasdc.program import write_whole
from megasdc.report.traces import TraceReport

SHADES = " ░▒▓█"
"""Share of results that differ: none, below 1/3, below 2/3, below 1, all."""
MAX_ROWS, MAX_COLUMNS = 40, 60


def render(report: TraceReport, console: Console, limit: int) -> None:
    """Print a comparison, first divergence first.

    Args:
        report: one comparison.
        console: to print on.
        limit: maximum of divergences listed.
    """
    comparison = report.comparison
    console.print(
        f"[bold]{escape(report.expected)}[/] and [bold]{escape(report.got)}[/]", highlight=False, soft_wrap=True
    )
    console.print(
        f"{comparison.compared:,} checksums of step{'s' if len(report.steps) > 1 else ''} "
        f"{_ranges(report.steps)} at {report.layout}",
        highlight=False,
        soft_wrap=True,
    )
    if report.steps_left_out:
        console.print(
            f"not compared, because not both have them whole: steps {_ranges(report.steps_left_out)}", soft_wrap=True
        )
    for note in report.notes:
        console.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    if report.same:
        console.print("[green]same[/]: every checksum is equal")
        return
    console.print(
        f"[red]different[/]: {len(comparison.divergences):,} checksums on "
        + ", ".join(f"rank {rank} ({count:,})" for rank, count in comparison.counts.items()),
        highlight=False,
        soft_wrap=True,
    )
    for one in map(report.describe, comparison.first):
        console.print(f"[bold]first divergence: {escape(place_text(one))}[/]", highlight=False, soft_wrap=True)
        console.print(f"  expected {one['expected']}, got {one['got']}", highlight=False, soft_wrap=True)
        if report.layout.data > 1 and one["phase"] not in REPLICA_PHASES:
            console.print("  after replicas exchanged values: another rank may have caused it", soft_wrap=True)
    _list(report, console, limit)
    _heat_map("share of a submodule's results that differ, by step", report.shares(lambda step, _: step), console)
    if report.layout.world_size > 1:
        _heat_map("by rank", report.shares(lambda _, rank: rank), console)


def place_text(one: dict[str, Any]) -> str:
    """Place of a divergence in words; ``one`` is from ``TraceReport.describe``."""
    micro_batch = "" if one["micro_batch"] is None else f", micro-batch {one['micro_batch']}"
    return (
        f"rank {one['rank']} (dp {one['dp']}, pp {one['pp']}, tp {one['tp']}), step {one['step']}{micro_batch}, "
        f"{one['phase']} of {one['submodule']} ({one['slot']})"
    )


def _list(report: TraceReport, console: Console, limit: int) -> None:
    shown = report.comparison.divergences[:limit]
    if not shown:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "dp", "pp", "tp", "step", "micro-batch", "phase", "submodule", "slot", "expected", "got"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for one in map(report.describe, shown):
        values = [one[key] for key in ("rank", "dp", "pp", "tp", "step", "micro_batch", "phase", "submodule", "slot")]
        table.add_row(*("-" if value is None else str(value) for value in [*values, one["expected"], one["got"]]))
    console.print(table)
    if (more := len(report.comparison.divergences) - len(shown)) > 0:
        console.print(f"... and {more:,} more (--limit)", highlight=False, soft_wrap=True)


def _heat_map(title: str, shares: dict[str, dict[int, float]], console: Console) -> None:
    """One row per submodule; where columns exceed ``MAX_COLUMNS``, a character shows the largest of several."""
    columns = list(next(iter(shares.values())))
    width = -(-len(columns) // MAX_COLUMNS)
    bins = [columns[i : i + width] for i in range(0, len(columns), width)]
    names = list(shares)[:MAX_ROWS]
    wide = max(map(len, names))
    console.print(
        f"\n{title} ({columns[0]} to {columns[-1]}, {width} a column; {_legend()})", highlight=False, soft_wrap=True
    )
    for name in names:
        cells = "".join(shade(max(shares[name][column] for column in group)) for group in bins)
        console.print(Text(f"{name:>{wide}} |") + Text(cells, style="red") + Text("|"), soft_wrap=True)
    if len(shares) > MAX_ROWS:
        console.print(f"... and {len(shares) - MAX_ROWS} more submodules", highlight=False, soft_wrap=True)


def shade(share: float) -> str:
    """The character for a share in [0, 1]; blank only for 0, darkest only for 1."""
    if share in (0.0, 1.0):
        return SHADES[-1] if share else SHADES[0]
    return SHADES[1 + min(2, int(share * 3))]


def _legend() -> str:
    return f"{SHADES[1]} below 1/3, {SHADES[2]} below 2/3, {SHADES[3]} below all, {SHADES[4]} all"


def _ranges(steps: list[int]) -> str:
    """Numbers as ``1-4, 7``."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def write_page(reports: list[TraceReport], path: Path) -> None:
    """Write heat maps of all comparisons as one HTML page that needs no network.

    Args:
        reports: one or more.
        path: the file; replaced.
    """
    from plotly import graph_objects
    from plotly.subplots import make_subplots

    titles = [f"{report.got}: share that differs, by {what}" for report in reports for what in ("step", "rank")]
    figure = make_subplots(rows=2 * len(reports), cols=1, subplot_titles=titles)
    heights = 0
    for place, report in enumerate(reports):
        for row, column in enumerate((lambda step, _: step, lambda _, rank: rank), start=2 * place + 1):
            shares = report.shares(column)
            names = list(shares)
            columns = list(shares[names[0]]) if names else []
            values = [[shares[name][at] for at in columns] for name in names]
            hover = "%{y}, %{x}: %{z:.3f}<extra></extra>"
            options = {"zmin": 0, "zmax": 1, "colorscale": "Reds", "hovertemplate": hover, "showscale": row == 1}
            figure.add_trace(graph_objects.Heatmap(z=values, x=columns, y=names, **options), row=row, col=1)
            figure.update_xaxes(
                title_text="rank" if row % 2 == 0 else "step", dtick=1 if len(columns) < 30 else None, row=row, col=1
            )
            figure.update_yaxes(autorange="reversed", row=row, col=1)
            heights += 160 + 18 * len(names)
    figure.update_layout(height=heights, title_text=f"compared with {reports[0].expected}")
    write_whole(path, figure.to_html(include_plotlyjs=True, full_html=True))
