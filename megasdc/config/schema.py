"""Problems of a JSON object whose sections are given as classes, told from the fields' declarations alone.

They are unknown keys, missing ones, wrong types and ranges; and fields that are set, but have no effect since what they
need is off: refused, warned of, or reset. What a field needs is declared where the field is
(`megasdc.config.fields.Needs`), and is judged after overrides and presets. Where an override has turned off what fields
of the file need, these are reset and warned of: who turns a section off need not remove each of its fields. What the
file alone would be refused for is refused.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megasdc.config.deepspeed import REFUSED_KEYS
from megasdc.config.fields import (
    ABSENT,
    LARGEST_INTEGER,
    Problem,
    alternatives,
    element_in,
    field_text,
    json_type_text,
    model_in,
    relations,
)
from megasdc.config.model import PRESETS
from megasdc.config.read import dotted, is_unusable, shown, unusable_values

Path_ = tuple[str | int, ...]
Root = type[BaseModel]
"""Class whose fields are the keys of a whole file."""
REMOVED = {
    "megasdc.sdc.always_on.toleranced": "what it warned of, sdc.always_on proves with slice_elements and rows",
}
"""Keys of earlier versions, with their replacements: a file that still has one is refused, and one is silently removed
from a stored configuration."""
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
    inside = model_in(annotation if info is None else info.annotation)
    if inside is not None and "enabled" in inside.model_fields:
        allowed += ', such as {"enabled": true}'
    remedy = _default_remedy(raw, path, info)
    if kind == "string_type" and isinstance(value, (int, float)):
        remedy += f"; on the command line write --set '{name}=\"{value}\"'"
    return Problem((name,), f"got {shown(value)}; allowed: {allowed}{meaning}{remedy}.")


def _default_remedy(raw: Any, path: Path_, info: FieldInfo | None) -> str:
    """Remedy to leave a field out, with its default; empty where it has none or its description says it."""
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
    if reason := getattr(root, "of_runs_only", {}).get(name):
        return Problem((name,), f"got {value}, and is of megasdc's own runs alone: {reason}; remove it.")
    if name in REFUSED_KEYS:
        return Problem((name,), f"got {value}; not supported: {REFUSED_KEYS[name]}. Remove the key.")
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
    """Dotted paths that end in a key, as hints for a misplaced one, shortest first, of at most ``depth`` names."""
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


ValueAt = Callable[[str], Any]
"""The value at a dotted path."""


@dataclass(frozen=True)
class Idle:
    """A field without effect.

    Attributes:
        path: dotted path from the root of the sections.
        value: value of the field.
        unmet: settings that it needs and lacks, alternatives as (path, wanted value as JSON or None, value got).
        refused: see `Needs.refused`.
    """

    path: str
    value: Any
    unmet: tuple[tuple[str, str | None, Any], ...]
    refused: bool

    def lacking(self, prefix: str) -> str:
        """Text on the lacking settings; ``prefix``: prefix of the sections' root in the file, such as ``megasdc.``."""
        got = dict.fromkeys(f"{prefix}{path} {shown(value)}" for path, _, value in self.unmet)
        return " and ".join(got)

    def problem(self, prefix: str) -> Problem:
        """The problem by which the field is refused."""
        others = tuple(dict.fromkeys(f"{prefix}{path}" for path, _, _ in self.unmet))
        wanted = {
            f"{prefix}{path}": " or ".join(_wanted(value, got) for other, value, got in self.unmet if other == path)
            for path, _, _ in self.unmet
        }
        remedy = " or ".join(f"{path} {value}".rstrip() for path, value in wanted.items())
        what = f"got {shown(self.value)}, which has no effect with {self.lacking(prefix)}; set {remedy}, or remove it."
        return Problem((f"{prefix}{self.path}", *others), what)


def find_idle(sections: BaseModel, given: Mapping[str, Any]) -> Iterator[Idle]:
    """Yield every field that is set and has no effect.

    A field that asks for something also counts where its default was given, but nothing of what it needs, so that its
    author believes in a check that is off.

    Args:
        sections: the checked sections.
        given: values that the file and overrides give, from the same root.
    """
    yield from _find_idle(type(sections), partial(value_of, sections), given)


def _find_idle(kind: type[BaseModel], value_at: ValueAt, given: Mapping[str, Any]) -> Iterator[Idle]:
    for path, field, needs in relations(kind, ""):
        unmet = next((one for one in needs.settings if not _holds(value_at, one)), None)
        if unmet is None:
            continue
        value = value_at(path)
        asked = value != field.get_default(call_default_factory=True, validated_data={})
        if needs.refused:
            believed = is_set(given, path) and not any(
                wanted is not None or is_set(given, other) for other, wanted in alternatives(unmet)
            )
            asked = (asked or (believed and bool(value))) and value is not None and value is not False
        if asked:
            lacking = tuple((other, want, value_at(other)) for other, want in alternatives(unmet))
            yield Idle(path, value, lacking, needs.refused)


def sort_out(
    sections: BaseModel,
    given: Mapping[str, Any],
    before: Mapping[str, Any],
    overridden: Iterable[str],
    prefix: str,
    *,
    stored: bool,
) -> tuple[list[Idle], list[Problem]]:
    """Fields that are to be reset, and refusals.

    Args:
        sections: the checked sections.
        given: values that the file and overrides give, from the same root.
        before: values that the file alone gives.
        overridden: dotted paths of overrides in the whole file.
        prefix: prefix of the sections' root in the file, such as ``megasdc.``.
        stored: every field is to be reset that would be refused.

    Returns:
        The fields, each with what was overridden as what it lacks; and one problem for each of the others.
    """
    kind, names = type(sections), [name.removeprefix(prefix) for name in overridden]
    needs_of = {path: needs.settings for path, _, needs in relations(kind, "")}
    reset: dict[str, Idle] = {}

    def value_at(path: str) -> Any:
        return given_or_default(kind, {}, path) if path in reset else value_of(sections, path)

    def is_turned_off(idle: Idle) -> bool:
        earlier = partial(given_or_default, kind, before)
        return not any(_covers(name, idle.path) for name in names) and all(
            _holds(earlier, setting) for setting in needs_of[idle.path]
        )

    # What is reset is off for others that need it, so that these are to be reset too.
    while True:
        idle = [one for one in _find_idle(kind, value_at, given) if one.refused and one.path not in reset]
        more = [one for one in idle if stored or is_turned_off(one)]
        if not more:
            return list(reset.values()), [one.problem(prefix) for one in idle]
        reset |= {one.path: replace(one, unmet=_causes(one, names, reset)) for one in more}


def _causes(idle: Idle, names: Sequence[str], reset: Mapping[str, Idle]) -> tuple[tuple[str, str | None, Any], ...]:
    """Settings that overrides have turned off and a field needs, by themselves or because other fields were reset."""
    causes = [one for one in idle.unmet if any(_covers(name, one[0]) for name in names)]
    causes += [cause for path, _, _ in idle.unmet if path in reset for cause in reset[path].unmet]
    return tuple(causes) or idle.unmet


def given_or_default(kind: type[BaseModel], given: Mapping[str, Any], path: str) -> Any:
    """Value at a dotted path of a file, or its default where the file gives none."""
    at: Any = given
    name, _, rest = path.partition(".")
    while True:
        field = kind.model_fields[name]
        if not isinstance(at, Mapping) or name not in at:
            value = field.get_default(call_default_factory=True, validated_data={})
            return value_of(value, rest) if rest else value
        at = at[name]
        inner = model_in(field.annotation)
        if not rest or inner is None:
            return at
        kind = inner
        name, _, rest = rest.partition(".")


def idle_warnings(sections: BaseModel, prefix: str) -> Iterator[str]:
    """Yield one sentence for all tuning fields that lack the same, in a file without contradictions."""
    groups: dict[str, list[str]] = {}
    for idle in find_idle(sections, {}):
        groups.setdefault(idle.lacking(prefix), []).append(f"{prefix}{idle.path}")
    for lacking, paths in groups.items():
        yield f"{', '.join(paths)}: no effect with {lacking}."


def reset_warnings(idle: Sequence[Idle], prefix: str) -> Iterator[str]:
    """Yield a sentence for each field that was reset since an override has turned off what it needs."""
    for one in idle:
        lacking = one.lacking(prefix)
        yield f"{prefix}{one.path}: {shown(one.value)} of the file is not used, since an override sets {lacking}."


def value_of(sections: BaseModel, path: str) -> Any:
    """The value at a dotted path."""
    value: Any = sections
    for name in path.split("."):
        value = getattr(value, name)
    return value


def unmet_paths(sections: BaseModel) -> set[str]:
    """Dotted paths of all fields that have no effect, whatever their value is, since what they need is off."""
    at = partial(value_of, sections)
    rows = relations(type(sections), "")
    return {path for path, _, needs in rows if not all(_holds(at, setting) for setting in needs.settings)}


def _holds(value_at: ValueAt, setting: str) -> bool:
    for path, wanted in alternatives(setting):
        value = value_at(path)
        if value == json.loads(wanted) if wanted is not None else bool(value):
            return True
    return False


def is_set(given: Mapping[str, Any], path: str) -> bool:
    """Whether sections in JSON give a value at a dotted path."""
    at: Any = given
    for name in path.split("."):
        if not isinstance(at, Mapping) or name not in at:
            return False
        at = at[name]
    return True


def _covers(name: str, path: str) -> bool:
    """Whether setting one path sets the other."""
    return path == name or path.startswith(f"{name}.")


def _wanted(value: str | None, got: Any) -> str:
    """Text on the value to set in place of the value got."""
    if value is not None:
        return f"to {value}"
    return "true" if isinstance(got, bool) else "to 1 or more" if isinstance(got, int) else ""
