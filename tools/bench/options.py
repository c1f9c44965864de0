"""Options of benchmarks: fields of dataclasses that carry name, help and range, from which commands are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from megasdc.cli.app import Application, Json, Out, print_result, stdout_kept_clean
from megasdc.errors import ConfigError

_SOURCE = "the benchmark's options"
_OPTION, _PART = "option", "part"


@dataclass(frozen=True)
class Option:
    """Description of a field as an option of the command line.

    Args:
        name: with its dashes; empty: that of the field.
        least: smallest value; smaller ones are refused together with all other wrong options.
        kind: type on the command line; None: that of the field.
        shown: default on the command line, if it is not the field's.
        read: from what was given to the field's value.
        settings: more for ``typer.Option``.
    """

    help: str
    name: str = ""
    least: int | None = None
    kind: Any = None
    shown: Any = ...
    read: Callable[[Any], Any] = lambda given: given
    settings: dict[str, Any] | None = None


def option(default: Any, help: str, name: str = "", **more: Any) -> Any:
    """A field of a dataclass that is an option of its command.

    Args:
        **more: further arguments of ``Option``; others are settings of ``typer.Option``.
    """
    own = {key: more.pop(key) for key in ("least", "kind", "shown", "read") if key in more}
    return field(default=default, metadata={_OPTION: Option(help, name, **own, settings=more)})


def repeated(default: tuple[int, ...], help: str, name: str = "", **more: Any) -> Any:
    """A field of several whole numbers, whose option may be repeated."""
    return option(default, help, name, kind=list[int] | None, shown=None, read=lambda a: tuple(a or default), **more)


def numbers(name: str, default: tuple[float, ...] | None, help: str, example: str, shown: str | None = None) -> Any:
    """A field of several numbers, whose option has commas between them; one that is not given stays None.

    Args:
        example: of what can be given.
        shown: default on the command line.
    """

    def read(text: str | None) -> tuple[float, ...] | None:
        return None if text is None else parse_numbers(name, text, example)

    return option(default, help, name, kind=str if shown else str | None, shown=shown, read=read)


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


def part_of(default: Any, *names: str, **changed: str | Option) -> Any:
    """A field that is a dataclass, of whose fields some are options of the command.

    Args:
        default: of the field.
        *names: of those options, in the order of the command.
        **changed: those with another help than the dataclass gives them, or described anew.
    """
    return field(default=default, metadata={_PART: (default, names, changed)})


class Options:
    """A dataclass of options, which are checked together."""

    def __post_init__(self) -> None:
        wrong = []
        for one in fields(self):  # type: ignore[arg-type]
            described = one.metadata.get(_OPTION)
            if described is None or described.least is None:
                continue
            value = getattr(self, one.name)
            wrong += [
                f"{_name_of(one, described)}: {number} must be at least {described.least}"
                for number in (value if isinstance(value, tuple) else (value,))
                if number < described.least
            ]
        if wrong := [*wrong, *self.problems()]:
            raise ConfigError(wrong, source=_SOURCE)

    def problems(self) -> list[str]:
        """Other options that are out of range, one sentence each."""
        return []


def _name_of(one: Field[Any], described: Option) -> str:
    return described.name or f"--{one.name.replace('_', '-')}"


@dataclass(frozen=True)
class _Given:
    """One option of a command: the path of its field through parts, its parameter, and how its value is read."""

    path: tuple[str, ...]
    parameter: inspect.Parameter
    read: Callable[[Any], Any]


def _options_of(kind: type) -> Iterator[_Given]:
    """Those of a dataclass, in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    for one in fields(kind):
        if _OPTION in one.metadata:
            yield _given(one, one.metadata[_OPTION], hints[one.name], one.default)
        elif _PART in one.metadata:
            inner, names, changed = one.metadata[_PART]
            inner_fields, inner_hints = {each.name: each for each in fields(inner)}, get_type_hints(type(inner))
            for name in dict.fromkeys((*names, *changed)):
                each, described = inner_fields[name], changed.get(name)
                own = each.metadata.get(_OPTION)
                if not isinstance(described, Option):
                    described = replace(own or Option(""), **({"help": described} if described else {}))
                yield _given(each, described, inner_hints[name], getattr(inner, name), one.name)


def _given(one: Field[Any], described: Option, hint: Any, default: Any, *parts: str) -> _Given:
    name = _name_of(one, described)
    kind = hint if described.kind is None else described.kind
    shown = default if described.shown is ... else described.shown
    settings = described.settings or {}
    make = settings.get("make", typer.Option)
    rest = {key: value for key, value in settings.items() if key != "make"}
    parameter = inspect.Parameter(
        name.strip("-").replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=shown,
        annotation=Annotated[kind, make(name, help=described.help, **rest)],
    )
    return _Given((*parts, one.name), parameter, described.read)


def add_command(app: Application, name: str, example: str, options: type | None = None) -> Callable[[Any], Any]:
    """Make a command of a function that measures.

    Its docstring is the command's help; its result is printed, or written as JSON, and a missed bar is exit code 1. It
    returns the result, or the result and what is called once that is printed.

    Args:
        example: arguments, shown below its help.
        options: dataclass whose options the command has in place of the function's parameter ``options``.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        given = [] if options is None else list(_options_of(options))
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]  # without on_progress
        parameters: list[inspect.Parameter] = []
        for one in own:
            parameters += [each.parameter for each in given] if one.name == "options" else [one]
        for name_, kind, default in (("out", Out, None), ("as_json", Json, False)):
            parameters.append(
                inspect.Parameter(name_, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            )
        keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]

        @wraps(function)
        def command(*, out: Path | None, as_json: bool, **values: Any) -> None:
            from megasdc.progress import progress_bars

            if options is not None:
                values["options"] = _build(options, given, values)
            with stdout_kept_clean(), progress_bars() as on_progress:
                found = function(on_progress, **values)
            result, finish = found if isinstance(found, tuple) else (found, None)
            print_result(result, type(result).render, out=out, as_json=as_json)
            if finish is not None:
                finish()
            raise typer.Exit(int(not result.passed))

        command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in keywords}
        app.command(name, epilog=f"Example: python -m tools.bench {name} {example}")(command)
        return function

    return register


def _build(options: type, given: Sequence[_Given], values: dict[str, Any]) -> Any:
    """The options of what was given on the command line; takes that out of ``values``."""
    top: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for one in given:
        value = one.read(values.pop(one.parameter.name))
        if len(one.path) == 1:
            top[one.path[0]] = value
        else:
            inner.setdefault(one.path[0], {})[one.path[1]] = value
    for each in fields(options):
        if each.name in inner:
            top[each.name] = replace(each.metadata[_PART][0], **inner[each.name])
    return options(**top)
