"""What options of benchmarks have beside those of commands: ranges checked together, numbers with commas, units."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import field, fields
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from megasdc.cli import options
from megasdc.cli.app import Application, Json, Out, output_option, print_result, stdout_to_stderr
from megasdc.common.errors import ConfigError

_SOURCE = "the benchmark's options"
_LEAST = "least"
"""Key of a field's metadata: its name on the command line and its smallest value."""


def option(default: Any, help: str, *names: str, least: int | None = None, **settings: Any) -> Any:
    """A field of a dataclass that is an option of its command, as of ``megasdc.cli.options``.

    Args:
        least: smallest value; smaller ones are refused by ``Options``, together with all other wrong options.
    """
    declared = options.option(default, help, *names, **settings)
    checked = {} if least is None else {_LEAST: (names, least)}
    return field(default=default, metadata={**declared.metadata, **checked})


Log = Annotated[Path | None, output_option("--log", help="File that keeps what is finished; that is not repeated.")]
"""Where a campaign that was ended goes on from."""


def parsed(default: str, help: str, parse: Callable[[str], Any]) -> Any:
    """A field whose option is a text, of which the value is made."""
    return option(parse(default), help, given=default, callback=parse)


def numbers(default: tuple[float, ...] | None, help: str, name: str, example: str) -> Any:
    """A field of several numbers, whose option has commas between them; None where it is not given and has no default.

    Args:
        example: of what can be given.
    """

    def read(text: str | None) -> tuple[float, ...] | None:
        return None if text is None else parse_numbers(name, text, example)

    return option(default, help, name, given=default and ",".join(map(str, default)), callback=read)


def in_unit(unit: float, default: float, help: str, name: str, least: float) -> Any:
    """A field whose option is in a unit of its own.

    Args:
        unit: factor from the option's value to the field's.
        least: smallest value of the option.
    """
    return option(default, help, name, given=round(default / unit, 6), callback=lambda value: value * unit, min=least)


def parse_numbers(name: str, text: str, example: str) -> tuple[float, ...]:
    """Numbers with commas between; an empty text is none of them.

    ``name`` and ``example`` are the option's, for the message of ConfigError if one is no number.
    """
    try:
        return tuple(float(one) for one in text.split(",") if one.strip())
    except ValueError:
        raise ConfigError(f"{name}: {text!r} must be numbers separated by commas, such as {example}") from None


def parse_layouts(text: str) -> tuple[tuple[int, int, int], ...]:
    """Read layouts such as ``1x1x2,2x1x1``.

    Raises:
        ConfigError: one is not three positive numbers.
    """
    found = []
    for part in text.split(","):
        sizes = part.strip().split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ConfigError(f"--layouts: {part!r} is not tensor x pipeline x data, such as 2x1x2")
        tensor, pipeline, data = map(int, sizes)
        found.append((tensor, pipeline, data))
    return tuple(found)


class Options:
    """A dataclass of options, which are checked together."""

    def __post_init__(self) -> None:
        wrong = []
        for one in fields(self):  # type: ignore[arg-type]
            if _LEAST not in one.metadata:
                continue
            names, least = one.metadata[_LEAST]
            name, value = names[0] if names else options.name_of(one.name), getattr(self, one.name)
            wrong += [
                f"{name}: {number} must be at least {least}"
                for number in (value if isinstance(value, tuple) else (value,))
                if number is not None and number < least
            ]
        if wrong := [*wrong, *self.problems()]:
            raise ConfigError(wrong, source=_SOURCE)

    def problems(self) -> list[str]:
        """Other options that are out of range, one sentence each."""
        return []


def add_command(app: Application, name: str, example: str) -> Callable[[Any], Any]:
    """Make a command of a function that measures.

    Its docstring is the command's help; its result is printed, or written as JSON, and a missed bar is exit code 1. It
    returns the result, or the result and what is called once that is printed.

    Args:
        example: arguments, shown below its help.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(*, out: Path | None, as_json: bool, **values: Any) -> None:
            from megasdc.common.program import progress_bars

            with stdout_to_stderr(), progress_bars() as on_progress:
                found = function(on_progress, **values)
            result, finish = found if isinstance(found, tuple) else (found, None)
            print_result(result, type(result).render, out=out, as_json=as_json)
            if finish is not None:
                finish()
            raise typer.Exit(int(not result.passed))

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]  # without on_progress
        printed = [
            Parameter("out", Parameter.KEYWORD_ONLY, default=None, annotation=Out),
            Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json),
        ]
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [one.replace(kind=Parameter.KEYWORD_ONLY) for one in [*own, *printed]]
        )
        app.command(name, epilog=f"Example: python -m tools.bench {name} {example}")(command)
        return function

    return register
