"""Is a result the same on the terminal, in the page and in its files?"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from browser import Browser, choose, needs_browser
from rich.console import Console

from megasdc.common.errors import StorageError
from megasdc.output.figure import Figure, Version, bars
from megasdc.output.html import write_page
from megasdc.output.page import Cell, Page, PageSection, Table, number_cell, print_page

MARKUP = "[red]<b>&name</b>[/]"


def table(**options: object) -> Table:
    """Three rows: a name with markup, a number with more text, and nothing."""
    rows = [
        (MARKUP, 12345, number_cell(0.25, ".1%", more=" of all"), Cell("kind (7)", group="kind", more=("why",))),
        ("b", None, 1.5, "other"),
        ("c", 7, float("nan"), "other"),
    ]
    return Table("t", ("name", "count", "share", "pattern"), rows, ("pattern",), **options)  # type: ignore[arg-type]


def printed(page: Page) -> str:
    """What a terminal shows."""
    console = Console(record=True, width=100, file=io.StringIO())
    print_page(page, console)
    return console.export_text()


def page_of(one: Table, **section: object) -> Page:
    """A page with one table."""
    return Page(
        "t", "The verdict.", notes=["a note"], sections=[PageSection("Part", ["said"], tables=[one], **section)]
    )  # type: ignore[arg-type]


def test_a_terminal_shows_sentences_and_tables() -> None:
    """The verdict first; names as they are; numbers with their text; a dash for nothing; no smaller lines."""
    text = printed(page_of(table(title="Title", note="How to read it.")))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["The", "verdict."]
    assert "note: a note" in text and "How to read it." in text and text.index("Title") < text.index("pattern")
    assert [MARKUP, "12,345", "25.0%", "of", "all", "kind", "(7)"] in lines
    assert ["b", "-", "1.5", "other"] in lines and ["c", "7", "NaN", "other"] in lines
    assert "why" not in text


def test_what_a_terminal_leaves_out_is_told() -> None:
    """Rows beyond the limit are counted; columns for pages alone are not there; an empty table is nothing at all."""
    text = printed(page_of(table(listed=1, elsewhere=("share",))))
    assert "... and 2 more (--limit)" in text
    assert "share" not in text and "12,345" in text
    assert "header" not in printed(page_of(Table("t", ("header",), [])))


def test_a_file_has_every_row_unrounded() -> None:
    """Rows beyond those shown too; a displayed text that says more has its own column, with the smaller lines."""
    rows = list(csv.reader(io.StringIO(table(shown=1).as_csv())))
    assert rows[0] == ["name", "count", "share", "share, shown", "pattern"]
    assert rows[1] == [MARKUP, "12345.0", "0.25", "25.0% of all", "kind (7); why"]
    assert len(rows) == 4
    assert table(shown=1).left_out == "2 more rows are left out here; t.csv of --figures has all."


def test_a_figure_drawn_with_characters_is_on_the_terminal() -> None:
    """Its text; one without a text needs the page."""
    figures = [Figure("f", "F", "", [], text="|▓ |"), Figure("g", "Only drawn", "", [])]
    text = printed(page_of(table(), figures=figures))
    assert "|▓ |" in text and "Only drawn" not in text


@pytest.mark.slow
@needs_browser
def test_choices_of_the_reader(browser: Browser, tmp_path: Path) -> None:
    """Figures follow one choice of the same label, hide where it has nothing for them, and filters find groups."""
    a, b = bars("a", ["x"], [1], "var(--c1)", "%{y}"), bars("b", ["x"], [2], "var(--c2)", "%{y}")
    one = [Version(("first",), [a], {"height": 300}), Version(("second",), [b], {"height": 400})]
    two = [Version(("first",), [a]), Version(("second",), [])]
    figures = [
        Figure("one", "One", "", [a], {"height": 300}, choices=("Kind",), versions=one),
        Figure("two", "Two", "", [a], {"height": 200}, choices=("Kind",), versions=two),
    ]
    more = table()
    many = Table(more.name, more.headings, [*more.rows, more.rows[1]], more.filters)
    write_page(page_of(many, figures=figures), tmp_path / "x.html")
    browser.open(tmp_path / "x.html")
    shown = "[find('one').data[0].name, find('one').layout.height, find('two').offsetHeight]"
    assert browser.run(shown) == ["a", 300, 200]
    choose(browser, "Kind", "second")
    assert browser.run(shown) == ["b", 400, 0]
    assert browser.run("[...document.querySelectorAll('[data-choice]')].map(one => one.value)") == ["second", "second"]
    choose(browser, "Kind", "first")
    assert browser.run(shown) == ["a", 300, 200]
    assert MARKUP in browser.run("document.body.innerText")
    browser.run(
        "(() => { const one = document.querySelector('[data-table=t] select'); one.value = 'kind';"
        "one.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )
    assert browser.run("find('t_shown').textContent") == "1 of 4 rows shown"
    assert browser.errors == []


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the place and the option."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"x\.html cannot be written: .*; choose another --figure"):
        write_page(page_of(table()), tmp_path / "file" / "x.html", "--figure")
