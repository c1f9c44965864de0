"""`megasdc dropcompute`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megasdc.cli.app import (
    Json,
    Output,
    dropcompute_app,
    input_argument,
    input_option,
    print_text,
    stdout_to_stderr,
)
from megasdc.cli.options import option
from megasdc.common.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megasdc.lab.planning.environment import DelayEnvironment
    from megasdc.lab.planning.simulate import Simulation
    from megasdc.lab.report.step_times import StepTimesOfRun

PAPER_SHARE = 0.5
"""Mean delay over the micro-batch's own latency in the paper's delay environment."""


@dataclass(frozen=True)
class RecordedStepsOptions:
    """Options that choose recorded steps of a run."""

    run: Annotated[Path, input_argument(DataError, metavar="RUN", help="Run folder, with `step_times` in it.")]
    first_step: int | None = option(None, "Steps before it are skipped, such as slow first ones.", min=1)
    last_step: int | None = option(None, "Steps after it are skipped.", min=1)

    def load(self, quiet: bool) -> StepTimesOfRun:
        """Read them, with a progress bar unless ``quiet``."""
        from megasdc.common.program import progress_bars

        with stdout_to_stderr(), progress_bars(quiet=quiet) as on_progress:
            from megasdc.lab.report.step_times import load_step_times

            return load_step_times(self.run, self.first_step, self.last_step, on_progress)


@dataclass(frozen=True)
class SimulateOptions:
    """Options of ``megasdc dropcompute simulate``."""

    replicas: str | None = option(None, "Replicas N, one number or several; default: 64, or the file's.")
    micro_batches: int | None = option(None, "Micro-batches M of a step; default: 12, or the file's.")
    stages: int | None = option(None, "Pipeline stages; default: 1, or the file's.")
    latency: float = option(0.45, "Seconds of an undisturbed micro-batch on one stage.")
    delays: tuple[str, ...] = option(
        (),
        "Added to it; may be repeated. bounded_lognormal, normal, gamma, exponential, bursts, slow_rank, "
        "slow_periods, trace or resampled; a wrong key shows the right ones. Default: the delay environment of the "
        "paper, bounded_lognormal with half the latency as mean.",
        "--delay",
        metavar="KIND:KEY=VALUE,...",
    )
    latencies: Path | None = option(
        None,
        "Instead of both: recorded seconds, a .npy file [replica, step, micro-batch] or with a fourth axis of stages. "
        "As recorded; with --replicas each step of a replica is a recorded one drawn at random.",
        make=input_option,
        reads=DataError,
    )
    communication: float = option(0.0, "Tc: seconds of a step that no threshold shortens.")
    max_drop_rate: float = option(0.1, "Largest share of micro-batches that may be dropped.")
    rule: Literal["interrupt", "finish"] = option(
        "interrupt",
        "At the threshold the micro-batch in progress is lost (the paper's eq. 6), or finished, and none is started "
        "later.",
    )
    min_micro_batches: int = option(1, "Micro-batches that always run.")
    forward_share: float = option(1 / 3, "Of the forward in a latency; for several stages.")
    steps: int = option(0, "Steps to draw; 0: a number that fits, at most 1000.")
    training_steps: int = option(10_000, "Planned steps, for the number of extra ones.")
    thresholds: int = option(200, "Thresholds to try.")
    seed: int = option(1, "Seed of all draws.", min=0)


@dropcompute_app.command(
    "simulate",
    epilog="Example: megasdc dropcompute simulate --replicas 8,64,512 --micro-batches 12 --communication 0.5 "
    "--delay bounded_lognormal:mean_s=0.225 --figure dropcompute.html",
)
def simulate_drops(options: SimulateOptions, output: Output) -> None:
    """Predict what dropping late micro-batches brings: step time, drop rate, effective speed-up, best threshold.

    Planning only: what is drawn is compared with the closed forms of Giladi et al. (NeurIPS 2023, arXiv 2306.10598).
    """
    with stdout_to_stderr():
        from megasdc.common.program import progress_bars
        from megasdc.lab.planning.simulate import SimulationResults, simulate_thresholds
        from megasdc.lab.report.simulation_page import simulation_page

    try:
        environment, simulations = _simulations(options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with progress_bars(quiet=output.as_json) as on_progress:
        results = [simulate_thresholds(simulation, environment, on_progress) for simulation in simulations]
    output.write(SimulationResults(environment, tuple(results)), simulation_page)


def _simulations(options: SimulateOptions) -> tuple[DelayEnvironment, list[Simulation]]:
    """What is simulated; a number that was not given is that of the recorded latencies, or the default."""
    from megasdc.distributions import RecordedDelay, Resampled, load_latencies
    from megasdc.dropcompute.threshold import DropRule
    from megasdc.lab.planning.environment import DelayEnvironment, parse_delay
    from megasdc.lab.planning.simulate import Simulation

    replicas, steps, micro_batches, stages = 64, 0, 12, 1
    if options.latencies is not None:
        if options.delays:
            raise ConfigError("--latencies and --delay: got both, needed only one of them; a delay can be a trace")
        replicas, steps, micro_batches, stages = load_latencies(options.latencies).shape
        kind = Resampled if options.replicas is not None else RecordedDelay
        environment = DelayEnvironment(0.0, (kind(str(options.latencies)),), options.seed)
    else:
        texts = options.delays or [f"bounded_lognormal:mean_s={PAPER_SHARE * options.latency!r}"]
        environment = DelayEnvironment(options.latency, tuple(parse_delay(text) for text in texts), options.seed)
    simulations = [
        Simulation(
            number,
            micro_batches if options.micro_batches is None else options.micro_batches,
            stages if options.stages is None else options.stages,
            options.communication,
            options.max_drop_rate,
            options.steps or (0 if options.replicas else steps),
            options.training_steps,
            DropRule(options.rule == "finish", options.min_micro_batches, options.forward_share),
            options.thresholds,
        )
        for number in (_numbers(options.replicas) if options.replicas else [replicas])
    ]
    return environment, simulations


@dropcompute_app.command(
    "threshold", epilog="Example: megasdc dropcompute threshold runs/smoke --first-step 6 --figure threshold.html"
)
def threshold_of_run(
    steps: RecordedStepsOptions,
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
    *,
    output: Output,
) -> None:
    """Search the best threshold on the steps of a run in which nothing was dropped, as the run itself would."""
    with stdout_to_stderr():
        from megasdc.lab.report.run_threshold import search_run
        from megasdc.lab.report.threshold_page import threshold_page

    times = steps.load(output.as_json)
    try:
        result = search_run(times, max_drop_rate, min_micro_batches, communication, sigmas)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    output.write(result, threshold_page)


@dropcompute_app.command("times", epilog="Example: megasdc dropcompute times runs/smoke --figure times.html")
def times_of_run(steps: RecordedStepsOptions, output: Output) -> None:
    """Show the compute time of each replica of a run, how often each was last, and why the others waited."""
    with stdout_to_stderr():
        from megasdc.lab.report.imbalance import report_times
        from megasdc.lab.report.times_page import times_page

    output.write(report_times(steps.load(output.as_json)), times_page)


@dropcompute_app.command(
    "convergence", epilog="Example: megasdc dropcompute convergence --steps 5000 --batch 512 --drop-rate 0.1"
)
def convergence(
    steps: Annotated[int, typer.Option(min=1, help="Planned steps.")],
    batch: Annotated[int, typer.Option(min=1, help="Planned samples of a step.")],
    drop_rate: Annotated[float, typer.Option(min=0, max=0.99, help="Share of samples that is dropped.")] = 0.1,
    smoothness: Annotated[float, typer.Option(min=1e-12, help="L: Lipschitz constant of the gradient.")] = 1.0,
    noise: Annotated[float, typer.Option(min=0, help="sigma: deviation of one sample's gradient.")] = 1.0,
    start_gap: Annotated[float, typer.Option(min=1e-12, help="D: first loss minus the least one.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Bound the gradient norm that SGD reaches, with and without drops: Theorem 4.1 of the paper, eq. 2.

    The bound is on the expected squared norm of the loss's gradient, averaged over samples. Samples that are made up
    for by extra steps restore it. The second bound is tighter, and megasdc's own; the guide derives it.
    """
    from megasdc.dropcompute.threshold import extra_steps_share, gradient_norm_bound, published_norm_bound

    planned = steps * batch
    given = {"planned": float(planned), "dropped": planned * (1 - drop_rate)}
    problem = (batch, smoothness, noise, start_gap)
    published = {name: published_norm_bound(samples, *problem) for name, samples in given.items()}
    tighter = {name: gradient_norm_bound(samples, *problem)[0] for name, samples in given.items()}
    extended = steps + math.ceil(steps * extra_steps_share(drop_rate))
    text = "\n".join(
        f"{whose}: {steps:,} steps with nothing dropped {of['planned']:.6g}, with {drop_rate:.1%} dropped "
        f"{of['dropped']:.6g}, which {extended:,} steps bring back"
        for whose, of in (("Theorem 4.1", published), ("a tighter bound of megasdc's own", tighter))
    )
    print_text({**published, "tighter": tighter, "steps_for_all_samples": extended}, as_json, text)


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--replicas: got {text!r}, needed a number, or several separated by commas") from error
