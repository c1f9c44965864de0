"""Trials of campaigns of injected faults, counted by what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tools.bench.campaign import grouped, tables
from tools.bench.result import Report, Result


@dataclass(frozen=True)
class CampaignResult(Result):
    """All trials of a campaign, with faults and clean."""

    counted: ClassVar[dict[str, tuple[str, Callable[[Any], Any]]]]
    """Counts of trials with faults: heading, and whether a trial is counted."""
    groups: ClassVar[dict[str, tuple[str, Callable[[Any], str]]]]
    """Groupings of faults: title of the table, and the group of a trial."""

    trials: Sequence[Any] = field(repr=False)

    @property
    def clean(self) -> list[Any]:
        """Trials without a fault."""
        return [trial for trial in self.trials if trial.clean]

    @property
    def faulty(self) -> list[Any]:
        """Trials with faults."""
        return [trial for trial in self.trials if not trial.clean]

    @property
    def clean_alarms(self) -> int:
        """Trials without a fault in which something was found."""
        return sum(trial.detected for trial in self.clean)

    def counts(self, key: Callable[[Any], str]) -> dict[str, Counter[str]]:
        """Counts of the trials with faults, grouped by ``key``."""
        return {name: self._count(found) for name, found in grouped(self.faulty, key).items()}

    def _count(self, trials: Sequence[Any]) -> Counter[str]:
        return Counter(
            {name: sum(bool(is_counted(one)) for one in trials) for name, (_, is_counted) in self.counted.items()}
        )

    def as_dict(self) -> dict[str, Any]:
        """See ``Result``; with counts by each grouping."""
        return super().as_dict() | {f"by_{name}": self.counts(key) for name, (_, key) in self.groups.items()}

    def count_tables(self) -> Report:
        """Counts of the trials with faults, a table for each grouping."""
        headings = [heading for heading, _ in self.counted.values()]
        keys = dict(self.groups.values())
        yield from tables("injected faults", self.faulty, keys, headings, lambda some: self._count(some).values())
