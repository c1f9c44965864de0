"""Figures of pages come from data: tables and inline figures are generated, numbers of no data are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from megasdc.common.errors import DataError
from tools.bench import figures
from tools.bench.machine import describe_machine
from tools.bench.result import Report, Result, table


@dataclass(frozen=True)
class Drills(Result):
    """A result with a table, a line and many trials."""

    trials: list[int]

    def report(self) -> Report:
        """One table and one line."""
        yield table("drills", ("kind", "found"), [("state", "7")])
        yield "7 of 7 found"


@pytest.fixture(name="page")
def _page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(figures, "DATA", tmp_path)
    monkeypatch.setattr("sys.argv", ["bench", "drills", "--faults", "7", "--out", "/here/a.json", "--log=/here/log"])
    result = Drills(describe_machine(), {}, list(range(figures.LONGEST + 1))).as_dict()
    (tmp_path / "drills.json").write_text(json.dumps(figures.condensed(result)), encoding="utf-8")
    known = {"pages": {"page.md": {"an old one": "3 4"}}}
    (tmp_path / "transcribed.json").write_text(json.dumps(known), encoding="utf-8")
    path = tmp_path / "page.md"
    path.write_text(
        "# Drills 1.5\n\nSay <!--=drills:report.0.rows.0.1-->8<!--=--> of them.\n\nAn old one: 3 of 4.\n\n"
        "<!-- figures drills/1:begin -->\n| a | 9 |\n<!-- figures drills/1:end -->\n",
        encoding="utf-8",
    )
    return path


def test_tables_and_inline_figures_are_those_of_the_data(page: Path) -> None:
    """Both are replaced, and the table tells its command without files, its commit, date and exit code."""
    text, renewed = figures.fresh(page)
    assert text != renewed
    assert "-->7<!--=-->" in renewed
    assert "| kind | found |\n| --- | --- |\n| state | 7 |" in renewed
    assert "`python -m tools.bench drills --faults 7`: exit code 0; 20" in renewed
    assert "| a | 9 |" not in renewed
    page.write_text(renewed, encoding="utf-8")
    assert figures.fresh(page) == (renewed, renewed)


def test_a_figure_of_no_data_is_told(page: Path) -> None:
    """A transcribed one may have other words, and no other numbers."""
    assert figures.unsourced(page, "page.md") == []
    page.write_text(page.read_text().replace("An old one: 3 of 4.", "3 of 4 old ones."), encoding="utf-8")
    assert figures.unsourced(page, "page.md") == []
    page.write_text(page.read_text().replace("3 of 4 old", "4 of 4 old") + "\nIt took 12 ms.\n", encoding="utf-8")
    assert figures.unsourced(page, "page.md") == ["4 of 4 old ones.", "It took 12 ms."]


def test_trials_are_left_out_by_name(page: Path) -> None:
    """Only lists that are longer than what pages need."""
    found = json.loads((page.parent / "drills.json").read_text())
    assert "trials" not in found
    assert found["left_out"] == ["trials"]
    assert found["exit_code"] == 0


@pytest.mark.parametrize("mark", ["<!--=drills:report.5-->1<!--=-->", "<!--=other:a-->1<!--=-->"])
def test_data_that_is_missing_is_named(page: Path, mark: str) -> None:
    """The file is named, with what it does not hold."""
    page.write_text(mark, encoding="utf-8")
    with pytest.raises(DataError, match=r"drills\.json: holds no report\.5|other\.json: .*--take"):
        figures.fresh(page)
