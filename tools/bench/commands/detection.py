"""`python -m tools.bench ...` of detection: faults detected, and the cost of detection and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megasdc.cli.app import output_option
from tools.bench.commands.app import app
from tools.bench.detection.options import (
    DetectionOptions,
    LiveOptions,
    OverheadOptions,
    PredictedAccelerator,
    TracedModel,
)
from tools.bench.options import add_command, parse_layouts


@add_command(app, "detection", "--live --faults 1000 --out detection.json")
def bench_detecting(
    on_progress: Any,
    live: Annotated[
        bool, typer.Option("--live", help="Test the checks of a running job instead of golden traces.")
    ] = False,
    faults: Annotated[
        int | None,
        typer.Option(
            "--faults", min=0, help="Faults over all layouts and types; default: 600, with --live 1000; 0: none."
        ),
    ] = None,
    toleranced: Annotated[
        int | None,
        typer.Option(
            "--toleranced", min=0, help="With --live: faults for the toleranced checks; default: 360, 0: none."
        ),
    ] = None,
    clean: Annotated[
        int | None,
        typer.Option(
            "--clean", min=1, help="Runs without a fault in between; default: 120; with --live steps of each part, 500."
        ),
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts",
            help="Layouts, tensor x pipeline x data, separated by commas; default: 1x1x2,2x1x1,1x2x1,2x2x2, "
            "with --live 1x1x3,1x1x4,2x1x3,1x2x3,1x1x2,2x2x2.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all draws.")] = 1,
    fuse: Annotated[bool, typer.Option("--fuse", help="With model.fuse.")] = False,
) -> Any:
    """Inject random faults and see whether each is found and its rank named; exit code 1 if not.

    Kinds x submodules x phases x ranks, in fp32 (GPT-2 style) and bf16 (Llama style); each fault is scored against what
    the injector reports, with --live also for the checks that users have today. Clean runs must raise no alarm. The
    toleranced checks of a run are scored apart, by the size of the fault in thresholds.
    """
    if toleranced is not None and not live:
        raise typer.BadParameter("--toleranced needs --live: those checks work in a running job")
    if faults == 0 and not live:
        raise typer.BadParameter("--faults 0 needs --live: nothing else would be injected")
    sizes: dict[str, Any] = {"faults": faults, "toleranced": toleranced, "clean": clean, "seed": seed, "fuse": fuse}
    sizes["layouts"] = None if layouts is None else parse_layouts(layouts)
    given = {name: value for name, value in sizes.items() if value is not None}
    from tools.bench.detection.golden import bench_detection
    from tools.bench.detection.live import bench_live

    if live:
        return bench_live(LiveOptions(**given), on_progress)
    return bench_detection(DetectionOptions(**given), on_progress)


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
    from tools.bench.detection.overhead import bench_overhead
    from tools.bench.detection.overhead_figure import write_figure

    result = bench_overhead(options, on_progress)
    return result if figure is None else (result, lambda: write_figure(result, figure))
