"""Fields that are set, but have no effect since what they need is off: refused, warned of, or reset.

What a field needs is declared where the field is (`megasdc.config.fields.Needs`), and is judged after overrides and
presets. Where an override has turned off what fields of the file need, these are reset and warned of: who turns a
section off need not remove each of its fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from megasdc.config.fields import alternatives
from megasdc.config.problems.problem import Problem
from megasdc.config.read import shown
from megasdc.config.table import relations


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
    for path, field, needs in relations(type(sections), ""):
        unmet = next((one for one in needs.settings if not _holds(sections, one)), None)
        if unmet is None:
            continue
        value = value_of(sections, path)
        asked = value != field.get_default(call_default_factory=True, validated_data={})
        if needs.refused:
            believed = _is_given(given, path) and not any(
                wanted is not None or _is_given(given, other) for other, wanted in alternatives(unmet)
            )
            asked = (asked or (believed and bool(value))) and value is not None and value is not False
        if asked:
            lacking = tuple((other, want, value_of(sections, other)) for other, want in alternatives(unmet))
            yield Idle(path, value, lacking, needs.refused)


def sort_out(
    sections: BaseModel, given: Mapping[str, Any], overridden: Iterable[str], prefix: str, *, stored: bool
) -> tuple[list[Idle], list[Problem]]:
    """Fields that are to be reset, and refusals.

    Args:
        sections: the checked sections.
        given: what the file and overrides give, from the same root.
        overridden: dotted paths of overrides in the whole file.
        prefix: of the root in the file, such as ``megasdc.``.
        stored: every field is to be reset that would be refused.
    """
    reset: list[Idle] = []
    names = [name.removeprefix(prefix) for name in overridden]
    idle = [one for one in find_idle(sections, given) if one.refused]
    # What is reset is off for others that need it, so that these are to be reset too.
    while more := [one for one in idle if one not in reset and (stored or _is_turned_off(one, names))]:
        reset += more
        names += [one.path for one in more]
    return reset, [one.problem(prefix) for one in idle if one not in reset]


def _is_turned_off(idle: Idle, names: Sequence[str]) -> bool:
    """Whether what a field needs was overridden, and not the field itself."""
    return any(_covers(name, path) for name in names for path, _, _ in idle.unmet) and not any(
        _covers(name, idle.path) for name in names
    )


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


def _holds(sections: BaseModel, setting: str) -> bool:
    for path, wanted in alternatives(setting):
        value = value_of(sections, path)
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
