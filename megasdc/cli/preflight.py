"""`megasdc preflight`: what to know before a run is left alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from megasdc.cli.app import ConfigOption, Json, LauncherArgs, Out, Overrides, Script, app, input_option, print_outcome
from megasdc.cli.options import option
from megasdc.common.errors import LaunchError, TraceError


@dataclass(frozen=True)
class PreflightOptions:
    """Options of ``megasdc preflight``; those of ``megasdc supervise`` have its meaning."""

    config_path: ConfigOption
    launcher_args: LauncherArgs = ()
    hostfile: Path | None = option(
        None,
        "Lines `NAME slots=N`, spares too: see megasdc.supervise.num_hosts; without: this host.",
        make=input_option,
        reads=LaunchError,
    )
    num_ranks: int | None = option(None, "Ranks of this host, without a hostfile.", min=1)
    script: Script = None
    overrides: Overrides = ()
    steps: int = option(20, "Steps of the short runs.", min=2)
    skip: str = option(
        "", "Checks to leave out, of data,hosts,storage,steps,resume,cost,golden,spares.", metavar="CHECKS"
    )
    golden: Path | None = option(
        None,
        "Folder of golden values, as of `megasdc stress --record`; default: megasdc.supervise.golden.",
        make=input_option,
        reads=TraceError,
    )
    stress_all: bool = option(False, "Test all hosts and their links, not the spares alone.", "--stress-all")
    keep: bool = option(False, "Keep what the short runs wrote.", "--keep")


@app.command(
    "preflight", epilog="Example: megasdc preflight --hostfile launch/hostfile.example --config configs/smoke.json"
)
def preflight(options: PreflightOptions, out: Out = None, as_json: Json = False) -> None:
    """Check in minutes whether a run can be left alone: configuration, data, hosts, storage, first steps, whether a
    resumed run has the same bits, cost of checkpoints, golden values, spares.

    Exit code 0: nothing failed, there may be warnings; else that of the first check that failed. What it writes lies in
    preflight/TIME of the run folder and is removed, unless --keep is given. Ctrl-C ends it and all that it has started.
    """
    from megasdc.common.program import progress_bars
    from megasdc.ops.preflight.command import SKIPPABLE, run_preflight
    from megasdc.ops.preflight.request import PreflightRequest

    skip = tuple(options.skip.split(",")) if options.skip else ()
    if unknown := [name for name in skip if name not in SKIPPABLE]:
        raise typer.BadParameter(
            f"--skip {options.skip}: there is no check {unknown[0]!r} to leave out; there are {', '.join(SKIPPABLE)}"
        )
    if options.hostfile is not None and options.num_ranks is not None:
        raise typer.BadParameter("--num-ranks is of this host alone: the hostfile has the ranks of each host")
    request = PreflightRequest(**{**vars(options), "skip": skip})
    with progress_bars(quiet=as_json) as on_progress:
        outcome = run_preflight(request, on_progress)
    print_outcome(outcome, out=out, as_json=as_json)
    raise typer.Exit(outcome.exit_code)
