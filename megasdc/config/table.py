"""The documentation's table of a configuration's fields, written into a markdown file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megasdc.config.deepspeed import DeepSpeedPart
from megasdc.config.fields import (
    AtResume,
    Needs,
    alternatives,
    field_rows,
    field_text,
    relations,
)
from megasdc.config.sections import MegasdcSection


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
        ValueError: it holds no table's markers, only one of two or several, or they are in the wrong order.
    """
    text = fresh = path.read_text(encoding="utf-8")
    markers = {name: (f"<!-- {name}:begin -->", f"<!-- {name}:end -->") for name in tables}
    held = [name for name, both in markers.items() if any(marker in text for marker in both)]
    if not held:
        wanted = " or ".join(" and after it ".join(both) for both in markers.values())
        raise ValueError(f"{path} holds no table; it needs the lines {wanted}")
    for name in held:
        begin, end = markers[name]
        head, *parts = fresh.split(begin)
        tails = parts[0].split(end)[1:] if len(parts) == 1 else []
        if len(tails) != 1 or end in head:
            raise ValueError(f"{path} needs the line {begin} once and after it the line {end} once")
        fresh = f"{head}{begin}\n{tables[name]()}{end}{tails[0]}"
    return text, fresh
