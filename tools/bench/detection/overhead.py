"""Cost of a run's checks: measured on ranks of this machine, and predicted by what they read and exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megasdc.config.detection import SdcSection
from megasdc.model.sizes import padded_vocab_size
from megasdc.sdc.cost import FP32_BYTES, Cadence, RankWork, Rates, median_rates
from tools.bench.detection.options import OverheadOptions
from tools.bench.detection.overhead_model import (
    ALWAYS_ON,
    AMORTISED,
    AUDIT,
    BETWEEN,
    CHAIN,
    OFF,
    PERMUTED,
    ROWS,
    SLICES,
    STEPS,
    TOKENS,
    amortised,
    predict,
)
from tools.bench.detection.overhead_rank import measure_rank
from tools.bench.machine import describe_machine
from tools.bench.rank import Progress, by_kind, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, interval, table, verdict
from tools.bench.statistics import Estimate, estimate_median
from tools.bench.training.options import TrainBenchOptions, run_config

BARS = {AMORTISED: 0.005, ROWS: 0.003, SLICES: 0.003}
"""Largest share of a step's time, on the first model."""
BUDGET = SdcSection().budget_of(replicas=2)
"""That of all checks at their defaults, on each model."""
SLACK = 0.5
"""Largest distance of the interval's upper end above a bar, as a share of it."""
BROKEN_DOWN = (ALWAYS_ON, AUDIT, BETWEEN, PERMUTED, ROWS, SLICES, CHAIN, TOKENS)
"""Kinds of steps whose parts are printed."""
SMALLEST = 1e-5
"""Smallest share that is worth a row."""
ACCELERATOR_SIZES = (2048, 4096, 6144, 8192, 12288)


@dataclass(frozen=True)
class TierCost:
    """Cost of one kind of check as a share of the step without.

    ``own`` is time inside our own calls over the rest of the same step, so that a slow moment touches both; ``slower``
    is the step's time over that without checks in the same block, less 1. None: no prediction, or no bar.
    """

    also = ("passed",)

    own: Estimate
    slower: Estimate
    parts: dict[str, float]
    predicted: float | None
    bar: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the time inside our own calls is within the bar."""
        return self.bar is None or self.own.passes(self.bar, SLACK * self.bar)

    @property
    def verdict(self) -> str:
        """As tables show it."""
        return "none" if self.bar is None else f"{100 * self.bar:g} {verdict(self.passed)}"


@dataclass(frozen=True)
class Kept:
    """All checks at their defaults, which the run keeps within its budget.

    Args:
        cadence: at the end.
        share: of the last steps' time.
        period: steps in which results of each micro-batch are looked at.
    """

    also = ("passed",)

    cadence: Cadence
    share: float
    period: int

    @property
    def passed(self) -> bool:
        """Whether it was kept."""
        return self.share <= BUDGET

    def __str__(self) -> str:
        one = self.cadence
        return (
            f"all checks at their defaults, kept by the run: {self.share:.2%} of a step, budget {BUDGET:.0%} "
            f"{verdict(self.passed)}; results of {one.micro_batches} of a step's micro-batches every "
            f"{one.every} steps, all of them within {self.period}; a slice of the optimizer every {one.every} steps"
        )


@dataclass(frozen=True)
class ModelCost:
    """Cost of the checks in one model: by kind of step, and of audits; ``step_s`` is of the step without checks."""

    also = ("passed",)

    hidden: int
    step_s: Estimate
    flop_per_s: float
    rates: Rates
    tiers: dict[str, TierCost]
    kept: Kept

    @property
    def passed(self) -> bool:
        """Whether every bar is met."""
        return self.kept.passed and all(tier.passed for tier in self.tiers.values())

    def report(self) -> Report:
        """Each check beside its prediction, and the rates."""
        rows = []
        for name, tier in self.tiers.items():
            predicted = "-" if tier.predicted is None else f"{100 * tier.predicted:.3f}"
            rows.append([name, *(interval(one, 3, 100) for one in (tier.own, tier.slower)), predicted, tier.verdict])
        title = f"H={self.hidden}: cost of checks, % of the step without ({self.step_s.median:.3f} s)"
        yield table(title, ("check", "inside our calls", "alternating steps", "predicted", "bar"), rows)
        rates = self.rates
        yield (
            f"{self.flop_per_s / 1e9:.1f} GFLOP/s; checksums {rates.checksum_bytes_per_s / 1e9:.1f} GB/s and "
            f"{rates.checksum_s * 1e6:.1f} us each, look for NaN and Inf {rates.extremes_bytes_per_s / 1e9:.1f} GB/s "
            f"and {rates.extremes_s * 1e6:.1f} us each, reduction over ranks {rates.exchange_s * 1e6:.0f} us, "
            f"blocks sent {rates.sent_bytes_per_s / 1e9:.1f} GB/s"
        )
        yield str(self.kept)

    def report_parts(self) -> Report:
        """Where the time inside our calls goes, the largest part first."""
        tiers = {name: self.tiers[name].parts for name in BROKEN_DOWN}
        names = dict.fromkeys(part for parts in tiers.values() for part in parts)
        largest = {part: max(one.get(part, 0.0) for one in tiers.values()) for part in names}
        rows = []
        for part in sorted(largest, key=lambda part: -largest[part]):
            if largest[part] >= SMALLEST:
                shares = [parts.get(part) for parts in tiers.values()]
                rows.append([part, *("" if share is None else f"{100 * share:.3f}" for share in shares)])
        title = f"H={self.hidden}: parts of the time inside our calls, % of the rest of the step"
        yield table(title, ("part", *tiers), rows)
        yield (
            "forward, recompute, backward, weight_grad: listening to these results; observer: the rest of what calls "
            "the listeners; replay: the audited micro-batch with its elements in other places; attach: hooks put on "
            "and taken off; before_step: parameters are read, replicas agree on the shared samples; "
            "after_micro_batches: what was seen is compared, over the ranks too; agreement, after_step: "
            "ranks learn whether an audit was asked for"
        )


@dataclass(frozen=True)
class OverheadResult(Result):
    """Measured costs, of which the first model has bars, and predicted shares for the accelerator by tier and width."""

    judged = ("models",)
    also = ("passed", "slack")
    slack = SLACK

    models: list[ModelCost]
    extrapolated: dict[str, dict[int, float]]

    @property
    def work(self) -> str:
        """The work of the ranks of this machine."""
        sizes = self.options.sizes
        return (
            f"{sizes.ranks} gloo ranks x {sizes.threads} thread(s), DP{sizes.ranks}, {sizes.precision}; Llama-like "
            f"L={sizes.layers} S={sizes.sequence} vocabulary {sizes.vocab}; {sizes.accumulation} micro-batches of "
            f"{sizes.micro_batch}; activations recomputed; audits every {self.options.interval} steps"
        )

    @property
    def assumptions(self) -> str:
        """Assumptions of the extrapolation."""
        assumed = self.options.accelerator
        return (
            f"assumed: reads {assumed.bytes_per_s / 1e12:.2f} TB/s, {assumed.call_s * 1e6:g} us a call, "
            f"{self.options.exchange_s * 1e3:g} ms a reduction over hosts; training {assumed.flop_per_s / 1e12:.0f} "
            f"TFLOP/s in bf16, activations recomputed; TP{assumed.tensor} DP{assumed.data}, {assumed.layers} layers "
            f"with embedding and output, S={assumed.sequence}, {assumed.accumulation} micro-batches of one sample"
        )

    def report(self) -> Report:
        """Each model, parts of the first, and predicted for an accelerator."""
        sizes, every = self.options.sizes, self.options.interval
        yield (
            f"{self.work}; {sizes.blocks} steps of each kind; medians with the interval of the median, of the rank "
            "that pays more"
        )
        for model in self.models:
            yield from model.report()
        yield from self.models[0].report_parts()
        yield (
            f"besides, audits take at most 1 / ({sizes.accumulation} micro-batches x {every} steps) = "
            f"{1 / (sizes.accumulation * every):.2%} of the independent samples"
        )
        yield table(
            "predicted for an accelerator, % of the step without",
            ("check", *(f"H={width}" for width in ACCELERATOR_SIZES)),
            [(name, *(f"{100 * one:.3f}" for one in shares.values())) for name, shares in self.extrapolated.items()],
        )
        yield (
            f"{self.assumptions}; what overlaps with other work costs less: launches, and the reduction that tells of "
            "requests for an audit; the wait for the device before a comparison is not counted"
        )


def bench_overhead(options: OverheadOptions, on_progress: Progress) -> OverheadResult:
    """Measure every kind of check in every model, and predict them for an accelerator.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    sizes = [replace(options.sizes, hidden=hidden) for hidden in (options.sizes.hidden, *options.others)]
    models = [_measure(one, options, BARS if place == 0 else {}, on_progress) for place, one in enumerate(sizes)]
    return OverheadResult(machine, options, models, extrapolate(options))


def _measure(
    sizes: TrainBenchOptions, options: OverheadOptions, bars: dict[str, float], on_progress: Progress
) -> ModelCost:
    with scratch_folder() as folder:
        arguments = {"options": sizes, "folder": folder, "kept": options.kept}
        found = run_in_ranks(
            measure_rank, arguments, sizes.ranks, folder, on_progress=on_progress, threads=sizes.threads, fresh=True
        )
    rates = median_rates([one["rates"] for one in found if "rates" in one])
    kept = found[-1]["kept"]
    kept = Kept(**kept, period=kept["cadence"].period(sizes.accumulation))
    return judge(sizes, by_kind(found), rates, options.interval, bars, kept)


def work_of(sizes: TrainBenchOptions) -> RankWork:
    """Work of a rank of the benchmark in a step, with recomputed activations."""
    model = run_config(sizes, Path("unused")).megasdc.model
    return RankWork(
        model,
        padded_vocab_size(sizes.vocab, model.vocab_multiple),
        sizes.sequence,
        sizes.micro_batch,
        sizes.accumulation,
        data=sizes.ranks,
        width_bytes=FP32_BYTES if sizes.precision == "fp32" else 2,
        recompute=True,
    )


def judge(
    sizes: TrainBenchOptions,
    steps: dict[str, list[dict[str, Any]]],
    rates: Rates,
    interval: int,
    bars: dict[str, float],
    kept: Kept,
) -> ModelCost:
    """Costs from the steps of each kind, one a block with its ``wall_s`` and the time inside our calls by ``parts``.

    ``interval`` is K, steps from one audit to the next; ``bars`` are the largest shares by kind of step; ``kept``
    is what a run kept within its budget.
    """
    work = work_of(sizes)
    untraced = [one["wall_s"] for one in steps[OFF]]
    step_s = estimate_median(untraced)
    predicted = predict(work, rates, work.flops / step_s.median, interval)
    shares = {name: [_shares(one) for one in steps[name]] for name in STEPS if name != OFF}
    slower = {
        name: [one["wall_s"] / off - 1 for one, off in zip(steps[name], untraced, strict=True)] for name in shares
    }
    shares[AMORTISED] = [
        {part: amortised(audited.get(part, 0.0), between.get(part, 0.0), interval) for part in {**audited, **between}}
        for audited, between in zip(shares[AUDIT], shares[BETWEEN], strict=True)
    ]
    slower[AMORTISED] = [
        amortised(audited, between, interval) for audited, between in zip(slower[AUDIT], slower[BETWEEN], strict=True)
    ]
    tiers = {
        name: TierCost(
            own=estimate_median([sum(one.values()) for one in of_name]),
            slower=estimate_median(slower[name]),
            parts={part: estimate_median([one.get(part, 0.0) for one in of_name]).median for part in of_name[0]},
            predicted=predicted.get(name),
            bar=bars.get(name),
        )
        for name, of_name in shares.items()
    }
    return ModelCost(sizes.hidden, step_s, work.flops / step_s.median, rates, tiers, kept)


def _shares(step: dict[str, Any]) -> dict[str, float]:
    """Time of each part of our calls over the rest of the step."""
    rest = step["wall_s"] - sum(step["parts"].values())
    return {part: seconds / rest for part, seconds in step["parts"].items()}


def extrapolate(options: OverheadOptions) -> dict[str, dict[int, float]]:
    """Predicted share of a step's time on the accelerator, by tier and width."""
    assumed = options.accelerator
    speeds = (assumed.bytes_per_s, assumed.bytes_per_s, assumed.call_s, assumed.call_s, options.exchange_s)
    rates = Rates(*speeds, sent_bytes_per_s=math.inf)  # checks with a prediction send no blocks
    found: dict[str, dict[int, float]] = {}
    for hidden in ACCELERATOR_SIZES:
        work = replace(assumed.work(hidden), recompute=True)
        for tier, share in predict(work, rates, assumed.flop_per_s, options.interval).items():
            found.setdefault(tier, {})[hidden] = share
    return found
