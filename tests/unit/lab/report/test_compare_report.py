"""Are runs beside a healthy one compared as the paper does, and shown as compared?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from browser import Browser, needs_browser
from hand_made import make_whole, write_checkpoint
from run_folder import losses, write_run
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.lab.report.run_pages.command import compare_page, names_of
from megasdc.ops.run_folder.record import load_run

STEPS = 60


def told(*arguments: object) -> dict[str, Any]:
    """What the command says as JSON."""
    result = CliRunner().invoke(app, ["report", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A healthy run, an equal one, one just below and one above 0.5 %, one that ends with NaN, one that stopped."""
    folder = tmp_path_factory.mktemp("runs")
    broken = losses(STEPS)
    broken[50:] = math.nan
    kept = {
        "healthy": losses(STEPS),
        "equal": losses(STEPS),
        "close": losses(STEPS, worse=0.0049),
        "worse": losses(STEPS, worse=0.0051),
        "broken": broken,
    }
    found = {name: write_run(folder / name, loss) for name, loss in kept.items()}
    half, settings = losses(STEPS, worse=-0.02)[: STEPS // 2], ("optimizer.params.lr=0.5",)
    found["half"] = write_run(folder / "half", half, planned=STEPS, ended=False, settings=settings)
    return found


@pytest.fixture(scope="module")
def page(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all."""
    path = tmp_path_factory.mktemp("written") / "page.html"
    told(*runs.values(), "--out", path)
    return path


def test_the_increase_is_that_of_the_paper(runs: dict[str, Path], tmp_path: Path) -> None:
    """(L_u / L_h - 1) at the last common step; worse above 0.5 %, NaN apart; equal: in every bit, first difference."""
    found = told(*runs.values(), "--out", tmp_path / "page.html")
    by_name = {one["name"]: one for one in found["runs"]}
    assert found["healthy"] == "healthy"
    assert "verdict" not in by_name["healthy"]
    verdicts = {name: one["verdict"] for name, one in by_name.items() if name != "healthy"}
    close = "within 0.5 %"
    assert verdicts == {"equal": "equal", "close": close, "worse": "worse", "broken": "NaN", "half": close}
    assert by_name["close"]["increase"] == pytest.approx(0.0049)
    assert by_name["worse"]["increase"] == pytest.approx(0.0051)
    assert by_name["equal"]["increase"] == 0.0
    assert by_name["broken"]["increase"] is None
    assert (by_name["half"]["at_step"], by_name["half"]["increase"]) == (30, pytest.approx(-0.01))
    assert by_name["equal"]["first_difference_at_step"] is None
    assert by_name["close"]["first_difference_at_step"] == 1
    assert by_name["broken"]["first_difference_at_step"] == 51
    loss = losses(STEPS)[-1]
    assert by_name["worse"]["eval_increase"] == pytest.approx((loss * 1.0051 + 0.1) / (loss + 0.1) - 1)
    assert "1 of 5 worse" in found["verdict"]
    assert "the worst, worse, by +0.51%" in found["verdict"]


def test_the_healthy_run_can_be_named(runs: dict[str, Path], tmp_path: Path) -> None:
    """--healthy takes the place of the first, given among the others or beside them."""
    others = [runs["worse"], runs["close"]]
    for paths in (others, [*others, runs["healthy"]]):
        found = told(*paths, "--healthy", runs["healthy"], "--out", tmp_path / "page.html")
        assert [one["name"] for one in found["runs"]] == ["healthy", "worse", "close"]


def test_settings_that_differ_are_told(runs: dict[str, Path]) -> None:
    """The learning rate alone, not the folders; equal configurations are said to be."""
    page = compare_page([load_run(runs["healthy"]), load_run(runs["half"])])
    (settings,) = (one for one in page.tables if one.name == "settings")
    assert [[cell.text for cell in row] for row in settings.rows] == [["optimizer.params.lr", "0.002", "0.5"]]
    same = compare_page([load_run(runs["healthy"]), load_run(runs["equal"])])
    assert "settings" not in [one.name for one in same.tables]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """By as many folders above as it takes."""
    paths = [write_run(tmp_path / one / "a" / "run", losses(3)) for one in "xy"]
    assert list(names_of([load_run(path) for path in paths])) == ["x/a/run", "y/a/run"]


def test_figures_hold_the_differences(runs: dict[str, Path]) -> None:
    """At every step that both have, NaN where one has none; plotly knows every setting."""
    page = compare_page([load_run(runs[name]) for name in ("healthy", "worse", "half")])
    figures = {one.name: one for one in page.figures}
    for one in figures.values():
        go.Figure(one.traces, one.layout)
    columns = figures["loss_difference"].columns
    expected = losses(STEPS, worse=0.0051) / losses(STEPS) - 1
    np.testing.assert_allclose(columns["worse"], expected)
    assert np.isfinite(columns["half"]).sum() == STEPS // 2
    assert set(figures["losses"].columns) == {"step", "healthy", "worse", "half"}


def test_parameters_are_compared_where_both_keep_checkpoints(tmp_path: Path) -> None:
    """||theta - theta_h|| / ||theta_h|| of all weights, by NumPy; a step that one lacks is left out."""
    paths = [write_run(tmp_path / name, losses(20)) for name in ("healthy", "bad")]
    whole = make_whole(2)
    whole["weight"]["2.layer.self_attention.linear_qkv.weight"][1, 2] += 0.25
    for step in (1, 2, 3):
        write_checkpoint(paths[0] / "checkpoints", step)
    write_checkpoint(paths[1] / "checkpoints", 1)
    write_checkpoint(paths[1] / "checkpoints", 2, whole=whole)
    page = compare_page([load_run(path) for path in paths])
    (figure,) = (one for one in page.figures if one.name == "parameters")
    good, bad = make_whole(2)["weight"], whole["weight"]
    apart = np.sqrt(sum(float(((bad[name].double() - good[name].double()) ** 2).sum()) for name in good))
    assert figure.columns["step"] == [1, 2]
    assert figure.columns["bad"] == [0.0, pytest.approx(apart / norm_of(good), rel=0.01)]
    assert "Equal in every bit, and so not drawn: bad at step 1" in figure.caption


def norm_of(tensors: dict[str, Any]) -> float:
    """Euclidean, of all tensors."""
    return float(np.sqrt(sum(float((one.double() ** 2).sum()) for one in tensors.values())))


@pytest.mark.slow
@needs_browser
def test_the_page_is_drawn_sorted_and_filtered(browser: Browser, page: Path) -> None:
    """No error, no request; a curve of each run; the table sorts by increase and shows the worse alone."""
    browser.open(page)
    assert browser.run("document.querySelector('h1').className") == "different"
    assert browser.run("find('losses').data.map(one => one.name)").count("healthy") == 1
    assert browser.run("find('losses').querySelectorAll('.scatterlayer .trace').length") == 6
    difference = browser.run("find('loss_difference').data.find(one => one.name === 'worse').y")
    np.testing.assert_allclose(difference, losses(STEPS, worse=0.0051) / losses(STEPS) - 1)
    rows = "[...find('runs').tBodies[0].rows].filter(row => row.offsetHeight).map(row => row.cells[0].textContent)"
    head = "[...find('runs').tHead.rows[0].cells].find(cell => cell.innerText.trim() === 'increase')"
    browser.run(f"{head}.querySelector('button').click()")
    assert browser.run(rows)[:4] == ["half", "equal", "close", "worse"]
    select = "document.querySelector('[data-table=runs] select')"
    browser.run(f"{select}.value = 'worse'; {select}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert browser.run(rows) == ["worse"]
    assert browser.errors == []


@pytest.mark.slow
@needs_browser
def test_it_reads_on_a_phone_and_on_paper(browser: Browser, page: Path) -> None:
    """Nothing is wider than the screen, and tables not wider than A4."""
    browser.open(page, width=390, height=800, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.covered_axes() == []
    browser.open(page, width=720, media="print")
    assert browser.run("document.documentElement.scrollWidth") <= 720
    assert browser.run("find('runs').getBoundingClientRect().right") <= 720
    assert browser.errors == []
