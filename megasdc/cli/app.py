"""The command's parts that all its rooms share: the applications, common options, how a result is printed."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from megasdc import __version__
from megasdc.errors import StorageError

app = typer.Typer(
    name="megasdc",
    help="Pretrain Megatron-core GPT models under DeepSpeed ZeRO-1, right and on time on imperfect hardware.",
    epilog="Example: megasdc check-config configs/smoke.json --world-size 2",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench_app = typer.Typer(
    help="Measure: each benchmark states its bar, its machine and its interval.",
    epilog="Example: megasdc bench train --against plain --blocks 30",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")

golden_app = typer.Typer(
    help="Golden traces: what trusted hardware computed, and whether this hardware computes the same.",
    epilog="Example: megasdc golden record --config configs/smoke.json --out smoke.golden",
    no_args_is_help=True,
)
app.add_typer(golden_app, name="golden")

dropcompute_app = typer.Typer(
    help="DropCompute: plan what leaving late micro-batches out would bring, and see what a run waited for.",
    epilog="Example: megasdc dropcompute simulate --replicas 64 --micro-batches 12 --communication 0.5",
    no_args_is_help=True,
)
app.add_typer(dropcompute_app, name="dropcompute")


def writable(path: Path | None) -> Path | None:
    """Check before the work that its result can be written; a callback of options.

    Raises:
        StorageError: it cannot be.
    """
    if path is None:
        return None
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written: {error.strerror}; choose another --out")


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override one value; may be repeated. The value is read as JSON."),
]
ConfigOption = Annotated[Path, typer.Option("--config", help="JSON configuration file.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the result, whole, as JSON.", callback=writable)]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megasdc {__version__}")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def stdout_kept_clean() -> contextlib.AbstractContextManager[Any]:
    """Send what is printed to standard error: DeepSpeed logs to whatever is standard output when it is imported."""
    return contextlib.redirect_stdout(sys.stderr)


def print_result(result: Any, render: Callable[..., None], *, out: Path | None, as_json: bool) -> None:
    """Print a result for people or as JSON, and then write it as JSON where that was asked for.

    Args:
        result: anything with `as_dict()`.
        render: writes it to a rich console: `render(result, console)`.
        out: file to write, or None.
        as_json: print JSON instead of rendering.

    Raises:
        StorageError: the file cannot be written.
    """
    from rich.console import Console

    text = json.dumps(result.as_dict(), indent=2)
    if as_json:
        typer.echo(text)
    else:
        render(result, Console())
    if out is None:
        return
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(out, error) from error
