"""Parameters of commands beyond typer's own: dataclasses of options, and options that may be repeated."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from megasdc.common.program import at_home

_BUILD = "option"
"""Key of a field's metadata: builds the parameter that typer takes, from the field's name, type and default."""


def option(
    default: Any,
    help: str,
    *names: str,
    make: Callable[..., Any] = typer.Option,
    given: Any = ...,
    **settings: Any,
) -> Any:
    """A field of a dataclass that is an option of a command.

    Args:
        default: where it is not given.
        help: for people.
        *names: of the option; without any it has the name of the field.
        make: ``typer.Option``, or one of ``megasdc.cli.app`` that makes one.
        given: default on the command line, whose type the option has (None: text), where ``callback`` makes the field's
            value of what is given there; without, both are the field's own.
        **settings: of ``make``.
    """

    def build(name: str, kind: Any, default: Any) -> Parameter:
        if given is not ...:
            kind, default = (str if given is None else type(given)) | None, given
        setting = make(*(names or (name_of(name),)), help=help, **settings)
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, setting])

    return dataclasses.field(default=default, metadata={_BUILD: build})


def name_of(field: str) -> str:
    """The option of a field, where it has no name of its own."""
    return f"--{field.replace('_', '-')}"


def as_typer_takes_it(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters are those that typer knows.

    In place of a parameter whose type is a dataclass stand the fields of that class that are options: declared by
    ``option``, or as parameters are, with ``Annotated``; likewise in place of a field whose type is a dataclass. So a
    command of many options lists each once, and gets them as one object. A parameter or field of type ``tuple[T, ...]``
    with a tuple as its default may be repeated. Of every path ``~`` becomes the home folder, see ``at_home``.

    Args:
        command: with any parameters that typer knows, and these.
    """
    signature = inspect.signature(command, eval_str=True)
    classes = {name: one.annotation for name, one in signature.parameters.items() if _is_option_class(one.annotation)}
    parameters: list[Parameter] = []
    for name, one in signature.parameters.items():
        parameters += _parameters_of(classes[name]) if name in classes else [one]
    repeated = {one.name: one.default for one in parameters if isinstance(one.default, tuple)}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values |= {name: tuple(values[name] or default) for name, default in repeated.items()}
        command(**{name: _filled(kind, values) for name, kind in classes.items()}, **values)

    taken = [_at_home(_as_list(one) if one.name in repeated else one) for one in parameters]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=Parameter.KEYWORD_ONLY) for one in taken]
    )
    run.__annotations__ = {one.name: one.annotation for one in taken}
    return run


def _is_option_class(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _options_of(base: Any) -> Iterator[tuple[dataclasses.Field[Any], Any, Any]]:
    """The fields of a class, or of an object that holds their defaults, that are or have options: type and default."""
    hints = get_type_hints(base if isinstance(base, type) else type(base), include_extras=True)
    for field in dataclasses.fields(base):
        hint = hints[field.name]
        if _is_option_class(hint):
            yield field, hint, getattr(base, field.name, hint)
        elif _BUILD in field.metadata or get_origin(hint) is Annotated:
            yield field, hint, getattr(base, field.name, Parameter.empty)


def _parameters_of(base: Any) -> Iterator[Parameter]:
    for field, hint, default in _options_of(base):
        if _is_option_class(hint):
            yield from _parameters_of(default)
        elif build := field.metadata.get(_BUILD):
            yield build(field.name, hint, default)
        else:
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _filled(base: Any, values: dict[str, Any]) -> Any:
    """An object with the values of its options, which are taken out of ``values``."""
    own = {
        field.name: _filled(default, values) if _is_option_class(hint) else values.pop(field.name)
        for field, hint, default in _options_of(base)
    }
    return base(**own) if isinstance(base, type) else dataclasses.replace(base, **own)


def _at_home(parameter: Parameter) -> Parameter:
    """A parameter whose paths are those of ``at_home``, before its own callback sees them."""
    if get_origin(parameter.annotation) is not Annotated or not _is_of_paths(parameter.annotation):
        return parameter
    kind, setting = get_args(parameter.annotation)
    setting, own = copy.copy(setting), setting.callback

    def callback(context: typer.Context, value: Any) -> Any:
        value = at_home(value)
        return value if own is None else own(context, value)

    setting.callback = callback
    return parameter.replace(annotation=Annotated[kind, setting])


def _is_of_paths(annotation: Any) -> bool:
    return annotation is Path or any(map(_is_of_paths, get_args(annotation)))


def _as_list(parameter: Parameter) -> Parameter:
    """A parameter that may be repeated, as typer knows it: a list, None where it was not given."""
    values, setting = get_args(parameter.annotation)
    value = get_args(values)[0]
    return parameter.replace(annotation=Annotated[list[value] | None, setting], default=None)  # type: ignore[valid-type]
