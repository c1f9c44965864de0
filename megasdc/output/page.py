"""A result to be shown: sentences, tables and figures in sections; and how a terminal shows it, by rich."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from megasdc.common.program import output_console
from megasdc.output.figure import Figure, number_or_none

if TYPE_CHECKING:
    from rich.console import Console

_NUMBER_ALONE = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?\s*%?|[-+]?(nan|inf)%?")


@dataclass(frozen=True)
class Cell:
    """One cell of a table, sorted by ``value``; None: by its text.

    ``link``: a relative URL; ``look``: ``bad``, ``good``, ``best`` or empty, on a page also a shade, ``s1`` to ``s4``,
    and ``origin``; ``more``: smaller lines below the text, which a terminal leaves out; ``group``: the text that a
    filter finds it by, empty: its own.
    """

    text: str
    value: float | None = None
    link: str = ""
    look: str = ""
    more: tuple[str, ...] = ()
    group: str = ""

    @property
    def has_more_text(self) -> bool:
        """Whether the text contains more than the number."""
        return self.value is not None and _NUMBER_ALONE.fullmatch(self.text) is None

    @property
    def sort_key(self) -> str:
        """The number as the page's script reads it."""
        return "" if self.value is None else f"{self.value!r}".replace("inf", "Infinity")

    @property
    def whole(self) -> str:
        """The text with the smaller lines."""
        return "; ".join((self.text, *self.more))


@dataclass(frozen=True)
class Table:
    """A table; in a page it can be sorted by every column and filtered.

    Args:
        name: name of its file, and of its anchor in the page.
        rows: as many values as headings: cells, or what ``cell`` makes cells of.
        filters: headings of columns that have a filter.
        shown: maximum of rows in a page; the file has all.
        searched: whether there is a search field.
        title: title above it; empty: none.
        note: explanation below it.
        listed: maximum of rows on a terminal; None: all.
        elsewhere: columns that a terminal leaves out.
        complete: name of the file with the rows that are not in the page; empty: its file of ``--figures``.
    """

    name: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    filters: Sequence[str] = ()
    shown: int = 1000
    searched: bool = True
    title: str = ""
    note: str = ""
    listed: int | None = None
    elsewhere: Sequence[str] = ()
    complete: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(tuple(map(cell, row)) for row in self.rows))

    @property
    def visible(self) -> Sequence[Sequence[Cell]]:
        """Rows in the page."""
        return self.rows[: self.shown]

    @property
    def left_out(self) -> str:
        """Sentence on the rows that are not in the page; empty: there are none."""
        more = len(self.rows) - self.shown
        complete = self.complete or f"{self.name}.csv of --figures"
        return f"{more:,} more rows are left out here; {complete} has all." if more > 0 else ""

    @property
    def choices(self) -> list[tuple[int, str, list[str]]]:
        """Column index, heading and values of each filter with more than one value."""
        found = []
        for heading in self.filters:
            place = self.headings.index(heading)
            values = sorted({row[place].group or row[place].text for row in self.visible if row[place].text})
            if len(values) > 1:
                found.append((place, heading, values))
        return found

    def as_csv(self) -> str:
        """All rows; unrounded numbers, and a second column with the displayed text where that contains more."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        twice = {place for row in self.rows for place, one in enumerate(row) if one.has_more_text}
        told = [
            (place, shown) for place in range(len(self.headings)) for shown in (False, True)[: 1 + (place in twice)]
        ]
        writer.writerow(f"{self.headings[place]}, shown" if shown else self.headings[place] for place, shown in told)
        for row in self.rows:
            writer.writerow(
                row[place].whole if shown or row[place].value is None else row[place].value for place, shown in told
            )
        return out.getvalue()


def table_of(
    name: str, items: Iterable[Any], columns: Mapping[str, str | Callable[[Any], Any]], **options: Any
) -> Table:
    """A table with a row for each item, an object or a mapping; ``options`` as of ``Table``.

    ``columns`` by heading: the name of a field, with a number's format after a colon (``drop_rate:.1%``), or a function
    of the item.
    """
    rows = [[_value(item, column) for column in columns.values()] for item in items]
    return Table(name, tuple(columns), rows, **options)


def _value(item: Any, column: str | Callable[[Any], Any]) -> Any:
    if callable(column):
        return column(item)
    field, _, form = column.partition(":")
    value = item[field] if isinstance(item, Mapping) else getattr(item, field)
    return number_cell(value, form) if form else value


def alarming(count: int) -> Cell:
    """A cell with a number that is bad unless it is zero."""
    return number_cell(count, ",d", look="bad" if count else "")


def cell(value: Cell | str | float | None) -> Cell:
    """A cell of a value: a text as it is, numbers as of ``number``, whole ones with all digits, None as a dash."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, str):
        return Cell(value)
    return number_cell(value, ",d" if isinstance(value, int) else ",.4g")


def number_cell(value: float | None, form: str = ",.4g", look: str = "", missing: str = "-", more: str = "") -> Cell:
    """A cell with a number, or with ``missing`` for None; ``more`` is text after the number."""
    if value is None:
        return Cell(missing, look=look)
    if not math.isfinite(value):
        return Cell("NaN" if math.isnan(value) else f"{value}", math.inf, look=look or "bad")
    return Cell(format(value, form) + more, float(value), look=look)


def percent(value: float | None, worse: float | None = None) -> Cell:
    """A cell with a signed share in percent; bad above a limit."""
    look = "bad" if value is not None and worse is not None and value > worse else ""
    return number_cell(value, "+.3%", look)


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

    Sentences come first, then items of a list, steps to take with their commands, facts by label, tables, folded texts
    and figures.
    """

    heading: str = ""
    sentences: Sequence[str] = ()
    facts: dict[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    items: Sequence[str] = ()
    folds: Sequence[Fold] = ()
    steps: Sequence[Fold] = ()


@dataclass(frozen=True)
class Page:
    """A result to be shown: the verdict in the first line, sentences, tiles, notes and sections.

    Args:
        title: title of the window.
        state: colour of the verdict.
        tiles: the main numbers by label.
        notes: sentences on ignored data, with the reasons.
        kind: kind of the report, for ``--json`` of ``megasdc report``.
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


_STYLES = {"same": "green", "different": "red", "unsure": "bold", "plain": "bold"}
_LOOKS = {"bad": "red", "good": "green", "best": "bold", "": ""}


def print_page(page: Page, console: Console) -> None:
    """Prints the sentences and tables of a result, and its figures that have a text."""
    print_sentence(page.verdict, console, _STYLES[page.state])
    for sentence in page.sentences:
        print_sentence(sentence, console)
    for note in page.notes:
        print_sentence(f"note: {note}", console)
    for section in page.sections:
        _print_section(section, console)


def print_pages(pages: Iterable[Page]) -> None:
    """Prints results on standard output, with an empty line between them."""
    console = output_console()
    for place, page in enumerate(pages):
        if place:
            print_sentence("", console)
        print_page(page, console)


def printer(build: Callable[..., Page]) -> Callable[[Any, Console], None]:
    """A function that prints the page that ``build`` makes of a result."""
    return lambda result, console: print_page(build(result), console)


def _print_section(section: PageSection, console: Console) -> None:
    told = (section.sentences, section.items, section.facts, section.folds, section.steps)
    if not (any(told) or any(one.rows for one in section.tables)):
        return
    if section.heading:
        print_sentence(f"\n{section.heading}", console, "bold")
    for sentence in (*section.sentences, *section.items):
        print_sentence(sentence, console)
    wide = max(map(len, section.facts), default=0)
    for label, value in section.facts.items():
        print_sentence(f"  {label:{wide}}  {value}", console)
    for table in section.tables:
        print_table(table, console)
    for fold in (*section.steps, *section.folds):
        print_sentence(f"\n{fold.title}\n{fold.text}", console)
    for text in filter(None, (figure.text for figure in section.figures)):
        print_sentence(f"\n{text}", console)


def print_table(table: Table, console: Console) -> None:
    """Prints a table, with its title and its note; nothing where it is empty."""
    if not table.rows:
        return
    from rich.table import Table as RichTable

    if table.title:
        print_sentence(f"\n{table.title}", console, "italic")
    shown = table.rows if table.listed is None else table.rows[: table.listed]
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    columns = [place for place, heading in enumerate(table.headings) if heading not in table.elsewhere]
    for place in columns:
        numbers = any(row[place].value is not None for row in table.rows)
        drawn.add_column(table.headings[place], overflow="fold", justify="right" if numbers else "left")
    for row in shown:
        drawn.add_row(*(_text(row[place]) for place in columns))
    if shown:
        console.print(drawn)
    if (more := len(table.rows) - len(shown)) > 0:
        print_sentence(f"... and {more:,} more (--limit)", console)
    if table.note:
        print_sentence(table.note, console)


def _text(cell: Cell) -> Any:
    from rich.text import Text

    return Text(cell.text, style=_LOOKS.get(cell.look, ""))


def print_sentence(text: str, console: Console, style: str = "") -> None:
    """Prints a sentence, all of it in ``style``, as it is: no markup, no colours of its own, no lines broken."""
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
