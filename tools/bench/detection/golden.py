"""Campaign of injected faults against a golden trace: which are found, and which rank is named.

Random faults - kinds x submodules x phases x ranks - are injected one a run, in several layouts and types. Each run is
compared with a golden trace of the same ranks as ``megasdc golden verify`` compares, and scored against the
firings of the injector. Clean runs in between must raise nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.bench.campaign import run_cells
from tools.bench.detection.counts import CampaignResult
from tools.bench.detection.golden_rank import Trial, run_campaign
from tools.bench.detection.options import DetectionOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, ignore_progress
from tools.bench.result import Report


@dataclass(frozen=True)
class DetectionResult(CampaignResult):
    """All trials of a campaign, with faults and clean."""

    also = ("passed", "clean_runs", "clean_alarms")
    counted = {
        "injected": ("injected", lambda trial: True),
        "no bit changed": ("no bit", lambda trial: not trial.changed),
        "rounded away": ("rounded", lambda trial: trial.changed and not trial.effect),
        "harmful": ("harmful", lambda trial: trial.harmful),
        "detected": ("found", lambda trial: trial.harmful and trial.detected),
        "rank": ("rank", lambda trial: trial.harmful and trial.rank_right),
        "submodule": ("place", lambda trial: trial.harmful and trial.submodule_right),
        "direction": ("phase", lambda trial: trial.harmful and trial.direction_right),
    }
    groups = {
        "phase": ("phase", lambda trial: str(trial.phase)),
        "layout": ("layout and type", lambda trial: f"{trial.layout} {trial.precision}"),
        "kind": ("kind", lambda trial: trial.kind),
    }

    trials: Sequence[Trial] = field(repr=False)

    @property
    def harmful(self) -> list[Trial]:
        """Trials whose fault changed a bit of something that was used or kept."""
        return [trial for trial in self.faulty if trial.harmful]

    @property
    def passed(self) -> bool:
        """Every harmful fault detected and named rightly, nothing else called divergent, and something tested."""
        right = all(t.rank_right and t.submodule_right and t.direction_right for t in self.harmful)
        without = [trial for trial in self.trials if trial not in self.harmful]
        return right and bool(self.harmful) and not any(trial.detected for trial in without)

    @property
    def clean_runs(self) -> int:
        """Runs without a fault."""
        return len(self.clean)

    def report(self) -> Report:
        """Counts, and every miss by itself."""
        yield from self.count_tables()
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


def bench_detection(options: DetectionOptions, on_progress: Progress = ignore_progress) -> DetectionResult:
    """Run a campaign with all ranks on this machine.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    counts = {"faults": options.share(options.faults), "clean": options.share(options.clean)}
    trials = run_cells(run_campaign, options, counts, on_progress)
    return DetectionResult(machine, options, trials)
