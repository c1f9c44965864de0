"""Parts of a report's page: sections of sentences, figures and tables; no HTML."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megasdc.report.run_pages.figures.figure import Figure, number_or_none

_NUMBER_ALONE = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?\s*%?|[-+]?(nan|inf)%?")
State = Literal["same", "different", "unsure"]
"""Colour of the first line: good, bad, in between; named as on the pages of comparisons."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Args:
        text: as displayed.
        value: number that it is sorted by; None: by its text.
        link: a relative URL; empty: none.
        look: ``bad``, ``good`` or empty.
    """

    text: str
    value: float | None = None
    link: str = ""
    look: str = ""

    @property
    def says_more(self) -> bool:
        """Whether the text contains more than the number."""
        return self.value is not None and _NUMBER_ALONE.fullmatch(self.text) is None

    @property
    def sort_key(self) -> str:
        """The number as the page's script reads it."""
        return "" if self.value is None else f"{self.value!r}".replace("inf", "Infinity")


@dataclass(frozen=True)
class Table:
    """A table that can be sorted by every column and filtered.

    Args:
        name: of its file, and its anchor in the page.
        headings: of the columns.
        rows: of cells, as many as headings.
        filters: headings of columns that have a filter.
        shown: maximum of rows in the page; the file has all.
        searched: whether there is a search field.
    """

    name: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    filters: tuple[str, ...] = ()
    shown: int = 1000
    searched: bool = True

    @property
    def visible(self) -> tuple[tuple[Cell, ...], ...]:
        """Rows in the page."""
        return self.rows[: self.shown]

    @property
    def left_out(self) -> str:
        """Sentence on the rows that are not in the page; empty: there are none."""
        more = len(self.rows) - self.shown
        return f"{more:,} more rows are left out here; {self.name}.csv of --figures has all." if more > 0 else ""

    @property
    def choices(self) -> list[tuple[int, str, list[str]]]:
        """Column index, heading and values of each filter with more than one value."""
        found = []
        for heading in self.filters:
            place = self.headings.index(heading)
            values = sorted({row[place].text for row in self.visible if row[place].text})
            if len(values) > 1:
                found.append((place, heading, values))
        return found

    def as_csv(self) -> str:
        """All rows; unrounded numbers, and a second column with the displayed text where that contains more."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        twice = {place for row in self.rows for place, one in enumerate(row) if one.says_more}
        told = [
            (place, shown) for place in range(len(self.headings)) for shown in (False, True)[: 1 + (place in twice)]
        ]
        writer.writerow(f"{self.headings[place]}, shown" if shown else self.headings[place] for place, shown in told)
        for row in self.rows:
            writer.writerow(
                row[place].text if shown or row[place].value is None else row[place].value for place, shown in told
            )
        return out.getvalue()


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading.

    Args:
        heading: of the section.
        sentences: paragraphs at its start.
        facts: values by label, shown as a list.
        tables: in order.
        figures: in order, after the tables.
    """

    heading: str
    sentences: Sequence[str] = ()
    facts: dict[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclass(frozen=True)
class Page:
    """A report.

    Args:
        kind: of the report.
        title: of the window.
        verdict: the first line.
        state: colour of the verdict.
        sentences: below the verdict.
        tiles: the main numbers by label.
        notes: what was ignored and why.
        sections: in order.
        summary: the output of ``--json``, plain values.
    """

    kind: Literal["run", "runs", "study", "sweep", "drops"]
    title: str
    verdict: str
    state: State
    sentences: Sequence[str]
    tiles: dict[str, str]
    notes: Sequence[str]
    sections: Sequence[Section]
    summary: dict[str, Any]

    @property
    def figures(self) -> list[Figure]:
        """All figures in order."""
        return [one for section in self.sections for one in section.figures]

    @property
    def tables(self) -> list[Table]:
        """All tables in order."""
        return [one for section in self.sections for one in section.tables]


def number(value: float | None, form: str = ",.4g", look: str = "", missing: str = "-") -> Cell:
    """A cell with a number.

    Args:
        value: None: there is none.
        form: format specification.
        look: as in ``Cell``.
        missing: shown in place of None.
    """
    if value is None:
        return Cell(missing, look=look)
    if not math.isfinite(value):
        return Cell("NaN" if math.isnan(value) else f"{value}", math.inf, look=look or "bad")
    return Cell(format(value, form), float(value), look=look)


def percent(value: float | None, worse: float | None = None) -> Cell:
    """A cell with a signed share in percent; bad above a limit."""
    look = "bad" if value is not None and worse is not None and value > worse else ""
    return number(value, "+.3%", look)


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Values for JSON: NaN and infinities become None, at any depth."""
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return plain_values(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return number_or_none(value)
