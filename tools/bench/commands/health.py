"""`python -m tools.bench ...` of health: who is named when a run is stuck, and who when a rank is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from megasdc.cli.app import output_option
from tools.bench.commands.app import app
from tools.bench.health.hang_options import HangOptions
from tools.bench.health.straggler_options import StragglerOptions
from tools.bench.options import add_command


@add_command(app, "hangs", "--drills 14 --clean-steps 500 --out hangs.json")
def bench_hanging(on_progress: Any, options: HangOptions) -> Any:
    """Make runs hang in many ways, and see who is named and how fast they end; exit code 1 if a bar is missed.

    The right rank in 99 % of the hangs, no other one ever, all ranks ended ten seconds after the limit of their phases,
    and no alarm in runs without a hang under other load.
    """
    from tools.bench.health.hangs import bench_hangs

    return bench_hangs(options, on_progress)


@add_command(app, "stragglers", "--log stragglers.jsonl --out stragglers.json")
def bench_slow_ranks(
    on_progress: Any,
    options: StragglerOptions,
    log: Annotated[
        Path | None,
        output_option("--log", help="File that keeps finished trials; those in it are not repeated."),
    ] = None,
) -> Any:
    """Measure who is named as a straggler among replicas that sleep; exit code 1 if one is missed or named wrongly.

    A replica that is 10 % slower must be named in 95 % of the runs, one that is 30 % slower in all, nobody else at any
    time; and 90 % of a micro-batch's time must be sleep. The whole table takes more than an hour.
    """
    from tools.bench.health.stragglers import bench_stragglers

    return bench_stragglers(options, log, on_progress)
