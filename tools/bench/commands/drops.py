"""`python -m tools.bench ...` of DropCompute: its cost, its gain, and its effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, Out, output_option, print_result
from megasdc.errors import ConfigError
from tools.bench.commands.app import app
from tools.bench.commands.options import Layers, Sequence


@app.command("dropcompute", epilog="Example: python -m tools.bench dropcompute --steps 20 --out dropcompute.json")
def bench_dropping_nothing(
    steps: Annotated[int, typer.Option("--steps", help="Steps that count, in each layout.")] = 20,
    delay: Annotated[
        float, typer.Option("--delay", min=0.0, help="Seconds that each stage sleeps before a micro-batch.")
    ] = 0.5,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="Of a replica's step.")] = 4,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 64.")] = 128,
    layouts: Annotated[
        str, typer.Option("--layouts", help="Tensor x pipeline x data, separated by commas.")
    ] = "1x1x2,2x2x1",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what DropCompute costs while nothing is dropped; exit code 1 if it is more than 0.2 % of a step.

    Cost is time inside its own calls over the time of a step; waiting for another stage or tensor rank to decide is not
    in it. The bar is for micro-batches of 0.5 s and more. Run it on a machine that does nothing else.
    """
    from dataclasses import replace

    from megasdc.progress import progress_bars
    from tools.bench.detection.golden import parse_layouts
    from tools.bench.drops.cost import GPT, DropCostOptions, bench_drop_cost
    from tools.bench.drops.cost_render import render_drop_cost

    gpt = replace(GPT, hidden=hidden, micro_batches=micro_batches)
    options = DropCostOptions(steps, delay, gpt, parse_layouts(layouts))
    with progress_bars() as on_progress:
        result = bench_drop_cost(options, on_progress)
    print_result(result, render_drop_cost, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


@app.command("drop-speedup", epilog="Example: python -m tools.bench drop-speedup --drop-rates 0.05,0.1 --steps 28")
def bench_speedup(
    steps: Annotated[int, typer.Option("--steps", help="Steps that are measured for each threshold.")] = 28,
    replicas: Annotated[int, typer.Option("--replicas", help="Ranks on this machine, all data parallel.")] = 8,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="Of a replica's step.")] = 8,
    constant: Annotated[
        float, typer.Option("--constant", min=0.0, help="Seconds that every micro-batch sleeps.")
    ] = 0.06,
    mean: Annotated[
        float, typer.Option("--mean", help="Mean of its additional sleep in seconds, bounded log-normal.")
    ] = 0.1,
    drop_rates: Annotated[
        str, typer.Option("--drop-rates", help="Drop rates for which thresholds are chosen, separated by commas.")
    ] = "0.025,0.05,0.1",
    sigmas: Annotated[
        float | None,
        typer.Option("--sigmas", min=0.0, help='Use rule "predictive" with so many standard deviations.'),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the delays.")] = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure how much faster DropCompute makes replicas that sleep, against the prediction; exit code 1 beyond 5 %.

    Runs without a threshold, with thresholds, and one that chooses its own take steps in turn; other steps predict. The
    fewer --steps, the more often the bar is missed by chance. Run it on a machine that does nothing else.
    """
    from dataclasses import replace

    from megasdc.progress import progress_bars
    from tools.bench.drops.speedup import GPT, DropSpeedupOptions, bench_drop_speedup
    from tools.bench.drops.speedup_render import render_drop_speedup

    options = DropSpeedupOptions(
        replicas=replicas,
        steps=steps,
        constant_s=constant,
        mean_s=mean,
        drop_rates=_numbers("--drop-rates", drop_rates),
        sigmas=sigmas,
        seed=seed,
        gpt=replace(GPT, micro_batches=micro_batches),
    )
    with progress_bars() as on_progress:
        result = bench_drop_speedup(options, on_progress)
    print_result(result, render_drop_speedup, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in text.split(",") if one.strip())
    except ValueError:
        raise ConfigError(f"{name}: {text!r} must be numbers separated by commas, such as 0.05,0.1") from None


@app.command("drop-training", epilog="Example: python -m tools.bench drop-training --log runs.jsonl --out loss.json")
def bench_training_with_drops(
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps of a run.")] = 240,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each setting; a seed is of weights and delays.")] = 3,
    rates: Annotated[
        str, typer.Option("--rates", help="Drop rates, separated by commas; 0 is always included.")
    ] = "0.025,0.05,0.1,0.2",
    replicas: Annotated[int, typer.Option("--replicas", help="Replicas of the simulated job.")] = 64,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 32.")] = 64,
    layers: Layers = 2,
    sequence: Sequence = 64,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="Of a replica's step.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Peak of the schedule.")] = 2e-3,
    evaluations: Annotated[int, typer.Option("--evaluations", help="Evaluations of a run; a divisor of --steps.")] = 6,
    eval_samples: Annotated[int, typer.Option("--eval-samples", help="Validation samples.")] = 256,
    log: Annotated[
        Path | None,
        output_option("--log", help="File that keeps finished runs; those in it are not repeated."),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train a small GPT with dropped micro-batches, at several drop rates and with each compensation at 10 %.

    Which ones are late is simulated for many replicas and repeated by two that train. Prints final losses as Table 1
    of Giladi et al. 2023 does, and loss against steps and simulated time. It only measures; there is no bar.
    """
    from dataclasses import replace

    from megasdc.progress import progress_bars
    from tools.bench.drops.training import bench_drop_training
    from tools.bench.drops.training_render import render_drop_training
    from tools.bench.drops.training_setup import GPT, DropTrainOptions

    options = DropTrainOptions(
        steps=steps,
        seeds=seeds,
        rates=_numbers("--rates", rates),
        replicas=replicas,
        learning_rate=learning_rate,
        evaluations=evaluations,
        eval_samples=eval_samples,
        gpt=replace(GPT, hidden=hidden, layers=layers, sequence=sequence, micro_batches=micro_batches),
    )
    with progress_bars() as on_progress:
        result = bench_drop_training(options, log, on_progress)
    print_result(result, render_drop_training, out=out, as_json=as_json)
