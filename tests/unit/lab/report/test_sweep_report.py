"""Does the page of a sweep show the paper's table beside ours, every run, and what it cannot tell?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from browser import Browser, needs_browser
from run_folder import losses
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import StorageError
from megasdc.config.faults import load_profile
from megasdc.lab.report.run_pages.study_page import LIMITS, sweep_page
from megasdc.lab.sweeps.sweep_file import SweepFile

CELLS = {"LR 5e-4": "pei_table_1/scratch LR 5e-4 b2 .95", "LR 5e-3": "pei_table_1/scratch LR 5e-3 b2 .95"}
RATES = {"LR 5e-4": 5e-4, "LR 5e-3": 5e-3}
LOW_BIT = {"submodule": "2.layer.mlp.linear_fc1", "phase": "forward", "kind": "bit_flip", "bits": "mantissa"}
SEEDS = (1, 2)
FINAL = {
    ("LR 5e-4", "healthy"): (3.0, 3.2),
    ("LR 5e-4", "node_10"): (3.003, 3.2032),
    ("LR 5e-4", "node_11"): (3.0, 3.2),
    ("LR 5e-4", "invented"): (3.0 * 1.03, 3.2 * 1.05),
    ("LR 5e-4", "low bit"): (3.0 * 1.0002, 3.2 * 0.9999),
    ("LR 5e-3", "healthy"): (2.9, 3.1),
    ("LR 5e-3", "node_10"): (2.9 * 1.01, 3.1 * 1.02),
    ("LR 5e-3", "node_11"): (None, 3.1),
}


def write_sweep(folder: Path, left_out: int = 0) -> Path:
    """Write a sweep's folder by hand: two cells, two nodes, two seeds; one run met NaN, the last ones lack."""
    sweep = SweepFile.model_validate(
        {
            "name": "rates",
            "description": "Learning rates in kind.",
            "tables": ["pei_table_1"],
            "base": "configs/smoke.json",
            "cells": [
                {"name": cell, "paper": paper, "set": {"optimizer.params.lr": RATES[cell]}}
                for cell, paper in CELLS.items()
            ],
            "nodes": [
                *({"name": name, "profile": name} for name in ("node_10", "node_11")),
                {"name": "invented", "made_up": True, "faults": [LOW_BIT]},
                {"name": "low bit", "control": True, "faults": [LOW_BIT]},
            ],
            "seeds": list(SEEDS),
        }
    )
    rows: list[dict[str, Any]] = []
    for (cell, node), finals in FINAL.items():
        for seed, final in zip(SEEDS, finals, strict=True):
            broken = final is None
            rows.append(
                {
                    "run_id": f"{cell}-{node}-{seed}".replace(" ", ""),
                    "cell": cell,
                    "node": node,
                    "profile": node if node.startswith("node") else None,
                    "control": node == "low bit",
                    "made_up": node == "invented",
                    "seed": seed,
                    "start": "scratch",
                    "status": "nan" if broken else "done",
                    "reason": "12 steps in a row were skipped" if broken else "",
                    "final_loss": final,
                    "eval_loss": None if broken else final + 0.1,
                    "steps": 40,
                    "skipped_steps": 12 if broken else 0,
                    "seconds": 10.0,
                    "versions": "{}",
                    "optimizer.params.lr": RATES[cell],
                }
            )
    names = ("cell", "node", "profile", "control", "made_up", "seed", "start", "run_id")
    places = [
        {name: row[name] for name in names} | {"settings": {"optimizer.params.lr": RATES[row["cell"]]}} for row in rows
    ]
    content = {
        "sweep": sweep.model_dump(mode="json"),
        "size": "cpu",
        "cells": [cell.model_dump(mode="json") for cell in sweep.cells],
        "varied": ["optimizer.params.lr"],
        "places": places,
        "runs": {},
        "profiles": {name: load_profile(name).model_dump(mode="json") for name in ("node_10", "node_11")},
        "versions": {"megasdc": "0.1.0"},
    }
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps(content))
    rows = rows[: len(rows) - left_out]
    pq.write_table(pa.Table.from_pylist(rows), folder / "results.parquet")
    series = []
    for row in rows:
        loss = losses(40, seed=row["seed"])
        if row["status"] == "nan":
            loss[28:] = math.nan
        series += [
            {"run_id": row["run_id"], "step": step, "name": name, "value": value * factor}
            for step, value in enumerate(loss.tolist(), 1)
            for name, factor in (("train/loss", 1.0), ("train/grad_norm", 1e3 if row["node"] == "invented" else 0.1))
        ]
    pq.write_table(pa.Table.from_pylist(series), folder / "series.parquet")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole sweep."""
    return write_sweep(tmp_path_factory.mktemp("sweep") / "rates")


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    """Its page, where the command puts it."""
    result = CliRunner().invoke(app, ["report", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["kind"] == "sweep"
    assert [one["cell"] for one in found["cells"]] == list(CELLS)
    return Path(found["page"])


def test_our_table_stands_beside_the_papers(folder: Path) -> None:
    """Mean, spread, worst case, numbers of worse and NaN nodes by hand; the paper's numbers as published."""
    table = sweep_page(folder).tables[0]
    rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    low, high = rows
    assert high["healthy"].text == f"{fmean((2.9, 3.1)):.4f} ± {stdev((2.9, 3.1)):.4f}"
    assert high["increase"].value == pytest.approx(0.015)
    assert high["increase"].text == f"+1.500% ± {stdev((0.01, 0.02)):.3%}"
    assert (high["its node"].text, high["worse"].text, high["NaN"].text) == ("node_10", "1 of 2", "node_11")
    assert low["chance"].value == pytest.approx(0.0002)
    assert (low["worse"].text, low["NaN"].text, low["failed"].text) == ("0 of 2", "0", "0")
    assert [cell.text for cell in list(low.values())[10:]] == ["2.6745", "2.679", "+0.17%", "0", "0"]
    assert [cell.text for cell in list(high.values())[10:]] == ["2.6133", "diverge", "-", "5", "1"]
    apart = sweep_page(folder).tables[1]
    first, second = ([cell.text for cell in row] for row in apart.rows)
    assert apart.name == "made_up_nodes"
    assert (first[2].split()[0], first[3], first[4]) == ("+4.000%", "invented", "1 of 1")
    assert second[1:5] == ["-", "-", "-", "0 of 0"]


def test_limits_settings_and_reasons_are_told(folder: Path) -> None:
    """The paragraph on simulated faults, varied settings of each cell, and why a run is not done."""
    page = sweep_page(folder)
    assert LIMITS in [one.sentences for one in page.sections]
    tables = {one.name: [[cell.text for cell in row] for row in one.rows] for one in page.tables}
    assert tables["cell_settings"] == [["LR 5e-4", "scratch", "0.0005"], ["LR 5e-3", "scratch", "0.005"]]
    assert tables["not_done"][0][:6] == ["LR 5e-3", "node_11", "1", "nan", "40", "12 steps in a row were skipped"]
    assert len(tables["all_runs"]) == 16
    node = load_profile("node_10")
    assert tables["nodes"][0][1] == node.description and tables["nodes"][0][3] == " ".join(node.assumed)
    assert "mismatch frequency forward attention 0.00478" in tables["nodes"][0][2]
    assert [row[0] for row in tables["nodes"]] == ["node_10", "node_11", "invented (made up)", "low bit (control)"]
    assert tables["nodes"][3][1:5] == ["-", "-", "-", "bit_flip in forward of 2.layer.mlp.linear_fc1"]
    assert page.tiles["rows"] == "16 of 16"
    assert page.state == "same"


def test_figures_hold_every_run(folder: Path) -> None:
    """Final losses of all that are done, healthy apart; increases by node and cell; curves with gaps for NaN."""
    figures = {one.name: one for one in sweep_page(folder).figures}
    for one in figures.values():
        go.Figure(one.traces, one.layout)
    sick, healthy, controls = figures["final_losses"].traces
    assert (len(sick["y"]), len(healthy["y"]), len(controls["y"])) == (9, 4, 2)
    assert "1 of 16 runs are not done" in figures["final_losses"].caption
    assert figures["increases"].traces[0]["z"][0] == [pytest.approx(0.001), pytest.approx(0.015)]
    assert figures["increases"].traces[0]["text"][1] == ["+0.00%", "nan"]
    assert figures["increases"].traces[1]["z"] == [[None, None], [None, 1], [None, None], [None, None]]
    broken = figures["cell_01"].traces[4]
    assert broken["name"] == "node_11, nan"
    assert broken["y"].count(None) == 12
    norms = figures["norm_00"]
    assert norms.layout["yaxis"]["type"] == "log" and len(norms.traces) == 10
    assert max(norms.traces[6]["y"]) > 100 * max(norms.traces[0]["y"])


def test_a_sweep_that_goes_on_says_so(tmp_path: Path) -> None:
    """How many rows lack, also when no run has finished; tables that are not there are told, with what writes them."""
    page = sweep_page(write_sweep(tmp_path / "going", left_out=3))
    assert "13 of 16 rows are there" in page.verdict
    assert page.notes == ["3 of 16 rows are not there yet; numbers of their cells will change"]
    assert page.state == "unsure"
    results = tmp_path / "going" / "results.parquet"
    pq.write_table(pq.read_table(results).slice(0, 0), results)
    assert "no run has finished yet; there will be 16 rows" in sweep_page(tmp_path / "going").verdict
    results.unlink()
    with pytest.raises(StorageError, match=r"results.parquet is missing.*megasdc sweep --table"):
        sweep_page(tmp_path / "going")


def test_damaged_results_are_told(tmp_path: Path) -> None:
    """A torn file, or one without a part, is named with what writes it anew."""
    for name in ("results.parquet", "sweep.json"):
        path = write_sweep(tmp_path / name) / name
        path.write_bytes(path.read_bytes()[:40])
        with pytest.raises(StorageError, match=r"damaged.*with the same --out writes it anew"):
            sweep_page(tmp_path / name)
    folder = write_sweep(tmp_path / "part")
    content = json.loads((folder / "sweep.json").read_text())
    del content["profiles"]
    (folder / "sweep.json").write_text(json.dumps(content))
    with pytest.raises(StorageError, match="profiles is missing"):
        sweep_page(folder)


@pytest.mark.slow
@needs_browser
def test_the_page_is_drawn(browser: Browser, page: Path) -> None:
    """No error, no request, every figure, all points of the strip; readable on a phone, in the dark, on paper."""
    browser.open(page)
    assert browser.run("[...document.querySelectorAll('.figure')].every(f => f.querySelector('.main-svg'))")
    assert browser.run("find('final_losses').querySelectorAll('.boxlayer .point').length") == 15
    assert browser.run("find('cell_00').querySelectorAll('.scatterlayer .trace').length") == 10
    assert "What simulated faults cannot tell" in browser.run("document.body.innerText")
    select = "document.querySelector('[data-table=all_runs] select')"
    browser.run(f"{select}.value = 'LR 5e-3'; {select}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert browser.run("find('all_runs_shown').textContent") == "6 of 16 rows shown"
    browser.open(page, width=390, height=800, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.covered_axes() == []
    browser.open(page, width=720, media="print")
    assert browser.run("document.documentElement.scrollWidth") <= 720
    assert browser.errors == []
