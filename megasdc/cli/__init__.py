"""The `megasdc` command: parses arguments and calls one library function each.

torch takes seconds to import, so every command imports what it needs when it runs.
"""

from __future__ import annotations

from megasdc.cli.app import app, hush_missing_accelerator
from megasdc.common.program import run_program

# isort: off
from megasdc.cli import config, init, run, preflight, supervise, checkpoints, compare, archive  # noqa: F401
from megasdc.cli import interchange, golden, devices, stress, drill, hosts  # noqa: F401
from megasdc.cli.plan import audits, checkpoints as plan_checkpoints, runs  # noqa: F401
from megasdc.cli import dropcompute, study, sweep, report, metrics, triage  # noqa: F401
# isort: on

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; an error of megasdc's own becomes one message and its documented exit code."""
    hush_missing_accelerator()
    run_program(lambda: app(prog_name="megasdc"), "megasdc")
