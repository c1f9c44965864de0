"""Fields that are set, but have no effect since what they need is off: refused, warned of, or reset.

What a field needs is declared where the field is (`megasdc.config.fields.Needs`), and is judged after overrides and
presets. Where an override has turned off what fields of the file need, these are reset and warned of: who turns a
section off need not remove each of its fields. What the file alone would be refused for is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic import BaseModel

from megasdc.config.fields import alternatives
from megasdc.config.problems.problem import Problem
from megasdc.config.read import shown
from megasdc.config.table import model_in, relations

ValueAt = Callable[[str], Any]
"""The value at a dotted path."""


@dataclass(frozen=True)
class Idle:
    """A field without effect.

    Attributes:
        path: its dotted path from the root of the sections.
        value: of it.
        unmet: what it needs and lacks, alternatives as (path, wanted value as JSON or None, value got).
        refused: as `Needs.refused`.
    """

    path: str
    value: Any
    unmet: tuple[tuple[str, str | None, Any], ...]
    refused: bool

    def lacking(self, prefix: str) -> str:
        """What is off, in words; ``prefix``: of the sections' root in the file, such as ``megasdc.``."""
        got = dict.fromkeys(f"{prefix}{path} {shown(value)}" for path, _, value in self.unmet)
        return " and ".join(got)

    def problem(self, prefix: str) -> Problem:
        """The refusal."""
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
        given: what the file and overrides give, from the same root.
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
            believed = _is_given(given, path) and not any(
                wanted is not None or _is_given(given, other) for other, wanted in alternatives(unmet)
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
        given: what the file and overrides give, from the same root.
        before: what the file alone gives.
        overridden: dotted paths of overrides in the whole file.
        prefix: of the root in the file, such as ``megasdc.``.
        stored: every field is to be reset that would be refused.

    Returns:
        The fields, each with what was overridden as what it lacks; and one problem for each of the others.
    """
    kind, names = type(sections), [name.removeprefix(prefix) for name in overridden]
    needs_of = {path: needs.settings for path, _, needs in relations(kind, "")}
    reset: dict[str, Idle] = {}

    def value_at(path: str) -> Any:
        return _given_or_default(kind, {}, path) if path in reset else value_of(sections, path)

    def is_turned_off(idle: Idle) -> bool:
        earlier = partial(_given_or_default, kind, before)
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
    """What a field lacks because of overrides: what they set, and what turned off what was reset."""
    causes = [one for one in idle.unmet if any(_covers(name, one[0]) for name in names)]
    causes += [cause for path, _, _ in idle.unmet if path in reset for cause in reset[path].unmet]
    return tuple(causes) or idle.unmet


def _given_or_default(kind: type[BaseModel], given: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of what a file gives, its default where it gives none."""
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


def _holds(value_at: ValueAt, setting: str) -> bool:
    for path, wanted in alternatives(setting):
        value = value_at(path)
        if value == json.loads(wanted) if wanted is not None else bool(value):
            return True
    return False


def _is_given(given: Mapping[str, Any], path: str) -> bool:
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
    """What to set, in words, in place of what was got."""
    if value is not None:
        return f"to {value}"
    return "true" if isinstance(got, bool) else "to 1 or more" if isinstance(got, int) else ""
