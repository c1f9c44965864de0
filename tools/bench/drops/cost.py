"""Cost of DropCompute with nothing dropped, ``python -m tools.bench dropcompute``: time in its calls over steps.

The threshold is finite and never reached, so that every micro-batch but the first is asked for, decided and announced.
A micro-batch is a delay that each stage sleeps, and the computation of a small GPT.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megasdc.dropcompute.gate import MESSAGE_BYTES
from megasdc.parallel.run_ranks import run_ranks
from tools.bench.drops.setup import SmallGpt, check_options, drop_config
from tools.bench.machine import describe_machine
from tools.bench.result import Progress
from tools.bench.statistics import Estimate, estimate_median

GPT = SmallGpt(hidden=128, layers=2, sequence=64, vocab=512, micro_batches=4)
LAYOUTS = ((1, 1, 2), (2, 2, 1))
"""(tensor, pipeline, data)."""
BAR = 0.002
"""Largest share of a step."""
LEAST_MICRO_BATCH_S = 0.5
"""Seconds of a micro-batch on a stage below which the bar does not hold."""
NEVER_S = 1e6
"""A threshold that no step reaches."""


@dataclass(frozen=True)
class DropCostOptions:
    """Size of the measurement.

    Args:
        steps: that count, in each layout.
        delay_s: that each stage sleeps before it starts a micro-batch.
        gpt: the model.
        layouts: (tensor, pipeline, data) of each.
    """

    steps: int = 20
    delay_s: float = 0.5
    gpt: SmallGpt = GPT
    layouts: tuple[tuple[int, int, int], ...] = LAYOUTS

    def __post_init__(self) -> None:
        check_options(self, self.gpt.problems())


@dataclass(frozen=True)
class StepCost:
    """One step, on the rank on which our calls take the largest share.

    Args:
        wall_s: from before it is decided what may be left out until all is counted and logged.
        parts: seconds inside our calls, by part.
        micro_batch_s: of the first stage in one micro-batch, mean.
        messages: of decisions, sent by all ranks.
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
    """All steps of one layout.

    Args:
        layout: (tensor, pipeline, data).
        micro_batches: M, of a replica's step.
        steps: that count.
    """

    layout: tuple[int, int, int]
    micro_batches: int
    steps: Sequence[StepCost] = field(repr=False)

    @property
    def own(self) -> Estimate:
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
    def messages(self) -> float:
        """Messages of one replica for each micro-batch that it asks for; the first of a step is not asked for."""
        asked = self.layout[2] * (self.micro_batches - 1)
        return median(step.messages for step in self.steps) / asked

    @property
    def bar(self) -> float | None:
        """Largest median share; None: micro-batches are too short for one."""
        return BAR if self.micro_batch_s >= LEAST_MICRO_BATCH_S else None

    @property
    def passed(self) -> bool:
        """Whether the median and the interval's upper end are within the bar."""
        return self.bar is None or self.own.passes(self.bar, 0.0)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "passed": self.passed,
            "layout": self.layout,
            "bar": self.bar,
            "share": asdict(self.own),
            "parts": self.parts,
            "step_s": self.step_s,
            "micro_batch_s": self.micro_batch_s,
            "messages_per_micro_batch": self.messages,
            "bytes_per_micro_batch": self.messages * MESSAGE_BYTES,
            "bytes_reduced_per_step": self.layout[2] * MESSAGE_BYTES,
            "steps": [asdict(step) for step in self.steps],
        }


@dataclass(frozen=True)
class DropCostResult:
    """Everything that was measured.

    Args:
        machine: date, processor, versions.
        options: size.
        layouts: one entry a layout.
    """

    machine: dict[str, Any]
    options: DropCostOptions
    layouts: Sequence[LayoutCost]

    @property
    def passed(self) -> bool:
        """Whether every layout passed."""
        return all(one.passed for one in self.layouts)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it, with verdicts."""
        return {
            "passed": self.passed,
            "machine": self.machine,
            "options": asdict(self.options),
            "layouts": [one.as_dict() for one in self.layouts],
        }


def bench_drop_cost(options: DropCostOptions, on_progress: Progress = lambda what, done, total: None) -> DropCostResult:
    """Measure, with all ranks on this machine.

    Args:
        options: size.
        on_progress: see ``Progress``.

    Raises:
        MegasdcError: a rank failed.
    """
    machine = describe_machine()
    return DropCostResult(machine, options, [_measure(options, layout, on_progress) for layout in options.layouts])


def _measure(options: DropCostOptions, layout: tuple[int, int, int], on_progress: Progress) -> LayoutCost:
    tensor, pipeline, data = layout
    name = f"TP{tensor} PP{pipeline} DP{data}"
    steps: list[StepCost] = []

    def take(message: dict[str, Any]) -> None:
        steps.append(StepCost(**message))
        on_progress(name, len(steps), options.steps)

    on_progress(name, 0, options.steps)
    with tempfile.TemporaryDirectory(prefix="megasdc_dropcompute_") as scratch:
        folder = Path(scratch)
        config = drop_config(
            options.gpt,
            folder / "run",
            options.steps + 1,
            {"threshold": NEVER_S, "warmup_steps": 0},
            delay=[{"kind": "normal", "mean_s": options.delay_s, "std_s": 0.0}],
            layout=(tensor, pipeline),
        )
        request = {"config": config, "vocab": options.gpt.vocab}
        run_ranks("tools.bench.drops.cost_rank", request, tensor * pipeline * data, 1, folder, take)
    return LayoutCost(layout, options.gpt.micro_batches, steps)
