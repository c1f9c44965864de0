"""`megasdc dropcompute`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from megasdc.cli.app import Json, Out, dropcompute_app, input_argument, input_option, output_option, print_result
from megasdc.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megasdc.distributions import Environment
    from megasdc.report.result.page import Page
    from megasdc.report.step_times import StepTimesOfRun

PAPER_SHARE = 0.5
"""Mean delay over the micro-batch's own latency in the paper's delay environment."""


RunFolder = Annotated[Path, input_argument(DataError, metavar="RUN", help="Run folder, with `step_times` in it.")]
FirstStep = Annotated[
    int | None, typer.Option("--first-step", min=1, help="Steps before it are skipped, such as slow first ones.")
]
LastStep = Annotated[int | None, typer.Option("--last-step", min=1, help="Steps after it are skipped.")]
Figure = Annotated[Path | None, output_option("--figure", help="Draw the result as an HTML page.")]


@dropcompute_app.command(
    "simulate",
    epilog="Example: megasdc dropcompute simulate --replicas 8,64,512 --micro-batches 12 --communication 0.5 "
    "--delay bounded_lognormal:mean_s=0.225 --figure dropcompute.html",
)
def simulate_drops(
    replicas: Annotated[
        str | None, typer.Option("--replicas", help="Replicas N, one number or several; default: 64, or the file's.")
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", help="Micro-batches M of a step; default: 12, or the file's.")
    ] = None,
    stages: Annotated[int | None, typer.Option("--stages", help="Pipeline stages; default: 1, or the file's.")] = None,
    latency: Annotated[
        float, typer.Option("--latency", help="Seconds of an undisturbed micro-batch on one stage.")
    ] = 0.45,
    delays: Annotated[
        list[str] | None,
        typer.Option(
            "--delay",
            metavar="KIND:KEY=VALUE,...",
            help="Added to it; may be repeated. bounded_lognormal, normal, gamma, exponential, bursts, slow_rank, "
            "slow_periods, trace or resampled; a wrong key shows the right ones. Default: the delay environment of "
            "the paper, bounded_lognormal with half the latency as mean.",
        ),
    ] = None,
    latencies: Annotated[
        Path | None,
        input_option(
            "--latencies",
            reads=DataError,
            help="Instead of both: recorded seconds, a .npy file [replica, step, micro-batch] or with a fourth axis of "
            "stages. As recorded; with --replicas each step of a replica is a recorded one drawn at random.",
        ),
    ] = None,
    communication: Annotated[
        float, typer.Option("--communication", help="Tc: seconds of a step that no threshold shortens.")
    ] = 0.0,
    max_drop_rate: Annotated[
        float, typer.Option("--max-drop-rate", help="Largest share of micro-batches that may be dropped.")
    ] = 0.1,
    rule: Annotated[
        Literal["interrupt", "finish"],
        typer.Option(
            "--rule",
            help="At the threshold the micro-batch in progress is lost (the paper's eq. 6), or finished, and none is "
            "started later.",
        ),
    ] = "interrupt",
    min_micro_batches: Annotated[int, typer.Option("--min-micro-batches", help="Micro-batches that always run.")] = 1,
    forward_share: Annotated[
        float, typer.Option("--forward-share", help="Of the forward in a latency; for several stages.")
    ] = 1 / 3,
    steps: Annotated[int, typer.Option("--steps", help="Steps to draw; 0: a number that fits, at most 1000.")] = 0,
    training_steps: Annotated[
        int, typer.Option("--training-steps", help="Planned steps, for the number of extra ones.")
    ] = 10_000,
    thresholds: Annotated[int, typer.Option("--thresholds", help="Thresholds to try.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all draws.")] = 1,
    figure: Figure = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Predict what dropping late micro-batches brings: step time, drop rate, effective speed-up, best threshold.

    Planning only: what is drawn is compared with the closed forms of Giladi et al. (NeurIPS 2023, arXiv 2306.10598).
    """
    from megasdc.distributions import Environment, load_latencies, parse_delay
    from megasdc.dropcompute.search import Rule
    from megasdc.dropcompute.simulate import Simulation, SimulationResults, simulate
    from megasdc.progress import progress_bars
    from megasdc.report.simulation_page import simulation_page

    recorded = None
    try:
        if latencies is not None:
            if delays:
                raise ConfigError("--latencies and --delay: got both, needed only one of them; a delay can be a trace")
            recorded = load_latencies(latencies).shape
            environment = _recorded(latencies, resample=replicas is not None, seed=seed)
        else:
            texts = delays or [f"bounded_lognormal:mean_s={PAPER_SHARE * latency!r}"]
            environment = Environment(latency, tuple(parse_delay(text) for text in texts), seed)
        numbers = _numbers(replicas) if replicas else [recorded[0] if recorded else 64]
        simulations = [
            Simulation(
                number,
                micro_batches if micro_batches is not None else recorded[2] if recorded else 12,
                stages if stages is not None else recorded[3] if recorded else 1,
                communication,
                max_drop_rate,
                steps or (recorded[1] if recorded and not replicas else 0),
                training_steps,
                Rule(rule == "finish", min_micro_batches, forward_share),
                thresholds,
            )
            for number in numbers
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with progress_bars(quiet=as_json) as on_progress:
        results = [simulate(simulation, environment, on_progress) for simulation in simulations]
    result = SimulationResults(environment, tuple(results))
    _show(result, simulation_page, figure, out, as_json)


@dropcompute_app.command(
    "threshold", epilog="Example: megasdc dropcompute threshold runs/smoke --first-step 6 --figure threshold.html"
)
def threshold_of_run(
    run: RunFolder,
    first_step: FirstStep = None,
    last_step: LastStep = None,
    max_drop_rate: Annotated[
        float, typer.Option("--max-drop-rate", help="Largest share of micro-batches that may be dropped.")
    ] = 0.1,
    min_micro_batches: Annotated[int, typer.Option("--min-micro-batches", help="Micro-batches that always run.")] = 1,
    communication: Annotated[
        float | None,
        typer.Option(
            "--communication",
            help="Tc: seconds of a step that no threshold shortens. Default: what the recorded steps took beyond the "
            "compute time of their slowest replica.",
        ),
    ] = None,
    sigmas: Annotated[
        float, typer.Option("--sigmas", min=0, help="Of rule predictive: standard deviations above the mean.")
    ] = 1.0,
    figure: Figure = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Search the best threshold on the steps of a run in which nothing was dropped, as the run itself would."""
    from megasdc.report.run_threshold import search_run
    from megasdc.report.threshold_page import threshold_page

    times = _load(run, first_step, last_step, as_json)
    try:
        result = search_run(times, max_drop_rate, min_micro_batches, communication, sigmas)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _show(result, threshold_page, figure, out, as_json)


@dropcompute_app.command("times", epilog="Example: megasdc dropcompute times runs/smoke --figure times.html")
def times_of_run(
    run: RunFolder,
    first_step: FirstStep = None,
    last_step: LastStep = None,
    figure: Figure = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Show the compute time of each replica of a run, how often each was last, and why the others waited."""
    from megasdc.report.imbalance import report_times
    from megasdc.report.times_page import times_page

    _show(report_times(_load(run, first_step, last_step, as_json)), times_page, figure, out, as_json)


def _show(result: Any, build: Callable[[Any], Page], figure: Path | None, out: Path | None, as_json: bool) -> None:
    """Print a result, and write it as JSON and as a page where that was asked for."""
    from megasdc.report.result.html import write_page
    from megasdc.report.result.terminal import printer

    print_result(result, printer(build), out=out, as_json=as_json)
    if figure is not None:
        write_page(build(result), figure, "--figure")


def _load(run: Path, first_step: int | None, last_step: int | None, quiet: bool) -> StepTimesOfRun:

    from megasdc.progress import progress_bars
    from megasdc.report.step_times import load_step_times

    with progress_bars(quiet=quiet) as on_progress:
        return load_step_times(run, first_step, last_step, on_progress)


def _recorded(path: Path, resample: bool, seed: int) -> Environment:
    from megasdc.distributions import Environment
    from megasdc.distributions.kinds import Resampled, Trace

    return Environment(0.0, (Resampled(str(path)) if resample else Trace(str(path)),), seed)


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--replicas: got {text!r}, needed a number, or several separated by commas") from error
