"""Comparison of manifests as text for a terminal."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megasdc.checkpoint.compare.digest_report import WHATS, Difference, DigestReport


def render_digests(report: DigestReport, console: Console, limit: int) -> None:
    """Print the comparison.

    Args:
        report: of the comparison.
        console: to print on.
        limit: maximum of differences listed.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    for label, digest in zip(report.labels, report.digests, strict=True):
        when = datetime.fromtimestamp(digest.time, UTC).isoformat(timespec="seconds")
        how = "as it was saved" if digest.as_saved else "as it was read"
        say(f"[bold]{escape(label)}[/]: {len(digest.files):,} files, {digest.size_bytes / 1e9:.3f} GB, {how} at {when}")
    say(f"{report.num_files:,} files compared by digest")
    for note in report.notes:
        say(f"note: {escape(note)}")
    for name, same in report.checkpoints.items():
        if name:
            say(f"{escape(name)}: {'[green]same[/]' if same else '[red]different[/]'}")
    if report.same:
        say("[green]same[/]")
        return
    first = f", {report.first_different} first" if report.first_different else ""
    say(f"[red]different[/]: {len(report.differences):,} tensors, values and files{first}")
    shown = report.differences[:limit]
    if shown:
        console.print(_table(shown))
    if (more := len(report.differences) - len(shown)) > 0:
        say(f"... and {more:,} more (--limit)")
    for what in dict.fromkeys(one.what for one in report.differences):
        say(f"[bold]{what}[/]: {WHATS[what]}")
    for label in report.odd:
        say(f"[bold]{escape(label)}[/] is not what is expected: {'; '.join(_bases(report, label))}")
    if not report.odd:
        say("nothing tells which side is wrong")


def _bases(report: DigestReport, label: str) -> dict[str, None]:
    return dict.fromkeys(one.basis for one in report.differences if one.digest == label and one.basis)


def _table(differences: list[Difference]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("on", "file", "tensor or value", "what", "blocks", "bytes", "elements", "holds", "writer", "detail"):
        table.add_column(name, overflow="fold")
    for one in differences:
        holds = list(dict.fromkeys(name for part in one.ranges for name in part.parameters))
        since = {True: "as it was saved", False: "changed since it was saved", None: ""}[one.unchanged]
        cells = [
            one.digest,
            f"{one.checkpoint}/{one.file}" if one.checkpoint else one.file,
            one.name,
            one.what,
            str(one.num_blocks or "-"),
            _few([f"{part.bytes[0]}-{part.bytes[1]}" for part in one.ranges]),
            _few([f"{part.elements[0]}-{part.elements[1]}" for part in one.ranges if part.elements]),
            _few(holds),
            "-" if one.rank is None else f"rank {one.rank} on {one.node}",
            "; ".join(filter(None, (one.detail, since))),
        ]
        table.add_row(*map(escape, cells))
    return table


def _few(parts: list[str], count: int = 3) -> str:
    return ", ".join(parts[:count]) + (f" and {len(parts) - count} more" if len(parts) > count else "") or "-"
