"""`megasdc golden record` and `golden verify`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import (
    ConfigOption,
    Json,
    Out,
    Overrides,
    golden_app,
    input_argument,
    input_option,
    output_option,
    print_outcome,
    stdout_to_stderr,
)
from megasdc.cli.options import option
from megasdc.common.errors import ConfigError, TraceError
from megasdc.common.program import echo
from megasdc.common.words import number_of

Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Runs of each case.")]
Minutes = Annotated[float | None, typer.Option("--minutes", min=0, help="Instead of --repeats: run for this long.")]
# Every process gives a sign of life each second; a timeout near that would take a busy one for a frozen one.
Timeout = Annotated[float, typer.Option("--timeout", min=5, help="Seconds without progress that count as a hang.")]
Faults = Annotated[
    Path | None,
    input_option("--faults", reads=ConfigError, help="Drill: JSON file of faults to inject into the ranks."),
]


@golden_app.command("record", epilog="Example: megasdc golden record --config configs/smoke.json --out smoke.golden")
def golden_record(
    config: ConfigOption,
    out: Annotated[Path, output_option("--out", help="The golden file to write; replaced if it exists.")],
    overrides: Overrides = (),
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Data-parallel size of the golden layout.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each case in each set of processes.")] = 3,
    timeout_s: Timeout = 600.0,
    as_json: Json = False,
) -> None:
    """Run the configuration's workload - seeded weights and tokens, a few steps - and keep its checksums.

    It runs in two sets of fresh processes; a workload that does not repeat bit for bit is refused. The file holds for
    devices, versions and layout like these; its key says which.
    """
    from rich.console import Console

    with stdout_to_stderr():
        from megasdc.common.program import runs_bar
        from megasdc.config.load import load_config
        from megasdc.ops.golden.record import record_golden_trace

        with runs_bar(Console(stderr=True), "recording") as on_progress:
            golden = record_golden_trace(
                load_config(config, overrides),
                out,
                replicas=replicas,
                repeats=repeats,
                timeout_s=timeout_s,
                on_progress=on_progress,
            )
    results = sum(len(trace) for trace in golden.traces.values())
    if as_json:
        echo(json.dumps({"file": str(out), "key": golden.key, "results": results, "repeats": golden.repeats}))
        return
    cases = number_of(len(golden.cases), "case")
    echo(f"{out}: {number_of(results, 'result')} of {golden.layout}, {cases}, equal in {golden.repeats} runs")
    for name, value in golden.key.items():
        echo(f"  {name}: {value}")


@dataclass(frozen=True)
class GoldenVerifyOptions:
    """Options of ``megasdc golden verify``."""

    file: Annotated[Path | None, input_argument(TraceError, help="The golden file; not with --library.")] = None
    library: Path | None = option(
        None, "Folder of *.golden files; the one for this machine is used.", make=input_option, reads=TraceError
    )
    local: int | None = option(
        None,
        "Verify so many devices of this host, each alone; 0: all of them. Without an accelerator: so many processes "
        "side by side on the processor; 0: one.",
        min=0,
    )
    repeats: Repeats = 3
    minutes: Minutes = None
    timeout_s: Timeout = 600.0
    faults: Faults = None


@golden_app.command("verify", epilog="Example: megasdc golden verify smoke.golden --repeats 10")
def golden_verify(options: GoldenVerifyOptions, out: Out = None, as_json: Json = False) -> None:
    """Compute the workload of a golden file on this host and compare every result.

    Exit code 0: every rank healthy; 73: some rank computed a different result; rank and first mismatch are named;
    75, 79: a rank hung or died; 80: not comparable, or the file is not a golden trace. Over many hosts:
    `deepspeed --hostfile H --module megasdc.entry.golden_verify FILE`.
    """
    from rich.console import Console

    with stdout_to_stderr():
        from megasdc.common.program import runs_bar
        from megasdc.ops.golden.drill import load_drill
        from megasdc.ops.golden.verify import verify_here
        from megasdc.parallel.local_ranks import count_accelerators
        from megasdc.sdc.golden import load_header

        devices = None if options.local is None else options.local or count_accelerators() or 1
        file = _golden_file(options, devices)
        drill = None if options.faults is None else load_drill(options.faults, load_header(file))
        with runs_bar(Console(stderr=True), "verifying", options.minutes) as on_progress:
            outcome = verify_here(
                file,
                devices=devices,
                repeats=options.repeats,
                minutes=options.minutes,
                timeout_s=options.timeout_s,
                drill=drill,
                on_progress=on_progress,
            )
    print_outcome(outcome, out=out, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


def _golden_file(options: GoldenVerifyOptions, devices: int | None) -> Path:
    """The file that was named, or the one of the library that is for this machine."""
    from megasdc.ops.golden.library import choose_golden

    if (options.file is None) == (options.library is None):
        raise typer.BadParameter("give either a golden file or --library DIR")
    if options.file is not None:
        return options.file
    assert options.library is not None, "checked above"
    file = choose_golden(options.library, None if devices is None else 1)
    echo(f"{file} is for this machine", err=True)
    return file
