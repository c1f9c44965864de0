"""The campaign against a golden trace as text: tables of counts, every miss by itself, a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from tools.bench.detection.golden import DetectionResult

COLUMNS = {
    "injected": "injected",
    "no bit changed": "no bit",
    "rounded away": "rounded",
    "harmful": "harmful",
    "detected": "found",
    "rank": "rank",
    "submodule": "place",
    "direction": "phase",
}
"""Heading of each count."""


def render_detection(result: DetectionResult, console: Console) -> None:
    """Print the result."""
    for title, key in (
        ("phase", lambda trial: str(trial.phase)),
        ("layout and type", lambda trial: f"{trial.layout} {trial.precision}"),
        ("kind", lambda trial: trial.kind),
    ):
        _table(title, result.counts(key), console)
    console.print(
        "no bit: the fault changed none; rounded: of a stored state, and no parameter, master or moment of any rank "
        "ends with other bits than without it, whatever the trace says; rank, place, phase: rank, submodule and "
        "direction named as the injector says"
    )
    for trial in result.harmful:
        if not (trial.rank_right and trial.submodule_right and trial.direction_right):
            told = f"named {trial.named}, first {trial.first or 'nothing'}"
            console.print(
                f"MISS {trial.layout} {trial.precision}: {trial.kind} on rank {trial.rank}, {trial.address}: {told}"
            )
    alarms = sum(trial.detected for trial in result.clean)
    console.print(f"{len(result.clean)} clean runs, {alarms} alarms")
    console.print("pass" if result.passed else "FAIL")


def _table(title: str, groups: Mapping[str, Counter[str]], console: Console) -> None:
    table = Table(title=f"injected faults by {title}")
    table.add_column(title, no_wrap=True)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    total: Counter[str] = sum(groups.values(), Counter())
    for name, count in sorted(groups.items()):
        table.add_row(name, *(str(count[column]) for column in COLUMNS))
    table.add_row("all", *(str(total[column]) for column in COLUMNS), style="bold")
    console.print(table)
