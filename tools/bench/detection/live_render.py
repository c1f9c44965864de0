"""The live campaign as text: tables of counts, what users have today, every miss by itself, a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from tools.bench.detection.live import LiveResult
from tools.bench.detection.live_cases import MAJORITY
from tools.bench.detection.live_today import OTHERS, compare_with_today
from tools.bench.detection.live_tolerance_render import render_tolerance
from tools.bench.detection.live_trial import UNSEEN, kind_of, row_of

COLUMNS = {
    "injected": "injected",
    "no bit changed": "no bit",
    "harmful": "harmful",
    "detected": "found",
    "rank": "rank",
    "place": "place",
    "inconclusive": "unnamed",
    "wrong accusations": "wrong",
}
"""Heading of each count."""


def render_live(result: LiveResult, console: Console) -> None:
    """Print the result."""
    if result.trials:
        _exact_checks(result, console)
    if result.toleranced.trials:
        render_tolerance(result.toleranced, console)
    console.print("pass" if result.passed else "FAIL")


def _exact_checks(result: LiveResult, console: Console) -> None:
    for title, key in (
        ("question", row_of),
        ("layout and type", lambda trial: f"{trial.layout} {trial.precision}"),
        ("kind", kind_of),
    ):
        _table(title, result.counts(key), console)
    console.print(
        "no bit: the fault changed none that the rank reads; rank: exactly the harmed ranks were named; place: with "
        "first submodule and direction; unnamed: somebody is wrong, but nobody can be named; wrong: a healthy rank was "
        "named"
    )
    console.print(
        f"{MAJORITY}: who differs from the majority is named, and every such verdict says that it is relative to it"
    )
    for row, reason in UNSEEN.items():
        console.print(f"{row}: {reason}")
    _table_of_today(compare_with_today(result.trials), console)
    for name, reason in OTHERS.items():
        console.print(f"{name}: {reason}")
    for trial in result.missed:
        told = ", ".join(f"{one.rank} {one.verdict} at {one.address}" for one in trial.named) or "nothing"
        where = ", ".join(trial.addresses) or "clean step"
        console.print(
            f"MISS {trial.layout} {trial.precision}, {row_of(trial)}: {' and '.join(trial.kinds)} on ranks "
            f"{list(trial.ranks)}, {where}: named {told}"
        )
    alarms = sum(trial.detected for trial in result.clean)
    uneven = sum(trial.uneven for trial in result.clean)
    where = f"in {uneven} of them replicas completed different numbers of micro-batches"
    console.print(f"{len(result.clean)} clean audited steps, {where}: {alarms} alarms")


def _table(title: str, groups: Mapping[str, Counter[str]], console: Console) -> None:
    table = Table(title=f"injected faults by {title}")
    table.add_column(title)
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    total: Counter[str] = sum(groups.values(), Counter())
    for name, count in sorted(groups.items()):
        table.add_row(name, *(str(count[column]) for column in COLUMNS))
    table.add_row("all", *(str(total[column]) for column in COLUMNS), style="bold")
    console.print(table)


def _table_of_today(found: Mapping[str, Mapping[str, int]], console: Console) -> None:
    table = Table(title="alarms of what users have today, one wrong rank in the audited micro-batch")
    table.add_column("rule")
    for name in found["faults or steps"]:
        table.add_column(name, justify="right", no_wrap=True)
    for rule, counts in found.items():
        table.add_row(rule, *(str(count) for count in counts.values()), style="bold" if rule == "ours" else None)
    console.print(table)
