"""Tables of a study as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megasdc.study.log import WHOLE
from megasdc.study.tables import MismatchRow, StudySummary, torn_note


def render_study(summary: StudySummary, console: Console, limit: int = 12) -> None:
    """Print the tables of a study.

    Args:
        summary: of the study.
        console: to print on.
        limit: submodules shown of each list of distances, the worst first; the whole model is always shown.
    """
    console.print(
        f"[bold]{escape(summary.run_dir)}[/]: {summary.mode}, {summary.steps} steps, {summary.replicas} replicas, "
        f"replica {summary.trusted} is trusted",
        highlight=False,
        soft_wrap=True,
    )
    if note := torn_note(summary):
        console.print(note, highlight=False, soft_wrap=True)
    if summary.mismatches:
        _mismatches(summary.mismatches, console)
    for row in summary.bursts:
        console.print(
            f"replica {row.replica}: wrong from step {row.first_step}, in {row.wrong_steps} steps; "
            f"{row.bursts} bursts, the longest of {row.longest_burst} steps",
            highlight=False,
        )
    _distances(summary, console, limit)
    if summary.losses:
        names = ["replica", "steps", "last", "most apart", "at step", "apart at last", "spikes at"]
        fields = ["replica", "steps", "last", "largest_difference", "largest_step", "last_difference"]
        rows = [[*_pick(one, fields), _few(one.spikes)] for one in summary.losses]
        _print("losses, differences to the trusted replica's", names, rows, console)
    if summary.evaluations:
        names = ["replica", "step", "loss", "accuracy", "tokens", "disagreement"]
        _print("evaluation", names, [[one[name] for name in names] for one in summary.evaluations], console)


_MISMATCHES = {
    "replica": "replica",
    "rank": "rank",
    "of": "name",
    "phase": "phase",
    "elements": "elements",
    "differ": "mismatches",
    "frequency": "frequency",
    "severity": "severity_mean",
    "at most": "severity_max",
    "from zero": "from_zero",
    "NaN or Inf": "non_finite",
}
"""Fields of ``MismatchRow`` by column title."""


def _mismatches(rows: Sequence[MismatchRow], console: Console) -> None:
    wrong, compared = sum(one.mismatches for one in rows), sum(one.elements for one in rows)
    console.print(f"{wrong:,} of {compared:,} elements compared differ", highlight=False)
    shown = [one for one in rows if one.mismatches]
    said = {field for field in _MISMATCHES.values() if any(getattr(one, field) is not None for one in shown)}
    said -= {field for field in ("from_zero", "non_finite") if not any(getattr(one, field) for one in shown)}
    columns = {title: field for title, field in _MISMATCHES.items() if field in said}
    if shown:
        title = "mismatches: share of elements that differ, their mean and largest relative difference"
        _print(title, list(columns), [_pick(one, list(columns.values())) for one in shown], console)


def _distances(summary: StudySummary, console: Console, limit: int) -> None:
    names = ["replica", "submodule", "worst", "at step", "last", "comparisons", "not finite"]
    fields = ["replica", "fqn", "worst", "worst_step", "last", "comparisons", "not_finite"]
    for quantity in ("gradient", "parameters"):
        rows = [one for one in summary.distances if one.quantity == quantity]
        whole = [one for one in rows if one.fqn == WHOLE]
        apart = sorted((one for one in rows if one.fqn != WHOLE and one.worst), key=lambda one: -(one.worst or 0.0))
        if rows:
            title = f"{quantity}: norm of the difference over the trusted norm ({WHOLE}: whole model)"
            _print(title, names, [_pick(one, fields) for one in (*whole, *apart[:limit])], console)


def _pick(row: Any, fields: Sequence[str]) -> list[Any]:
    return [getattr(row, name) for name in fields]


def _print(title: str, names: Iterable[str], rows: Iterable[Iterable[Any]], console: Console) -> None:
    console.print(f"[italic]{escape(title)}[/]", highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold", justify="left" if name in ("of", "phase", "submodule") else "right")
    for row in rows:
        table.add_row(*(escape(_shown(value)) for value in row))
    console.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    large = isinstance(value, int) and value >= 10_000_000
    return f"{value:.4g}" if isinstance(value, float) or large else str(value)


def _few(steps: Sequence[int], count: int = 5) -> str:
    more = f" and {len(steps) - count} more" if len(steps) > count else ""
    return ", ".join(map(str, steps[:count])) + more or "none"
