"""`python -m tools.bench ...` of detection: faults detected, and the cost of detection and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megasdc.cli.app import output_option
from tools.bench.commands.app import app
from tools.bench.detection.options import (
    BubblesOptions,
    CampaignOptions,
    DetectionOptions,
    LiveOptions,
    OverheadOptions,
    PredictedAccelerator,
    RefereeOptions,
    TracedModel,
)
from tools.bench.guard.options import DisputeOptions, GuardCostOptions, GuardOptions
from tools.bench.isolation.options import IsolationOptions, RateOptions
from tools.bench.options import Log, add_command


@add_command(app, "detection", "--live --faults 1000 --out detection.json")
def bench_detecting(on_progress: Any, options: CampaignOptions, log: Log = None) -> Any:
    """Inject random faults and see whether each is found and its rank named; exit code 1 if not.

    Kinds x submodules x phases x ranks, in fp32 (GPT-2 style) and bf16 (Llama style); each fault is scored against what
    the injector reports, with --live also for the checks that users have today. Clean runs must raise no alarm. With
    --drills whole runs have faults in the links from tokens to parameters; each must end with the bits of a run
    without, or the run says in its coverage that such a fault may pass.
    """
    if (options.drills or options.kinds) and not options.live:
        raise typer.BadParameter("--drills and --kinds need --live: they are whole runs")
    if options.faults == 0 and not options.live:
        raise typer.BadParameter("--faults 0 needs --live: nothing else would be injected")
    from tools.bench.detection.golden import bench_detection
    from tools.bench.detection.live import bench_live

    if options.live:
        return bench_live(LiveOptions(**options.given), on_progress, log)
    return bench_detection(DetectionOptions(**options.given), on_progress)


@add_command(app, "referee", "--elements 100000 --out referee.json")
def bench_refereeing(on_progress: Any, options: RefereeOptions) -> Any:
    """Ask the referee of results of a healthy device, and of flipped bits; exit code 1 if it accuses a healthy one.

    Each kind of result is computed in several ways - on a processor with one thread and two, with oneDNN and without,
    on a GPU by several libraries - and these are given to it as if two ranks had computed them.
    """
    from tools.bench.detection.referee import bench_referee

    return bench_referee(options, on_progress)


@add_command(app, "guard", "--trainings 16 --names zero1 --out guard.json")
def bench_guarding(on_progress: Any, options: GuardOptions, log: Log = None) -> Any:
    """Plant faults in trainings that are not megasdc's own; exit code 1 if a guard names another or none.

    Rank, submodule and direction must be named, and in trainings without a fault nobody.
    """
    from tools.bench.guard.campaign import bench_guard

    return bench_guard(options, log, on_progress)


@add_command(app, "guard-disputes", "--healthy 40 --faults 12 --out disputes.json")
def bench_guard_disputes(on_progress: Any, options: DisputeOptions) -> Any:
    """Let the referee judge two replicas of small models in one process; exit code 1 if it names a wrong one.

    Healthy ones compute in two right ways, and nobody may be named; of faults at drawn places 95 % are to be.
    """
    from tools.bench.guard.disputes import bench_disputes

    return bench_disputes(options, on_progress)


@add_command(app, "guard-cost", "--pairs 4 --out cost.json")
def bench_guard_costs(on_progress: Any, options: GuardCostOptions) -> Any:
    """Measure what a guard costs a training that is not megasdc's own; exit code 1 if it is more than it may be."""
    from tools.bench.guard.cost import bench_guard_cost

    return bench_guard_cost(options, on_progress)


@add_command(app, "isolation", "--drills 20 --layouts 1x1x3 --out isolation.json")
def bench_isolating(on_progress: Any, options: IsolationOptions, log: Log = None) -> Any:
    """Leave replicas out of runs whose faults go on; exit code 1 if one does not end with the right bits.

    Exactly the wrong replicas must be left out, and every loss and the last checkpoint must be those of a run without
    faults whose replicas end at the same steps; clean runs leave nobody out.
    """
    from tools.bench.isolation.campaign import bench_isolation

    return bench_isolation(options, log, on_progress)


@add_command(app, "isolation-rate", "--rounds 1 --out rate.json")
def bench_isolating_rate(on_progress: Any, options: RateOptions) -> Any:
    """Measure the rate of a run that goes on without a replica, and what it costs that it could; exit code 1 off a bar.

    Micro-batches are slept. Bars: (N - 1) / N of the samples per second within 3 %, and 1.01 of a step's time while no
    replica is left out.
    """
    from tools.bench.isolation.rate import bench_isolation_rate

    return bench_isolation_rate(options, on_progress)


@add_command(app, "trace", "--blocks 10 --tflops 400 --bandwidth 2680")
def bench_tracing(on_progress: Any, sizes: TracedModel, accelerator: PredictedAccelerator) -> Any:
    """Measure what a trace costs by granularity, and predict it for an accelerator from the bytes that it reads.

    Cost is time inside our own calls over the time of a step, and, noisier, alternating steps with and without.
    """
    from tools.bench.detection.trace import bench_trace

    return bench_trace(sizes, accelerator, on_progress)


@add_command(app, "detection-overhead", "--blocks 8 --figure overhead.html")
def bench_overheads(
    on_progress: Any,
    options: OverheadOptions,
    figure: Annotated[Path | None, output_option("--figure", help="Draw cost against width as an HTML page.")] = None,
) -> Any:
    """Measure what the checks of a run cost by tier, and predict it for an accelerator; exit code 1 if a bar is missed.

    Cost is time inside our own calls over the rest of the step, reductions over the ranks included, and, noisier,
    alternating steps with and without. Bars: checks of every step at their defaults 1 %, audits 0.5 % over all steps.
    Run it on a machine that does nothing else.
    """
    from megasdc.output.html import write_page
    from tools.bench.detection.overhead import bench_overhead
    from tools.bench.detection.overhead_page import overhead_page

    result = bench_overhead(options, on_progress)
    return result if figure is None else (result, lambda: write_page(overhead_page(result), figure, "--figure"))


@add_command(app, "bubbles", "--blocks 15 --out bubbles.json")
def bench_hiding(on_progress: Any, options: BubblesOptions) -> Any:
    """Measure how much of a permuted replay is hidden where the stages of a pipeline wait; exit code 1 below a bar.

    Audited steps without a replay, with one in the bubbles, and with one after all micro-batches, in turn. Bars, where
    passes are slept: 60 % of a stage's replay with two stages and 4 micro-batches, 80 % with four and 8.
    """
    from tools.bench.detection.bubbles import bench_bubbles

    return bench_bubbles(options, on_progress)
