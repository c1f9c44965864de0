"""How is a detection campaign shown? Tables of counts, every miss by itself, a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from megasdc.bench.detection import DetectionResult

COLUMNS = ("injected", "no bit changed", "rounded away", "harmful", "detected", "rank", "submodule", "direction")


def render_detection(result: DetectionResult, console: Console) -> None:
    """Print the result."""
    for title, key in (
        ("phase", lambda trial: str(trial.phase)),
        ("layout and type", lambda trial: f"{trial.layout} {trial.precision}"),
        ("kind", lambda trial: trial.kind),
    ):
        _table(title, result.counts(key), console)
    console.print(
        "harmful: bits of a result changed; rounded away: a fault in a stored state that the next update overwrote "
        "with the same bits as without it; rank, submodule, direction: named as the injector says"
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
    table.add_column(title)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    total: Counter[str] = sum(groups.values(), Counter())
    for name, count in sorted(groups.items()):
        table.add_row(name, *(str(count[column]) for column in COLUMNS))
    table.add_row("all", *(str(total[column]) for column in COLUMNS), style="bold")
    console.print(table)
