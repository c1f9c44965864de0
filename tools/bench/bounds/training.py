"""Effect of gradient bounds on training, ``python -m tools.bench bound-training``: a campaign of small runs.

Each setting - no bound, absolute and spike-aware thresholds - trains the same small GPT with every seed, healthy and
with faults on one replica's gradient. Source: Pei, Lausen, Karypis, IEEE Micro 2025, 10.1109/MM.2025.3642709, whose
table the result follows; the faults there are those of unhealthy nodes, here they are injected.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megasdc.data.manifest import Manifest
from megasdc.data.prepare import prepare
from megasdc.parallel.run_ranks import run_ranks
from tools.bench.bounds.training_scores import EPSILON, BoundRun, SettingScore, score
from tools.bench.bounds.training_setup import (
    REPLICAS,
    SHARES,
    BoundTrainOptions,
    Setting,
    as_request,
    prepared_section,
)
from tools.bench.bounds.training_verdict import verdict
from tools.bench.machine import describe_machine
from tools.bench.result import Progress

RUNS = "runs"


@dataclass(frozen=True)
class BoundTrainResult:
    """All runs of a campaign.

    Args:
        machine: date, processor, versions.
        options: size.
        entropy: of token frequencies, nats; finite losses above it count as diverged.
        sizes: of healthy gradients, by kind of bound: what ``SHARES`` of their elements exceed.
        runs: one entry a run.
    """

    machine: dict[str, Any]
    options: BoundTrainOptions
    entropy: float
    sizes: dict[str, dict[str, float]]
    runs: Sequence[BoundRun] = field(repr=False)

    @property
    def scores(self) -> list[SettingScore]:
        """What came out for each setting."""
        return score(self.runs, self.entropy)

    @property
    def verdict(self) -> str:
        """What these numbers show, as one sentence."""
        return verdict(self.scores, self.options.seeds)

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON holds it; losses that JSON does not have as text."""
        runs = [asdict(run) | ({} if math.isfinite(run.loss) else {"loss": str(run.loss)}) for run in self.runs]
        return {
            "verdict": self.verdict,
            "machine": self.machine,
            "options": asdict(self.options),
            "epsilon": EPSILON,
            "diverged_above": self.entropy,
            "fault_probabilities": self.options.fault_probabilities,
            "shares_of_healthy_elements": SHARES,
            "healthy_sizes": self.sizes,
            "scores": [asdict(one) | {"name": one.setting.name} for one in self.scores],
            "runs": runs,
        }


def bench_bound_training(
    options: BoundTrainOptions, on_progress: Progress = lambda what, done, total: None
) -> BoundTrainResult:
    """Run a campaign with both ranks on this machine.

    Args:
        options: size.
        on_progress: see ``Progress``.

    Raises:
        MegasdcError: the data cannot be used, or a rank failed.
    """
    machine = describe_machine()
    runs: list[BoundRun] = []
    sizes: dict[str, dict[str, float]] = {}

    def take(message: dict[str, Any]) -> None:
        sizes.update(message.get("sizes", {}))
        if "run" in message:
            found = message["run"]
            runs.append(BoundRun(**{**found, "setting": Setting(**found["setting"])}))
            on_progress(RUNS, len(runs), options.num_runs)

    with tempfile.TemporaryDirectory(prefix="megasdc_bounds_") as scratch:
        folder = Path(scratch)
        data = options.data
        if data is None:
            on_progress("text of the standard library", 0, 1)
            data = str(folder / "data")
            prepare(prepared_section(options, folder / "data"), workers=len(os.sched_getaffinity(0)), progress=False)
            on_progress("text of the standard library", 1, 1)
        entropy = Manifest.load(data).unigram_entropy_nats
        on_progress(RUNS, 0, options.num_runs)
        run_ranks("tools.bench.bounds.training_rank", as_request(options, data, folder), REPLICAS, 1, folder, take)
    return BoundTrainResult(machine, options, entropy, sizes, runs)
