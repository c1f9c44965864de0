"""`python -m tools.bench ...` of supervised runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megasdc.cli.app import output_folder
from tools.bench.commands.app import app
from tools.bench.options import Log, add_command
from tools.bench.supervised.options import SupervisedOptions

Keep = Annotated[
    Path | None,
    typer.Option(**output_folder(help="Folder that gets the runs' folders, without checkpoints, for plan-run.")),
]


@add_command(app, "supervised", "--drills 15 --log supervised.jsonl --out supervised.json")
def bench_supervising(on_progress: Any, options: SupervisedOptions, log: Log = None, keep: Keep = None) -> Any:
    """Bring faults about in supervised runs between test hosts; exit code 1 if one does not end right by itself.

    All losses, the last checkpoint and the places in the data as without a fault, bit for bit; few attempts; no host
    away whose test has passed, and none used again that computed wrong results. Needs root. A run with two faults
    takes a minute or two, with --slurm up to five: requeued jobs wait, and a lost node is known after a while.
    """
    from tools.bench.supervised.campaign import bench_supervised

    return bench_supervised(options, log, keep, on_progress)
