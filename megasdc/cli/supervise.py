"""`megasdc supervise`: a run that goes on by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from megasdc.cli.app import AllowChanged, ConfigOption, LauncherArgs, Overrides, Script, app, input_option
from megasdc.cli.options import option
from megasdc.common.errors import LaunchError


@dataclass(frozen=True)
class SuperviseOptions:
    """Options of ``megasdc supervise``; those of ``megasdc launch`` have its meaning."""

    config_path: ConfigOption
    launcher_args: LauncherArgs = ()
    hostfile: Path | None = option(
        None,
        "Lines `NAME slots=N`, spares too: see megasdc.supervise.num_hosts; without: the nodes of this SLURM job.",
        make=input_option,
        reads=LaunchError,
    )
    script: Script = None
    overrides: Overrides = ()
    allow_changed: AllowChanged = ()


@app.command(
    "supervise", epilog="Example: megasdc supervise --hostfile launch/hostfile.example --config configs/smoke.json"
)
def supervise(options: SuperviseOptions) -> None:
    """Launch a run and start it again after failures, on other hosts where some are the cause, until it is done.

    What it plans and does is in supervise/journal.jsonl of the run folder: where this command is killed, the same one
    goes on from there. Ctrl-C, or SIGTERM, lets the run save and end; a SLURM job is requeued then, after SIGTERM. Exit
    code: of the last attempt.
    """
    from megasdc.ops.supervise.command import supervise_run

    raise typer.Exit(supervise_run(**vars(options)))
