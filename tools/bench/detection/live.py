"""Campaign of injected faults in running trainings: which are found, and which rank is named.

``python -m tools.bench detection --live``: in several layouts and types, seeded faults are injected into runs of the
real loop with the real checks, and what these report is scored against what the injector did. The same faults are
scored for what users have today. Clean steps in between must raise nothing. The toleranced checks, which only warn, are
scored apart.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasdc.errors import ConfigError
from megasdc.parallel.run_ranks import run_ranks
from tools.bench.detection.golden import PRECISIONS, STYLES
from tools.bench.detection.live_cases import CLEAN, LONG
from tools.bench.detection.live_today import OTHERS, compare_with_today
from tools.bench.detection.live_tolerance_trial import ToleranceResult, ToleranceTrial, read_tolerance_trial
from tools.bench.detection.live_trial import UNSEEN, LiveTrial, Named, kind_of, row_of
from tools.bench.machine import describe_machine
from tools.bench.result import Progress

LAYOUTS = ((1, 1, 3), (1, 1, 4), (2, 1, 3), (1, 2, 3), (1, 1, 2), (2, 2, 2))
"""(tensor, pipeline, data)."""
DROPOUT = 0.1


@dataclass(frozen=True)
class LiveOptions:
    """Size of a campaign.

    Args:
        faults: trials with faults, over all layouts and types; rounded up to equal shares.
        toleranced: trials with faults for the toleranced checks, likewise.
        clean: steps without, likewise, for each of both that has faults.
        layouts: (tensor, pipeline, data) of each, at least 2 replicas.
        precisions: some of fp32, bf16.
        seed: of every draw.
        fuse: whether the models have ``model.fuse``.

    Raises:
        ConfigError: a layout has one replica, or nothing is to be injected.
    """

    faults: int = 1000
    toleranced: int = 360
    clean: int = 500
    layouts: tuple[tuple[int, int, int], ...] = LAYOUTS
    precisions: tuple[str, ...] = PRECISIONS
    seed: int = 1
    fuse: bool = False

    def __post_init__(self) -> None:
        if not (self.faults or self.toleranced):
            raise ConfigError("--faults, --toleranced: both are 0, and nothing would be tested; give one of them")
        for layout in self.layouts:
            if layout[2] < 2:
                name = "x".join(map(str, layout))
                raise ConfigError(f"--layouts: {name} has one replica, and an audit compares at least 2; set data to 2")

    @property
    def cells(self) -> list[dict[str, Any]]:
        """Every layout with every type; recompute in half of them, dropout in half of each half."""
        return [
            {
                "layout": layout,
                "precision": precision,
                "style": STYLES[precision],
                "fuse": self.fuse,
                "recompute": (place + number) % 2 == 0,
                "dropout": DROPOUT if (place // 2 + number) % 2 else 0.0,
            }
            for place, layout in enumerate(self.layouts)
            for number, precision in enumerate(self.precisions)
        ]


@dataclass(frozen=True)
class LiveResult:
    """All trials of a campaign.

    Args:
        machine: date, processor, versions.
        options: size.
        trials: with faults and clean.
        toleranced: those of the toleranced checks.
    """

    machine: dict[str, Any]
    options: LiveOptions
    trials: Sequence[LiveTrial] = field(repr=False)
    toleranced: ToleranceResult

    @property
    def clean(self) -> list[LiveTrial]:
        """Steps without a fault."""
        return [trial for trial in self.trials if trial.row == CLEAN]

    @property
    def faulty(self) -> list[LiveTrial]:
        """Trials with faults."""
        return [trial for trial in self.trials if trial.row != CLEAN]

    @property
    def missed(self) -> list[LiveTrial]:
        """Trials in which the checks did not say what they have to say."""
        return [trial for trial in self.trials if not trial.met]

    @property
    def passed(self) -> bool:
        """Whether all trials were as they have to be, and something was tested."""
        tested = not self.options.faults or (bool(self.clean) and any(trial.harmed for trial in self.faulty))
        return not self.missed and tested and (not self.options.toleranced or self.toleranced.passed)

    def counts(self, key: Callable[[LiveTrial], str]) -> dict[str, Counter[str]]:
        """Counts of the trials with faults, grouped by what ``key`` says."""
        groups: dict[str, Counter[str]] = {}
        for trial in self.faulty:
            count = groups.setdefault(key(trial), Counter())
            count["injected"] += 1
            count["no bit changed"] += not trial.harmed
            count["wrong accusations"] += bool(trial.wrongly)
            if trial.harmed:
                count["harmful"] += 1
                count["detected"] += trial.detected
                count["rank"] += trial.rank_right
                count["place"] += trial.place_right
                count["inconclusive"] += trial.inconclusive
        return groups

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it."""
        return {
            "passed": self.passed,
            "machine": self.machine,
            "options": asdict(self.options),
            "by_row": self.counts(row_of),
            "by_layout": self.counts(lambda trial: f"{trial.layout} {trial.precision}"),
            "by_kind": self.counts(kind_of),
            "not_detectable": UNSEEN,
            "today": compare_with_today(self.trials),
            "not_run": OTHERS,
            "clean_steps": len(self.clean),
            "clean_uneven_steps": sum(trial.uneven for trial in self.clean),
            "clean_alarms": sum(trial.detected for trial in self.clean),
            "trials": [_plain(trial) for trial in self.trials],
            "toleranced": self.toleranced.as_dict(),
        }


def bench_live(options: LiveOptions, on_progress: Progress = lambda what, done, total: None) -> LiveResult:
    """Run a campaign with all ranks on this machine.

    Args:
        options: size.
        on_progress: see ``Progress``.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    faults = -(-options.faults // len(options.cells))
    clean = -(-options.clean // (len(options.cells) * LONG))
    toleranced = -(-options.toleranced // len(options.cells))
    trials: list[LiveTrial] = []
    tolerance_trials: list[ToleranceTrial] = []
    for number, cell in enumerate(options.cells):
        common = {**cell, "seed": options.seed * 1000 + number}
        if faults:
            sizes = {"faults": faults, "clean_runs": clean}
            trials += map(_read, _run_cell("live_rank", {**common, **sizes}, faults + clean, on_progress))
        if toleranced:
            sizes = {"faults": toleranced, "clean_steps": -(-options.clean // len(options.cells))}
            found = _run_cell("live_tolerance_rank", {**common, **sizes}, toleranced + 1, on_progress)
            tolerance_trials += map(read_tolerance_trial, found)
    return LiveResult(machine, options, trials, ToleranceResult(tolerance_trials))


def _run_cell(program: str, request: dict[str, Any], total: int, on_progress: Progress) -> list[dict[str, Any]]:
    """Run one layout and type; trials as their JSON says."""
    name = f"{'x'.join(map(str, request['layout']))} {request['precision']}"
    on_progress(name, 0, total)
    with tempfile.TemporaryDirectory(prefix="megasdc_live_") as scratch:
        run_ranks(
            f"tools.bench.detection.{program}",
            {**request, "folder": scratch},
            math.prod(request["layout"]),
            1,
            Path(scratch),
            lambda message: on_progress(name, message["done"], total),
        )
        return [json.loads(line) for line in (Path(scratch) / "trials.jsonl").read_text(encoding="utf-8").splitlines()]


def _read(found: dict[str, Any]) -> LiveTrial:
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return LiveTrial(**{**found, **lists, "named": tuple(Named(**one) for one in found["named"])})


def _plain(trial: LiveTrial) -> dict[str, Any]:
    """A trial for JSON, which has no NaN: such values as text."""
    found = asdict(trial)
    return found | {name: str(found[name]) for name in ("loss", "grad_norm") if not math.isfinite(found[name])}
