"""`python -m tools.bench ...` of DropCompute: its cost, its gain, and its effect on training."""

from __future__ import annotations

from typing import Any

from tools.bench.commands.app import app
from tools.bench.drops.options import DropCostOptions, DropSpeedupOptions, DropTrainOptions
from tools.bench.options import Log, add_command


@add_command(app, "dropcompute", "--steps 20 --out dropcompute.json")
def bench_dropping_nothing(on_progress: Any, options: DropCostOptions) -> Any:
    """Measure what DropCompute costs while nothing is dropped; exit code 1 if it is more than 0.2 % of a step.

    Cost is time inside its own calls over the time of a step; waiting for another stage or tensor rank to decide is not
    in it. The bar is for micro-batches of 0.5 s and more. Run it on a machine that does nothing else.
    """
    from tools.bench.drops.cost import bench_drop_cost

    return bench_drop_cost(options, on_progress)


@add_command(app, "drop-speedup", "--drop-rates 0.05,0.1 --steps 28")
def bench_speedup(on_progress: Any, options: DropSpeedupOptions) -> Any:
    """Measure how much faster DropCompute makes replicas that sleep, against the prediction; exit code 1 beyond 5 %.

    Runs without a threshold, with thresholds, and one that chooses its own take steps in turn; other steps predict. The
    fewer --steps, the more often the bar is missed by chance. Run it on a machine that does nothing else.
    """
    from tools.bench.drops.speedup import bench_drop_speedup

    return bench_drop_speedup(options, on_progress)


@add_command(app, "drop-training", "--log runs.jsonl --out loss.json")
def bench_training_with_drops(on_progress: Any, options: DropTrainOptions, log: Log = None) -> Any:
    """Train a small GPT with dropped micro-batches, at several drop rates and with each compensation at 10 %.

    Which ones are late is simulated for many replicas and repeated by two that train. Prints final losses as Table 1
    of Giladi et al. 2023 does, and loss against steps and simulated time. It only measures; there is no bar.
    """
    from tools.bench.drops.training import bench_drop_training

    return bench_drop_training(options, log, on_progress)
