"""Cost of DropCompute with nothing dropped, ``python -m tools.bench dropcompute``: time in its calls over steps.

The threshold is finite and never reached, so that every micro-batch but the first is asked for, decided and announced.
A micro-batch is a delay that each stage sleeps, and the computation of a small GPT.

Ours is everything that ``DropCompute``, its ``StepTimes`` and its gate do in the engine and between steps: deciding,
sending, announcing, marks, the sum of counts, logs. Hearing a decision counts from when its sender began to send it:
what a rank waits before that is waiting for the stage or tensor rank before it, whose activation it would have waited
for just as long. All ranks are on one host and read one clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist

from megasdc.dropcompute.gate import MESSAGE_BYTES, ReplicaGate
from megasdc.parallel.collectives import gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.train.drop_compute import DropCompute
from tools.bench.clocks import Clock, Timed, TimedAgreement
from tools.bench.drops.options import DropCostOptions
from tools.bench.machine import describe_machine
from tools.bench.rank import Messages, Progress, ignore_progress, join_ranks, run_in_ranks, scratch_folder
from tools.bench.result import Report, Result, Told, interval, side_by_side, verdict
from tools.bench.small.gpt import small_config
from tools.bench.small.runs import build_run, drop_compute_of
from tools.bench.statistics import Estimate, estimate_median

BAR = 0.002
"""Largest share of a step."""
LEAST_MICRO_BATCH_S = 0.5
"""Seconds of a micro-batch on a stage below which the bar does not hold."""
NEVER_S = 1e6
"""A threshold that no step reaches."""
Moments = dict[int, float]
"""Seconds on the host's clock, by micro-batch."""


@dataclass(frozen=True)
class StepCost:
    """One step, on the rank on which our calls take the largest share.

    ``wall_s`` runs from the decision what to drop until all is counted and logged; ``parts`` are seconds inside our
    calls; ``micro_batch_s`` is the first stage's mean; ``messages`` are of decisions, sent by all ranks.
    """

    wall_s: float
    parts: dict[str, float]
    micro_batch_s: float
    messages: int

    @property
    def share(self) -> float:
        """Time inside our calls over the step's."""
        return sum(self.parts.values()) / self.wall_s


@dataclass(frozen=True)
class LayoutCost:
    """All steps that count of one layout (tensor, pipeline, data), with M micro-batches of a replica's step."""

    also = (
        *("passed", "bar", "share", "parts", "step_s", "micro_batch_s"),
        *("messages_per_micro_batch", "bytes_per_micro_batch", "bytes_reduced_per_step"),
    )

    layout: tuple[int, int, int]
    micro_batches: int
    steps: Sequence[StepCost] = field(repr=False)

    @property
    def name(self) -> str:
        """As tables show it."""
        tensor, pipeline, data = self.layout
        return f"TP{tensor} PP{pipeline} DP{data}"

    @property
    def share(self) -> Estimate:
        """Share of the step inside our calls."""
        return estimate_median([step.share for step in self.steps])

    @property
    def parts(self) -> dict[str, float]:
        """Median share of each part."""
        names = dict.fromkeys(name for step in self.steps for name in step.parts)
        return {name: median(step.parts.get(name, 0.0) / step.wall_s for step in self.steps) for name in names}

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(step.wall_s for step in self.steps)

    @property
    def micro_batch_s(self) -> float:
        """Median seconds of a micro-batch on the first stage."""
        return median(step.micro_batch_s for step in self.steps)

    @property
    def messages_per_micro_batch(self) -> float:
        """Messages of one replica for each micro-batch that it asks for; the first of a step is not asked for."""
        asked = self.layout[2] * (self.micro_batches - 1)
        return median(step.messages for step in self.steps) / asked

    @property
    def bytes_per_micro_batch(self) -> float:
        """Of these messages."""
        return self.messages_per_micro_batch * MESSAGE_BYTES

    @property
    def bytes_reduced_per_step(self) -> int:
        """Summed over ranks."""
        return self.layout[2] * MESSAGE_BYTES

    @property
    def bar(self) -> float | None:
        """Largest median share; None: micro-batches are too short for one."""
        return BAR if self.micro_batch_s >= LEAST_MICRO_BATCH_S else None

    @property
    def passed(self) -> bool:
        """Whether the median and the interval's upper end are within the bar."""
        return self.bar is None or self.share.passes(self.bar, 0.0)

    @property
    def verdict(self) -> str:
        """As tables show it."""
        if self.bar is None:
            return f"none below {LEAST_MICRO_BATCH_S} s a micro-batch"
        return f"{100 * self.bar:g} {verdict(self.passed)}"


@dataclass(frozen=True)
class DropCostResult(Result):
    """Measured costs, one entry a layout."""

    judged = ("layouts",)
    layouts: Sequence[LayoutCost]

    def report(self) -> Report:
        """Shares of the step by part, and what is sent."""
        options, layouts = self.options, self.layouts
        yield (
            f"{options.gpt}; each stage sleeps {options.delay_s:g} s before a micro-batch; {options.steps} steps; "
            "nothing left out"
        )
        rows: Told = {
            **{part: partial(_share, part) for part in layouts[0].parts},
            "all (interval of the median)": lambda one: interval(one.share, 4, 100),
            "bar": lambda one: one.verdict,
            "seconds of a step": lambda one: f"{one.step_s:.3f}",
            "seconds of a micro-batch, stage 0": lambda one: f"{one.micro_batch_s:.3f}",
            "messages a replica and micro-batch": lambda one: f"{one.messages_per_micro_batch:g}",
            "their bytes": lambda one: f"{one.bytes_per_micro_batch:g}",
            "bytes summed over ranks a step": lambda one: one.bytes_reduced_per_step,
        }
        yield side_by_side("DropCompute, % of the step inside its calls", "part", layouts, rows)
        yield (
            "of the rank on which it is most, medians over steps; hear: from when a decision was sent until the rank "
            "that waits for it goes on, its wake-up included; waiting before that is waiting for the stage or tensor "
            "rank before, whose activation comes no earlier; the first micro-batch of a step is not asked for"
        )


def _share(part: str, one: LayoutCost) -> str:
    return f"{100 * one.parts[part]:.4f}"


def bench_drop_cost(options: DropCostOptions, on_progress: Progress = ignore_progress) -> DropCostResult:
    """Measure, with all ranks on this machine.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    return DropCostResult(machine, options, [_measure(options, layout, on_progress) for layout in options.layouts])


def _measure(options: DropCostOptions, layout: tuple[int, int, int], on_progress: Progress) -> LayoutCost:
    tensor, pipeline, data = layout
    sections = {
        "drop_compute": {"enabled": True, "threshold": NEVER_S, "warmup_steps": 0},
        "delay": [{"kind": "normal", "mean_s": options.delay_s, "std_s": 0.0}],
    }
    with scratch_folder() as folder:
        config = small_config(options.gpt, folder / "run", options.steps + 1, sections, layout=(tensor, pipeline))
        request = {"config": config, "vocab": options.gpt.vocab}
        found = run_in_ranks(measure_rank, request, tensor * pipeline * data, folder, on_progress=on_progress)
    return LayoutCost(layout, options.gpt.micro_batches, [one["step"] for one in found])


class TimedGate:
    """Stands for a rank's gate, adds up the time inside its calls, and records when decisions are sent and received."""

    def __init__(self, inner: ReplicaGate, dims: ParallelDims) -> None:
        self._inner = inner
        self.clock = Clock()
        self._decides = dims.is_first_stage and dims.tp_rank == 0
        self.source = dims.rank - dims.tensor * dims.data if dims.pp_rank else dims.rank - dims.tp_rank
        self._hears_by = "announced" if dims.pp_rank else "decided"
        self.told: dict[str, Moments] = {"decided": {}, "announced": {}}
        self._heard: dict[int, tuple[float, float]] = {}

    def time_left_s(self, micro_batch: int) -> float:
        """Time it."""
        return float(self.clock.timed("decide", self._inner.time_left_s, micro_batch))

    def may_start(self, micro_batch: int) -> bool:
        """Time it where it is decided; elsewhere keep when the answer was waited for."""
        began = time.perf_counter()
        if self._decides:
            self.told["decided"][micro_batch] = began
            return bool(self.clock.timed("decide", self._inner.may_start, micro_batch))
        starts = self._inner.may_start(micro_batch)
        self._heard[micro_batch] = (began, time.perf_counter())
        return starts

    def announce(self, micro_batch: int, starts: bool) -> None:
        """Time it."""
        self.told["announced"][micro_batch] = time.perf_counter()
        self.clock.timed("announce", self._inner.announce, micro_batch, starts)

    def receive_s(self, told: list[dict[str, Moments]]) -> float:
        """Seconds in which this rank received decisions in the step that ended, without waiting for the senders.

        ``told`` is that of every rank.
        """
        moments = told[self.source][self._hears_by]
        return sum(max(0.0, ended - max(began, moments[one])) for one, (began, ended) in self._heard.items())

    def begin(self) -> None:
        """A step begins."""
        self.clock.parts.clear()
        self.told = {"decided": {}, "announced": {}}
        self._heard.clear()


def measure_rank(messages: Messages, config: dict[str, Any], vocab: int) -> None:
    """Take steps and report what each of them took."""
    parallel = config["megasdc"]["parallel"]
    dims = join_ranks(parallel["tensor"], parallel["pipeline"])
    run, _ = build_run(config, dims, vocab)
    drop = drop_compute_of(run)
    gate, marks, calls = TimedGate(drop.gate, dims), Clock(), Clock()
    hook: Any = Timed(drop, calls)
    run.engine.gate = gate
    run.engine.agreement = TimedAgreement(calls)
    run.engine.hooks = [_timed(one, drop, marks, hook) for one in run.engine.hooks]
    drop.on_start(run)
    for step in range(run.steps):
        for clock in (marks, calls):
            clock.parts.clear()
        gate.begin()
        sent = drop.gate.num_sent
        dist.barrier()
        began = time.perf_counter()
        hook.before_step(run)
        result = run.engine.train_step(run.batches)
        run.progress.step = result.step
        hook.after_step(run, result)
        wall_s = time.perf_counter() - began
        heard_s = gate.receive_s(gather_objects(gate.told))
        parts = {
            "decide, send": gate.clock.parts.get("decide", 0.0),
            "announce": gate.clock.parts.get("announce", 0.0),
            "hear": heard_s,
            "marks": marks.total_s,
            "count, exchange, log": calls.total_s,
        }
        record = drop.times.pop_record()
        found = gather_objects((wall_s, parts, record.busy_s, drop.gate.num_sent - sent))
        slowest = max(found, key=lambda one: sum(one[1].values()) / one[0])
        if step:  # the first one is slower
            micro_batch_s = sum(found[0][2]) / len(found[0][2])
            num_sent = sum(one[3] for one in found)
            messages.send(step=StepCost(slowest[0], slowest[1], micro_batch_s, num_sent))
            messages.progress(f"TP{dims.tensor} PP{dims.pipeline} DP{dims.data}", step, run.steps - 1)
    drop.close()
    run.events.close()


def _timed(hook: Any, drop: DropCompute, marks: Clock, calls: Any) -> Any:
    if hook is drop.times:
        return Timed(hook, marks)
    return calls if hook is drop else hook
