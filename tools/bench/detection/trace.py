"""Cost of a trace: measured here, predicted for an accelerator by the bytes it reads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megasdc.model.kinds import GRANULARITIES
from megasdc.model.transformer_config import padded_vocab_size
from megasdc.parallel.run_ranks import run_ranks
from megasdc.sdc.cost import Accelerator, Work, predicted_share, reads_of_step, total
from tools.bench.machine import describe_machine
from tools.bench.statistics import Estimate, estimate_median
from tools.bench.training.options import TrainBenchOptions, run_config

OFF = "off"
"""Name of a step without a trace."""
HIDDEN_SIZES = (4096, 8192, 12288)


@dataclass(frozen=True)
class GranularityCost:
    """Cost of one granularity as a share of the step without a trace.

    Args:
        checksums: of a step.
        bytes: that they read, by the model.
        own: time inside our calls over the rest of the same step, so that a slow moment of the machine touches both.
        slower: time of a traced step over the untraced step of the same block, less 1.
        predicted: by bytes and calls.
    """

    checksums: int
    bytes: int
    own: Estimate
    slower: Estimate
    predicted: float


@dataclass(frozen=True)
class TraceBenchResult:
    """What was measured and predicted.

    Args:
        options: sizes.
        machine: where and when.
        step_s: of the untraced step.
        flop_per_s: that it reaches.
        bytes_per_s: of a large checksum.
        call_s: of a checksum of one value.
        costs: by granularity.
        accelerator: assumptions of the extrapolation.
        extrapolated: share of a step's time by granularity and width, every step traced.
    """

    options: TrainBenchOptions
    machine: dict[str, Any]
    step_s: Estimate
    flop_per_s: float
    bytes_per_s: float
    call_s: float
    costs: dict[str, GranularityCost]
    accelerator: Accelerator
    extrapolated: dict[str, dict[int, float]]

    def as_dict(self) -> dict[str, Any]:
        """In plain values."""
        return asdict(self)


def bench_trace(
    options: TrainBenchOptions, accelerator: Accelerator, on_progress: Callable[[str, int, int], None]
) -> TraceBenchResult:
    """Measure tracing on one rank of this machine and predict it for an accelerator.

    Args:
        options: sizes; one rank, blocks of one step of each kind.
        accelerator: what to predict for.
        on_progress: told what is done, how much of it, and of how much.

    Raises:
        MegasdcError: the rank failed.
    """
    options = replace(options, ranks=1, steps_per_block=1)
    machine = describe_machine()
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in (OFF, *GRANULARITIES)}
    rates: dict[str, float] = {}

    def on_message(message: dict[str, Any]) -> None:
        if message.pop("kind") == "rates":
            rates.update(message)
            return
        steps[message.pop("name")].append(message)
        on_progress("steps", sum(map(len, steps.values())), options.blocks * len(steps))

    with tempfile.TemporaryDirectory(prefix="bench_trace_") as folder:
        request = {"options": asdict(options), "folder": folder}
        run_ranks("tools.bench.detection.trace_rank", request, 1, options.threads, Path(folder), on_message, fresh=True)
        model = run_config(options, Path(folder)).megasdc.model
    vocab = padded_vocab_size(options.vocab, model.vocab_multiple)
    width = 4 if options.precision == "fp32" else 2
    work = Work(model, vocab, options.sequence, options.micro_batch, options.accumulation, width_bytes=width)
    untraced = [one["wall_s"] for one in steps[OFF]]
    step_s = estimate_median(untraced)
    flop_per_s = work.flops / step_s.median
    costs = {}
    for name in GRANULARITIES:
        costs[name] = GranularityCost(
            checksums=round(steps[name][0]["checksums"]),
            bytes=round(total(reads_of_step(work, name)).bytes),
            own=estimate_median([one["own_s"] / (one["wall_s"] - one["own_s"]) for one in steps[name]]),
            slower=estimate_median([one["wall_s"] / off - 1 for one, off in zip(steps[name], untraced, strict=True)]),
            predicted=predicted_share(
                work, name, flop_per_s=flop_per_s, bytes_per_s=rates["bytes_per_s"], call_s=rates["call_s"]
            ),
        )
    return TraceBenchResult(
        options,
        machine,
        step_s,
        flop_per_s,
        rates["bytes_per_s"],
        rates["call_s"],
        costs,
        accelerator,
        extrapolate(accelerator),
    )


def extrapolate(accelerator: Accelerator) -> dict[str, dict[int, float]]:
    """Predicted share of a step's time by granularity and width.

    Args:
        accelerator: the assumptions.
    """
    return {
        name: {
            hidden: predicted_share(
                accelerator.work(hidden),
                name,
                bytes_per_s=accelerator.bytes_per_s,
                flop_per_s=accelerator.flop_per_s,
                call_s=accelerator.call_s,
            )
            for hidden in HIDDEN_SIZES
        }
        for name in GRANULARITIES
    }
