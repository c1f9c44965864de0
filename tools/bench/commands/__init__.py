"""The commands of ``python -m tools.bench``: each parses its options and calls one function."""

from __future__ import annotations

from megasdc.common.program import run_program
from tools.bench.commands.app import app

# isort: off
from tools.bench.commands import training, detection, bounds, checkpoints, drops, health, supervised, reference, figures  # noqa: F401 - in the order of --help
# isort: on

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; an error of megasdc's own becomes one message and its documented exit code."""
    run_program(lambda: app(prog_name="python -m tools.bench"), "bench")
