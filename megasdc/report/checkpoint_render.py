"""Comparison of checkpoints as text for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megasdc.checkpoint.compare.checkpoints import Finding, Report
from megasdc.checkpoint.compare.damage import MEANINGS


def render(report: Report, console: Console, limit: int) -> None:
    """Print the comparison.

    Args:
        report: of the comparison.
        console: to print on.
        limit: maximum of findings listed.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    for view in report.views:
        layout = "" if view.layout is None else f", {view.layout}"
        say(f"[bold]{escape(str(view.path))}[/]: {view.kind}{layout}")
    say(f"{report.num_compared:,} tensors and values compared, {report.num_tolerated:,} differ within what is allowed")
    for note in report.notes:
        say(f"note: {escape(note)}")
    if report.same:
        if not report.problems:
            say("[green]same[/]: every bit is equal" if not report.num_tolerated else "[green]same[/]")
        return
    say(f"[red]different[/]: {len(report.findings):,} tensors and values")
    shown = report.findings[:limit]
    if shown:
        console.print(_table(shown))
    if (more := len(report.findings) - len(shown)) > 0:
        say(f"... and {more:,} more (--limit)")
    say("")
    for pattern in dict.fromkeys(finding.pattern for finding in report.findings):
        count = sum(finding.pattern == pattern for finding in report.findings)
        say(f"[bold]{pattern}[/] ({count:,}): {MEANINGS[pattern]}")
    say("")
    for line in _where(report):
        say(escape(line))


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("checkpoint", "tensor", "slot", "pattern", "different", "first", "last", "ULP", "relative", "detail"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        found = finding.measure
        numbers = ["-"] * 5
        if found is not None:
            numbers = [
                f"{found.num_different:,} of {found.numel:,}",
                str(found.first),
                str(found.last),
                "-" if found.max_ulp is None else f"{found.max_ulp:,}",
                f"{found.max_relative:.3g}",
            ]
        cells = [finding.checkpoint, finding.fqn, finding.slot, finding.pattern, *numbers, finding.detail]
        table.add_row(*map(escape, cells))
    return table


def _where(report: Report) -> list[str]:
    """One line per file: its owner, whether it changed after it was saved, and its number of findings."""
    lines: dict[str, str] = {}
    counts: dict[str, int] = {}
    for finding in report.findings:
        for one in finding.pieces:
            file = str(one.piece.file)
            unchanged = finding.unchanged.get(one.piece.file.name)
            since = {True: "as it was saved", False: "changed since it was saved", None: "no manifest says how it was"}
            lines[file] = f"{file}: {one.piece.owner}; {since[unchanged]}"
            counts[file] = counts.get(file, 0) + 1
    bases = dict.fromkeys(f"{finding.checkpoint}: expected is {finding.basis or '?'}" for finding in report.findings)
    told = [line.replace("expected is ?", "nothing tells which side is wrong") for line in bases]
    return [f"{line}; {counts[file]:,} findings" for file, line in lines.items()] + told
