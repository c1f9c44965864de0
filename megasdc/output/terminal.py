"""Results on a terminal, by rich: sentences, tables, and figures that can be drawn with characters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from megasdc.common.program import output_console
from megasdc.output.page import Page, PageSection
from megasdc.output.table import Cell, Table

if TYPE_CHECKING:
    from rich.console import Console

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
    told = (section.sentences, section.items, section.facts, section.folds)
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
    for fold in section.folds:
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

    return Text(cell.text, style=_LOOKS[cell.look])


def print_sentence(text: str, console: Console, style: str = "") -> None:
    """Prints a sentence, all of it in ``style``, as it is: no markup, no colours of its own, no lines broken."""
    console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)
