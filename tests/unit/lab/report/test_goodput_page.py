"""The page, the summary and the live view of a supervised run say where its time went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from browser import Browser, needs_browser
from run_folder import columns, losses, write_run
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.lab.report.run_pages.command import write_report
from megasdc.lab.report.run_pages.figures import goodput
from megasdc.lab.report.run_pages.run_page import goodput_section
from megasdc.ops.run_folder.summary import render, summarize_run
from megasdc.ops.supervise.goodput import PARTS, goodput_of
from megasdc.ops.supervise.journal import FOLDER, Journal
from megasdc.ops.top.view import RunWatcher

TRAINED = {"resumed": 0, "began_at": 110.0, "last": 20, "last_at": 150.0, "loading_s": 4.0, "saving_s": 8.0}
AGAIN = {"resumed": 10, "began_at": 190.0, "last": 60, "last_at": 290.0}


def supervised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 200 s: half of 32 s of an attempt that failed are lost, then 100 s productive."""
    write_run(folder, losses(60))
    slots = {"node1": 1, "<b>node2": 1}

    def write(time: float, kind: str, **fields: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda: time)
            patch.setattr("time.monotonic", lambda: time)
            journal.write(kind, **fields)

    with Journal(folder / FOLDER, print) as journal:
        write(99.0, "opened", config="c.json")
        write(100.0, "planned", attempt=1, slots=slots, launch_id="x")
        lost = {"kind": "host_lost", "text": "node2 cannot be reached"}
        write(170.0, "ended", exit_code=1, diagnosis=lost, trained=TRAINED)
        write(170.0, "decided", action="replace hosts")
        write(180.0, "planned", attempt=2, slots={"node1": 1, "node3": 1}, launch_id="y")
        done = {"kind": "done", "text": "all 2 ranks are done"}
        write(298.0, "ended", exit_code=0, diagnosis=done, trained=AGAIN)
        write(298.0, "decided", action="finish")
        write(300.0, "finished", exit_code=0, text="done")
    return folder


WANTED = {
    "productive": 16.0 + 100.0,
    "recomputed": 16.0,
    "evaluating": 0.0,
    "saving": 8.0,
    "stalled": 0.0,
    "starting": 6.0 + 10.0,
    "loading": 4.0,
    "detecting": 20.0,
    "ending": 8.0,
    "deciding": 10.0 + 2.0,
    "queued": 0.0,
    "idle": 0.0,
}


@pytest.mark.slow
def test_the_page_has_a_row_an_attempt_and_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile, a table, a bar of all time and a timeline, whose lengths and places are the seconds by hand."""
    folder = supervised(tmp_path / "run", monkeypatch)
    written = write_report([folder], figures=tmp_path / "figures")
    page = written.page
    assert page.tiles["effective training time"] == "58.0%" and not page.notes
    (section,) = [one for one in page.sections if one.heading == "Where the time went"]
    assert section.sentences[0].startswith("Effective training time ratio 58.0%: 116 s of 200 s, in 2 attempts")
    rows = [[cell.text for cell in row] for row in section.tables[0].rows]
    assert [row[:6] for row in rows] == [
        ["1", "1970-01-01 00:01:40 UTC", "node1, <b>node2", "1 to 20", "80.0", "16.0"],
        ["2", "1970-01-01 00:03:00 UTC", "node1, node3", "11 to 60", "120.0", "100.0"],
    ]
    assert [row[6:] for row in rows] == [
        ["a host cannot be reached", "node2 cannot be reached", "replace hosts"],
        ["all steps are done", "all 2 ranks are done", "finish"],
    ]
    told = json.loads(json.dumps(written.as_dict()))["goodput"]
    assert told["parts"] == pytest.approx(WANTED) and tuple(told["parts"]) == PARTS
    bar, timeline = section.figures
    assert {trace["name"]: trace["x"] for trace in bar.traces} == {
        part: [pytest.approx(seconds / 200.0)] for part, seconds in WANTED.items() if seconds
    }
    spans = {trace["name"]: list(zip(trace["base"], trace["x"], strict=True)) for trace in timeline.traces}
    assert spans["starting"] == [(0.0, 6.0), (80.0, 10.0)] and spans["deciding"] == [(70.0, 10.0), (198.0, 2.0)]
    assert spans["detecting"][0] == (50.0, 20.0) and spans["productive"] == [(10.0, 16.0), (90.0, 100.0)]
    for one in (bar, timeline):
        go.Figure(one.traces, one.layout)
    csv = columns(tmp_path / "figures" / "goodput_attempts.csv")
    assert csv["productive_s"] == ["16.0", "100.0"] and csv["began_s"] == ["0.0", "80.0"]


def test_only_the_last_attempts_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caption says so; the file of the figure has all of them."""
    monkeypatch.setattr(goodput, "MAX_ATTEMPTS", 1)
    found = goodput_of(supervised(tmp_path / "run", monkeypatch), 1e9)
    assert found is not None
    timeline = goodput_section(found).figures[1]
    assert timeline.traces[0]["y"] == ["attempt 2"] and "The last 1 of 2 attempts are drawn" in timeline.caption
    assert len(timeline.columns["attempt"]) == 2


def test_summary_and_live_view_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a line, as JSON, and as a number on the terminal; not of a run that was not supervised."""
    folder = supervised(tmp_path / "run", monkeypatch)
    assert "goodput           58.0% of 200 s in 2 attempts: productive 116.0 s, " in render(summarize_run(folder))
    told = json.loads(CliRunner().invoke(app, ["summary", str(folder), "--json"]).stdout)["goodput"]
    assert (told["effective_ratio"], told["wall_s"]) == (pytest.approx(0.58), pytest.approx(200.0))
    assert told["parts"] == pytest.approx(WANTED)
    assert [one["ended"] for one in told["attempts"]] == ["host_lost", "done"]
    assert RunWatcher(folder).read().effective_ratio == pytest.approx(0.58)
    assert "effective time 58.0%" in CliRunner().invoke(app, ["top", str(folder)]).stdout
    plain = write_run(tmp_path / "plain", losses(20))
    page = write_report([plain]).page
    assert page.summary["goodput"] is None and "Where the time went" not in [one.heading for one in page.sections]
    assert RunWatcher(plain).read().effective_ratio is None and summarize_run(plain).goodput is None


def test_a_damaged_journal_leaves_the_rest_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noted, in the live view too."""
    folder = supervised(tmp_path / "run", monkeypatch)
    path = folder / FOLDER / "journal.jsonl"
    path.write_text(path.read_text().replace("replace hosts", "start again"))
    written = write_report([folder])
    assert any("where the time went is not shown: line 4" in note for note in written.as_dict()["notes"])
    view = RunWatcher(folder).read()
    assert view.effective_ratio is None and any("effective training time is left out" in note for note in view.notes)


@pytest.mark.slow
@needs_browser
def test_the_figures_are_drawn(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a real browser, without an error, with bars of all parts that are not empty, and nothing over the axes."""
    folder = supervised(tmp_path / "run", monkeypatch)
    write_report([folder])
    browser.open(folder / "reports" / "report.html")
    drawn = {part for part, seconds in WANTED.items() if seconds}
    for name in ("goodput_parts", "goodput_attempts"):
        names = browser.run(f"find('{name}').data.map(one => one.name)")
        assert set(names) == drawn
        bars = browser.run(f"find('{name}').querySelectorAll('.barlayer .point path').length")
        assert bars >= len(drawn)
    widths = browser.run("[...find('goodput_parts').querySelectorAll('.point path')].map(one => one.getBBox().width)")
    assert max(widths) / sum(widths) == pytest.approx(0.58, abs=0.01)
    assert "node2 cannot be reached" in browser.run("find('attempts').innerText")
    assert browser.covered_axes() == [] and browser.errors == []
