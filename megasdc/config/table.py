"""Documentation of the configuration's fields: types in words, and tables in markdown files."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megasdc.config.fields import LARGEST_INTEGER, AtResume, Needs, alternatives, at_resume_of, needs_of
from megasdc.config.sections.deepspeed import DeepSpeedPart
from megasdc.config.sections.megasdc import MegasdcSection

_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict: "object",
    Any: "any value",
}
_BOUNDS = ((annotated_types.Gt, "gt", ">"), (annotated_types.Ge, "ge", ">="), (annotated_types.Lt, "lt", "<"))
_ALL_BOUNDS = (*_BOUNDS, (annotated_types.Le, "le", "<="))


def json_type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The JSON values that an annotation allows, in words, such as ``integer > 0 or null``.

    Args:
        metadata: bounds that pydantic has separated from the annotation.
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return json_type_text(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return " or ".join(json.dumps(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(json_type_text(argument) for argument in arguments)
    if origin is list:
        return _list_text(arguments[0], _flat(metadata))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "object"
    words = _WORDS.get(origin or annotation, str(annotation))
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in _flat(metadata)
        for kind, name, sign in _ALL_BOUNDS
        if isinstance(item, kind) and getattr(item, name) != LARGEST_INTEGER
    ]
    return f"{words} {' and '.join(bounds)}" if bounds else words


def field_text(field: FieldInfo) -> str:
    """The JSON values that a field allows, in words."""
    return json_type_text(field.annotation, field.metadata)


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _flat(item.metadata)
        else:
            yield item


def _list_text(element: Any, metadata: Iterator[Any]) -> str:
    low, high = 0, None
    for item in metadata:
        if isinstance(item, annotated_types.MinLen):
            low = item.min_length
        if isinstance(item, annotated_types.MaxLen):
            high = item.max_length
    count = f"{low} " if low == high else f"at least {low} " if low and high is None else ""
    return f"list of {count}({json_type_text(element)})"


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section class that an annotation holds, also in a union, else None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return next((found for part in get_args(annotation) if (found := model_in(part))), None)
    return None


def element_in(annotation: Any) -> Any:
    """Return the element type of a list annotation, else None."""
    return get_args(annotation)[0] if get_origin(annotation) is list else None


def field_rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, AtResume]]:
    """Yield path, field and effect of a change at a resume, for every field that is not a section."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = model_in(field.annotation)
        element = element_in(field.annotation)
        if inner is not None:
            yield from field_rows(inner, f"{path}.")
            continue
        yield path, field, at_resume_of(model, field)
        if element is not None and (inner := model_in(element)) is not None:
            yield from field_rows(inner, f"{path}[].")


def relations(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo, Needs]]:
    """Yield path, field and relation of every field that needs others to have an effect; entries of lists have none."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        if (inner := model_in(field.annotation)) is not None:
            yield from relations(inner, f"{path}.")
            continue
        needs = needs_of(section, field)
        if needs.settings and all(path != other for one in needs.settings for other, _ in alternatives(one)):
            yield path, field, needs


def _needs_text(needs: Needs) -> str:
    wanted = [
        " or ".join(f"`{path}`" if value is None else f"`{path}` {value}" for path, value in alternatives(one))
        for one in needs.settings
    ]
    return f" Needs {'; and '.join(wanted)}{', else it is refused' if needs.refused else ''}."


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ""
    if isinstance(value, list):
        value = [item.model_dump(exclude_defaults=True) if isinstance(item, BaseModel) else item for item in value]
    return f"`{json.dumps(value)}`"


def render_table() -> str:
    """The markdown tables: every field under `megasdc`, and DeepSpeed's keys by effect of a change at a resume."""
    lines = ["| field | type | default | at resume | meaning |", "|---|---|---|---|---|"]
    needs = {path: _needs_text(needs) for path, _, needs in relations(MegasdcSection, "")}
    for path, field, at_resume in field_rows(MegasdcSection, ""):
        meaning = (field.description or "") + needs.get(path, "")
        cells = (f"`{path}`", field_text(field), _default_text(field), at_resume, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", *_deepspeed_lines()]) + "\n"


def _deepspeed_lines() -> Iterator[str]:
    """The table of DeepSpeed's keys by effect of a change at a resume."""
    yield "| at resume | DeepSpeed's keys |"
    yield "|---|---|"
    kinds: dict[str, dict[str, AtResume]] = {}
    for path, _, at_resume in field_rows(DeepSpeedPart, ""):
        kinds.setdefault(path.split(".")[0], {})[path] = at_resume
    del kinds["bfloat16"]  # another name of bf16
    for kind in get_args(AtResume):
        names: list[str] = []
        for key, fields in kinds.items():
            alike = set(fields.values()) == {kind}  # the section's name stands for all its fields
            names += [key] if alike else [path for path, at_resume in fields.items() if at_resume == kind]
        if names:
            yield f"| {kind} | {', '.join(f'`{name}`' for name in names)} |"


def with_tables(path: Path, tables: Mapping[str, Callable[[], str]]) -> tuple[str, str]:
    """Text of a markdown file, and the same text with its tables, between markers, replaced by the current ones.

    Args:
        path: the file; it must hold the lines ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->`` of one table at least.
        tables: functions that render a table, by NAME.

    Raises:
        ValueError: it holds no table's markers, only one of two, or they are in the wrong order.
    """
    text = fresh = path.read_text(encoding="utf-8")
    markers = {name: (f"<!-- {name}:begin -->", f"<!-- {name}:end -->") for name in tables}
    held = [name for name, both in markers.items() if any(marker in text for marker in both)]
    if not held:
        wanted = " or ".join(" and after it ".join(both) for both in markers.values())
        raise ValueError(f"{path} holds no table; it needs the lines {wanted}")
    for name in held:
        begin, end = markers[name]
        head, found, rest = fresh.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{path} needs the line {begin} and after it the line {end}")
        fresh = f"{head}{begin}\n{tables[name]()}{end}{tail}"
    return text, fresh
