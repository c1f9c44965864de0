"""`megasdc drill`: would a run notice a wrong computation?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import (
    ConfigOption,
    Json,
    Overrides,
    app,
    input_option,
    output_folder,
    print_outcome,
    stdout_to_stderr,
)
from megasdc.common.errors import LaunchError
from megasdc.common.program import echo


@app.command("drill", epilog="Example: megasdc drill --config configs/smoke.json")
def drill(
    config: ConfigOption,
    ranks: Annotated[
        int | None,
        typer.Option("--num-ranks", min=2, help="Ranks on this host; default: the fewest with two replicas."),
    ] = None,
    hostfile: Annotated[
        Path | None, input_option("--hostfile", reads=LaunchError, help="Hosts to run on; without: this host.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Step of the fault; default: 7.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", **output_folder(help="Folder of both runs; default: RUN_DIR_drill.")),
    ] = None,
    overrides: Overrides = (),
    as_json: Json = False,
) -> None:
    """Take the first steps of a run twice, once with a rank that computes something wrong, and say what came of it.

    The fault is the sign of one value of a gradient, once. Both runs are protected as by `protect` "standard", with an
    audit in the step of the fault. Nothing of the run itself is touched.

    Exit code 0: the fault was found, its rank named, the step repaired, and every bit at the end is that of the run
    without a fault; 1: not so; that of a run that failed.
    """
    from megasdc.config.load import load_config

    with stdout_to_stderr():
        from megasdc.lab.triage.drill import plan_drill, run_drill, with_preset
        from megasdc.train.signals import exiting_on_signals

        loaded = with_preset(load_config(config, overrides), lambda more: load_config(config, [*overrides, *more]))
        plan = plan_drill(loaded, step, ranks, hostfile, out)
        with exiting_on_signals():
            outcome = run_drill(plan, partial(echo, err=True))
    print_outcome(outcome, as_json=as_json)
    raise typer.Exit(outcome.exit_code)
