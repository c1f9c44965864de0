"""Shared parts of the command line: the applications, groups of commands in help, common options, printed results."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megasdc import __version__
from megasdc.cli.options import as_typer_takes_it, option
from megasdc.common.errors import ConfigError, LaunchError, MegasdcError, StorageError
from megasdc.common.program import FULL, echo, output_console, why_unreadable, write_atomically

if TYPE_CHECKING:
    from megasdc.output.outcome import Outcome
    from megasdc.output.page import Page

_PLACES = "megasdc.places"
COMMAND = "-- COMMAND"
"""How help names any program with its arguments."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Start a run": (
        *("init", "check-config", "preflight", "launch", "run", "supervise", "test-hosts"),
        *("schema", "config-table"),
    ),
    "Watch a run, and see what came of it": ("top", "summary", "report", "export-metrics", "triage"),
    "Data": ("prepare-data", "verify-data", "inspect-data"),
    "Checkpoints and models": (
        "verify-checkpoint",
        "inspect-checkpoint",
        "compare",
        "convert-checkpoint",
        "manifest",
        "archive",
        "export-hf",
        "import-hf",
        "eval",
        "generate",
    ),
    "Trust the hardware, or not": (
        "drill",
        "check-determinism",
        "compare-traces",
        "golden",
        "devices",
        "stress",
        "coverage",
    ),
    "Plan": ("plan-audit", "plan-checkpoints", "plan-run", "dropcompute"),
    "Research": ("study", "sweep"),
}
"""Commands by heading, both in the order of help; also names that another version has."""

_OF_TRAINING = (
    "megasdc launch --num-ranks 2 --config FILE; a script of your own: megasdc run -- deepspeed --num_gpus 8 train.py"
)
_OF_STATE = "megasdc top RUN while it trains, megasdc summary RUN afterwards"
_OF_HOST = (
    "megasdc devices (this host's devices), megasdc check-determinism --config FILE (does it repeat bit for bit?), "
    "megasdc preflight --hostfile HOSTS --config FILE (everything before a long run)"
)
_OF_BEGIN = "megasdc init my.json, which asks what it needs; all at once in a fresh clone: bash launch/quickstart.sh"
_OF_DATA = "megasdc prepare-data --config FILE"
HINTS = {
    **dict.fromkeys(("train", "pretrain", "start", "resume", "restart"), _OF_TRAINING),
    **dict.fromkeys(("status", "ps", "watch", "monitor", "progress", "logs", "log", "show", "info"), _OF_STATE),
    **dict.fromkeys(("doctor", "check", "diagnose", "test", "selftest"), _OF_HOST),
    **dict.fromkeys(("new", "create", "setup", "configure", "quickstart"), _OF_BEGIN),
    **dict.fromkeys(("prepare", "preprocess", "tokenize", "data"), _OF_DATA),
    **dict.fromkeys(("validate", "lint", "config"), "megasdc check-config FILE --world-size N"),
    **dict.fromkeys(
        ("verify", "fsck"), "megasdc verify-checkpoint DIR, megasdc verify-data DIR, megasdc golden verify"
    ),
    **dict.fromkeys(("convert", "reshard"), "megasdc convert-checkpoint DIR --to universal"),
    "diff": "megasdc compare A B, megasdc compare-traces RUN_A RUN_B",
    **dict.fromkeys(("export", "import", "hf"), "megasdc export-hf DIR OUT, megasdc import-hf MODEL OUT"),
    **dict.fromkeys(
        ("evaluate", "benchmark", "bench"), "megasdc eval DIR; what a feature costs: python -m tools.bench"
    ),
    **dict.fromkeys(("plan",), "megasdc plan-run, megasdc plan-audit, megasdc plan-checkpoints"),
    **dict.fromkeys(
        ("protect", "guard", "attach"),
        "megasdc launch --protect WORD, megasdc run --protect WORD; in a script megasdc.attach(engine, protect=WORD)",
    ),
    "help": "megasdc --help, megasdc COMMAND --help",
    "version": "megasdc --version",
}
"""What does what people look for under a name that no command has."""


def help_group_of(command: str) -> str | None:
    """Heading of a command in help; None: it is in no group."""
    return next((heading for heading, names in GROUPS.items() if command in names), None)


def in_help_order(commands: list[str]) -> list[str]:
    """Commands in the order of help; those of no group are last."""
    order = [name for names in GROUPS.values() for name in names]
    return sorted(commands, key=lambda name: order.index(name) if name in order else len(order))


class _ShowsFlags:
    """Help shows no type for options that take no value."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters, flags among them without a type."""
        found = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if getattr(one, "is_flag", False) and one.metavar is None:
                one.metavar = ""
        return found


class _Command(_ShowsFlags, TyperCommand):
    """A command whose errors of the file system have a documented exit code, wherever they come from."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse it; a command line after ``--`` that was given without is refused with the ``--`` put where it goes.

        Options of DeepSpeed or of the script would else be refused, or taken as megasdc's own where names are the same.
        """
        takes_one = any("-- deepspeed" in (one.metavar or "") for one in self.params)
        begin = args.index("deepspeed") if takes_one and "deepspeed" in args and "--" not in args else len(args)
        if any(one.startswith("-") for one in args[begin:]):
            meant = shlex.join([*args[:begin], "--", *args[begin:]])
            ctx.fail(f"put -- before DeepSpeed's command line: {ctx.command_path} {meant}")
        unmarked = any(one.metavar == COMMAND for one in self.params) and not {"--", "-h", "--help"} & set(args)
        if unmarked and sum(not one.startswith("-") for one in args) > 1:  # else nothing is given that could be one
            ctx.fail(f"put -- before the command: {ctx.command_path} 2 -- PROGRAM ARGUMENT ...")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run it; see ``_explain``."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise _explain(error, ctx.meta.get(_PLACES, [])) from error


class _Group(_ShowsFlags, TyperGroup):
    """Commands of one subject."""


class _Program(_Group):
    """All commands, listed by group; a name that people type instead of a command is refused with what does it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of help."""
        return in_help_order(super().list_commands(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name."""
        if self.get_command(ctx, args[0]) is None and args[0] in HINTS:
            ctx.fail(f"No such command {args[0]!r}. What does it: {HINTS[args[0]]}.")
        return super().resolve_command(ctx, args)


def _explain(error: OSError, places: list[tuple[Path, type[MegasdcError]]]) -> Exception:
    """The error of megasdc's own for one of the file system: by errno, or by the argument in which the file lies."""
    if error.filename is None or not isinstance(error.filename, str | bytes):
        return error
    file = Path(os.fsdecode(error.filename))
    text = f"{file}: {error.strerror}"
    if error.errno in FULL:
        return StorageError(f"{text}; free space, or write to another place")
    around = [place for place in places if file.absolute().is_relative_to(place[0].absolute())]
    if around:
        return max(around, key=lambda place: len(place[0].absolute().parts))[1](text)
    return StorageError(text) if isinstance(error, PermissionError) else error


class Application(typer.Typer):
    """Commands of this program; see ``_Command`` and ``as_typer_takes_it``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": _Group, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Register a command, as typer does."""
        group = help_group_of(name or "") if self.info.cls is _Program else None
        register = super().command(name, cls=_Command, rich_help_panel=group, **options)

        def register_command(command: Any) -> Any:
            taken = as_typer_takes_it(command)
            taken.__doc__ = _unwrapped(taken.__doc__ or "")
            register(taken)
            return command

        return register_command


def _unwrapped(text: str) -> str:
    """A docstring as help shows it: its paragraphs are wrapped by the terminal; lists and indented lines stay."""
    paragraphs = [part.split("\n") for part in inspect.cleandoc(text).split("\n\n")]
    kept = ("-", "*", " ", "|")
    return "\n\n".join(
        "\n".join(lines) if any(line.startswith(kept) for line in lines) else " ".join(lines) for lines in paragraphs
    )


app = Application(
    name="megasdc",
    cls=_Program,
    help="Pretrain Megatron-core GPT models under DeepSpeed ZeRO-1, right and on time on imperfect hardware.",
    epilog="Example: megasdc check-config configs/smoke.json --world-size 2",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

golden_app = Application(
    help="Golden traces: what trusted hardware computed, and whether this hardware computes the same.",
    epilog="Example: megasdc golden record --config configs/smoke.json --out smoke.golden",
    no_args_is_help=True,
)
app.add_typer(golden_app, name="golden", rich_help_panel=help_group_of("golden"))

dropcompute_app = Application(
    help="DropCompute: predict the gain from dropping late micro-batches, and see what a run waited for.",
    epilog="Example: megasdc dropcompute simulate --replicas 64 --micro-batches 12 --communication 0.5",
    no_args_is_help=True,
)
app.add_typer(dropcompute_app, name="dropcompute", rich_help_panel=help_group_of("dropcompute"))

archive_app = Application(
    help="The archive of checkpoints: any folder or store, compressed, each block stored once, verified.",
    epilog="Example: megasdc archive push runs/smoke/checkpoints /backup/archive",
    no_args_is_help=True,
)
app.add_typer(archive_app, name="archive", rich_help_panel=help_group_of("archive"))


def input_argument(reads: type[MegasdcError], *, missing: bool = False, **settings: Any) -> Any:
    """An argument that names what is read; see ``input_option``."""
    return typer.Argument(readable=False, callback=_readable(reads, missing), **settings)


def input_option(*names: str, reads: type[MegasdcError], missing: bool = False, **settings: Any) -> Any:
    """An option that names a file or folder to read.

    What nobody can read is refused before the work: no right to, a named pipe, a device.

    Args:
        *names: of the option.
        reads: the error where it cannot be read, also later.
        missing: nothing there is refused at once too, else by whatever reads it.
        **settings: as of ``typer.Option``.
    """
    return typer.Option(*names, readable=False, callback=_readable(reads, missing), **settings)


def _readable(reads: type[MegasdcError], missing: bool) -> Callable[[typer.Context, Any], Any]:
    def check(context: typer.Context, value: Any) -> Any:
        given = value if isinstance(value, list | tuple) else [] if value is None else [value]
        for path in given if not context.resilient_parsing else []:
            if problem := why_unreadable(path, missing=missing):
                raise reads(f"{path} {problem}")
            context.meta.setdefault(_PLACES, []).append((path, reads))
        return value

    return check


def output_option(*names: str, **settings: Any) -> Any:
    """An option that names a file to write, which is checked before the work."""
    return typer.Option(*names, readable=False, callback=writable, **settings)


def output_folder(**settings: Any) -> dict[str, Any]:
    """Settings of an argument or option that names a folder to write."""
    return noted_as(StorageError, **settings)


def noted_as(kind: type[MegasdcError], **settings: Any) -> dict[str, Any]:
    """Settings of an argument or option whose files are not looked at before the work.

    Args:
        kind: error of those in it that cannot be read or written.
        **settings: further ones.
    """

    def note(context: typer.Context, value: Any) -> Any:
        given = value if isinstance(value, list | tuple) else [] if value is None else [value]
        context.meta.setdefault(_PLACES, []).extend((path, kind) for path in given)
        return value

    return {"readable": False, "callback": note, **settings}


def writable(context: typer.Context, path: Path | None) -> Path | None:
    """Check before the work that its result can be written; a callback of options.

    Raises:
        StorageError: it cannot be.
    """
    if path is None or context.resilient_parsing:
        return path
    context.meta.setdefault(_PLACES, []).append((path, StorageError))
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if path.exists() and not path.is_file():  # a device or a pipe
            if not os.access(path, os.W_OK):
                raise PermissionError(None, "Permission denied")
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written: {error.strerror}; choose another --out")


Overrides = Annotated[
    tuple[str, ...],
    typer.Option("--set", metavar="PATH=VALUE", help="Override one value; may be repeated. The value is read as JSON."),
]
ConfigOption = Annotated[Path, input_option("--config", reads=ConfigError, help="JSON configuration file.")]
LauncherArgs = Annotated[
    tuple[str, ...], typer.Argument(metavar="[-- OPTIONS]", help="More options for DeepSpeed's launcher.")
]
Script = Annotated[
    Path | None, input_option("--script", reads=LaunchError, help="Training script; default: pretrain_gpt.py.")
]
AllowChanged = Annotated[
    tuple[str, ...],
    typer.Option(
        "--allow-changed",
        metavar="PATH",
        help="Allow a resume with a value of this field that differs from the checkpoint's; may be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Out = Annotated[Path | None, output_option("--out", help="Also write the result, whole, as JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from megasdc.common.versions import describe_versions

        echo(f"megasdc {__version__}\n{describe_versions()}")
        raise typer.Exit


@app.callback()
def _main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and exit.")
    ] = False,
) -> None:
    pass


def hush_missing_accelerator() -> None:
    """On a host without a device of a GPU, DeepSpeed does not warn that it found none when a command imports it.

    Every other line of DeepSpeed stays, and this one too where there is a device that it cannot use.
    """
    logging.getLogger("DeepSpeed").addFilter(is_unexpected)  # its logger, which it makes when it is imported


def is_unexpected(record: logging.LogRecord) -> bool:
    """Whether a line of DeepSpeed says more than that this host, which has no device of a GPU, has no accelerator."""
    expected = record.getMessage().startswith("Setting accelerator to CPU.") and not (
        list(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    )
    return not expected


def stdout_to_stderr() -> contextlib.AbstractContextManager[Any]:
    """Send what is printed to standard error: DeepSpeed logs to whatever is standard output when it is imported."""
    return contextlib.redirect_stdout(sys.stderr)


def print_text(result: Any, as_json: bool, text: str | None = None) -> None:
    """Print a result as JSON (``json_value``) or as text; None: what its ``render`` makes, of several one a line."""
    if as_json:
        echo(json.dumps(json_value(result), indent=2))
    elif text is not None:
        echo(text)
    else:
        echo("\n".join(one.render() for one in (result if isinstance(result, list) else [result])))


def json_value(result: Any) -> Any:
    """A result as JSON holds it: what its ``as_dict`` makes, or the fields of a dataclass; of a list each entry."""
    if isinstance(result, list):
        return [json_value(one) for one in result]
    if hasattr(result, "as_dict"):
        return result.as_dict()
    return asdict(result) if is_dataclass(result) and not isinstance(result, type) else result


def print_result(result: Any, render: Callable[..., None], *, out: Path | None, as_json: bool) -> None:
    """Print a result for people or as JSON, and then write it as JSON where that was asked for.

    Args:
        result: see ``json_value``.
        render: writes it to a rich console: `render(result, console)`.
        out: file to write, or None.
        as_json: print JSON instead of rendering.

    Raises:
        StorageError: the file cannot be written.
    """
    text = json.dumps(json_value(result), indent=2)
    if as_json:
        echo(text)
    else:
        render(result, output_console())
    if out is None:
        return
    try:
        write_atomically(out, text + "\n")
    except OSError as error:
        raise _unwritable(out, error) from error


def print_outcome(outcome: Outcome[Any], *, out: Path | None = None, as_json: bool = False) -> None:
    """Print an outcome for people or as JSON, and write it as JSON where that was asked for; see ``print_result``."""
    from megasdc.output.page import print_page

    print_result(outcome, lambda found, console: print_page(found.page, console), out=out, as_json=as_json)


@dataclass(frozen=True)
class Output:
    """Options that say in which forms a result is wanted."""

    figure: Path | None = option(None, "Draw the result as an HTML page.", make=output_option)
    out: Out = None
    as_json: Json = False

    def write(self, result: Any, build: Callable[[Any], Page]) -> None:
        """Print the result's page, and write it as JSON and as a page where that was asked for."""
        from megasdc.output.html import write_page
        from megasdc.output.page import printer

        print_result(result, printer(build), out=self.out, as_json=self.as_json)
        if self.figure is not None:
            write_page(build(result), self.figure, "--figure")
