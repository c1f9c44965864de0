"""Does the page of a sweep of studies show what each node computed, beside what was published of it?"""

from __future__ import annotations

import csv
from pathlib import Path

import plotly.graph_objects as go
import pytest
from browser import Browser, needs_browser
from test_study_report import write_study
from test_sweep_report import CELLS, write_sweep
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.lab.report.run_pages.study_page import sweep_page
from megasdc.ops.run_folder.study_log import StudyLog

RARE, FAST = CELLS


def write_studies(folder: Path, modes: dict[str, str]) -> Path:
    """A sweep whose runs with seed 1 are studies, by cell; healthy pairs are equal."""
    write_sweep(folder)
    for cell, mode in modes.items():
        for node in ("healthy", "node_10", "node_11"):
            run = folder / "runs" / f"{cell}-{node}-1".replace(" ", "")
            write_study(run, "parameter_sync" if node == "healthy" else mode)  # which writes no difference
            if node == "healthy" and mode != "parameter_sync":
                _rename(run, mode)
            if mode == "parameter_sync":
                log = StudyLog(run, 1, 1, 20)
                for step in (21, 22):
                    ratio = 0.0 if node == "healthy" else 0.06 * (step - 20)
                    log.write("gradient", step, fqn="*", difference_norm=ratio, trusted_norm=1.0, ratio=ratio)
                log.close()
    return folder


def _rename(run: Path, mode: str) -> None:
    for path in (run / "study").iterdir():
        path.write_text(path.read_text().replace('"parameter_sync"', f'"{mode}"'))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cell compares submodules, the other lets both train."""
    return write_studies(tmp_path_factory.mktemp("studies") / "nodes", {RARE: "computation_sync", FAST: "free_run"})


def test_each_node_has_its_points_and_its_curve(folder: Path) -> None:
    """Frequencies and severities by hand, published ones hollow; parameters over steps, without the zero of step 1."""
    figures = {one.name: one for one in sweep_page(folder).figures}
    for one in figures.values():
        go.Figure(one.traces, one.layout)
    frequency = {trace["name"]: trace for trace in figures["rq1_frequency"].traces}
    own, published = frequency["attention, forward"], frequency["attention, forward, published"]
    assert own["y"] == ["healthy, seed 1", "node_10, seed 1", "node_11, seed 1"]
    assert own["x"] == [None, 12 / 40_000, 12 / 40_000]
    assert published["x"] == [None, 4.78e-3, 2.89e-2]
    assert published["marker"]["symbol"] == "circle-open"
    assert figures["rq1_frequency"].columns["ffn, forward"] == [0.0, 0.0, 0.0]
    severity = {trace["name"]: trace["x"] for trace in figures["rq1_severity"].traces}
    assert severity["attention, forward"] == [None, pytest.approx(0.2), pytest.approx(0.2)]
    curves = {trace["name"]: trace["y"] for trace in figures["rq3_parameters"].traces}
    assert sorted(curves) == ["node_10, seed 1", "node_11, seed 1"], "healthy pairs are equal"
    assert figures["rq3_parameters"].caption.endswith("Equal in every bit: healthy, seed 1.")
    assert curves["node_10, seed 1"][:2] == [None, pytest.approx(2e-4)]


def test_cells_kept_equal_have_no_scores(folder: Path) -> None:
    """A node cannot be worse where it is overwritten: neither in the table, the first line nor the figures."""
    page = sweep_page(folder)
    scores = next(table for table in page.tables if table.name == "cells")
    assert [row[0].text for row in scores.rows] == [FAST]
    assert "in 1 of 1 cells a node is worse" in page.verdict
    drawn = {one.name: one for one in page.figures}["final_losses"]
    assert set(drawn.columns["cell"]) == {FAST}


def test_gradients_alone(tmp_path: Path) -> None:
    """The worst of all steps beside what was published; where no cell trains freely there is no table of cells."""
    page = sweep_page(write_studies(tmp_path / "nodes", {RARE: "parameter_sync", FAST: "parameter_sync"}))
    assert "6 studies of nodes, each kept equal to its trusted replica" in page.verdict
    assert "cells" not in [table.name for table in page.tables]
    names = [one.name for one in page.figures]
    assert names[0] == "rq2_noise" and "final_losses" not in names and "increases" not in names
    own, published = page.figures[0].traces
    assert own["x"] == [None, 0.12, 0.12] * 2
    assert published["x"] == [None, None, 0.051] * 2


@pytest.mark.slow
def test_tables_as_csv_have_all_that_they_show(folder: Path, tmp_path: Path) -> None:
    """Beside a number what else the page says of it: what was published, spreads, names of nodes; and only then."""
    result = CliRunner().invoke(
        app, ["report", str(folder), "--out", str(tmp_path / "x.html"), "--figures", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    with open(tmp_path / "rq1_submodules.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["attention, forward"]) == 12 / 40_000
    assert rows[1]["attention, forward, shown"] == "0.0003 [0.00478]; 0.2 (0.5)"
    with open(tmp_path / "cells.csv", encoding="utf-8", newline="") as file:
        (scores,) = csv.DictReader(file)
    assert (scores["worse"], scores["worse, shown"]) == ("1.0", "1 of 2")
    assert (scores["NaN"], scores["NaN, shown"]) == ("1.0", "node_11")
    assert "±" in scores["healthy, shown"] and "worst case, shown" not in scores


@pytest.mark.slow
@needs_browser
def test_the_page_is_drawn(browser: Browser, folder: Path, tmp_path: Path) -> None:
    """No error, all points, no legend over an axis, on a phone too."""
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(folder), "--out", str(page)]).exit_code == 0
    browser.open(page)
    assert browser.run("find('rq1_frequency').querySelectorAll('.scatterlayer .point').length") == 10
    assert browser.covered_axes() == []
    browser.open(page, width=390, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.covered_axes() == []
    assert browser.errors == []
