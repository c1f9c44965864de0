"""A result to be shown: sentences, tables and figures in sections; no HTML, no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megasdc.output.figure import Figure, number_or_none
from megasdc.output.table import Table

State = Literal["same", "different", "unsure", "plain"]
"""Colour of the first line: good, bad, in between, none."""


@dataclass(frozen=True)
class Fold:
    """Text of fixed width below a title; a page shows it on request."""

    title: str
    text: str


@dataclass(frozen=True)
class PageSection:
    """A part of a result under a heading, none where that is empty.

    Sentences come first, then items of a list, facts by label, tables, folded texts and figures.
    """

    heading: str = ""
    sentences: Sequence[str] = ()
    facts: dict[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    items: Sequence[str] = ()
    folds: Sequence[Fold] = ()


@dataclass(frozen=True)
class Page:
    """A result to be shown: the verdict in the first line, sentences, tiles, notes and sections.

    Args:
        title: of the window.
        state: colour of the verdict.
        tiles: the main numbers by label.
        notes: what was ignored and why.
        kind: of the report, for ``--json`` of ``megasdc report``.
        summary: the output of ``--json``, plain values.
    """

    title: str
    verdict: str
    state: State = "plain"
    sentences: Sequence[str] = ()
    tiles: dict[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    sections: Sequence[PageSection] = ()
    kind: str = ""
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def figures(self) -> list[Figure]:
        """All figures in order."""
        return [one for section in self.sections for one in section.figures]

    @property
    def tables(self) -> list[Table]:
        """All tables in order."""
        return [one for section in self.sections for one in section.tables]

    @property
    def steps(self) -> list[int] | None:
        """Range of the step axis that figures share; None where no figure has one."""
        steps = [x for one in self.figures if one.on_steps for trace in one.traces for x in trace["x"]]
        if not steps:
            return None
        low, high = min(steps), max(steps)
        return [low, high if high > low else low + 1]


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Values for JSON: NaN and infinities become None, at any depth."""
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return plain_values(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return number_or_none(value)
