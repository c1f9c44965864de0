"""`python -m tools.bench ...` of gradient bounds: their cost, and their effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, Out, input_option, print_result
from megasdc.errors import DataError
from tools.bench.commands.app import app
from tools.bench.commands.options import Layers, Precision, Sequence


@app.command("bounds", epilog="Example: python -m tools.bench bounds --blocks 30 --sizes 4 --sizes 64")
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
    from megasdc.progress import progress_bars
    from tools.bench.bounds.cost import BoundsBenchOptions, bench_bounds
    from tools.bench.bounds.cost_render import render_bounds

    options = BoundsBenchOptions(blocks=blocks, sizes_million=tuple(sizes or (1, 4, 16, 64)), threads=threads)
    with progress_bars() as on_progress:
        result = bench_bounds(options, on_progress)
    print_result(result, render_bounds, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@app.command(
    "bound-training", epilog="Example: python -m tools.bench bound-training --absolute 2e-4,1e-3 --spike-aware 100"
)
def bench_bounded_training(
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps of a run.")] = 400,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each kind; a seed is of weights and faults.")] = 3,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 32.")] = 64,
    layers: Layers = 2,
    sequence: Sequence = 64,
    vocab: Annotated[int, typer.Option("--vocab", help="Entries of the vocabulary, without --data.")] = 1024,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples of a step on each replica.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Peak of the schedule.")] = 5e-3,
    fault_probability: Annotated[
        float,
        typer.Option(
            "--fault-probability",
            help="Probability that +10 (or -10) is injected into a parameter's gradient in a step.",
        ),
    ] = 0.01,
    eval_samples: Annotated[int, typer.Option("--eval-samples", min=1, help="Validation samples.")] = 256,
    precision: Precision = "fp32",
    data: Annotated[
        Path | None,
        input_option(
            "--data", reads=DataError, help="Folder of prepared data; default: the standard library's modules."
        ),
    ] = None,
    absolute: Annotated[
        str | None,
        typer.Option("--absolute", help="Thresholds, separated by commas, empty: none; default: three are chosen."),
    ] = None,
    spike_aware: Annotated[str | None, typer.Option("--spike-aware", help="As --absolute.")] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train a small GPT healthy and with faults on one replica's gradient, without and with gradient bounds.

    Prints final losses as the table of Pei et al. 2025 does: worst case, number of worse cases, diverged runs; and the
    cost of each bound on healthy runs. It only measures; there is no bar.
    """
    from megasdc.progress import progress_bars
    from tools.bench.bounds.training import bench_bound_training
    from tools.bench.bounds.training_render import render_bound_training
    from tools.bench.bounds.training_setup import BoundTrainOptions, parse_thetas

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
    with progress_bars() as on_progress:
        result = bench_bound_training(options, on_progress)
    print_result(result, render_bound_training, out=out, as_json=as_json)
