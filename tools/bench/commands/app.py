"""The application of ``python -m tools.bench``."""

from __future__ import annotations

from megasdc.cli.app import Application

app = Application(
    name="python -m tools.bench",
    help="Measure: each benchmark states its bar, its machine and its interval; exit code 1 if a bar is missed.",
    epilog="Example: python -m tools.bench train --against plain --blocks 30",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
