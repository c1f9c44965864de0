"""`megasdc bench ...` of DropCompute: what it costs, gains, and does to training."""

from __future__ import annotations

from typing import Annotated

import typer

from megasdc.cli.app import Json, Out, bench_app, print_result


@bench_app.command("dropcompute", epilog="Example: megasdc bench dropcompute --steps 20 --out dropcompute.json")
def bench_dropping_nothing(
    steps: Annotated[int, typer.Option("--steps", help="Steps that count, in each layout.")] = 20,
    delay: Annotated[
        float, typer.Option("--delay", min=0.0, help="Seconds that each stage sleeps before a micro-batch.")
    ] = 0.5,
    micro_batches: Annotated[int, typer.Option("--micro-batches", help="Of a replica's step.")] = 4,
    hidden: Annotated[int, typer.Option("--hidden", help="Width h; a multiple of 64.")] = 128,
    layouts: Annotated[
        str, typer.Option("--layouts", help="Tensor x pipeline x data, commas between.")
    ] = "1x1x2,2x2x1",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure what DropCompute costs while nothing is left out; exit code 1 if it is more than 0.2 % of a step.

    Cost is time inside its own calls over the time of a step; waiting for another stage or tensor rank to decide is not
    in it. The bar is for micro-batches of 0.5 s and more. Run it on a machine that does nothing else.
    """
    from dataclasses import replace

    from rich.console import Console

    from megasdc.bench.detection import parse_layouts
    from megasdc.bench.drop_cost import GPT, DropCostOptions, bench_drop_cost
    from megasdc.bench.drop_cost_render import render_drop_cost
    from megasdc.bench.render import progress_bar

    gpt = replace(GPT, hidden=hidden, micro_batches=micro_batches)
    options = DropCostOptions(steps, delay, gpt, parse_layouts(layouts))
    with progress_bar(Console(stderr=True)) as on_progress:
        result = bench_drop_cost(options, on_progress)
    print_result(result, render_drop_cost, out=out, as_json=as_json)
    raise typer.Exit(int(not result.passed))
