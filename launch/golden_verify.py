#!/usr/bin/env python3
"""Entry script for the ``deepspeed`` launcher: verifies every rank of every node against a golden trace.

deepspeed --hostfile hosts launch/golden_verify.py smoke.golden --repeats 10 --out result.json

The golden file must lie at the same path on every node. Rank 0 prints a table; exit codes are listed in the README.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path


def main() -> int:
    """Parse the command line, verify, print on rank 0, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path, nargs="?", help="the golden file; left out with --library")
    parser.add_argument("--library", type=Path, help="folder of *.golden files; each node takes the one for it")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case")
    parser.add_argument("--minutes", type=float, help="instead of --repeats: so long")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without progress: a hang")
    parser.add_argument("--faults", type=Path, help="a drill: JSON file of faults that harm ranks on purpose")
    parser.add_argument("--out", type=Path, help="rank 0 also writes the result as JSON")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--local_rank", type=int, help="given by the launcher; the environment's LOCAL_RANK counts")
    arguments = parser.parse_args()
    if (arguments.golden is None) == (arguments.library is None):
        parser.error("give either a golden file or --library DIR")

    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to what is stdout when it is imported
        from rich.console import Console

        from megasdc.errors import MegasdcError
        from megasdc.golden.drill import load_drill
        from megasdc.golden.library import choose_golden
        from megasdc.golden.node import verify_as_launched
        from megasdc.golden.progress import run_progress
        from megasdc.golden.result import render_result

    quiet = os.environ.get("RANK", "0") != "0"
    try:
        with run_progress(Console(stderr=True, quiet=quiet), "ranks that have answered") as on_progress:
            code, result = verify_as_launched(
                arguments.golden or choose_golden(arguments.library, int(os.environ.get("WORLD_SIZE", "1"))),
                repeats=arguments.repeats,
                minutes=arguments.minutes,
                timeout_s=arguments.timeout,
                drill=None if arguments.faults is None else load_drill(arguments.faults),
                on_progress=on_progress,
            )
    except MegasdcError as error:
        print(f"rank {os.environ.get('RANK', '?')}: {error}", file=sys.stderr)
        return error.exit_code
    if result is not None:
        text = json.dumps(result.as_dict(), indent=2)
        if arguments.out is not None:
            arguments.out.write_text(text + "\n", encoding="utf-8")
        if arguments.json:
            print(text)
        else:
            render_result(result, Console())
    return code


if __name__ == "__main__":
    sys.exit(main())
