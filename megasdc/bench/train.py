"""Is our training loop as fast as it should be? ``megasdc bench train``: comparisons, bars and a verdict.

``plain``: our engine and loop with everything a default run has around them, against DeepSpeed's ``PipelineEngine`` in
a bare loop over the same modules; both must also end with the same bits. ``hf``: against ``LlamaForCausalLM`` under
DeepSpeed ZeRO-1. ``hf-compiled``: against the same model under ``torch.compile``, with a bar for fused modules only.
``determinism``: our loop with deterministic mode against without; its cost is told and has no bar. On
GPUs the environment variables of that mode act on whole processes and so on both sides: set or unset them for both.
``bounds``: our loop with gradient bounds against without; the bar is for 8 or more micro-batches a step.
``launch``: seconds from the launcher's command to the first step, with ``fuse`` by what is compiled; it has no bar.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.bench.launch_time import COMMANDS, FUSED_COMMANDS, measure_launches
from megasdc.bench.machine import describe_machine
from megasdc.bench.options import TrainBenchOptions
from megasdc.bench.ranks import run_ranks
from megasdc.bench.result import BenchResult, Comparison, Progress
from megasdc.bench.statistics import Cost, estimate_median, ratios

AGAINST = ("plain", "hf", "hf-compiled", "determinism", "bounds", "launch")
BARS = {"plain": 1.01, "hf": 1.0, "bounds": 1.01}
"""Largest median of our time over the other loop's; without one, no time is too long."""
FUSED_BARS = {**BARS, "hf": 0.9, "hf-compiled": 1.0}
"""The same with fused modules."""
LEAST_MICRO_BATCHES = {"bounds": 8}
"""Micro-batches of a step below which a bar does not hold."""


@dataclass(frozen=True)
class TrainComparison(Comparison):
    """Our loop against another one.

    Args:
        against: one of ``AGAINST`` but ``launch``.
        tokens_per_s: median over blocks of our loop and of the other, all ranks.
        step_s: median seconds of a step of our loop and of the other.
        library_shares: parts of a profiled step in matrix products and attention, ours and the other's.
        parameters: of each model.
        first_losses: ours and the other's, nats.
        last_losses: the same after all steps.
    """

    against: str
    tokens_per_s: tuple[float, float]
    step_s: tuple[float, float]
    library_shares: tuple[float, float]
    parameters: int
    first_losses: tuple[float, float]
    last_losses: tuple[float, float]

    @property
    def outside_library(self) -> float:
        """Our seconds of a step outside matrix products and attention over the other's."""
        ours, other = (step * (1 - share) for step, share in zip(self.step_s, self.library_shares, strict=True))
        return ours / other


@dataclass(frozen=True)
class TrainBenchResult(BenchResult):
    """Everything that was measured.

    Args:
        launch: seconds to the first step by command; None if not asked for.
    """

    comparisons: list[TrainComparison]
    launch: dict[str, Any] | None


def bench_train(
    options: TrainBenchOptions,
    against: tuple[str, ...] = AGAINST,
    launches: int = 5,
    on_progress: Progress = lambda what, done, total: None,
) -> TrainBenchResult:
    """Measure, with all ranks on this machine.

    Args:
        options: sizes.
        against: some of ``AGAINST``.
        launches: launches that count, of each command.
        on_progress: told what is measured, how much is done, and of how much.

    Raises:
        MegasdcError: a rank or a launch failed.
    """
    machine = describe_machine()
    comparisons = []
    launch = None
    commands = FUSED_COMMANDS if options.fuse else COMMANDS
    num_launches = (launches + 1) * len(commands)
    for what in against:
        with tempfile.TemporaryDirectory(prefix="megasdc_bench_") as scratch:
            folder = Path(scratch)
            if what == "launch":
                on_progress("launch", 0, num_launches)
                launch = measure_launches(
                    commands,
                    launches,
                    options.ranks,
                    options.threads,
                    folder,
                    lambda done: on_progress("launch", done, num_launches),
                )
            else:
                comparisons.append(_compare(options, what, folder, on_progress))
    return TrainBenchResult(machine, options, comparisons, launch)


def bar_of(against: str, options: TrainBenchOptions) -> float | None:
    """The bar of a comparison at these sizes; None: there is none.

    Args:
        against: some of ``AGAINST``.
        options: sizes.
    """
    bars = FUSED_BARS if options.fuse else BARS
    return bars.get(against) if options.accumulation >= LEAST_MICRO_BATCHES.get(against, 1) else None


def _compare(options: TrainBenchOptions, against: str, folder: Path, on_progress: Progress) -> TrainComparison:
    """Run one comparison in ranks of its own."""
    found: dict[str, Any] = {}

    def take(message: dict[str, Any]) -> None:
        if message["kind"] == "progress":
            on_progress(f"against {against}", message["done"], message["total"])
        else:
            found.update(message)

    request = {"options": asdict(options), "against": against, "folder": str(folder)}
    on_progress(f"against {against}", 0, options.blocks)
    run_ranks("megasdc.bench.train_rank", request, options.ranks, options.threads, folder, take)
    costs = [(Cost(**ours), Cost(**other)) for ours, other in found["costs"]]
    walls = [estimate_median([pair[side].wall_s for pair in costs]).median for side in (0, 1)]
    tokens = options.steps_per_block * options.tokens_per_step
    return TrainComparison(
        against=against,
        bar=bar_of(against, options),
        ratios=ratios(costs),
        tokens_per_s=(tokens / walls[0], tokens / walls[1]),
        step_s=(walls[0] / options.steps_per_block, walls[1] / options.steps_per_block),
        library_shares=tuple(found["library_shares"]),
        parameters=found["parameters"],
        first_losses=tuple(found["first_losses"]),
        last_losses=tuple(found["last_losses"]),
        difference=found["difference"],
        costs=costs,
    )
