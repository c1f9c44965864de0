"""Does the page on DropCompute show what its commands found? Simulated, measured and trained."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from browser import Browser, needs_browser
from run_folder import data_of
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import DataError
from megasdc.distributions import BoundedLogNormal
from megasdc.lab.planning.environment import DelayEnvironment
from megasdc.lab.planning.simulate import Simulation, SimulationResults, simulate_thresholds
from tools.bench.drops.options import DropSpeedupOptions, DropTrainOptions
from tools.bench.drops.speedup import DropSpeedupResult
from tools.bench.drops.speedup_scores import Comparison, LargerBatchRun
from tools.bench.drops.training import DropTrainResult
from tools.bench.drops.training_scores import DropRun

REPLICAS, MICRO_BATCHES, REST_S = (2, 16), 6, 0.5


def told(*arguments: object) -> dict[str, Any]:
    """What the command says as JSON."""
    result = CliRunner().invoke(app, ["report", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    """Two numbers of replicas in the paper's environment."""
    environment = DelayEnvironment(0.45, (BoundedLogNormal(0.225),), 1)
    sizes = [Simulation(one, MICRO_BATCHES, communication_s=REST_S, steps=40, thresholds=20) for one in REPLICAS]
    results = tuple(simulate_thresholds(one, environment, lambda *_: None) for one in sizes)
    return SimulationResults(environment, results).as_dict()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, simulated: dict[str, Any]) -> list[Path]:
    """A result of each command; the measured one is beyond its bar at one threshold."""
    folder = tmp_path_factory.mktemp("results")
    measured = [
        Comparison(0.5, False, 0.05, 0.052, 1.10, 1.10, 1.12),
        Comparison(0.4, True, 0.10, 0.11, 1.20, 1.20, 1.30),
    ]
    options = DropTrainOptions(steps=12, seeds=2, rates=(0.1,), evaluations=2)
    runs = [
        DropRun(setting, seed, 12, 960, 5000, 0, [[6, 5.0], [12, 4.0 + setting.rate * (1 + seed)]], 3.0)
        for setting, seed in options.runs
    ]
    machine = {"date": "today", "processor": "a processor"}
    larger = LargerBatchRun(0.6, 10, 0.998, 1.15, 1.14)
    found = {
        "simulated": simulated,
        "measured": DropSpeedupResult(machine, DropSpeedupOptions(), measured, larger, 0.97).as_dict(),
        "trained": DropTrainResult(machine, options, runs).as_dict(),
    }
    paths = []
    for name, content in found.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(content))
    return paths


@pytest.fixture(scope="module")
def page(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all."""
    path = tmp_path_factory.mktemp("written") / "page.html"
    told(*files, "--out", path)
    return path


def figure(page: Path, name: str) -> dict[str, Any]:
    """A figure of the page."""
    return next(one for one in data_of(page)["figures"] if one["name"] == name)


def test_scaling_is_over_replicas_that_never_wait(page: Path, simulated: dict[str, Any]) -> None:
    """(M mu + Tc) / (E[T] + Tc), and times the effective speed-up of the best threshold, for each N."""
    found = {one["name"]: one for one in figure(page, "drop_scaling")["traces"]}
    for place, one in enumerate(simulated["results"]):
        alone = MICRO_BATCHES * one["latency"]["mean_s"] + REST_S
        waits = alone / (one["longest"]["simulated_s"] + REST_S)
        assert found["every micro-batch waited for"]["y"][place] == pytest.approx(waits)
        assert found["with the best threshold"]["y"][place] == pytest.approx(waits * one["best"]["speedup"])
        assert found["with the best threshold"]["x"][place] == REPLICAS[place]
    curve = figure(page, "drop_thresholds")["traces"][1]
    whole = simulated["results"][1]["curve"]
    drawn = {(1 - share, gain) for share, gain in zip(whole["completed_share"], whole["speedup"], strict=True)}
    assert set(zip(curve["x"], curve["y"], strict=True)) == {point for point in drawn if point[0] <= 0.3}


@pytest.mark.slow
def test_measured_and_trained_are_shown_as_found(files: list[Path], tmp_path: Path) -> None:
    """What misses its bar is said; losses stand at their steps and at their simulated time; tables have the scores."""
    found = told(*files, "--out", tmp_path / "page.html", "--figures", tmp_path / "figures")
    assert "not within 5% of the predicted ones (at most 8.3% apart)" in " ".join(found["sentences"])
    scores = json.loads(files[2].read_text())["scores"]
    steps = figure(tmp_path / "page.html", "drop_loss_steps_0")["traces"]
    times = figure(tmp_path / "page.html", "drop_loss_time_0")["traces"]
    assert [one["name"] for one in steps] == [one["name"] for one in scores]
    for score, by_step, by_time in zip(scores, steps, times, strict=True):
        assert by_step["x"] == [6.0, 12.0]
        assert by_step["y"] == by_time["y"] == [point[2] for point in score["curve"]]
        assert by_time["x"] == pytest.approx([point[1] / 3600 for point in score["curve"]])
    text = (tmp_path / "figures" / "drop_training_table_0.csv").read_text()
    table = list(csv.DictReader(text.splitlines()))
    assert [float(row["final loss"]) for row in table] == pytest.approx([4.0, *[4.25] * (len(scores) - 1)])
    assert [float(row["largest"]) for row in table] == pytest.approx([0.0, *[0.075] * (len(scores) - 1)])


@pytest.mark.slow
@needs_browser
def test_several_numbers_of_replicas_make_a_curve(files: list[Path], tmp_path: Path, browser: Browser) -> None:
    """Each rule for a threshold is a line over the numbers of replicas, measured and predicted; one number has none."""
    more = json.loads(files[1].read_text())
    more["options"]["replicas"] = 2
    for one in more["thresholds"]:
        one["speedup"], one["predicted"] = one["speedup"] - 0.05, one["predicted"] - 0.06
    (tmp_path / "two.json").write_text(json.dumps(more))
    told(files[1], tmp_path / "two.json", "--out", tmp_path / "page.html")
    lines = {one["name"]: one for one in figure(tmp_path / "page.html", "drop_measured_scaling")["traces"]}
    assert sorted(lines) == [
        "chosen by the run", "chosen by the run, predicted", "for 2.5% dropped", "for 2.5% dropped, predicted",
    ]  # fmt: skip
    assert lines["for 2.5% dropped"]["x"] == [2, 8]
    assert lines["for 2.5% dropped"]["y"] == pytest.approx([1.07, 1.12])
    assert lines["chosen by the run, predicted"]["y"] == pytest.approx([1.14, 1.20])
    told(files[1], "--out", tmp_path / "one.html")
    assert "drop_measured_scaling" not in [one["name"] for one in data_of(tmp_path / "one.html")["figures"]]
    browser.open(tmp_path / "page.html")
    assert browser.run("find('drop_measured_scaling').querySelectorAll('.scatterlayer .trace').length") == 4
    assert browser.covered_axes() == []
    assert browser.errors == []


def test_files_that_are_no_results_are_refused(files: list[Path], tmp_path: Path) -> None:
    """Another JSON file, a broken one, two simulations, files beside folders: named, with what to give."""
    other, broken = tmp_path / "other.json", tmp_path / "broken.json"
    other.write_text("{}")
    broken.write_text("{")
    for paths, said in (
        ([other], "other.json is no result of DropCompute"),
        ([broken], "broken.json cannot be read as JSON"),
        ([files[0], files[0]], "2 simulations were given"),
        ([files[0], tmp_path], "folders have pages of their own"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, paths), "--out", str(tmp_path / "page.html")])
        assert isinstance(result.exception, DataError)
        assert said in str(result.exception)
    assert not (tmp_path / "page.html").exists()


def test_every_figure_is_valid(page: Path) -> None:
    """Plotly itself takes every trace and layout."""
    for one in data_of(page)["figures"]:
        text = json.dumps(one).replace("var(--", "#000000(--")
        cleaned = json.loads(re.sub(r"#000000\(--\w+\)", "#000000", text))
        taken = go.Figure(cleaned["traces"], cleaned["layout"])  # raises a ValueError at what it does not know
        assert len(taken.data) == len(one["traces"]) > 0


@pytest.mark.slow
@needs_browser
def test_the_page_in_a_browser(browser: Browser, page: Path) -> None:
    """No console error and no request; every figure is drawn; a phone needs no sideways scrolling."""
    browser.errors.clear()
    browser.open(page)
    drawn = browser.run(
        "[...document.querySelectorAll('.js-plotly-plot')].filter(one => one.querySelector('path')).length"
    )
    assert drawn == len(data_of(page)["figures"]) == 5
    browser.open(page, width=390, height=800)
    assert browser.run("document.documentElement.scrollWidth <= 390")
    assert browser.covered_axes() == []
    assert browser.errors == []
