"""One rank of the campaign on dropped micro-batches."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from megasdc.metrics.writer import read_metrics
from megasdc.parallel.run_ranks import Messages
from megasdc.train.main import set_up_logging
from tools.bench.drops.run import build_drop_run, end_rank, start_rank, train_in_turn


def train_all(configs: list[dict[str, Any]], messages: Messages) -> None:
    """Train one run after another, and report each as it ends.

    Args:
        configs: of the runs.
        messages: where to report.
    """
    dims = start_rank()
    for config in configs:
        run = build_drop_run(config, dims)
        (walls,) = train_in_turn([run])
        rows = read_metrics(run.folder) if dims.rank == 0 else []
        messages.send(
            steps=run.step,
            samples=run.samples,
            epoch_samples=run.loader.samples_per_epoch,
            skipped=run.skipped_steps,
            losses=[[row["step"], row["eval/loss"]] for row in rows if "eval/loss" in row],
            seconds=sum(walls) - run.paused_s,
        )
    end_rank()


def main() -> None:
    """Run the request of the command line."""
    messages = Messages(int(sys.argv[2]) if len(sys.argv) > 2 else None)
    set_up_logging(int(os.environ["RANK"]))
    train_all(json.loads(sys.argv[1])["configs"], messages)


if __name__ == "__main__":
    main()
