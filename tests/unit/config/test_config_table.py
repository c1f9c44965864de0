"""The documentation's table of fields is generated from the sections and kept up to date."""

from pathlib import Path
from typing import get_args

import pytest

from megasdc.common.versions import render_tables
from megasdc.config.fields import AtResume, json_type_text
from megasdc.config.sections import MegasdcSection
from megasdc.config.table import render_table, with_tables

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
TABLES = {"config-table": render_table, "other": lambda: "table\n"}
BEGIN, END = "<!-- config-table:begin -->", "<!-- config-table:end -->"


def test_table_has_every_field_with_a_meaning():
    """One row a field, each with type, default, what a resume makes of it and a meaning that ends a sentence."""
    rows = [line.split(" | ") for line in render_table().partition("\n\n")[0].splitlines()[2:]]
    assert all(len(row) == 5 for row in rows)
    paths = [row[0].removeprefix("| ") for row in rows]
    assert "`model.num_layers`" in paths and "`data.sources[].kind`" in paths and "`training.steps`" in paths
    assert all(row[1] and row[2] and row[4].removesuffix(" |").endswith(".") for row in rows)
    assert {row[3] for row in rows} == set(get_args(AtResume))
    assert {path.strip("`").split(".")[0].removesuffix("[]") for path in paths} == set(MegasdcSection.model_fields)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [(int, "integer"), (int | None, "integer or null"), (list[str], "list of (text)"), (bool, "true or false")],
)
def test_types_in_words(annotation, words):
    """Types are written as JSON users know them."""
    assert json_type_text(annotation) == words


def test_the_table_stands_between_the_markers_only(tmp_path):
    """Text around the markers stays; with the table in it the file is up to date; nothing is written."""
    file = tmp_path / "page.md"
    second = "<!-- other:begin -->\n{}<!-- other:end -->\n"
    file.write_text(old := f"before\n{BEGIN}\nold\n{END}\nafter\n{second.format('')}")
    fresh = f"before\n{BEGIN}\n{render_table()}{END}\nafter\n" + second.format("table\n")
    assert with_tables(file, TABLES) == (old, fresh)
    assert file.read_text() == old
    file.write_text(fresh)
    assert with_tables(file, TABLES) == (fresh, fresh)


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}\n"])
def test_missing_markers_are_an_error(tmp_path, text):
    """Without both markers in order nothing is written."""
    file = tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(ValueError, match="config-table"):
        with_tables(file, TABLES)
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("page", "tables"), [("configuration", TABLES), ("versions", {"versions-table": render_tables})]
)
def test_the_documentation_is_up_to_date(page, tables):
    """The tables of the reference are the generated ones."""
    file = REFERENCE / f"{page}.md"
    assert len(set(with_tables(file, tables))) == 1, f"run: megasdc config-table --write {file}"
