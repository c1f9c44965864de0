"""`python -m tools.bench reference`: the documentation of these commands, generated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from megasdc.cli.app import input_option
from megasdc.cli.config import render_commands, update_tables
from megasdc.common.errors import DataError
from tools.bench.commands.app import app


@app.command("reference", epilog="Example: python -m tools.bench reference --check docs/reference/command-line.md")
def reference(
    write: Annotated[
        Path | None, input_option("--write", reads=DataError, help="Put it between the file's markers `bench`.")
    ] = None,
    check: Annotated[
        Path | None, input_option("--check", reads=DataError, help="Change nothing; exit code 1 if it is out of date.")
    ] = None,
) -> None:
    """Keep the documentation of these commands in a file up to date."""
    update_tables(write, check, {"bench": _render}, "python -m tools.bench reference")


def _render() -> str:
    return render_commands(app, "python -m tools.bench")
