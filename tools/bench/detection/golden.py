"""Campaign of injected faults against a golden trace: which are found, and which rank is named.

Random faults - kinds x submodules x phases x ranks - are injected one a run, in several layouts and types. Each run is
compared with a golden trace of the same ranks as ``megasdc golden verify`` compares, and scored against the
firings of the injector. Clean runs in between must raise nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from tools.bench.detection.golden_rank import Trial, run_campaign
from tools.bench.detection.options import DetectionOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import run_in_ranks, scratch_folder
from tools.bench.result import Progress, Report, Result, table

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
GROUPS: dict[str, tuple[str, Callable[[Trial], str]]] = {
    "phase": ("phase", lambda trial: str(trial.phase)),
    "layout": ("layout and type", lambda trial: f"{trial.layout} {trial.precision}"),
    "kind": ("kind", lambda trial: trial.kind),
}
"""Groupings of faults: title of the table, and the group of a trial."""


@dataclass(frozen=True)
class DetectionResult(Result):
    """All trials of a campaign, with faults and clean."""

    also = ("passed", "clean_runs", "clean_alarms")

    trials: Sequence[Trial] = field(repr=False)

    @property
    def harmful(self) -> list[Trial]:
        """Trials whose fault changed a bit of something that was used or kept."""
        return [trial for trial in self.trials if trial.phase is not None and trial.changed and trial.effect]

    @property
    def clean(self) -> list[Trial]:
        """Runs without a fault."""
        return [trial for trial in self.trials if trial.phase is None]

    @property
    def passed(self) -> bool:
        """Every harmful fault detected and named rightly, nothing else called divergent, and something tested."""
        right = all(t.rank_right and t.submodule_right and t.direction_right for t in self.harmful)
        without = [trial for trial in self.trials if trial not in self.harmful]
        return right and bool(self.harmful) and not any(trial.detected for trial in without)

    def counts(self, key: Callable[[Trial], str]) -> dict[str, Counter[str]]:
        """Counts of the trials with faults, grouped by ``key``."""
        groups: dict[str, Counter[str]] = {}
        for trial in self.trials:
            if trial.phase is None:
                continue
            count = groups.setdefault(key(trial), Counter())
            count["injected"] += 1
            count["no bit changed"] += not trial.changed
            count["rounded away"] += bool(trial.changed) and not trial.effect
            if trial.changed and trial.effect:
                count["harmful"] += 1
                count["detected"] += trial.detected
                count["rank"] += trial.rank_right
                count["submodule"] += trial.submodule_right
                count["direction"] += trial.direction_right
        return groups

    @property
    def clean_runs(self) -> int:
        """Runs without a fault."""
        return len(self.clean)

    @property
    def clean_alarms(self) -> int:
        """Of these, those in which something was found."""
        return sum(trial.detected for trial in self.clean)

    def as_dict(self) -> dict[str, Any]:
        """See ``Result``; with counts by phase, layout and type, and kind."""
        return super().as_dict() | {f"by_{name}": self.counts(key) for name, (_, key) in GROUPS.items()}

    def report(self) -> Report:
        """Counts, and every miss by itself."""
        for title, key in GROUPS.values():
            yield count_table(title, self.counts(key), COLUMNS)
        yield (
            "no bit: the fault changed none; rounded: of a stored state, and no parameter, master or moment of any "
            "rank ends with other bits than without it, whatever the trace says; rank, place, phase: rank, submodule "
            "and direction named as the injector says"
        )
        for trial in self.harmful:
            if not (trial.rank_right and trial.submodule_right and trial.direction_right):
                told = f"named {trial.named}, first {trial.first or 'nothing'}"
                yield (
                    f"MISS {trial.layout} {trial.precision}: {trial.kind} on rank {trial.rank}, {trial.address}: {told}"
                )
        yield f"{self.clean_runs} clean runs, {self.clean_alarms} alarms"


def count_table(title: str, groups: Mapping[str, Counter[str]], columns: Mapping[str, str]) -> Table:
    """Counts of trials by group as a table; ``columns`` holds the heading of each count."""
    total: Counter[str] = sum(groups.values(), Counter())
    rows = [(name, *(str(count[one]) for one in columns)) for name, count in [*sorted(groups.items()), ("all", total)]]
    return table(f"injected faults by {title}", (title, *columns.values()), rows, total=True)


def bench_detection(
    options: DetectionOptions, on_progress: Progress = lambda what, done, total: None
) -> DetectionResult:
    """Run a campaign with all ranks on this machine.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    faults, clean = options.share(options.faults), options.share(options.clean)
    trials: list[Trial] = []
    for number, cell in enumerate(options.cells):
        request = {**cell, "faults": faults, "clean": clean, "seed": options.seed * 1000 + number}
        trials += run_cell(run_campaign, request, faults + clean, on_progress)
    return DetectionResult(machine, options, trials)


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
