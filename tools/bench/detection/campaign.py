"""Campaigns of injected faults: one layout and type at a time in ranks of this machine, and counts of the trials."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tools.bench.rank import run_in_ranks, scratch_folder
from tools.bench.result import Progress, Report, Result, table


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
        groups: dict[str, Counter[str]] = {}
        for trial in self.faulty:
            count = groups.setdefault(key(trial), Counter())
            for name, (_, is_counted) in self.counted.items():
                count[name] += bool(is_counted(trial))
        return groups

    def as_dict(self) -> dict[str, Any]:
        """See ``Result``; with counts by each grouping."""
        return super().as_dict() | {f"by_{name}": self.counts(key) for name, (_, key) in self.groups.items()}

    def count_tables(self) -> Report:
        """Counts of the trials with faults, a table for each grouping."""
        for title, key in self.groups.values():
            groups = self.counts(key)
            total: Counter[str] = sum(groups.values(), Counter())
            rows = [
                (name, *(str(count[one]) for one in self.counted))
                for name, count in [*sorted(groups.items()), ("all", total)]
            ]
            headings = (heading for heading, _ in self.counted.values())
            yield table(f"injected faults by {title}", (title, *headings), rows, total=True)


def run_cell(function: Callable[..., None], request: dict[str, Any], total: int, on_progress: Progress) -> list[Any]:
    """Run one layout and type of a campaign, and return all trials.

    The ranks run ``function``, which sends ``trials`` after each of the ``total`` cases. ``request`` is the cell, its
    counts and its seed; the ranks also get ``folder``.
    """
    name = f"{'x'.join(map(str, request['layout']))} {request['precision']}"
    trials: list[Any] = []
    done = 0

    def take(message: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        trials.extend(message["trials"])
        on_progress(name, done, total)

    on_progress(name, 0, total)
    with scratch_folder() as folder:
        arguments = {"request": {**request, "folder": str(folder)}}
        run_in_ranks(function, arguments, math.prod(request["layout"]), folder, take)
    return trials
