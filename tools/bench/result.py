"""Results of benchmarks: what was measured, verdicts, the same as JSON and as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from tools.bench.statistics import SLACK, Cost, Estimate

Report = Iterator[str | Table]
"""Lines and tables, in the order in which they are printed."""


@dataclass(frozen=True)
class Result:
    """Everything that was measured; a benchmark adds its own fields.

    Args:
        machine: date, processor, versions.
    """

    also: ClassVar[tuple[str, ...]] = ("passed",)
    """Properties that JSON holds beside the fields."""

    judged: ClassVar[tuple[str, ...]] = ()
    """Fields of parts, each of which has to have passed."""
    machine: dict[str, Any]
    options: Any

    @property
    def passed(self) -> bool:
        """Whether every bar is met; of a benchmark without one, true."""
        return all(part.passed for name in self.judged for part in getattr(self, name))

    def report(self) -> Report:
        """The measurements, for people."""
        yield from ()

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it, with verdicts, the exit code, and lines and tables as they are printed."""
        printed = [part if isinstance(part, str) else _cells(part) for part in self.report()]
        found: dict[str, Any] = plain(self)
        return found | {"exit_code": int(not self.passed), "report": printed}

    def render(self, console: Console) -> None:
        """Print machine, lines and tables, and the verdict where there is a bar."""
        machine = self.machine
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        console.print(
            f"{machine['date']}; {machine['cpu']}, {machine['cores']} cores, load {machine['load_before']} before"
        )
        console.print(f"Python {machine['python']}, {versions}")
        for part in self.report():
            console.print(part, soft_wrap=isinstance(part, str))
        if "passed" in self.also:
            console.print(verdict(self.passed))


@dataclass(frozen=True)
class Comparison:
    """Ours against another one, in pairs of blocks.

    Args:
        bar: largest median ratio that passes; None: any does.
        ratios: our time over the other's, by quantity ``wall`` and ``cpu``.
        difference: first thing whose bits differed; None where all that have to be equal are.
        costs: (ours, the other's) of each pair of blocks.
    """

    also: ClassVar[tuple[str, ...]] = ("passed",)

    bar: float | None
    ratios: dict[str, Estimate]
    difference: str | None
    costs: list[tuple[Cost, Cost]] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether all ratios are within the bar, and nothing differs that has to be equal."""
        bar = self.bar
        return self.difference is None and (bar is None or all(one.passes(bar, SLACK) for one in self.ratios.values()))

    @property
    def verdict(self) -> str:
        """As tables show it."""
        return "FAIL" if not self.passed else "-" if self.bar is None else "pass"

    def ratio_table(self, title: str) -> Table:
        """A row for each quantity, with its interval, bar and verdict."""
        bar, rows = self.bar, []
        for name, ratio in self.ratios.items():
            interval, told, came = f"{ratio.low:.4f} - {ratio.high:.4f}", "none", "-"
            if bar is not None:
                told = f"median <= {bar}, upper end <= {bar + SLACK:.2f}"
                came = verdict(ratio.passes(bar, SLACK))
            coverage = f"{100 * ratio.coverage:.1f} %"
            rows.append([name, f"{ratio.median:.4f}", interval, coverage, str(ratio.count), told, came])
        columns = ("time, ours / theirs", "median", "interval of the median", "coverage", "pairs", "bar", "verdict")
        return table(title, columns, rows)


@dataclass(frozen=True)
class ComparisonResult(Result):
    """A result made of comparisons with other programs."""

    also = ("passed", "slack")
    slack: ClassVar[float] = SLACK

    judged: ClassVar[tuple[str, ...]] = ("comparisons",)
    comparisons: Sequence[Comparison]


def plain(value: Any) -> Any:
    """Dataclasses, with the properties that they name in ``also``, as what JSON has; NaN and infinity as text."""
    if is_dataclass(value) and not isinstance(value, type):
        names = (*getattr(value, "also", ()), *(one.name for one in fields(value)))
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, total: bool = False, tight: bool = False
) -> Table:
    """A table whose first column names the row.

    Args:
        total: the last row is the sum of the others.
        tight: no space between columns, and long headings are folded.
    """
    found = Table(title=title, padding=0) if tight else Table(title=title)
    for number, column in enumerate(columns):
        overflow: Any = "fold" if tight else "ellipsis"
        found.add_column(column, justify="right" if number else "left", overflow=overflow)
    listed = list(rows)
    for number, row in enumerate(listed, 1):
        found.add_row(*row, style="bold" if total and number == len(listed) else None)
    return found


Told = Mapping[str, Callable[[Any], object]]
"""What a table tells of each part, by heading."""


def listing(title: str, columns: Told, parts: Iterable[Any], *, tight: bool = False) -> Table:
    """A table with a row for each part; ``tight`` as of ``table``."""
    rows = [[str(tell(one)) for tell in columns.values()] for one in parts]
    return table(title, tuple(columns), rows, tight=tight)


def side_by_side(title: str, first: str, parts: Sequence[Any], rows: Told) -> Table:
    """A table with a column for each part, which has a ``name``; ``first``: heading of what is told."""
    told = [(name, *(str(tell(one)) for one in parts)) for name, tell in rows.items()]
    return table(title, (first, *(one.name for one in parts)), told)


def _cells(one: Table) -> dict[str, Any]:
    """A table as JSON."""
    columns = [list(column.cells) for column in one.columns]
    headings = [str(column.header) for column in one.columns]
    return {"title": str(one.title), "columns": headings, "rows": [list(row) for row in zip(*columns, strict=True)]}


def verdict(passed: bool) -> str:
    """As tables and lines show it."""
    return "pass" if passed else "FAIL"


def interval(estimate: Estimate, digits: int = 3, scale: float = 1.0, link: str = " to ") -> str:
    """A median with its interval.

    Args:
        digits: after the point.
        scale: what values are multiplied by, 100 for per cent.
        link: between the ends of the interval.
    """
    middle, low, high = (f"{scale * one:.{digits}f}" for one in (estimate.median, estimate.low, estimate.high))
    return f"{middle} ({low}{link}{high})"
