"""`python -m tools.bench ...` of detection: faults detected, and the cost of detection and traces."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from megasdc.cli.app import Json, Out, output_option, print_result
from tools.bench.commands.app import app
from tools.bench.commands.options import (
    Accumulation,
    Bandwidth,
    CallUs,
    Layers,
    MicroBatch,
    Precision,
    Sequence,
    Tflops,
    Threads,
    Vocab,
)


@app.command("detection", epilog="Example: python -m tools.bench detection --live --faults 1000 --out detection.json")
def bench_detecting(
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
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Inject random faults and see whether each is found and its rank named; exit code 1 if not.

    Kinds x submodules x phases x ranks, in fp32 (GPT-2 style) and bf16 (Llama style); each fault is scored against what
    the injector reports, with --live also for the checks that users have today. Clean runs must raise no alarm. The
    toleranced checks of a run are scored apart, by the size of the fault in thresholds.
    """
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to what is standard output when it is imported
        from megasdc.progress import progress_bars
        from tools.bench.detection.golden import DetectionOptions, bench_detection, parse_layouts
        from tools.bench.detection.golden_render import render_detection
        from tools.bench.detection.live import LiveOptions, bench_live
        from tools.bench.detection.live_render import render_live

    sizes: dict[str, Any] = {"faults": faults, "clean": clean, "seed": seed, "fuse": fuse}
    sizes["layouts"] = None if layouts is None else parse_layouts(layouts)
    if toleranced is not None and not live:
        raise typer.BadParameter("--toleranced needs --live: those checks work in a running job")
    if faults == 0 and not live:
        raise typer.BadParameter("--faults 0 needs --live: nothing else would be injected")
    sizes["toleranced"] = toleranced
    given = {name: value for name, value in sizes.items() if value is not None}
    with progress_bars() as on_progress:
        if live:
            live_result = bench_live(LiveOptions(**given), on_progress)
        else:
            result = bench_detection(DetectionOptions(**given), on_progress)
    if live:
        print_result(live_result, render_live, out=out, as_json=as_json)
        raise typer.Exit(int(not live_result.passed))
    print_result(result, render_detection, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@app.command("trace", epilog="Example: python -m tools.bench trace --blocks 10 --tflops 400 --bandwidth 2680")
def bench_tracing(
    blocks: Annotated[int, typer.Option("--blocks", help="Steps of each kind.")] = 10,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 64.")] = 1024,
    layers: Layers = 2,
    sequence: Sequence = 512,
    vocab: Vocab = 8192,
    micro_batch: MicroBatch = 1,
    accumulation: Accumulation = 2,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads.")] = 1,
    precision: Precision = "fp32",
    bandwidth: Bandwidth = 2680.0,
    tflops: Tflops = 395.6,
    call_us: CallUs = 10.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what a trace costs by granularity, and predict it for an accelerator from the bytes that it reads.

    Cost is time inside our own calls over the time of a step, and, noisier, alternating steps with and without.
    """
    from megasdc.progress import progress_bars
    from tools.bench.detection.trace import Accelerator, bench_trace
    from tools.bench.detection.trace_render import render
    from tools.bench.training.options import TrainBenchOptions

    options = TrainBenchOptions(
        blocks=blocks,
        hidden=hidden,
        layers=layers,
        sequence=sequence,
        vocab=vocab,
        micro_batch=micro_batch,
        accumulation=accumulation,
        threads=threads,
        precision=precision,
    )
    accelerator = Accelerator(bytes_per_s=bandwidth * 1e9, flop_per_s=tflops * 1e12, call_s=call_us * 1e-6)
    with progress_bars() as on_progress:
        result = bench_trace(options, accelerator, on_progress)
    print_result(result, render, out=out, as_json=as_json)


@app.command(
    "detection-overhead", epilog="Example: python -m tools.bench detection-overhead --blocks 8 --figure overhead.html"
)
def bench_overheads(
    blocks: Annotated[int, typer.Option("--blocks", help="Steps of each kind.")] = 8,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h of the model with bars; a multiple of 64.")] = 1024,
    others: Annotated[
        list[int] | None,
        typer.Option("--other", help="Width of a model without bars; may be repeated; default: 256, 512."),
    ] = None,
    layers: Layers = 2,
    sequence: Sequence = 512,
    vocab: Vocab = 8192,
    micro_batch: MicroBatch = 1,
    accumulation: Accumulation = 2,
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Data-parallel ranks on this machine.")] = 2,
    threads: Threads = 1,
    precision: Precision = "fp32",
    interval: Annotated[int, typer.Option("--interval", min=1, help="Steps between audits.")] = 50,
    bandwidth: Bandwidth = 2680.0,
    tflops: Tflops = 395.6,
    call_us: CallUs = 10.0,
    exchange_ms: Annotated[
        float, typer.Option("--exchange-ms", min=0.0, help="Accelerator: milliseconds of a reduction over all hosts.")
    ] = 1.0,
    figure: Annotated[Path | None, output_option("--figure", help="Draw cost against width as an HTML page.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what the checks of a run cost by tier, and predict it for an accelerator; exit code 1 if a bar is missed.

    Cost is time inside our own calls over the rest of the step, reductions over the ranks included, and, noisier,
    alternating steps with and without. Bars: checks of every step at their defaults 1 %, audits 0.5 % over all steps.
    Run it on a machine that does nothing else.
    """
    from megasdc.progress import progress_bars
    from megasdc.sdc.cost import Accelerator
    from tools.bench.detection.overhead import OverheadOptions, bench_overhead
    from tools.bench.detection.overhead_render import render_overhead, write_figure
    from tools.bench.training.options import TrainBenchOptions

    sizes = TrainBenchOptions(
        blocks=blocks,
        steps_per_block=1,
        hidden=hidden,
        layers=layers,
        sequence=sequence,
        vocab=vocab,
        micro_batch=micro_batch,
        accumulation=accumulation,
        ranks=ranks,
        threads=threads,
        precision=precision,
    )
    accelerator = Accelerator(bytes_per_s=bandwidth * 1e9, flop_per_s=tflops * 1e12, call_s=call_us * 1e-6)
    widths = (256, 512) if others is None else tuple(others)
    options = OverheadOptions(sizes, widths, interval, accelerator, exchange_ms * 1e-3)
    with progress_bars() as on_progress:
        result = bench_overhead(options, on_progress)
    print_result(result, render_overhead, out=out, as_json=as_json)
    if figure is not None:
        write_figure(result, figure)
    raise typer.Exit(int(not result.passed))
