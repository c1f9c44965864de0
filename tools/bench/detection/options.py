"""Options of the benchmarks of detection, and of the costs of checksums, traces and checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from megasdc.sdc.cost import Accelerator
from tools.bench.options import Options, in_unit, option, parse_layouts
from tools.bench.training.options import TrainBenchOptions

PRECISIONS = ("fp32", "bf16")
STYLES = {"fp32": "gpt", "bf16": "llama"}
"""Each type trains another style of model, so that both are in a campaign."""
GOLDEN_LAYOUTS = ((1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2))
"""(tensor, pipeline, data)."""
CHAIN_LAYOUTS = ((1, 1, 3), (1, 2, 2), (2, 1, 2))
CHAIN_KINDS = (
    *("tokens", "place", "sum", "reduced", "part", "adds", "norm", "factor", "clipped"),
    *("lr", "beta", "eps", "decay", "count", "state", "update", "rest", "groups", "copy", "parameter", "alike"),
)
PRESET_KINDS = ("forward", "backward", "weight_grad", *CHAIN_KINDS)
"""Of runs with a preset alone, with faults in what a micro-batch computes."""
LIVE_LAYOUTS = ((1, 1, 3), (1, 1, 4), (2, 1, 3), (1, 2, 3), (1, 1, 2), (2, 2, 2), (1, 1, 1), (2, 2, 1))
DROPOUT = 0.1
Layouts = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class ChecksumBenchOptions(Options):
    """Compare checksums with reading a tensor, and count the faults they miss; exit code 1 if a bar is missed.

    On the host XXH3 against tensor.sum(); on a GPU the mixed sum against a sum reduction and a device copy. Ratios are
    our time over theirs in alternating blocks, with an exact interval of the median. Run it on a machine that does
    nothing else.

    Args:
        blocks: one pair before those that count does not.
        trials: with fewer than 100 the algorithms for comparison may miss none.
    """

    blocks: int = option(40, "Blocks of each side.", least=1)
    sizes_mib: tuple[int, ...] = option(
        (1, 4, 16, 64, 256), "MiB of a tensor; may be repeated; default: 1 to 256.", "--sizes", least=1
    )
    threads: int = option(1, "CPU threads of tensor.sum(); XXH3 has one.", least=1)
    trials: int = option(4000, "Faults of each kind.", least=100)


@dataclass(frozen=True)
class DetectionOptions(Options):
    """Size of a campaign against golden traces.

    Args:
        faults: how many are injected, over all layouts and types; rounded up to equal shares.
        clean: runs without a fault, likewise.
        layouts: (tensor, pipeline, data) of each.
        precisions: some of ``PRECISIONS``.
    """

    faults: int = 600
    clean: int = 120
    layouts: Layouts = GOLDEN_LAYOUTS
    precisions: tuple[str, ...] = PRECISIONS
    seed: int = 1
    fuse: bool = False

    @property
    def cells(self) -> list[dict[str, Any]]:
        """Every layout with every type."""
        return [
            {
                "layout": layout,
                "precision": precision,
                "style": STYLES[precision],
                "fuse": self.fuse,
                **self.more_of_cell(place, number),
            }
            for place, layout in enumerate(self.layouts)
            for number, precision in enumerate(self.precisions)
        ]

    def more_of_cell(self, place: int, number: int) -> dict[str, Any]:
        """Further settings of the cell with this place of its layout and number of its type."""
        return {}

    def share(self, count: int) -> int:
        """Of each cell, rounded up."""
        return -(-count // len(self.cells))


@dataclass(frozen=True)
class LiveOptions(DetectionOptions):
    """Size of a campaign in running trainings.

    Args:
        clean: steps without a fault, where there are trials with faults.
        drills: whole runs with faults in the chain from tokens to parameters.
        kinds: of these faults, with commas between; "all".
        protect: word of the preset that alone protects the drills; None: all checks, of every step.
        budget: `sdc.budget` of such drills; None: its default.
    """

    faults: int = 1000
    clean: int = 500
    layouts: Layouts = LIVE_LAYOUTS
    drills: int = 0
    kinds: str = "all"
    protect: Literal["standard", "strict"] | None = None
    budget: float | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """Kinds that drills may have."""
        return CHAIN_KINDS if self.protect is None else PRESET_KINDS

    @property
    def drawn(self) -> tuple[str, ...]:
        """Kinds of faults of drills."""
        return self.known if self.kinds == "all" else tuple(one.strip() for one in self.kinds.split(","))

    def problems(self) -> list[str]:
        """See ``Options``."""
        if unknown := [one for one in self.drawn if one not in self.known]:
            return [f"--kinds: {unknown[0]!r} is none of {', '.join(self.known)}"]
        if self.budget is not None and self.protect is None:
            return ["--budget: drills without a preset check all of each step; it goes with --protect"]
        if not (self.faults or self.drills):
            return ["--faults, --drills: both are 0, and nothing would be tested; give one of them"]
        return []

    def more_of_cell(self, place: int, number: int) -> dict[str, Any]:
        """Recompute in half of them, dropout in half of each half."""
        return {
            "recompute": (place + number) % 2 == 0,
            "dropout": DROPOUT if (place // 2 + number) % 2 else 0.0,
        }


def _layouts(text: str | None) -> Layouts | None:
    return None if text is None else parse_layouts(text)


@dataclass(frozen=True)
class CampaignOptions:
    """Options of the command for both campaigns, whose defaults differ; None: that of the one that runs."""

    live: bool = option(False, "Test the checks of a running job instead of golden traces.")
    faults: int | None = option(
        None, "Faults over all layouts and types; default: 600, with --live 1000; 0: none.", min=0
    )
    drills: int | None = option(
        None, "With --live: whole runs with faults between tokens and parameters; default: none.", min=0
    )
    kinds: str | None = option(None, f"With --drills: kinds of faults, of {', '.join(CHAIN_KINDS)}; default: all.")
    protect: Literal["standard", "strict"] | None = option(
        None, "With --drills: this preset alone protects the runs, and results of micro-batches have faults, too."
    )
    budget: float | None = option(
        None, "With --protect: `sdc.budget` of the runs; as tiny steps are, 1 leaves the room that large ones have."
    )
    clean: int | None = option(None, "Runs without a fault in between; default: 120; with --live steps, 500.", min=1)
    layouts: Layouts | None = option(
        None,
        "Layouts, tensor x pipeline x data, separated by commas; default: 1x1x2,2x1x1,1x2x1,2x2x2, "
        "with --live 1x1x3,1x1x4,2x1x3,1x2x3,1x1x2,2x2x2,1x1x1,2x2x1, of drills 1x1x3,1x2x2,2x1x2.",
        given=None,
        callback=_layouts,
    )
    seed: int = option(1, "Seed of all draws.", min=0)
    fuse: bool = option(False, "With model.fuse.")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the options of the campaign that runs."""
        given = {name: value for name, value in vars(self).items() if name != "live" and value is not None}
        if self.drills and not (self.faults or self.layouts):
            given["layouts"] = CHAIN_LAYOUTS
        return given


@dataclass(frozen=True)
class CheckedModel(TrainBenchOptions):
    """Sizes of a model whose checks or traces are measured; blocks are one step of each kind."""

    steps_per_block: int = 1
    hidden: int = option(1024, "Width h; a multiple of 64.", least=1)
    layers: int = option(2, "Transformer layers.", least=1)
    sequence: int = option(512, "Tokens of a sample.", least=1)
    vocab: int = option(8192, "Entries of the vocabulary.", least=1)
    micro_batch: int = option(1, "Samples of a micro-batch.", least=1)
    fuse: bool = False


@dataclass(frozen=True)
class TracedModel(CheckedModel):
    """Measure what a trace costs by granularity, and predict it for an accelerator from the bytes that it reads.

    Cost is time inside our own calls over the time of a step, and, noisier, alternating steps with and without.
    """

    blocks: int = option(10, "Steps of each kind.", least=1)
    ranks: int = 1
    threads: int = option(1, "CPU threads.", least=1)


@dataclass(frozen=True)
class PredictedAccelerator(Accelerator):
    """The accelerator to predict for, by the speeds that can be chosen."""

    bytes_per_s: float = in_unit(
        1e9,
        Accelerator.bytes_per_s,
        "Accelerator: GB/s at which checks read; 0.8 of an H100's.",
        "--bandwidth",
        least=1.0,
    )
    flop_per_s: float = in_unit(
        1e12,
        Accelerator.flop_per_s,
        "Accelerator: TFLOP/s that training reaches; 40 % of an H100's.",
        "--tflops",
        least=0.1,
    )
    call_s: float = in_unit(
        1e-6, Accelerator.call_s, "Accelerator: microseconds to launch one check of a result.", "--call-us", least=0.0
    )


@dataclass(frozen=True)
class AuditedModel(CheckedModel):
    """Sizes of the model with bars for its checks."""

    blocks: int = option(8, "Steps of each kind.", least=1)
    hidden: int = option(1024, "Width h of the model with bars; a multiple of 64.", least=1)
    ranks: int = option(2, "Data-parallel ranks on this machine.", min=2)


@dataclass(frozen=True)
class RefereeOptions(Options):
    """Ask the referee of results of a healthy device, and of flipped bits; exit code 1 if it accuses a healthy one.

    Each kind of result is computed in several ways - on a processor with one thread and two, with oneDNN and without,
    on a GPU by several libraries - and these are given to it as if two ranks had computed them.
    """

    elements: int = option(20_000, "Healthy elements of each kind of result, of all ways to compute them.", min=1)
    flips: int = option(40, "Elements of each draw, of which every bit is flipped.", min=0)
    width: int = option(512, "Elements of a row, and of a sum.", min=2)
    seed: int = option(1, "Seed of all draws.", min=0)
    device: Literal["cpu", "cuda"] = option("cpu", "Whose results they are.")


@dataclass(frozen=True)
class OverheadOptions(Options):
    """Size of the measurement of checks.

    Args:
        sizes: of the first model, its batch and its ranks; blocks of one step of each kind.
        others: widths of further models, otherwise the same; no bar is set for them.
        interval: K, steps from one audit to the next.
        kept: steps in a row with all checks, kept within the budget.
        accelerator: what to predict for.
        exchange_s: seconds of a small reduction over the hosts of a run on accelerators.
    """

    sizes: TrainBenchOptions = AuditedModel()
    others: tuple[int, ...] = option(
        (256, 512), "Width of a model without bars; may be repeated; default: 256, 512.", "--other"
    )
    interval: int = option(50, "Steps between audits.", min=1)
    kept: int = option(60, "Steps in a row with all checks at their defaults, kept within `sdc.budget`.", min=20)
    accelerator: Accelerator = PredictedAccelerator()
    exchange_s: float = in_unit(
        1e-3, 1e-3, "Accelerator: milliseconds of a reduction over all hosts.", "--exchange-ms", least=0.0
    )


@dataclass(frozen=True)
class PipelineModel(CheckedModel):
    """Sizes of the model that stages compute."""

    blocks: int = option(15, "Steps of each kind.", least=1)
    hidden: int = option(512, "Width h where stages compute; a multiple of 64.", least=1)
    layers: int = option(4, "Transformer layers.", least=4)
    vocab: int = option(512, "Entries of the vocabulary; more make the last stage slower than the others.", least=1)


@dataclass(frozen=True)
class BubblesOptions(Options):
    """Measure how much of a permuted replay is hidden where the stages of a pipeline wait; exit code 1 below a bar.

    Audited steps without a replay, with one in the bubbles, and with one after all micro-batches, in turn. Bars, where
    passes are slept: 60 % of a stage's replay with two stages and 4 micro-batches, 80 % with four and 8.

    Args:
        sizes: where stages compute.
        pass_s: seconds that a stage sleeps in a forward pass, where stages sleep; twice as many in a backward pass.
    """

    sizes: TrainBenchOptions = PipelineModel()
    pass_s: float = in_unit(
        1e-3,
        0.1,
        "Milliseconds that a forward pass sleeps, where there are more stages than cores.",
        "--pass-ms",
        least=1.0,
    )

    @property
    def slept(self) -> TrainBenchOptions:
        """Sizes where stages sleep: computing takes little beside that."""
        return replace(self.sizes, hidden=64, sequence=32, vocab=256, micro_batch=1)


SMOKE = "smoke"
"""The model of `configs/smoke.json`."""


@dataclass(frozen=True)
class ProtectOptions(Options):
    """Train with `protect: standard` and `off` in turn, and compare their time; exit code 1 if the bar is missed.

    Whole runs of the training program, with saves, snapshots and health; blocks of steps alternate. Bars of the ratio:
    1.03 for the model of configs/smoke.json, 1.015 for others. Blocks are without audited steps; what audits take of
    all steps, as the run has measured it, is added. Run it on a machine that does nothing else.

    Args:
        hidden: of a model in the place of that of `configs/smoke.json`; 0: none.
    """

    blocks: int = option(12, "Blocks of each side.", least=1)
    steps_per_block: int = option(20, "Steps of a block; a multiple of 10, the interval of snapshots.", least=10)
    warmup: int = option(
        150, "Steps of each side before the first block, in which audits and looks find their pace.", least=0
    )
    hidden: int = option(
        0, "Width h of a GPT in the place of that of configs/smoke.json, such as 1024; 0: that one.", least=0
    )
    layers: int = option(2, "With --hidden: transformer layers.", least=1)
    sequence: int = option(512, "With --hidden: tokens of a sample.", least=1)
    accumulation: int = option(2, "With --hidden: micro-batches of a step, of one sample.", least=1)
    vocab: int = option(4096, "Entries of the vocabulary.", least=400)
    ranks: int = option(2, "Data-parallel ranks on this machine.", least=1)
    threads: ClassVar[int] = 1

    def problems(self) -> list[str]:
        """See ``Options``."""
        found = []
        if self.hidden % 64:
            found.append(f"--hidden: {self.hidden} must be a multiple of 64, the width of a head")
        if self.steps_per_block % 10:
            found.append(f"--steps-per-block: {self.steps_per_block} must be a multiple of 10, as snapshots are")
        return found

    @property
    def model(self) -> str:
        """Name of the model in tables."""
        return f"H={self.hidden}" if self.hidden else SMOKE

    @property
    def work(self) -> str:
        """Model and batch of a step, as reports show them."""
        if not self.hidden:
            return "configs/smoke.json"
        return (
            f"GPT H={self.hidden} L={self.layers} S={self.sequence} vocabulary {self.vocab}; {self.accumulation} "
            "micro-batches of 1"
        )

    @property
    def warmup_steps(self) -> int:
        """Steps before the first block; blocks begin half-way between two snapshots."""
        return self.warmup // 10 * 10 + 5

    @property
    def total_steps(self) -> int:
        """Steps of each side; the last, after which a run saves, is in no block."""
        return self.warmup_steps + self.blocks * self.steps_per_block + 5
