"""`python -m tools.bench ...` of gradient bounds: their cost, and their effect on training."""

from __future__ import annotations

from typing import Any

from tools.bench.bounds.options import BoundsBenchOptions, BoundTrainOptions
from tools.bench.commands.app import app
from tools.bench.options import add_command


@add_command(app, "bounds", "--blocks 30 --sizes 4 --sizes 64")
def bench_bounding(on_progress: Any, options: BoundsBenchOptions) -> Any:
    """Compare gradient bounds with reading g and V once, and with optimizer steps; exit code 1 if a bar is missed.

    The pass bounds elements and sums squares for the norm. Read once is the faster of a compiled loop that adds both up
    and g.sum(), V.sum(). Ratios are our time over theirs in alternating blocks, with an exact interval of the median.
    Run it on a machine that does nothing else; the first run compiles DeepSpeed's CPU Adam, for a minute or more.
    """
    from tools.bench.bounds.cost import bench_bounds

    return bench_bounds(options, on_progress)


@add_command(app, "bound-training", "--absolute 2e-4,1e-3 --spike-aware 100")
def bench_bounded_training(on_progress: Any, options: BoundTrainOptions) -> Any:
    """Train a small GPT healthy and with faults on one replica's gradient, without and with gradient bounds.

    Prints final losses as the table of Pei et al. 2025 does: worst case, number of worse cases, diverged runs; and the
    cost of each bound on healthy runs. It only measures; there is no bar.
    """
    from tools.bench.bounds.training import bench_bound_training

    return bench_bound_training(options, on_progress)
