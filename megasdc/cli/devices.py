"""`megasdc devices`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, app, print_outcome

FIRST_S = 30.0
"""Seconds to answer; a driver that nothing holds loaded takes some of them to start its devices."""


@app.command("devices", epilog="Example: megasdc devices --json")
def devices(
    since_s: Annotated[
        float, typer.Option("--since-s", min=1, help="Seconds of the kernel's log whose errors and XIDs count.")
    ] = 3600.0,
    as_json: Json = False,
) -> None:
    """Show whether the devices of this host, its memory and its disks are fit, degraded or unfit, and why.

    Read by NVIDIA's driver and the kernel; the disk is that of the current folder. Exit code 0: fit or degraded; 78: a
    device or the host is unfit. A host without NVIDIA's driver is judged by the rest. Never a proof of silent data
    corruption, nor of its absence.
    """
    from megasdc.ops.devices.render import survey_outcome
    from megasdc.ops.devices.telemetry import Telemetry

    telemetry = Telemetry(Path.cwd(), look_back_s=since_s, answer_s=FIRST_S)
    telemetry.start()
    telemetry.wait_for_first(FIRST_S)
    outcome = survey_outcome(telemetry.survey())
    telemetry.close()
    print_outcome(outcome, as_json=as_json)
    raise typer.Exit(outcome.exit_code)
