"""Result of a benchmark against another program: ratios under a bar, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.bench.statistics import Cost, Estimate

SLACK = 0.01
"""How far the interval's upper end may lie above the bar."""

Progress = Callable[[str, int, int], None]
"""Told what is measured, how much is done, and of how much."""


@dataclass(frozen=True)
class Comparison:
    """Ours against another one, in pairs of blocks.

    Args:
        bar: largest median ratio that passes; None: any does.
        ratios: our time over the other's, by quantity ``wall`` and ``cpu``.
        difference: first thing whose bits differed; None where all that have to be equal are.
        costs: (ours, the other's) of each pair of blocks.
    """

    bar: float | None
    ratios: dict[str, Estimate]
    difference: str | None
    costs: list[tuple[Cost, Cost]] = field(repr=False)

    @property
    def passed(self) -> bool:
        """Whether both ratios are within the bar, and nothing differs that has to be equal."""
        bar = self.bar
        return self.difference is None and (bar is None or all(one.passes(bar, SLACK) for one in self.ratios.values()))


@dataclass(frozen=True)
class BenchResult:
    """Everything that was measured.

    Args:
        machine: date, processor, versions.
        options: sizes, a dataclass.
        comparisons: those that were asked for.
    """

    machine: dict[str, Any]
    options: Any
    comparisons: Sequence[Comparison]

    @property
    def passed(self) -> bool:
        """Whether every comparison passed."""
        return all(comparison.passed for comparison in self.comparisons)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it, with verdicts."""
        comparisons = [{"passed": one.passed, **asdict(one)} for one in self.comparisons]
        return {"passed": self.passed, "slack": SLACK, **asdict(self), "comparisons": comparisons}
