"""Predicted and measured speed-up of DropCompute, ``python -m tools.bench drop-speedup``: gloo replicas that sleep.

Runs of the same delays take steps in turn: one without a threshold, one for each of several thresholds, and one that
chooses its own. Each micro-batch is a constant delay and one from the paper's environment, which no threshold cuts;
computation is little beside them, so that many replicas fit few cores. What is predicted for steps comes from steps of
other delays, in which nothing was left out, by the search that runs use.

Source: Giladi et al., NeurIPS 2023, arXiv 2306.10598, eq. 6 and section 5.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.config.sections.drop_compute import PREDICTIVE
from megasdc.parallel.run_ranks import run_ranks
from tools.bench.drops.setup import SmallGpt, check_options, drop_config
from tools.bench.drops.speedup_scores import Comparison, Segment, compare, recorded_steps, sleep_share
from tools.bench.machine import describe_machine
from tools.bench.result import Progress

GPT = SmallGpt()
BAR = 0.05
"""Largest difference of a measured speed-up from the predicted one, over the latter."""
NEVER, AUTO = "inf", "auto"


@dataclass(frozen=True)
class DropSpeedupOptions:
    """Size of the measurement.

    Args:
        replicas: N, one rank each.
        steps: that are measured for each threshold, and as many that predict.
        warmup: steps before them in each run, at least 1.
        constant_s: that every micro-batch sleeps.
        mean_s: mean of what it sleeps more, bounded log-normal.
        drop_rates: shares that the thresholds are to leave out; one that a run chooses itself comes on top.
        sigmas: of the rule "predictive"; None: that of the paper, which starts micro-batches before tau.
        seed: of delays; the steps that predict have those of the next one, or in a run that chooses are its first.
        gpt: the model.
    """

    replicas: int = 8
    steps: int = 28
    warmup: int = 2
    constant_s: float = 0.06
    mean_s: float = 0.1
    drop_rates: tuple[float, ...] = (0.025, 0.05, 0.1)
    sigmas: float | None = None
    seed: int = 1
    gpt: SmallGpt = GPT

    def __post_init__(self) -> None:
        problems = self.gpt.problems()
        if self.sigmas is not None and not 0 <= self.sigmas < math.inf:
            problems.append(f"--sigmas: {self.sigmas} must be at least 0")
        if self.warmup < 1:
            problems.append(f"--warmup: {self.warmup} must be at least 1, since a first step is slower")
        if not self.mean_s > 0:
            problems.append(f"--mean: {self.mean_s} must be above 0, since equal replicas gain nothing")
        if not all(0 < rate < 1 for rate in self.drop_rates):
            problems.append("--drop-rates: each must be above 0 and below 1")
        check_options(self, problems)

    @property
    def first(self) -> Segment:
        """The first steps after warming up."""
        return Segment(self.warmup, self.warmup + self.steps)

    @property
    def second(self) -> Segment:
        """As many steps after those."""
        return Segment(self.first.stop, self.first.stop + self.steps)

    def delay(self, seed: int) -> list[dict[str, Any]]:
        """Entries of `delay`."""
        constant = {"kind": "normal", "mean_s": self.constant_s, "std_s": 0.0, "seed": seed}
        return [constant, {"kind": "bounded_lognormal", "mean_s": self.mean_s, "seed": seed}]

    @property
    def num_steps(self) -> int:
        """Of all runs."""
        return 2 * self.second.stop + (1 + len(self.drop_rates)) * self.first.stop

    def config(
        self, folder: Path, threshold: float | str, steps: int | None = None, seed: int | None = None
    ) -> dict[str, Any]:
        """A run.

        Args:
            folder: where it writes.
            threshold: as in the section.
            steps: of the run; None: until what is measured of it has ended.
            seed: of its delays; None: that of the runs that are compared.
        """
        if steps is None:
            steps = self.second.stop if isinstance(threshold, str) else self.first.stop
        drop: dict[str, Any] = {
            "threshold": threshold,
            "warmup_steps": self.warmup,
            "window_steps": self.steps,
            "max_drop_rate": 1.0,
        }
        if threshold == NEVER:
            drop = {"threshold": threshold}
        elif self.sigmas is not None:
            drop |= {"rule": PREDICTIVE, "sigmas": self.sigmas}
        return drop_config(self.gpt, folder, steps, drop, delay=self.delay(self.seed if seed is None else seed))


@dataclass(frozen=True)
class DropSpeedupResult:
    """Everything that was measured.

    Args:
        machine: date, processor, versions.
        options: size.
        thresholds: one entry each; the last one is the run's own.
        sleep_share: of the time of micro-batches without a threshold, that they slept.
    """

    machine: dict[str, Any]
    options: DropSpeedupOptions
    thresholds: Sequence[Comparison]
    sleep_share: float

    @property
    def passed(self) -> bool:
        """Whether every speed-up is as predicted, within the bar."""
        return all(abs(one.difference) <= BAR for one in self.thresholds)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it, with verdicts."""
        return {
            "passed": self.passed,
            "bar": BAR,
            "machine": self.machine,
            "options": asdict(self.options),
            "sleep_share": self.sleep_share,
            "thresholds": [asdict(one) | {"difference": one.difference} for one in self.thresholds],
        }


def bench_drop_speedup(
    options: DropSpeedupOptions, on_progress: Progress = lambda what, done, total: None
) -> DropSpeedupResult:
    """Measure, with all ranks on this machine.

    Args:
        options: size.
        on_progress: see ``Progress``.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    runs: list[tuple[Path, list[float]]] = []
    taus: list[float | None] = []

    def take(message: dict[str, Any]) -> None:
        if "walls_s" in message:
            runs.append((Path(message["folder"]), message["walls_s"]))
            taus.append(message["tau_s"])
        on_progress("steps", message["done"], options.num_steps)

    with tempfile.TemporaryDirectory(prefix="megasdc_speedup_") as scratch:
        on_progress("steps", 0, options.num_steps)
        request = {"options": asdict(options), "folder": scratch}
        run_ranks("tools.bench.drops.speedup_rank", request, options.replicas, 1, Path(scratch), take)
        (plain, *dropping, own), first, second = runs, options.first, options.second
        before = Path(scratch) / "before"
        sigmas = options.sigmas
        found = [
            compare(tau, plain, run, first, before, first, sigmas)
            for tau, run in zip(taus[1:-1], dropping, strict=True)
        ]
        found.append(compare(taus[-1], plain, own, second, own[0], first, sigmas))
        slept = sleep_share(recorded_steps(plain[0], first), first, options.delay(options.seed))
    return DropSpeedupResult(machine, options, found, slept)


def options_of(request: dict[str, Any]) -> DropSpeedupOptions:
    """The options in a request."""
    given = request["options"]
    return DropSpeedupOptions(**{**given, "drop_rates": tuple(given["drop_rates"]), "gpt": SmallGpt(**given["gpt"])})
