"""`megasdc stress`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megasdc.cli.app import Json, Out, app, input_option, print_outcome, stdout_to_stderr
from megasdc.cli.golden import Timeout
from megasdc.cli.options import option
from megasdc.common.errors import LaunchError, TraceError
from megasdc.common.program import echo

if TYPE_CHECKING:
    from megasdc.ops.stress.run import StressPlan


@dataclass(frozen=True)
class StressOptions:
    """Options of ``megasdc stress``."""

    hostfile: Path | None = option(
        None, "Lines `NAME slots=N`, N devices each; without: this host.", make=input_option, reads=LaunchError
    )
    rounds: int = option(3, "Rounds of all tests.", min=1)
    minutes: float | None = option(None, "Instead of --rounds: so long.", min=0)
    only: str = option("collectives,gemm,training,links", "Tests to run, of collectives,gemm,training,links.")
    golden: Path | None = option(
        None, "Folder of golden values; the files for each device are used.", make=input_option, reads=TraceError
    )
    record: bool = option(False, "Write what this host computes to the folder of --golden.")
    drill: str | None = option(
        None, "Inject the faults of a node profile on one host: a drill.", metavar="PROFILE[@HOST]"
    )
    timeout_s: Timeout = 300.0
    ssh_port: int | None = option(None, "Port of the hosts' sshd.", min=1)
    out: Out = None
    resume: bool = option(False, "Resume after the complete rounds of an earlier call with the same --out.")


@app.command("stress", epilog="Example: megasdc stress --hostfile hosts --minutes 30 --golden golden --out stress.json")
def stress(options: StressOptions, as_json: Json = False) -> None:
    """Repeat collectives, matrix products and a small training run on all hosts, and report which hosts are healthy.

    Links between pairs of hosts are measured, too, and slow ones named.

    Exit code 0: all are; 73: one is unhealthy, or one of several is and none can be named; 78: a host could not be
    tested to the end, or a link between hosts is slow. Ctrl-C ends the test with the verdict so far. With --out FILE
    the results of each host are kept in FILE.hosts/HOST.json after each round.
    """
    from rich.console import Console

    excluded = options.hostfile is not None or options.drill is not None or options.resume
    if options.record and (options.golden is None or excluded):
        raise typer.BadParameter(
            "--record needs --golden DIR, and works on this host alone: leave out --hostfile, --drill and --resume"
        )
    if options.resume and options.out is None:
        raise typer.BadParameter("--resume needs the --out FILE of the earlier call")
    with stdout_to_stderr():
        from megasdc.common.program import runs_bar
        from megasdc.ops.stress.record import record_stress
        from megasdc.ops.stress.run import stress_hosts as run_stress

        plan = _plan(options)
        with runs_bar(
            Console(stderr=True, quiet=as_json), "stress test", options.minutes, unit="rounds"
        ) as on_progress:
            if options.record:
                assert options.golden is not None, "checked above"
                outcome, files = record_stress(plan, options.golden, on_progress)
            else:
                outcome, files = run_stress(plan, on_progress), []
    print_outcome(outcome, out=options.out, as_json=as_json)
    for file in files:
        echo(f"golden values: {file}", err=True)
    raise typer.Exit(outcome.exit_code)


def _plan(options: StressOptions) -> StressPlan:
    from megasdc.ops.launch.hosts import LOCAL_HOST, read_hostfile
    from megasdc.ops.stress.drill import read_drill
    from megasdc.ops.stress.golden import GoldenFolder, load_folder
    from megasdc.ops.stress.run import StressPlan
    from megasdc.ops.stress.state import LINKS

    slots = {LOCAL_HOST: 0} if options.hostfile is None else read_hostfile(options.hostfile)
    if len(slots) == 1 and options.only == LINKS:
        raise typer.BadParameter("--only links needs a --hostfile of two hosts or more, there is one")
    return StressPlan(
        slots=slots,
        remote=options.hostfile is not None,
        rounds=options.rounds if options.minutes is None else None,
        minutes=options.minutes,
        only=_tests(options.only),
        timeout_s=options.timeout_s,
        drill=None if options.drill is None else read_drill(options.drill, list(slots)),
        golden=GoldenFolder() if options.golden is None or options.record else load_folder(options.golden),
        folder=None if options.out is None else options.out.with_name(f"{options.out.name}.hosts"),
        resume=options.resume,
        ssh_port=options.ssh_port,
    )


def _tests(text: str) -> tuple[str, ...]:
    from megasdc.ops.stress.state import TESTS

    asked = text.split(",")
    unknown = [name for name in asked if name not in TESTS]
    if unknown:
        raise typer.BadParameter(f"--only {text}: there is no test {unknown[0]!r}; there are {', '.join(TESTS)}")
    return tuple(name for name in TESTS if name in asked)
