"""`megasdc bench ...`: each benchmark states its bar, its machine and its interval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from megasdc.cli.app import Json, Out, bench_app, print_result, writable


@bench_app.command("train", epilog="Example: megasdc bench train --against plain --blocks 30 --out bench.json")
def bench_training(
    against: Annotated[
        Literal["plain", "hf", "determinism", "bounds", "launch", "all"],
        typer.Option(
            "--against",
            help="A bare PipelineEngine loop, HF Llama + ZeRO-1, deterministic mode or bounds against without, "
            "time to first step, or all.",
        ),
    ] = "all",
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of each loop.")] = 30,
    steps_per_block: Annotated[int, typer.Option("--steps-per-block", help="Steps of a block.")] = 10,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 64.")] = 256,
    layers: Annotated[int, typer.Option("--layers", help="Transformer layers.")] = 8,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens of a sample.")] = 256,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary.")] = 12032,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples of a micro-batch.")] = 2,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches of a step.")] = 2,
    ranks: Annotated[int, typer.Option("--ranks", help="Data-parallel ranks on this machine.")] = 2,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of a rank.")] = 1,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option("--precision", help="Type of parameters.")] = "fp32",
    launches: Annotated[int, typer.Option("--launches", min=1, help="Launches whose time counts.")] = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare our training loop with other loops in alternating blocks; exit code 1 if a bar is missed.

    Ratios are our time over theirs, wall and processor time, with an exact interval of the median. Run it on a machine
    that does nothing else.
    """
    from rich.console import Console

    from megasdc.bench.options import TrainBenchOptions
    from megasdc.bench.render import progress_bar, render
    from megasdc.bench.train import AGAINST, bench_train

    options = TrainBenchOptions(
        blocks=blocks,
        steps_per_block=steps_per_block,
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
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_train(options, AGAINST if against == "all" else (against,), launches, on_progress)
    print_result(result, render, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@bench_app.command("detection", epilog="Example: megasdc bench detection --live --faults 1000 --out detection.json")
def bench_detecting(
    live: Annotated[
        bool, typer.Option("--live", help="The checks of a run under way, instead of a golden trace afterwards.")
    ] = False,
    faults: Annotated[
        int | None,
        typer.Option(
            "--faults", min=0, help="Faults over all layouts and types; 600, with --live 1000, and 0 leaves them out."
        ),
    ] = None,
    toleranced: Annotated[
        int | None,
        typer.Option(
            "--toleranced", min=0, help="With --live: faults for the toleranced checks, 360; 0 leaves them out."
        ),
    ] = None,
    clean: Annotated[
        int | None,
        typer.Option(
            "--clean", min=1, help="Runs without a fault in between, 120; with --live steps of each part, 500."
        ),
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            "--layouts",
            help="Layouts, tensor x pipeline x data, with commas between; 1x1x2,2x1x1,1x2x1,2x2x2, with --live "
            "1x1x3,1x1x4,2x1x3,1x2x3,1x1x2,2x2x2.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of every draw.")] = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Inject random faults and see whether each is found and its rank named; exit code 1 if not.

    Kinds x submodules x phases x ranks, in fp32 (GPT-2 style) and bf16 (Llama style); each fault is scored against what
    the injector says it did, with --live also for what users have today. Clean runs must raise nothing. The toleranced
    checks of a run are scored apart, by the size of the fault in thresholds.
    """
    from rich.console import Console

    from megasdc.bench.detection import DetectionOptions, bench_detection, parse_layouts
    from megasdc.bench.detection_render import render_detection
    from megasdc.bench.live import LiveOptions, bench_live
    from megasdc.bench.live_render import render_live
    from megasdc.bench.render import progress_bar

    sizes: dict[str, Any] = {"faults": faults, "clean": clean, "seed": seed}
    sizes["layouts"] = None if layouts is None else parse_layouts(layouts)
    if toleranced is not None and not live:
        raise typer.BadParameter("--toleranced needs --live: those checks are of a run under way")
    if faults == 0 and not live:
        raise typer.BadParameter("--faults 0 needs --live: nothing else would be injected")
    sizes["toleranced"] = toleranced
    given = {name: value for name, value in sizes.items() if value is not None}
    with progress_bar(Console(stderr=True)) as on_progress:
        if live:
            live_result = bench_live(LiveOptions(**given), on_progress)
        else:
            result = bench_detection(DetectionOptions(**given), on_progress)
    if live:
        print_result(live_result, render_live, out=out, as_json=as_json)
        raise typer.Exit(int(not live_result.passed))
    print_result(result, render_detection, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@bench_app.command("data", epilog="Example: megasdc bench data --workers 2 --blocks 10 --out bench.json")
def bench_preparing(
    tokenizer: Annotated[
        Literal["sentencepiece", "huggingface", "all"], typer.Option("--tokenizer", help="Kind of tokenizer.")
    ] = "all",
    workers: Annotated[int, typer.Option("--workers", help="Tokenizing processes; 0: one a core.")] = 0,
    blocks: Annotated[int, typer.Option("--blocks", help="Runs of each side.")] = 10,
    characters: Annotated[int, typer.Option("--characters", help="Length of the text.")] = 24_000_000,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary.")] = 4096,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare prepare-data with Megatron's preprocess_data in alternating runs; exit code 1 if a bar is missed.

    Both read the same text with the same trained tokenizer and as many processes, and must write the same bytes.
    Ratios are our time over theirs, wall and processor time, with an exact interval of the median. Run it on a machine
    that does nothing else.
    """
    from rich.console import Console

    from megasdc.bench.data import KINDS, DataBenchOptions, bench_data
    from megasdc.bench.render import progress_bar, render_data

    options = DataBenchOptions(workers=workers, blocks=blocks, characters=characters, vocab=vocab)
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_data(options, KINDS if tokenizer == "all" else (tokenizer,), on_progress)
    print_result(result, render_data, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@bench_app.command("checksum", epilog="Example: megasdc bench checksum --blocks 40 --sizes 16 --sizes 64")
def bench_checksums(
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of each side.")] = 40,
    sizes: Annotated[
        list[int] | None, typer.Option("--sizes", help="MiB of a tensor; may be repeated; default: 1 to 256.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of tensor.sum(); XXH3 has one.")] = 1,
    trials: Annotated[int, typer.Option("--trials", help="Faults of each kind.")] = 4000,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare checksums with reading a tensor, and count the faults they miss; exit code 1 if a bar is missed.

    On the host XXH3 against tensor.sum(); on a GPU the mixed sum against a sum reduction and a device copy. Ratios are
    our time over theirs in alternating blocks, with an exact interval of the median. Run it on a machine that does
    nothing else.
    """
    from rich.console import Console

    from megasdc.bench.checksum import ChecksumBenchOptions, bench_checksum
    from megasdc.bench.render import progress_bar, render_checksum

    options = ChecksumBenchOptions(
        blocks=blocks, sizes_mib=tuple(sizes or (1, 4, 16, 64, 256)), threads=threads, trials=trials
    )
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_checksum(options, on_progress)
    print_result(result, render_checksum, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@bench_app.command("bounds", epilog="Example: megasdc bench bounds --blocks 30 --sizes 4 --sizes 64")
def bench_bounding(
    blocks: Annotated[int, typer.Option("--blocks", help="Blocks of each side.")] = 30,
    sizes: Annotated[
        list[int] | None,
        typer.Option("--sizes", help="Elements of a shard in units of 2^20; may be repeated; default: 1, 4, 16, 64."),
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", help="CPU threads of torch's operations and optimizers; the pass has one.")
    ] = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare gradient bounds with reading g and V once, and with optimizer steps; exit code 1 if a bar is missed.

    The pass bounds elements and sums squares for the norm. Read once is the faster of a compiled loop that adds both up
    and g.sum(), V.sum(). Ratios are our time over theirs in alternating blocks, with an exact interval of the median.
    Run it on a machine that does nothing else; the first run compiles DeepSpeed's CPU Adam, for a minute or more.
    """
    from rich.console import Console

    from megasdc.bench.bounds import BoundsBenchOptions, bench_bounds
    from megasdc.bench.bounds_render import render_bounds
    from megasdc.bench.render import progress_bar

    options = BoundsBenchOptions(blocks=blocks, sizes_million=tuple(sizes or (1, 4, 16, 64)), threads=threads)
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_bounds(options, on_progress)
    print_result(result, render_bounds, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@bench_app.command("trace", epilog="Example: megasdc bench trace --blocks 10 --tflops 400 --bandwidth 2680")
def bench_tracing(
    blocks: Annotated[int, typer.Option("--blocks", help="Steps of each kind.")] = 10,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 64.")] = 1024,
    layers: Annotated[int, typer.Option("--layers", help="Transformer layers.")] = 2,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens of a sample.")] = 512,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary.")] = 8192,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples of a micro-batch.")] = 1,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches of a step.")] = 2,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads.")] = 1,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option("--precision", help="Type of parameters.")] = "fp32",
    bandwidth: Annotated[
        float, typer.Option("--bandwidth", min=1.0, help="Accelerator: GB/s at which checksums read; 0.8 of an H100's.")
    ] = 2680.0,
    tflops: Annotated[
        float, typer.Option("--tflops", min=0.1, help="Accelerator: TFLOP/s that training reaches; 40 % of an H100's.")
    ] = 395.6,
    call_us: Annotated[
        float, typer.Option("--call-us", min=0.0, help="Accelerator: microseconds to launch one checksum.")
    ] = 10.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what a trace costs by granularity, and predict it for an accelerator from the bytes that it reads.

    Cost is time inside our own calls over the time of a step, and, noisier, alternating steps with and without.
    """
    from rich.console import Console

    from megasdc.bench.options import TrainBenchOptions
    from megasdc.bench.render import progress_bar
    from megasdc.bench.trace import Accelerator, bench_trace
    from megasdc.bench.trace_render import render

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
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_trace(options, accelerator, on_progress)
    print_result(result, render, out=out, as_json=as_json)


@bench_app.command(
    "detection-overhead", epilog="Example: megasdc bench detection-overhead --blocks 8 --figure overhead.html"
)
def bench_overheads(
    blocks: Annotated[int, typer.Option("--blocks", help="Steps of each kind.")] = 8,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h of the model with bars; a multiple of 64.")] = 1024,
    others: Annotated[
        list[int] | None, typer.Option("--other", help="Width of a model without; may be repeated; default: 256, 512.")
    ] = None,
    layers: Annotated[int, typer.Option("--layers", help="Transformer layers.")] = 2,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens of a sample.")] = 512,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary.")] = 8192,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples of a micro-batch.")] = 1,
    accumulation: Annotated[int, typer.Option("--accumulation", help="Micro-batches of a step.")] = 2,
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Data-parallel ranks on this machine.")] = 2,
    threads: Annotated[int, typer.Option("--threads", help="CPU threads of a rank.")] = 1,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option("--precision", help="Type of parameters.")] = "fp32",
    interval: Annotated[int, typer.Option("--interval", min=1, help="Steps from one audit to the next.")] = 50,
    bandwidth: Annotated[
        float, typer.Option("--bandwidth", min=1.0, help="Accelerator: GB/s at which checks read; 0.8 of an H100's.")
    ] = 2680.0,
    tflops: Annotated[
        float, typer.Option("--tflops", min=0.1, help="Accelerator: TFLOP/s that training reaches; 40 % of an H100's.")
    ] = 395.6,
    call_us: Annotated[
        float, typer.Option("--call-us", min=0.0, help="Accelerator: microseconds to launch one check of a result.")
    ] = 10.0,
    exchange_ms: Annotated[
        float, typer.Option("--exchange-ms", min=0.0, help="Accelerator: milliseconds of a reduction over all hosts.")
    ] = 1.0,
    figure: Annotated[
        Path | None, typer.Option("--figure", help="Draw cost against width as an HTML page.", callback=writable)
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what the checks of a run cost by tier, and predict it for an accelerator; exit code 1 if a bar is missed.

    Cost is time inside our own calls over the rest of the step, reductions over the ranks included, and, noisier,
    alternating steps with and without. Bars: checks of every step at their defaults 1 %, audits 0.5 % over all steps.
    Run it on a machine that does nothing else.
    """
    from rich.console import Console

    from megasdc.bench.options import TrainBenchOptions
    from megasdc.bench.overhead import OverheadOptions, bench_overhead
    from megasdc.bench.overhead_render import render_overhead, write_figure
    from megasdc.bench.render import progress_bar
    from megasdc.bench.trace import Accelerator

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
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_overhead(options, on_progress)
    print_result(result, render_overhead, out=out, as_json=as_json)
    if figure is not None:
        write_figure(result, figure)
    raise typer.Exit(int(not result.passed))


@bench_app.command(
    "bound-training", epilog="Example: megasdc bench bound-training --absolute 2e-4,1e-3 --spike-aware 100"
)
def bench_bounded_training(
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps of a run.")] = 400,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each kind; a seed is of weights and faults.")] = 3,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 32.")] = 64,
    layers: Annotated[int, typer.Option("--layers", help="Transformer layers.")] = 2,
    sequence: Annotated[int, typer.Option("--sequence", help="Tokens of a sample.")] = 64,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary, without --data.")] = 1024,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples of a step on each replica.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Largest of the schedule.")] = 5e-3,
    fault_probability: Annotated[
        float,
        typer.Option("--fault-probability", help="That +10 (or -10) harms a parameter's gradient in a step."),
    ] = 0.01,
    eval_samples: Annotated[int, typer.Option("--eval-samples", min=1, help="Validation samples.")] = 256,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option("--precision", help="Type of parameters.")] = "fp32",
    data: Annotated[
        Path | None, typer.Option("--data", help="Folder of prepared data; default: the standard library's modules.")
    ] = None,
    absolute: Annotated[
        str | None,
        typer.Option("--absolute", help="Thresholds, commas between, empty: none; default: three are chosen."),
    ] = None,
    spike_aware: Annotated[str | None, typer.Option("--spike-aware", help="Likewise.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train a small GPT healthy and with faults on one replica's gradient, without and with gradient bounds.

    Prints final losses as the table of Pei et al. 2025 does: worst case, number of worse cases, diverged runs; and the
    price of each bound on healthy runs. It measures; there is no bar.
    """
    from rich.console import Console

    from megasdc.bench.bound_training import bench_bound_training
    from megasdc.bench.bound_training_render import render_bound_training
    from megasdc.bench.bound_training_setup import BoundTrainOptions, parse_thetas
    from megasdc.bench.render import progress_bar

    options = BoundTrainOptions(
        steps=steps,
        seeds=seeds,
        hidden=hidden,
        layers=layers,
        sequence=sequence,
        vocab=vocab,
        micro_batch=micro_batch,
        learning_rate=learning_rate,
        fault_probability=fault_probability,
        eval_samples=eval_samples,
        precision=precision,
        data=None if data is None else str(data),
        absolute=parse_thetas("--absolute", absolute),
        spike_aware=parse_thetas("--spike-aware", spike_aware),
    )
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_bound_training(options, on_progress)
    print_result(result, render_bound_training, out=out, as_json=as_json)
