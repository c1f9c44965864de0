"""Campaign of injected faults in running trainings: which are found, and which rank is named.

``python -m tools.bench detection --live``: in several layouts and types, seeded faults are injected into runs of the
real loop with the real checks, and what these report is scored against what the injector did. The same faults are
scored for what users have today. Clean steps in between must raise nothing. Whole runs with faults between tokens and
parameters are scored by how they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.campaign import run_cells
from tools.bench.detection.counts import CampaignResult
from tools.bench.detection.live_cases import LONG, MAJORITY
from tools.bench.detection.live_chain import ChainPlan, ChainResult, PresetPlan, run_chain_drills
from tools.bench.detection.live_rank import run_campaign
from tools.bench.detection.live_today import OTHERS, compare_with_today
from tools.bench.detection.live_trial import UNSEEN, LiveTrial, kind_of, row_of
from tools.bench.detection.options import LiveOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress
from tools.bench.result import Report, table


@dataclass(frozen=True)
class LiveResult(CampaignResult):
    """All trials of a campaign, with faults and clean, and drills of whole runs."""

    also = ("passed", "not_detectable", "today", "not_run", "clean_steps", "clean_uneven_steps", "clean_alarms")
    counted = {
        "injected": ("injected", lambda trial: True),
        "no bit changed": ("no bit", lambda trial: not trial.harmed),
        "harmful": ("harmful", lambda trial: trial.harmed),
        "detected": ("found", lambda trial: trial.harmed and trial.detected),
        "rank": ("rank", lambda trial: trial.harmed and trial.rank_right),
        "place": ("place", lambda trial: trial.harmed and trial.place_right),
        "inconclusive": ("unnamed", lambda trial: trial.harmed and trial.inconclusive),
        "wrong accusations": ("wrong", lambda trial: trial.wrongly),
    }
    groups = {
        "row": ("question", row_of),
        "layout": ("layout and type", lambda trial: f"{trial.layout} {trial.precision}"),
        "kind": ("kind", kind_of),
    }
    not_detectable = UNSEEN
    not_run = OTHERS

    trials: Sequence[LiveTrial] = field(repr=False)
    chain: ChainResult

    @property
    def missed(self) -> list[LiveTrial]:
        """Trials in which the checks did not report what they have to."""
        return [trial for trial in self.trials if not trial.met]

    @property
    def passed(self) -> bool:
        """Whether all trials were as they have to be, and something was tested."""
        tested = not self.options.faults or (bool(self.clean) and any(trial.harmed for trial in self.faulty))
        return not self.missed and tested and (not self.options.drills or self.chain.passed)

    @property
    def today(self) -> dict[str, dict[str, Any]]:
        """The same faults judged by what users have today."""
        return compare_with_today(self.trials)

    @property
    def clean_steps(self) -> int:
        """Steps without a fault."""
        return len(self.clean)

    @property
    def clean_uneven_steps(self) -> int:
        """Of these, those in which replicas completed different numbers of micro-batches."""
        return sum(trial.uneven for trial in self.clean)

    def report(self) -> Report:
        """Counts, what users have today, every miss by itself; whole runs apart."""
        if self.trials:
            yield from self._exact_checks()
        if self.chain.drills:
            yield from self.chain.report()

    def _exact_checks(self) -> Report:
        yield from self.count_tables()
        yield (
            "no bit: the fault changed none; rank: exactly the harmed ranks were named; place: "
            "with first submodule and direction; unnamed: somebody is wrong, but nobody can be named; wrong: a healthy "
            "rank was named"
        )
        yield (
            f"{MAJORITY}: who differs from the majority is named, and every such verdict says that it is relative to it"
        )
        for row, reason in UNSEEN.items():
            yield f"{row}: {reason}"
        today = self.today
        yield table(
            "alarms of what users have today, one wrong rank in the audited micro-batch",
            ("rule", *today["faults or steps"]),
            [(rule, *map(str, counts.values())) for rule, counts in today.items()],
            total=True,
        )
        for name, reason in OTHERS.items():
            yield f"{name}: {reason}"
        for trial in self.missed:
            told = ", ".join(f"{one.rank} {one.verdict} at {one.address}" for one in trial.named) or "nothing"
            where = ", ".join(trial.addresses) or "clean step"
            yield (
                f"MISS {trial.layout} {trial.precision}, {row_of(trial)}: {' and '.join(trial.kinds)} on ranks "
                f"{list(trial.ranks)}, {where}: named {told}"
            )
        yield (
            f"{self.clean_steps} clean audited steps, in {self.clean_uneven_steps} of them replicas completed "
            f"different numbers of micro-batches: {self.clean_alarms} alarms"
        )


def bench_live(options: LiveOptions, on_progress: Progress = ignore_progress, log: Path | None = None) -> LiveResult:
    """Run a campaign with all ranks on this machine.

    Args:
        log: file that keeps drills of whole runs, which are not repeated; None: none does.

    Raises:
        MegasdcError: a rank failed, or the log cannot be used.
    """
    machine = describe_machine()
    counts = {"faults": options.share(options.faults), "clean_runs": options.share(-(-options.clean // LONG))}
    trials = run_cells(run_campaign, options, counts, on_progress) if options.faults else []
    chain = ChainResult([])
    if options.drills:
        sizes = options.drills, options.drawn, options.layouts, options.clean, options.seed
        plan = ChainPlan(*sizes)
        if options.protect is not None:
            plan = PresetPlan(*sizes, protect=options.protect, budget=options.budget)
        chain = run_chain_drills(plan, log, on_progress)
    return LiveResult(machine, options, trials, chain)
