"""`python -m tools.bench ...` of health: who is named when a run is stuck."""

from __future__ import annotations

from typing import Any

from tools.bench.commands.app import app
from tools.bench.health.options import HangOptions
from tools.bench.options import add_command


@add_command(app, "hangs", "--drills 14 --clean-steps 500 --out hangs.json")
def bench_hanging(on_progress: Any, options: HangOptions) -> Any:
    """Make runs hang in many ways, and see who is named and how fast they end; exit code 1 if a bar is missed.

    The right rank in 99 % of the hangs, no other one ever, all ranks ended ten seconds after the limit of their phases,
    and no alarm in runs without a hang under other load.
    """
    from tools.bench.health.hangs import bench_hangs

    return bench_hangs(options, on_progress)
