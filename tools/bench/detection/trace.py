"""Cost of a trace: measured here on one rank, predicted for an accelerator by the bytes it reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megasdc.config.sections import TraceSection
from megasdc.engine.engine import TrainingEngine
from megasdc.model.kinds import GRANULARITIES
from megasdc.model.sizes import padded_vocab_size
from megasdc.model.submodules import list_submodules
from megasdc.sdc.cost import Accelerator, RankWork, predicted_share, reads_of_step, total
from megasdc.sdc.trace import TraceWriter
from megasdc.sdc.tracer import Tracer, choose_submodules
from megasdc.tensors.checksum import default_algorithm
from megasdc.train.detection.budget import measure_rates
from tools.bench.clocks import TimedObserver
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, by_kind, join_ranks, run_in_ranks, scratch_folder, take_turns
from tools.bench.result import Report, Result, interval, table
from tools.bench.small.runs import memory_run
from tools.bench.statistics import Estimate, estimate_median
from tools.bench.training.options import TrainBenchOptions, run_config

OFF = "off"
"""Name of a step without a trace."""
HIDDEN_SIZES = (4096, 8192, 12288)


@dataclass(frozen=True)
class GranularityCost:
    """Cost of one granularity as a share of the step without a trace; ``bytes`` are those its checksums read.

    ``own`` is time inside our calls over the rest of the same step, so that a slow moment of the machine touches both;
    ``slower`` is the traced step's time over the untraced one's of the same block, less 1.
    """

    checksums: int
    bytes: int
    own: Estimate
    slower: Estimate
    predicted: float


@dataclass(frozen=True)
class TraceBenchResult(Result):
    """Measured and predicted cost of traces; there is no bar.

    ``step_s`` is of the untraced step, ``bytes_per_s`` of a large checksum, ``call_s`` of a checksum of one value;
    ``extrapolated`` holds shares of a step's time by granularity and width, every step traced.
    """

    also = ()

    step_s: Estimate
    flop_per_s: float
    bytes_per_s: float
    call_s: float
    costs: dict[str, GranularityCost]
    accelerator: Accelerator
    extrapolated: dict[str, dict[int, float]]

    def report(self) -> Report:
        """Cost by granularity, and predicted for an accelerator."""
        options, assumed = self.options, self.accelerator
        yield (
            f"one rank x {options.threads} thread(s), {options.precision}; {options.work}; step "
            f"{self.step_s.median:.3f} s, {self.flop_per_s / 1e9:.1f} GFLOP/s; checksums "
            f"{self.bytes_per_s / 1e9:.1f} GB/s and {self.call_s * 1e6:.1f} us a call"
        )
        columns = ("granularity", "checksums", "MB read", "inside our calls", "alternating steps", "predicted")
        rows = []
        for name, cost in self.costs.items():
            values = [f"{cost.checksums:,}", f"{cost.bytes / 1e6:,.1f}"]
            shares = [interval(one, 2, 100) for one in (cost.own, cost.slower)]
            rows.append([name, *values, *shares, f"{100 * cost.predicted:.2f}"])
        yield table("cost of a trace of every step, % of the step without", columns, rows)
        yield f"{options.blocks} steps each; medians with 95 % intervals"
        yield table(
            "predicted for an accelerator, % of the step without; every step traced (every 50th: / 50)",
            ("granularity", *(f"H={width}" for width in HIDDEN_SIZES)),
            [(name, *(f"{100 * one:.2f}" for one in shares.values())) for name, shares in self.extrapolated.items()],
        )
        yield (
            f"assumed: checksums {assumed.bytes_per_s / 1e12:.2f} TB/s and {assumed.call_s * 1e6:.0f} us a call; "
            f"training {assumed.flop_per_s / 1e12:.0f} TFLOP/s in bf16; TP{assumed.tensor} DP{assumed.data}, "
            f"{assumed.layers} layers with embedding and output, S={assumed.sequence}, "
            f"{assumed.accumulation} micro-batches of one sample"
        )


def bench_trace(options: TrainBenchOptions, accelerator: Accelerator, on_progress: Progress) -> TraceBenchResult:
    """Measure tracing on one rank of this machine and predict it for an accelerator; a block is one step of each kind.

    Raises:
        MegasdcError: the rank failed.
    """
    options = replace(options, ranks=1, steps_per_block=1)
    machine = describe_machine()
    with scratch_folder() as folder:
        arguments = {"options": options, "folder": folder}
        found = run_in_ranks(
            measure_rank, arguments, 1, folder, on_progress=on_progress, threads=options.threads, fresh=True
        )
        model = run_config(options, folder).megasdc.model
    vocab = padded_vocab_size(options.vocab, model.vocab_multiple)
    width = 4 if options.precision == "fp32" else 2
    work = RankWork(model, vocab, options.sequence, options.micro_batch, options.accumulation, width_bytes=width)
    steps, rates = by_kind(found), found[-1]["rates"]
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
                work, name, flop_per_s=flop_per_s, bytes_per_s=rates.checksum_bytes_per_s, call_s=rates.checksum_s
            ),
        )
    return TraceBenchResult(
        machine,
        options,
        step_s,
        flop_per_s,
        rates.checksum_bytes_per_s,
        rates.checksum_s,
        costs,
        accelerator,
        extrapolate(accelerator),
    )


def extrapolate(accelerator: Accelerator) -> dict[str, dict[int, float]]:
    """Predicted share of a step's time by granularity and width."""
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


def measure_rank(messages: Messages, options: TrainBenchOptions, folder: Path) -> None:
    """Take steps without a trace and with each granularity in turn, and report what each took."""
    config = run_config(options, folder)
    dims = join_ranks(threads=options.threads, timeout_s=config.megasdc.parallel.timeout_s)
    kinds = [OFF, *GRANULARITIES]
    run, batches = memory_run(config, dims, options.vocab, (options.blocks + 1) * len(kinds), folder)

    def step(name: str) -> dict[str, float]:
        return _step(run.engine, batches, name, folder)

    take_turns(messages, "blocks", kinds, options.blocks, step)
    messages.send(rates=measure_rates(run.engine))


def _step(engine: TrainingEngine, batches: Iterator[Any], name: str, folder: Path) -> dict[str, float]:
    """Wall time of one step, and of it the time inside our calls."""
    if name == OFF:
        began = time.perf_counter()
        engine.train_step(batches)
        return {"wall_s": time.perf_counter() - began, "own_s": 0.0, "checksums": 0}
    chosen = choose_submodules(list_submodules(engine.module), name, None)
    tracer = Tracer(default_algorithm(engine.device), TraceSection())
    observer = TimedObserver(engine, chosen, [tracer])
    writer = TraceWriter(folder / "bench.trace", {})
    began = time.perf_counter()
    engine.train_step(batches)
    taken = time.perf_counter()
    trace = tracer.pop_trace()
    writer.append(trace)
    ended = time.perf_counter()
    observer.close()
    writer.close()
    return {"wall_s": ended - began, "own_s": observer.own_s + ended - taken, "checksums": len(trace)}
