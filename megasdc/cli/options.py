"""Parameters of commands beyond typer's own: dataclasses of options, and options that may be repeated."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any, get_args, get_type_hints

import typer

_BUILD = "option"
"""Key of a field's metadata: builds what typer knows of it, from its name."""


def option(default: Any, help: str, *names: str, make: Callable[..., Any] = typer.Option, **settings: Any) -> Any:
    """A field of a dataclass that is an option of a command.

    Args:
        default: where it is not given.
        help: for people.
        *names: of the option; without any it has the name of the field.
        make: ``typer.Option``, or one of ``megasdc.cli.app`` that makes one.
        **settings: of ``make``.
    """

    def build(name: str) -> Any:
        return make(*(names or (f"--{name.replace('_', '-')}",)), help=help, **settings)

    return dataclasses.field(default=default, metadata={_BUILD: build})


def as_typer_takes_it(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters are those that typer knows.

    In place of a parameter whose type is a dataclass stand the fields of that class, declared by ``option`` or as
    parameters are, with ``Annotated``. So a command of many options lists each once, and gets them as one object. A
    parameter or field of type ``tuple[T, ...]`` with the default ``()`` may be repeated.

    Args:
        command: with any parameters that typer knows, and these.
    """
    signature = inspect.signature(command, eval_str=True)
    classes = {name: one.annotation for name, one in signature.parameters.items() if _is_option_class(one.annotation)}
    parameters: list[Parameter] = []
    for name, one in signature.parameters.items():
        parameters += _fields_of(classes[name]) if name in classes else [one]
    repeated = [one.name for one in parameters if one.default == ()]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        values |= {name: tuple(values[name] or ()) for name in repeated}
        for name, kind in classes.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        command(**values)

    taken = [_as_list(one) if one.name in repeated else one for one in parameters]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=Parameter.KEYWORD_ONLY) for one in taken]
    )
    run.__annotations__ = {one.name: one.annotation for one in taken}
    return run


def _is_option_class(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _fields_of(kind: Any) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    parameters = []
    for field in dataclasses.fields(kind):
        annotation, default = hints[field.name], field.default
        if (build := field.metadata.get(_BUILD)) is not None:
            annotation = Annotated[annotation, build(field.name)]
        if default is dataclasses.MISSING:
            default = Parameter.empty
        parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return parameters


def _as_list(parameter: Parameter) -> Parameter:
    """A parameter that may be repeated, as typer knows it: a list, None where it was not given."""
    values, setting = get_args(parameter.annotation)
    value = get_args(values)[0]
    return parameter.replace(annotation=Annotated[list[value] | None, setting], default=None)  # type: ignore[valid-type]
