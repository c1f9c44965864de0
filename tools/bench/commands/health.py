"""`python -m tools.bench ...` of health: who is named when a run is stuck, who when a rank is slow, what it costs."""

from __future__ import annotations

from typing import Any

from tools.bench.commands.app import app
from tools.bench.health.cost_options import HealthCostOptions
from tools.bench.health.hang_options import HangOptions
from tools.bench.health.straggler_options import StragglerOptions
from tools.bench.options import Log, add_command


@add_command(app, "hangs", "--drills 14 --clean-steps 500 --log hangs.jsonl --out hangs.json")
def bench_hanging(on_progress: Any, options: HangOptions, log: Log = None) -> Any:
    """Make runs hang in many ways, and see who is named and how fast they end; exit code 1 if a bar is missed.

    The right rank in 99 % of the hangs, no other one ever, all ranks ended ten seconds after the limit of their phases,
    and no alarm in runs without a hang under other load.
    """
    from tools.bench.health.hangs import bench_hangs

    return bench_hangs(options, log, on_progress)


@add_command(app, "stragglers", "--log stragglers.jsonl --out stragglers.json")
def bench_slow_ranks(on_progress: Any, options: StragglerOptions, log: Log = None) -> Any:
    """Measure who is named as a straggler among replicas that sleep; exit code 1 if one is missed or named wrongly.

    A replica that is 10 % slower must be named in 95 % of the runs, one that is 30 % slower in all, nobody else at any
    time; and 90 % of a micro-batch's time must be sleep. The whole table takes more than an hour.
    """
    from tools.bench.health.stragglers import bench_stragglers

    return bench_stragglers(options, log, on_progress)


@add_command(app, "health-cost", "--steps 100 --out health_cost.json")
def bench_watching(on_progress: Any, options: HealthCostOptions) -> Any:
    """Measure what health costs; exit code 1 if it is more than 0.05 % of a step or 1 % of a core for the agent.

    Time inside all calls of its hooks over the time of a step, an agent's processor time after its start, losses with
    and without it bit for bit, and memory and files of an agent's parts over a simulated time.
    """
    from tools.bench.health.cost import bench_health_cost

    return bench_health_cost(options, on_progress)
