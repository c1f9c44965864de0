"""Trials of the toleranced checks as text: found by size of the fault, thresholds, false warnings, every miss."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from megasdc.train.detection.toleranced import UNITS
from tools.bench.detection.live_tolerance_trial import CERTAIN, UNCOVERED, ToleranceResult

SIZES = {"smaller": "< 1", "up to twice": f"1 to {CERTAIN:g}", "larger": f"> {CERTAIN:g}", "not looked at": "unseen"}
"""Heading of each class of sizes."""
COLUMNS = {"first": "first", "audits": "audits"}


def render_tolerance(result: ToleranceResult, console: Console) -> None:
    """Print the result."""
    table = Table(title="toleranced checks: found of injected faults, by size in thresholds", padding=0)
    table.add_column("fault: check", min_width=12)
    for heading in ("faults", "same", "skip", *SIZES.values(), *COLUMNS.values()):
        table.add_column(heading, justify="right", overflow="fold")
    for name, count in sorted(result.counts().items()):
        injected = [str(count[column]) for column in ("injected", "no bit changed", "step skipped")]
        table.add_row(name, *injected, *(_found(count, size) for size in SIZES), *(str(count[one]) for one in COLUMNS))
    console.print(table)
    console.print(
        "size: how far the fault moves the value of the check; unseen: outside the slice of that step, or no check "
        "looks there; same: no bit changed; skip: the gradient was not finite, and the optimizer did not step; first: "
        "no check warned before this one; audits: one was called"
    )
    wrong = sum(count["wrong accusations"] for count in result.counts().values())
    console.print(f"healthy ranks were named in {wrong} trials")
    for row, reason in UNCOVERED.items():
        console.print(f"{row}: {reason}")
    for check, (least, most) in result.thresholds().items():
        console.print(f"threshold of {check} as measured on clean steps: {least:.3g} to {most:.3g} {UNITS[check]}")
    for trial in result.missed:
        sizes = ", ".join(f"{size:.3g} of {check}" for check, size in trial.sizes.items()) or "no size"
        said = ", ".join(f"{check} in step {step}" for step, check in trial.warnings) or "nothing"
        console.print(
            f"MISS {trial.layout} {trial.precision}, {trial.row}: {trial.kind or 'no fault'} on ranks "
            f"{list(trial.ranks)}, {trial.address or f'{trial.steps} steps'} ({sizes}): warned {said}; named "
            f"{list(trial.accused)}"
        )
    console.print(f"{result.clean_steps} clean steps, {result.false_warnings} false warnings")


def _found(count: Counter[str], size: str) -> str:
    return f"{count[f'{size}, found']}/{count[size]}" if count[size] else "-"
