"""Problems of a JSON object whose sections are given as classes: unknown keys, missing ones, wrong types and ranges."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megasdc.config.deepspeed_keys import REFUSED
from megasdc.config.fields import ABSENT, LARGEST_INTEGER
from megasdc.config.presets import PRESETS
from megasdc.config.problems.problem import Problem
from megasdc.config.read import dotted, is_unusable, shown, unusable_values
from megasdc.config.table import element_in, field_text, json_type_text, model_in

Path_ = tuple[str | int, ...]
Root = type[BaseModel]
"""Class of a whole file."""
REMOVED = {
    "megasdc.sdc.always_on.toleranced": "what it warned of, sdc.always_on proves with slice_elements and rows",
}
"""Keys that earlier versions had, with what took their place: a file that still has one is refused, a stored one loses
it without a word."""
_HOME = re.compile(r"~([\w.-]*/|$)")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the valid name most similar to a misspelt one, None if none is similar."""
    by_lower = {valid.lower(): valid for valid in names}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def type_problems(raw: dict[str, Any], root: Root) -> dict[Path_, Problem]:
    """Unknown keys, missing keys, wrong types and values out of range, by path."""
    found: dict[Path_, Problem] = {}
    try:
        root.model_validate(raw)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            path, info, annotation = locate_key(item["loc"], root)
            found.setdefault(path, _as_problem(raw, path, item["type"], info, annotation, root))
    return found


def unusable_problems(raw: dict[str, Any]) -> dict[Path_, Problem]:
    """Texts that are impossible in file names, and numbers that are impossible in JSON; removes such keys."""
    found: dict[Path_, Problem] = {}
    for path, reason in list(unusable_values(raw)):
        name = dotted(path)
        found[path] = Problem((name,), f"{reason}, got {shown(value_at(raw, path))}; write it without.")
    for path in found:  # pydantic would reject the whole object without naming the key
        if path and isinstance(path[-1], str) and is_unusable(path[-1]):
            remove_key(raw, path)
    return found


def home_problems(raw: dict[str, Any]) -> dict[Path_, Problem]:
    """Texts that begin with a home folder as shells write it, which to a program is a folder of the name ``~``.

    Not arguments of an alert command, which may be a shell's.
    """
    found: dict[Path_, Problem] = {}
    for path, text in _texts(raw, ()):
        if _HOME.match(text) and not (path[-2:-1] == ("alert_command",) and path[-1] != 0):
            whole = os.path.expanduser(text)
            meant = "the whole path" if whole == text else shown(whole)
            what = f"got {shown(text)}, and `~` is no home folder in a file; write {meant}, or {shown(f'./{text}')} for"
            found[path] = Problem((dotted(path),), f"{what} a folder that is named so.")
    return found


def _texts(value: Any, at: Path_) -> Iterator[tuple[Path_, str]]:
    """All texts that are values, with their paths."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, (*at, key))


def _as_problem(raw: Any, path: Path_, kind: str, info: FieldInfo | None, annotation: Any, root: Root) -> Problem:
    name = dotted(path)
    if kind == "extra_forbidden":
        return _unknown_key(raw, path, root)
    meaning = f" ({info.description.rstrip('.')})" if info is not None and info.description else ""
    allowed = json_type_text(annotation) if info is None else field_text(info)
    if kind == "missing":
        return Problem((name,), f"missing; needed: {allowed}{meaning}.")
    value = value_at(raw, path)
    if isinstance(value, int) and value > LARGEST_INTEGER:
        allowed += f", up to {LARGEST_INTEGER}"
    remedy = _default_remedy(raw, path, info)
    if kind == "string_type" and isinstance(value, (int, float)):
        remedy += f"; on the command line write --set '{name}=\"{value}\"'"
    return Problem((name,), f"got {shown(value)}; allowed: {allowed}{meaning}{remedy}.")


def _default_remedy(raw: Any, path: Path_, info: FieldInfo | None) -> str:
    """What a field is without a value; empty where its meaning says so, which may depend on other fields."""
    if info is None or info.is_required() or ABSENT in (info.description or ""):
        return ""
    default = info.get_default(call_default_factory=True, validated_data={})
    if path[:-1] == ("megasdc", "model"):
        name = raw["megasdc"]["model"].get("preset")
        default = PRESETS.get(name if isinstance(name, str) else "", {}).get(str(path[-1]), default)
    return "" if isinstance(default, (BaseModel, list)) else f"; leave it out for {shown(default)}"


def _unknown_key(raw: Any, path: Path_, root: Root) -> Problem:
    name, key = dotted(path), str(path[-1])
    value = shown(value_at(raw, path))
    if name in REFUSED:
        return Problem((name,), f"got {value}; not supported: {REFUSED[name]}. Remove the key.")
    if name in REMOVED:
        return Problem((name,), f"is gone (value {value}): {REMOVED[name]}; remove the key.")
    _, _, annotation = locate_key(path[:-1], root)
    model = (model_in(annotation) if path[:-1] else None) or root
    names = list(model.model_fields)
    where = dotted(path[:-1])
    paths = [name]
    if meant := nearest(key, names):
        paths.append(f"{where}.{meant}" if where else meant)
        hint = f"did you mean {paths[-1]}?"
    elif homes := homes_of(key, root):
        hint = f"did you mean {' or '.join(homes[:3])}?"
    else:
        hint = "remove it."
    listed = f" Allowed in {where}: {', '.join(names)}." if where and len(names) <= 30 else ""
    return Problem(tuple(paths), f"unknown key (value {value}); {hint}{listed}")


def homes_of(key: str, root: Root, depth: int = 3) -> list[str]:
    """Dotted paths that end in a key, as hints for a misplaced one; the shortest first, of at most so many names."""
    found = [key] if key in root.model_fields else []
    if depth > 1:
        for name, info in root.model_fields.items():
            inner = model_in(info.annotation)
            found += [f"{name}.{path}" for path in homes_of(key, inner, depth - 1)] if inner is not None else []
    return sorted(found, key=lambda path: path.count("."))


def locate_key(loc: Path_, root: Root) -> tuple[Path_, FieldInfo | None, Any]:
    """Follow pydantic's location through the sections; tags of a union, which are no keys, end the path."""
    path: list[str | int] = []
    info: FieldInfo | None = None
    annotation: Any = root
    for item in loc:
        model, element = model_in(annotation), element_in(annotation)
        if model is not None and isinstance(item, str):
            path.append(item)
            info = model.model_fields.get(item)
            if info is None:
                return tuple(path), None, None
            annotation = info.annotation
        elif element is not None and isinstance(item, int):
            path.append(item)
            info, annotation = None, element
        else:
            break
    return tuple(path), info, annotation


def value_at(raw: Any, path: Path_) -> Any:
    """The value at a path; an entry that stands for an object with one key, as in `hooks`, is the value of that key."""
    for item in path:
        raw = raw if isinstance(raw, str) else raw[item]
    return raw


def remove_removed(raw: dict[str, Any]) -> None:
    """Remove the keys of earlier versions from a stored configuration."""
    for name in REMOVED:
        *sections, key = name.split(".")
        inner: Any = raw
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(key, None)


def remove_key(raw: Any, path: Path_) -> None:
    """Remove a key; for a bad list item the whole list, since the indices of the other items would change."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    for key in path[:-1]:
        if isinstance(raw, dict) and key not in raw:
            return
        raw = raw[key]
    raw.pop(path[-1], None)
