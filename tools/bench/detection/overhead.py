"""Cost of a run's checks: measured on ranks of this machine, and predicted by what they read and exchange."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megasdc.model.transformer_config import padded_vocab_size
from megasdc.parallel.run_ranks import run_ranks
from megasdc.sdc.check_cost import Rates, median_rates
from megasdc.sdc.cost import FP32_BYTES, Accelerator, Work
from tools.bench.detection.overhead_model import (
    ALWAYS_ON,
    AMORTISED,
    AUDIT,
    BETWEEN,
    OFF,
    STEPS,
    amortised,
    predict,
)
from tools.bench.machine import describe_machine
from tools.bench.result import Progress
from tools.bench.statistics import Estimate, estimate_median
from tools.bench.training.options import TrainBenchOptions, run_config

BARS = {ALWAYS_ON: 0.01, AMORTISED: 0.005}
"""Largest share of a step's time, on the first model."""
SLACK = 0.5
"""How far the interval's upper end may lie above a bar, as a share of it."""
ACCELERATOR_SIZES = (2048, 4096, 6144, 8192, 12288)


@dataclass(frozen=True)
class OverheadOptions:
    """What is measured.

    Args:
        sizes: of the first model, its batch and its ranks; blocks of one step of each kind.
        others: widths of further models, otherwise the same; no bar is set for them.
        interval: K, steps from one audit to the next.
        accelerator: what to predict for.
        exchange_s: seconds of a small reduction over the hosts of a run on accelerators.
    """

    sizes: TrainBenchOptions
    others: tuple[int, ...] = ()
    interval: int = 50
    accelerator: Accelerator = field(default_factory=Accelerator)
    exchange_s: float = 1e-3


@dataclass(frozen=True)
class TierCost:
    """Cost of one kind of check as a share of the step without.

    Args:
        own: time inside our own calls over the rest of the same step, so that a slow moment touches both.
        slower: time of the step over that of the step without checks in the same block, less 1.
        parts: median share of each part of our calls.
        predicted: by bytes, calls and exchanges; None where there is no model.
        bar: largest median that passes; None: any does.
    """

    own: Estimate
    slower: Estimate
    parts: dict[str, float]
    predicted: float | None
    bar: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the time inside our own calls is within the bar."""
        return self.bar is None or self.own.passes(self.bar, SLACK * self.bar)


@dataclass(frozen=True)
class ModelCost:
    """What the checks cost in one model.

    Args:
        hidden: its width.
        step_s: of the step without checks.
        flop_per_s: that it reaches.
        rates: of what checks consist of.
        tiers: cost by kind of step, and of audits.
    """

    hidden: int
    step_s: Estimate
    flop_per_s: float
    rates: Rates
    tiers: dict[str, TierCost]


@dataclass(frozen=True)
class OverheadResult:
    """What was measured and predicted.

    Args:
        options: what was asked for.
        machine: where and when.
        models: the first with bars.
        extrapolated: predicted share for the accelerator by tier and width.
    """

    options: OverheadOptions
    machine: dict[str, Any]
    models: list[ModelCost]
    extrapolated: dict[str, dict[int, float]]

    @property
    def passed(self) -> bool:
        """Whether every bar is met."""
        return all(tier.passed for model in self.models for tier in model.tiers.values())

    def as_dict(self) -> dict[str, Any]:
        """In plain values, with verdicts."""
        whole = asdict(self)
        for model, plain in zip(self.models, whole["models"], strict=True):
            for name, tier in model.tiers.items():
                plain["tiers"][name]["passed"] = tier.passed
        return {"passed": self.passed, "slack": SLACK, **whole}


def bench_overhead(options: OverheadOptions, on_progress: Progress) -> OverheadResult:
    """Measure every kind of check in every model, and predict them for an accelerator.

    Args:
        options: what is measured.
        on_progress: told what is done, how much of it, and of how much.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    sizes = [replace(options.sizes, hidden=hidden) for hidden in (options.sizes.hidden, *options.others)]
    models = [
        _measure(one, options.interval, BARS if place == 0 else {}, on_progress) for place, one in enumerate(sizes)
    ]
    return OverheadResult(options, machine, models, extrapolate(options))


def _measure(sizes: TrainBenchOptions, interval: int, bars: dict[str, float], on_progress: Progress) -> ModelCost:
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in STEPS}
    rates: list[Rates] = []

    def on_message(message: dict[str, Any]) -> None:
        if message.pop("kind") == "rates":
            rates.append(Rates(**message))
            return
        steps[message.pop("name")].append(message)
        on_progress(f"steps, H={sizes.hidden}", sum(map(len, steps.values())), sizes.blocks * len(STEPS))

    with tempfile.TemporaryDirectory(prefix="bench_overhead_") as folder:
        request = {"options": asdict(sizes), "folder": folder}
        run_ranks(
            "tools.bench.detection.overhead_rank",
            request,
            sizes.ranks,
            sizes.threads,
            Path(folder),
            on_message,
            fresh=True,
        )
    return judge(sizes, steps, median_rates(rates), interval, bars)


def work_of(sizes: TrainBenchOptions) -> Work:
    """What a rank of the benchmark computes in a step, activations computed again."""
    model = run_config(sizes, Path("unused")).megasdc.model
    return Work(
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
) -> ModelCost:
    """What steps of each kind come to.

    Args:
        sizes: of the model.
        steps: by kind, one a block: wall time ``wall_s`` and time inside our calls by part ``parts``.
        rates: of what checks consist of.
        interval: K, steps from one audit to the next.
        bars: largest share by kind of step.
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
    return ModelCost(sizes.hidden, step_s, work.flops / step_s.median, rates, tiers)


def _shares(step: dict[str, Any]) -> dict[str, float]:
    """Time of each part of our calls over the rest of the step."""
    rest = step["wall_s"] - sum(step["parts"].values())
    return {part: seconds / rest for part, seconds in step["parts"].items()}


def extrapolate(options: OverheadOptions) -> dict[str, dict[int, float]]:
    """Predicted share of a step's time on the accelerator, by tier and width.

    Args:
        options: the assumptions.
    """
    assumed = options.accelerator
    rates = Rates(assumed.bytes_per_s, assumed.bytes_per_s, assumed.call_s, assumed.call_s, options.exchange_s)
    found: dict[str, dict[int, float]] = {}
    for hidden in ACCELERATOR_SIZES:
        work = replace(assumed.work(hidden), recompute=True)
        for tier, share in predict(work, rates, assumed.flop_per_s, options.interval).items():
            found.setdefault(tier, {})[hidden] = share
    return found
