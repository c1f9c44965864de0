"""Does the page of a launch of replicas show its rounds, and all replicas side by side, in a real browser?"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from browser import Browser, needs_browser
from run_folder import add_incident, losses, write_replicas
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import DataError
from megasdc.lab.report.run_pages.command import write_report
from megasdc.lab.report.run_pages.figures.rounds import MAX_MARKS, round_figures
from megasdc.localsgd.rounds import Round
from megasdc.ops.run_folder.replicas import load_rounds


def told(*arguments: object) -> dict[str, Any]:
    """What the command says as JSON."""
    result = CliRunner().invoke(app, ["report", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a launch of two replicas, the second of which was wrong once and late once."""
    folder = tmp_path_factory.mktemp("runs") / "apart"
    write_replicas(folder)
    add_incident(folder / "replica_1", 10)
    return folder


@pytest.fixture(scope="module")
def page(launch: Path) -> Path:
    """Its page, where the command puts it."""
    return Path(told(launch)["page"])


def test_numbers_are_those_of_the_files(launch: Path) -> None:
    """Rounds, who was left out and returned, each replica's part; figures of rounds and of all runs together."""
    found = told(launch)
    assert found["kind"] == "replicas" and found["page"] == str(launch / "reports" / "report.html")
    assert "6 of 6 rounds of 2 replicas" in found["verdict"] and "left out 2 times" in found["verdict"]
    out = [(one["replica"], one["first"], one["last"], one["kind"]) for one in found["rounds"]["left_out"]]
    assert out == [(1, 2, 2, "wrong"), (1, 4, 5, "late")]
    assert [one["rounds"] for one in found["rounds"]["of_replicas"]] == [6, 3]
    assert [one["loss"] for one in found["runs"]] == [losses(30, seed=one)[-1] for one in range(2)]
    assert {"members", "weights", "outer_norms", "exchange", "losses", "throughput"} <= set(found["figures"])
    alone = told(launch / "replica_0")
    assert alone["kind"] == "run" and {"members", "exchange"} <= set(alone["figures"])
    both = told(launch / "replica_0", launch / "replica_1", "--out", launch / "both.html")
    assert both["kind"] == "runs" and {"members", "loss_difference"} <= set(both["figures"])


def test_figures_hold_every_round_and_leave_out_no_fault(launch: Path) -> None:
    """Marks of each replica, weights by tokens, norms; of many rounds some marks of those that took part are drawn."""
    rounds = load_rounds(launch, [])
    members, weights, norms = round_figures(rounds, 5, {})
    for one in (members, weights, norms):
        go.Figure(data=one.traces, layout=one.layout)
    assert {one["name"]: list(one["x"]) for one in members.traces} == {
        "took part": [5, 5, 10, 15, 15, 20, 25, 30, 30],
        "late": [20, 25],
        "wrong": [10],
    }
    assert weights.columns["replica 0"][:3] == [0.5, 1.0, pytest.approx(2 / 3)]
    assert weights.columns["replica 1"] == [0.5, 0, pytest.approx(1 / 3), 0, 0, 0.5]
    assert norms.columns["replica 1"][2] == 3.0 and math.isnan(norms.columns["replica 1"][3])
    assert len(members.columns["step"]) == 12
    many = [replace(rounds[number == 700], round=number) for number in range(1, 2001)]
    drawn = {one["name"]: one["x"] for one in round_figures(many, 5, {})[0].traces}
    assert len(drawn["took part"]) == MAX_MARKS and list(drawn["wrong"]) == [3500]
    assert round_figures(list[Round](), 5, {}) == []


def test_a_launch_has_a_page_of_its_own(launch: Path, tmp_path: Path) -> None:
    """Other paths beside it are refused, and one of which no replica has begun."""
    with pytest.raises(DataError, match="is a launch of replicas, and 2 paths were given"):
        write_report([launch, launch / "replica_0"], tmp_path / "a.html")
    (tmp_path / "rounds.jsonl").touch()
    with pytest.raises(DataError, match="none of which has begun here"):
        write_report([tmp_path], tmp_path / "a.html")


@needs_browser
def test_the_page_is_drawn(browser: Browser, page: Path) -> None:
    """Lanes with marks of all kinds, a curve for each replica, tables with both; nothing is covered on a phone."""
    browser.open(page)
    assert browser.run("document.querySelector('h1').className") == "different"
    assert browser.run("find('members').data.map(one => one.name)") == ["took part", "late", "wrong"]
    assert browser.run("find('members').querySelectorAll('.scatterlayer .point').length") == 12
    for name in ("weights", "outer_norms", "exchange", "losses"):
        assert browser.run(f"find('{name}').querySelectorAll('.scatterlayer .trace').length") == 2
    text = browser.run("document.body.innerText")
    for one in ("its weights are not finite", "Rounds 6, of 2 replicas, every 5 steps.", "took part again in round"):
        assert one in text
    assert browser.run("[...document.querySelectorAll('a')].some(one => one.href.includes('incident_step'))")
    browser.open(page, width=390, height=800, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.covered_axes() == [] and browser.errors == []
