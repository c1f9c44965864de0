"""Does the page of a study show where, when and how far results differ, as its lines say?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from browser import Browser, needs_browser
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import DataError
from megasdc.lab.report.run_pages.study_page import study_page
from megasdc.ops.run_folder.study_log import StudyLog

QKV, FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"


def write_study(folder: Path, mode: str) -> Path:
    """Write 20 steps of two replicas, of which the second is wrong in QKV of layer 2 at steps 5 to 7."""
    logs = [StudyLog(folder, rank, rank, 0) for rank in range(2)]
    for rank, log in enumerate(logs):
        log.write(
            "start", 0, mode=mode, replicas=2, trusted=0, replica_rank=0, dp_rank=0, pp_rank=0, tp_rank=0, host="h"
        )
        for step in range(1, 21):
            log.write("loss", step, loss=4.0 - 0.1 * step + 0.01 * rank, trusted_loss=4.0 - 0.1 * step)
    log = logs[1]
    for step in range(1, 21):
        for name in (f"2.layer.{QKV}", f"3.layer.{QKV}", f"2.layer.{FC1}"):
            log.write("compared", step, steps=1, fqn=name, phase="forward", slot="output", results=1, elements=1000)
        if mode == "computation_sync" and 5 <= step <= 7:
            wrong = {"mismatches": 4, "severity_count": 3, "severity_sum": 0.6, "severity_max": 0.5, "from_zero": 1}
            wrong |= {"non_finite": 0, "flips": {"3": 2, "22": 2}, "decades": {"-3": 1, "-1": 2}, "elements": 1000}
            where = {"micro_batch": 0, "fqn": f"2.layer.{QKV}", "phase": "forward", "slot": "output"}
            log.write("mismatch", step, dtype="float32", shape=[1000], samples=[[7, "0.5", "0.75"]], **where, **wrong)
        if mode == "free_run":
            for place, name in enumerate(("*", f"2.layer.{QKV}", f"2.layer.{FC1}")):
                ratio = 0.0 if step == 1 else 1e-4 * step * (place + 1)
                log.write("parameters", step, fqn=name, difference_norm=ratio, trusted_norm=1.0, ratio=ratio)
    for log in logs:
        log.close()
    return folder


def test_mismatches_are_those_of_the_lines(tmp_path: Path) -> None:
    """Frequency in the cell of its layer and submodule, zero elsewhere; bursts, severities and bits by hand."""
    page = study_page(write_study(tmp_path / "study_1", "computation_sync"))
    figures = {one.name: one for one in page.figures}
    for one in figures.values():
        go.Figure(one.traces, one.layout)
    grey, differs = figures["mismatches_1"].traces
    assert (differs["x"], differs["y"]) == (["2", "3"], [f"forward {FC1}", f"forward {QKV}"])
    assert differs["z"] == [[None, None], [pytest.approx(np.log10(12 / 20_000)), None]]
    assert grey["z"] == [[0, None], [None, 0]]
    assert figures["bursts_1"].columns == {"step": [5, 6, 7], "attention": [4.0, 4.0, 4.0]}
    assert figures["severity_1"].columns == {"from": ["1e-3", "1e-2", "1e-1"], "mismatches": [3, 0, 6]}
    assert "3 whose trusted value is 0" in figures["severity_1"].caption
    counts = dict(zip(figures["bits_1"].columns["bit"], figures["bits_1"].columns["float32"], strict=True))
    assert {bit: count for bit, count in counts.items() if count} == {3: 6, 22: 6}
    samples = next(table for table in page.tables if table.name == "samples")
    assert [cell.text for cell in samples.rows[0]] == [
        "1",
        "1",
        "5",
        "0",
        f"2.layer.{QKV}",
        "forward",
        "7",
        "0.5",
        "0.75",
    ]
    assert len(samples.rows) == 3
    assert page.state == "different"
    assert "12 of 60,000 elements differ" in page.verdict


def test_distances_and_losses_are_those_of_the_lines(tmp_path: Path) -> None:
    """The whole and each submodule over the steps; the difference of losses; equal studies are said to be."""
    figures = {one.name: one for one in study_page(write_study(tmp_path / "study_2", "free_run")).figures}
    columns = figures["parameters_apart"].columns
    assert columns["replica 1, whole"][:3] == [0.0, pytest.approx(2e-4), pytest.approx(3e-4)]
    assert figures["parameters_apart"].traces[0]["y"][0] is None, "zero has no place on a logarithmic axis"
    np.testing.assert_allclose(figures["study_loss_difference"].columns["replica 1"], 0.01)
    equal = study_page(write_study(tmp_path / "study_3", "parameter_sync"))
    assert equal.state == "same"
    assert "no difference in any bit" in equal.verdict


def test_the_worst_step_decides_what_is_drawn(tmp_path: Path) -> None:
    """A submodule that was apart in one step alone is drawn, and one whose last ratio is NaN too."""
    folder = write_study(tmp_path / "study_7", "parameter_sync")
    log = StudyLog(folder, 1, 1, 20)
    for step, ratios in ((21, (0.5, 0.5, 0.0)), (22, (0.0, 0.0, 0.1)), (23, (0.0, 0.0, float("nan")))):
        for name, ratio in zip(("*", f"2.layer.{QKV}", f"2.layer.{FC1}"), ratios, strict=True):
            log.write("gradient", step, fqn=name, difference_norm=ratio, trusted_norm=1.0, ratio=ratio)
    log.close()
    figures = {one.name: one for one in study_page(folder).figures}
    drawn = [trace["name"] for trace in figures["gradient_apart"].traces]
    assert drawn == ["replica 1, whole", f"replica 1, 2.layer.{QKV}", f"replica 1, 2.layer.{FC1}"]


def test_losses_and_their_spikes_have_a_table(tmp_path: Path) -> None:
    """Last loss, differences to the trusted one, and the steps of spikes by number."""
    folder = write_study(tmp_path / "study_8", "free_run")
    log = StudyLog(folder, 1, 1, 20)
    for step in range(21, 31):
        log.write("loss", step, loss=9.0 if step == 28 else 2.0, trusted_loss=2.0)
    log.close()
    table = next(table for table in study_page(folder).tables if table.name == "losses")
    row = dict(zip(table.headings, table.rows[-1], strict=True))
    assert (row["replica"].value, row["largest difference"].value, row["at step"].value) == (1, 7.0, 28)
    assert (row["spikes"].value, row["spikes at steps"].text) == (1, "28")


def test_how_far_it_is_and_what_is_left_out(tmp_path: Path) -> None:
    """Steps of those planned and where the trusted replica is; a torn last line is counted; nothing yet is an error."""
    folder = write_study(tmp_path / "study_6", "computation_sync")
    (folder / "replica_0").mkdir()
    (folder / "replica_0" / "resolved.json").write_text('{"megasdc": {"training": {"steps": 50}}}')
    (folder / "replica_0" / "metrics.jsonl").write_text('{"step": 20, "time": 90.0, "train/loss": 2.0}\n')
    page = study_page(folder)
    assert page.tiles["steps"] == "20 of 50"
    assert page.sentences[0].startswith("Replica 0: under way at step 20 of 50")
    with open(folder / "study" / "rank_00001.jsonl", "a") as file:
        file.write('{"kind": "mismatch", "st')
    torn = "1 file ends within a line, which is skipped: it is being written, or its process was killed"
    assert study_page(folder).notes == [torn, *page.notes]
    for path in (folder / "study").iterdir():
        path.write_text("")
    with pytest.raises(DataError, match="no rank of the study has begun"):
        study_page(folder)


@pytest.mark.slow
@needs_browser
def test_the_page_is_drawn(browser: Browser, tmp_path: Path) -> None:
    """By the command, which finds that it is a study; no error, no request, on a phone and in the dark too."""
    folder = write_study(tmp_path / "study_4", "computation_sync")
    result = CliRunner().invoke(app, ["report", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["kind"] == "study"
    browser.open(Path(found["page"]), width=390, height=800, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.open(Path(found["page"]))
    assert browser.run("[...document.querySelectorAll('.figure')].every(f => f.querySelector('.main-svg'))")
    assert browser.run("find('bursts_1').querySelectorAll('.scatterlayer .point').length") == 3
    assert browser.errors == []


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1200, 390])
def test_legends_have_room(browser: Browser, tmp_path: Path, width: int) -> None:
    """A legend of many rows makes its figure higher, and covers no axis; after a change of the window too."""
    folder = write_study(tmp_path / "study_5", "free_run")
    log = StudyLog(folder, 1, 1, 0)
    for place in range(9):
        name = f"{3 + place}.layer.{QKV}"
        for step in (1, 20):
            log.write("parameters", step, fqn=name, difference_norm=0.5, trusted_norm=1.0, ratio=0.5)
    log.close()
    page = Path(json.loads(CliRunner().invoke(app, ["report", str(folder), "--json"]).stdout)["page"])
    browser.open(page, width=width)
    height = "find('parameters_apart').offsetHeight"
    wide, rows = browser.run(height), browser.run("find('parameters_apart').querySelectorAll('.legend .traces').length")
    assert rows == browser.run("find('parameters_apart').data.length") > 5
    assert browser.covered_axes() == []
    browser.call("Emulation.setDeviceMetricsOverride", width=width - 40, height=800, deviceScaleFactor=1, mobile=False)
    browser.run("new Promise(done => setTimeout(done, 500))")
    assert browser.covered_axes() == []
    assert browser.run(height) >= wide
    assert browser.errors == []
