"""Options of the benchmarks of detection, and of the costs of checksums, traces and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megasdc.sdc.cost import Accelerator
from tools.bench.options import Option, Options, option, part_of, repeated
from tools.bench.training.options import TrainBenchOptions

PRECISIONS = ("fp32", "bf16")
STYLES = {"fp32": "gpt", "bf16": "llama"}
"""Each type trains another style of model, so that both are in a campaign."""
GOLDEN_LAYOUTS = ((1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2))
"""(tensor, pipeline, data)."""
LIVE_LAYOUTS = ((1, 1, 3), (1, 1, 4), (2, 1, 3), (1, 2, 3), (1, 1, 2), (2, 2, 2))
DROPOUT = 0.1
Layouts = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class ChecksumBenchOptions(Options):
    """Sizes of a measurement; one pair of blocks before those that count does not.

    With fewer than 100 trials the algorithms for comparison may miss none.
    """

    blocks: int = option(40, "Blocks of each side.", least=1)
    sizes_mib: tuple[int, ...] = repeated(
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
    """Size of a campaign in running trainings; layouts have at least 2 replicas.

    Args:
        clean: steps without a fault, for each of exact and toleranced checks that have faults.
        toleranced: trials with faults for the toleranced checks, over all layouts and types.
    """

    faults: int = 1000
    clean: int = 500
    layouts: Layouts = LIVE_LAYOUTS
    toleranced: int = 360

    def problems(self) -> list[str]:
        """See ``Options``."""
        found = []
        if not (self.faults or self.toleranced):
            found.append("--faults, --toleranced: both are 0, and nothing would be tested; give one of them")
        for layout in self.layouts:
            if layout[2] < 2:
                name = "x".join(map(str, layout))
                found.append(f"--layouts: {name} has one replica, and an audit compares at least 2; set data to 2")
        return found

    def more_of_cell(self, place: int, number: int) -> dict[str, Any]:
        """Recompute in half of them, dropout in half of each half."""
        return {
            "recompute": (place + number) % 2 == 0,
            "dropout": DROPOUT if (place // 2 + number) % 2 else 0.0,
        }


_SIZES = ("blocks", "hidden", "layers", "sequence", "vocab", "micro_batch", "accumulation")
_MODEL: dict[str, Any] = {
    "steps_per_block": 1,
    "hidden": 1024,
    "layers": 2,
    "sequence": 512,
    "vocab": 8192,
    "micro_batch": 1,
}
_BANDWIDTH = Option(
    "Accelerator: GB/s at which checks read; 0.8 of an H100's.",
    "--bandwidth",
    shown=2680.0,
    read=lambda gb_per_s: gb_per_s * 1e9,
    settings={"min": 1.0},
)
_TFLOPS = Option(
    "Accelerator: TFLOP/s that training reaches; 40 % of an H100's.",
    "--tflops",
    shown=395.6,
    read=lambda tflop_per_s: tflop_per_s * 1e12,
    settings={"min": 0.1},
)
_CALL_US = Option(
    "Accelerator: microseconds to launch one check of a result.",
    "--call-us",
    shown=10.0,
    read=lambda call_us: call_us * 1e-6,
    settings={"min": 0.0},
)


@dataclass(frozen=True)
class TraceOptions(Options):
    """Sizes of the model that is traced on one rank, and the accelerator to predict for.

    Blocks are one step of each kind.
    """

    sizes: TrainBenchOptions = part_of(
        TrainBenchOptions(blocks=10, ranks=1, **_MODEL),
        *_SIZES,
        blocks="Steps of each kind.",
        threads="CPU threads.",
        precision="Type of parameters.",
    )
    accelerator: Accelerator = part_of(Accelerator(), bytes_per_s=_BANDWIDTH, flop_per_s=_TFLOPS, call_s=_CALL_US)


@dataclass(frozen=True)
class OverheadOptions(Options):
    """Size of the measurement of checks.

    Args:
        sizes: of the first model, its batch and its ranks; blocks of one step of each kind.
        others: widths of further models, otherwise the same; no bar is set for them.
        interval: K, steps from one audit to the next.
        accelerator: what to predict for.
        exchange_s: seconds of a small reduction over the hosts of a run on accelerators.
    """

    sizes: TrainBenchOptions = part_of(
        TrainBenchOptions(blocks=8, **_MODEL),
        *_SIZES,
        "ranks",
        "threads",
        "precision",
        blocks="Steps of each kind.",
        hidden="Width h of the model with bars; a multiple of 64.",
        ranks=Option("Data-parallel ranks on this machine.", settings={"min": 2}),
    )
    others: tuple[int, ...] = repeated(
        (256, 512), "Width of a model without bars; may be repeated; default: 256, 512.", "--other"
    )
    interval: int = option(50, "Steps between audits.", min=1)
    accelerator: Accelerator = part_of(Accelerator(), bytes_per_s=_BANDWIDTH, flop_per_s=_TFLOPS, call_s=_CALL_US)
    exchange_s: float = option(
        1e-3,
        "Accelerator: milliseconds of a reduction over all hosts.",
        "--exchange-ms",
        shown=1.0,
        read=lambda milliseconds: milliseconds * 1e-3,
        min=0.0,
    )
