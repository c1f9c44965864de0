#!/usr/bin/env python3
"""Entry script for the ``deepspeed`` launcher: verifies every rank of every node against a golden trace.

deepspeed --hostfile hosts --module megasdc.entry.golden_verify smoke.golden --repeats 10 --out result.json
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from megasdc.cli.app import Json, print_outcome, stdout_to_stderr
from megasdc.cli.golden import Faults, Minutes, Repeats, Timeout
from megasdc.cli.options import as_typer_takes_it
from megasdc.common.errors import MegasdcError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class RankOptions:
    """Options of what each rank computes."""

    repeats: Repeats = 3
    minutes: Minutes = None
    timeout_s: Timeout = 600.0
    faults: Faults = None


def verify(
    runs: RankOptions,
    golden: Annotated[Path | None, typer.Argument(help="The golden file; omit it with --library.")] = None,
    library: Annotated[
        Path | None, typer.Option("--library", help="Folder of *.golden files; each node takes the one for it.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Rank 0 also writes the result as JSON.")] = None,
    as_json: Json = False,
    _local_rank: Annotated[int | None, typer.Option("--local_rank", hidden=True)] = None,  # LOCAL_RANK counts
) -> None:
    """Verify every rank of every node against a golden trace.

    The golden file, or the folder, must lie at the same path on every node. Rank 0 prints a table; exit codes are
    listed in docs/reference/exit-codes.md.
    """
    path = golden or library
    if path is None or (golden and library):
        raise typer.BadParameter("give either a golden file or --library DIR")
    with stdout_to_stderr():
        from rich.console import Console

        from megasdc.common.program import runs_bar
        from megasdc.ops.golden.node import verify_as_launched
        from megasdc.output.outcome import Outcome
        from megasdc.sdc.golden import GoldenVerdict

        console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    with ExitStack() as bar:

        def show(outcome: Outcome[GoldenVerdict]) -> None:
            bar.close()
            print_outcome(outcome, out=out, as_json=as_json)

        code = verify_as_launched(
            path,
            **vars(runs),
            on_result=show,
            on_progress=bar.enter_context(runs_bar(console, "verifying", runs.minutes)),
        )
    raise typer.Exit(code)


app.command()(as_typer_takes_it(verify))


def main() -> None:
    """Run the command line; an error of megasdc's own becomes one message and its documented exit code."""
    try:
        app()
    except MegasdcError as error:
        print(f"rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
