"""Does the page of a run show what its files hold, whole or not, in a real browser?"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from browser import Browser, needs_browser
from recorded_run import write_run as write_times
from run_folder import VERSIONS, add_hang, add_incident, columns, losses, write_run
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.errors import DataError
from megasdc.events import EventLog
from megasdc.lab.report.run_pages.command import write_report
from megasdc.lab.report.run_pages.drops import Drops, load_drops
from megasdc.lab.report.run_pages.facts import highlights
from megasdc.lab.report.run_pages.figures.drops import drop_figures
from megasdc.lab.report.run_pages.figures.run import completed_micro_batches, run_figures
from megasdc.lab.report.run_pages.run_page import run_page
from megasdc.ops.run_folder.marks import counts_of, lane_of, marks_of
from megasdc.ops.run_folder.record import load_run
from megasdc.ops.run_folder.status import SILENT_S, status_of
from megasdc.output.figure import Figure, thin
from megasdc.output.html import write_tables

STEPS = 100
DOCS = Path(__file__).parents[4] / "docs"


def report(*arguments: object) -> Any:
    """The real command."""
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def told(*arguments: object) -> dict[str, Any]:
    """What the command says as JSON."""
    result = report(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a hundred steps, one with a loss that is NaN, and an incident at step 60."""
    loss = losses(STEPS)
    loss[44] = math.nan
    path = write_run(tmp_path_factory.mktemp("runs") / "node_7", loss)
    add_incident(path, 60)
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    """Its page, where the command puts it."""
    found = told(folder)
    assert found["page"] == str(folder / "reports" / "report.html")
    return Path(found["page"])


def test_numbers_are_those_of_the_files(folder: Path) -> None:
    """Last step, losses and counts as JSON; two faults in each of ten steps on one rank are twenty."""
    found = told(folder)
    assert (found["kind"], found["state"], found["step"], found["planned_steps"]) == ("run", "done", STEPS, STEPS)
    assert found["loss"] == losses(STEPS)[-1]
    assert found["eval_loss"] == losses(STEPS)[-1] + 0.1
    counts = {"incident": 1, "finding": 1, "not finite": 1, "fault injected": 20, "save": 5, "start, stop": 2}
    assert found["marks"] == counts
    assert found["notes"] == []


def test_peaks_and_gaps_outlive_thinning() -> None:
    """Of a long series the smallest and largest of every stretch stay, NaN too, and no more points than allowed."""
    values = np.random.default_rng(1).normal(size=100_003)
    values[70_001], values[7], values[50_000:50_010] = 1e9, -1e9, np.nan
    kept = thin(values, 500)
    assert len(kept) <= 500
    assert (np.diff(kept) > 0).all()
    assert {0, 7, 70_001, 100_002} <= set(kept.tolist())
    assert np.isnan(values[kept]).any()
    for stretch in np.array_split(np.arange(len(values)), 100):
        inside = values[kept[(kept >= stretch[0]) & (kept <= stretch[-1])]]
        spread = np.nanmax(values[stretch]) - np.nanmin(values[stretch])
        assert np.nanmax(inside) - np.nanmin(inside) > 0.5 * spread
    assert thin(values[:500], 500).tolist() == list(range(500))


def test_a_long_run_is_thinned_in_the_picture_alone(tmp_path: Path) -> None:
    """The picture has fewer points and says so; the CSV has every one."""
    (figure, *_) = run_figures(load_run(write_run(tmp_path / "long", losses(6000))), [])
    assert len(figure.traces[0]["x"]) <= 2000
    assert "of 6,000 points are drawn" in figure.caption
    write_tables(tmp_path / "figures", [figure], [])
    csv = columns(tmp_path / "figures" / "loss.csv")
    assert len(csv["training"]) == 6000
    np.testing.assert_array_equal(np.array(csv["training"], dtype=float), losses(6000))


def test_plotly_knows_every_setting(folder: Path, tmp_path: Path) -> None:
    """The checks of plotly itself of names and values pass over every trace and layout."""
    run = load_run(folder)
    figures = [*run_figures(run, marks_of(run)), *drop_figures(_drops(tmp_path))]
    assert {"loss", "happened", "gradient_norm", "throughput", "drop_speedup", "drop_times"} <= _names(figures)
    for one in figures:
        go.Figure(one.traces, one.layout)


def _names(figures: list[Figure]) -> set[str]:
    return {one.name for one in figures}


def _drops(folder: Path) -> Drops:
    """Recorded times of 30 steps, 3 replicas, 5 micro-batches; a threshold of 2 s chosen after step 20."""
    work = 0.3 + np.random.default_rng(4).gamma(0.7, 0.3, (3, 30, 5, 1))
    write_times(folder, work, 0.25)
    log = EventLog(folder, 0)
    log.emit("drop", "threshold", step=20, tau_s=2.0)
    log.close()
    drops = load_drops(load_run(folder))
    assert isinstance(drops, Drops)
    return drops


def test_drops_of_a_run_are_those_recorded(tmp_path: Path) -> None:
    """Latencies, which steps had a threshold, and micro-batches per second with it over those without it."""
    work = 0.3 + np.random.default_rng(4).gamma(0.7, 0.3, (3, 30, 5, 1))
    drops = _drops(tmp_path)
    np.testing.assert_allclose(np.sort(drops.latencies_s), np.sort(work.ravel()))
    assert np.isinf(drops.tau_s[:20]).all()
    assert (drops.tau_s[20:] == 2.0).all()
    seconds = work.sum(axis=(2, 3)).max(axis=0) + 0.25
    assert drops.gain == pytest.approx(seconds[:20].mean() / seconds[20:].mean())
    assert drops.search is not None
    latencies, completed, *_ = drop_figures(drops)
    assert sum(latencies.columns["micro_batches"]) == 450
    assert completed.columns["with a threshold"] == [0, 0, 0, 0, 0, 1]


def test_an_ended_backward_pass_counts_by_its_layers(tmp_path: Path) -> None:
    """Three of four layers done are three quarters of a micro-batch, in recorded times and in events."""
    drops = _drops(tmp_path)
    layers = np.full((3, 30), -1)
    layers[1, 25] = 3
    cut = replace(drops, times=replace(drops.times, layers=layers), num_layers=4)
    assert cut.completed.sum() == 450 - 0.25 and cut.completed[1, 25] == 4.75
    assert cut.gain == pytest.approx(drops.gain * (150 - 0.25) / 150)
    latencies, completed, times, *_ = drop_figures(cut)
    assert "449 completed micro-batches (without 1 whose backward passes were ended)" in latencies.caption
    assert sum(latencies.columns["micro_batches"]) == 449
    assert "are finished" not in times.caption and "A backward pass ends between two layers, so" in times.caption
    assert completed.columns["completed"] == [0, 1, 2, 3, 4, 4.75, 5]
    assert completed.columns["with a threshold"] == pytest.approx([0, 0, 0, 0, 0, 1 / 30, 29 / 30])
    told = {"drop_compute": {"enabled": True, "threshold": 2.0, "granularity": "backward"}}
    run = replace(load_run(write_run(tmp_path / "run", losses(4))), config={"megasdc": told})
    assert highlights(run)["DropCompute"] == "threshold 2, granularity backward"
    assert "In all 0 of 450 micro-batches were dropped. 1 backward passes were ended: 0.25" in completed.caption
    folder = write_run(tmp_path / "told", losses(4))
    log = EventLog(folder, 0)
    log.emit("start", "run", layout={"data": 2})
    log.emit("drop", "micro_batches", step=3, planned=2, dropped=1, completed={"1": 1}, layers={"0": 1, "1": 4})
    log.close()
    run = replace(load_run(folder), config={"megasdc": {"model": {"num_layers": 4}}})
    series = completed_micro_batches(run)
    assert series is not None and series.values.tolist() == [1, 1, 1 - 1.75 / 4, 1]


def test_where_a_run_is(tmp_path: Path) -> None:
    """Done, under way, silent, failed: by end, time of the last line, and record of the launch."""
    done = load_run(write_run(tmp_path / "done", losses(20)))
    assert status_of(done).state == "done"
    going = load_run(write_run(tmp_path / "going", losses(20), planned=50, ended=False))
    assert going.written_at is not None
    status = status_of(replace(going, quiet_s=5.0))
    assert (status.state, status.step, status.planned) == ("running", 20, 50)
    assert "under way at step 20 of 50" in status.text
    assert status_of(replace(going, quiet_s=10 * SILENT_S)).state == "silent"
    launch = tmp_path / "going" / "done" / "launch_1"
    launch.mkdir(parents=True)
    (launch / "launch.json").write_text(json.dumps({"exit_code": 73, "lines": ["rank 1 on node7: corruption"]}))
    failed = status_of(load_run(tmp_path / "going"))
    assert failed.state == "failed"
    assert "exit code 73: rank 1 on node7: corruption" in failed.text


def test_what_is_damaged_is_counted_and_said(tmp_path: Path) -> None:
    """Torn and broken lines, a broken configuration and incident: each is named, the rest is shown."""
    run = write_run(tmp_path / "run", losses(40), ended=False)
    add_incident(run, 20)
    metrics, events = run / "metrics.jsonl", run / "events" / "rank_00001.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    lines[3] = b"\xff\x00 garbage\n"
    lines[10] = b'{"step": "x", "time": 1}\n'
    metrics.write_bytes(b"".join(lines) + b'{"step": 41, "ti')
    events.write_bytes(events.read_bytes() + b'[1]\n{"time": 0}\n')
    (run / "resolved.json").write_text("{")
    next((run / "reports").glob("*.json")).write_text("{}")
    found = told(run)
    notes = "\n".join(found["notes"])
    assert "metrics.jsonl: 2 of 44 lines cannot be read and are left out, the first is line 4" in notes
    assert "metrics.jsonl: the last line has no end" in notes
    assert "events/rank_00001.jsonl: 2 of 10 lines cannot be read" in notes
    assert "resolved.json cannot be read" in notes
    assert "reports/incident_step_00000020.json is left out" in notes
    assert found["loss"] == losses(40)[-1]
    series = load_run(run).series
    assert sorted(set(range(1, 41)) - set(series["train/loss"].steps.tolist())) == [4]
    assert series["eval/loss"].steps.tolist() == [20, 30, 40]


def test_a_run_begun_anew_shows_itself_alone(tmp_path: Path) -> None:
    """Events of an earlier run in the same folder, whose metrics were set aside, are left out, and that is said."""
    run = write_run(tmp_path / "run", losses(20))
    (run / "metrics.jsonl").rename(run / "metrics.until_20261120-101010.jsonl")
    log = EventLog(run, 0)
    log.emit("start", "run", layout={}, world_size=2)
    log.emit("start", "metrics_set_aside", path="x")
    log.close()
    record = load_run(run)
    assert [one.name for one in record.events] == ["run", "metrics_set_aside"]
    assert any("events of an earlier run" in note for note in record.notes)
    assert status_of(record).state == "running"


def test_bad_paths_are_refused(tmp_path: Path, folder: Path) -> None:
    """With what is needed and a documented exit code; a page that cannot be written too."""
    for arguments in ([tmp_path], [folder, tmp_path], [folder, folder], [folder, "--healthy", folder]):
        refused = report(*arguments)
        assert isinstance(refused.exception, DataError), arguments
        assert refused.exception.exit_code == 71
    (tmp_path / "file").write_text("")
    refused = report(folder, "--out", tmp_path / "file" / "page.html")
    assert "choose another --out" in str(refused.exception)


@pytest.mark.slow
@needs_browser
def test_the_page_is_drawn_from_itself_alone(browser: Browser, folder: Path, page: Path) -> None:
    """No error, no request; every figure has the points of the file, on one axis of steps, in light and dark."""
    for dark in (False, True):
        browser.open(page, dark=dark)
        assert browser.errors == []
        assert browser.run("[...document.querySelectorAll('.figure')].every(f => f.querySelector('.main-svg'))")
        shade = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (shade == "rgb(255, 255, 255)") is not dark
        assert (browser.run("find('loss').layout.paper_bgcolor") == "#ffffff") is not dark
    browser.run("find('theme').click()")
    assert browser.run("find('loss').layout.paper_bgcolor") == "#ffffff", "the switch turns dark to light"
    points = browser.run("find('loss').data.map(one => [one.name, one.y])")
    wanted = [None if step == 44 else value for step, value in enumerate(losses(STEPS).tolist())]
    assert points[0] == ["training", wanted]
    assert points[1] == ["evaluation", [losses(STEPS)[step - 1] + 0.1 for step in range(10, STEPS + 1, 10)]]
    drawn = "find('loss').querySelectorAll('.scatterlayer .trace')[1].querySelectorAll('.points path').length"
    assert browser.run(drawn) == 10
    ranges = browser.run("[...document.querySelectorAll('.figure')].map(f => f.layout.xaxis.range.join())")
    assert len(set(ranges)) == 1
    assert browser.run("find('gradient_norm').layout.yaxis.type") == "log", "one norm of 1e6 hides no other"
    text = browser.run("document.body.innerText")
    assert all(f"{name} {version}" in text for name, version in VERSIONS.items())
    assert "1 values are NaN or infinite and leave gaps" in text


@needs_browser
def test_marks_lie_on_the_axis_of_steps(browser: Browser, page: Path) -> None:
    """Each kind in its lane at its steps; an incident is a line through the other figures."""
    browser.open(page)
    lanes = dict(browser.run("find('happened').data.map(one => [one.name, one.x])"))
    assert lanes["incident"] == [60]
    assert lanes["finding"] == [60]
    assert lanes["not finite"] == [45]
    assert lanes["fault injected"] == list(range(10, STEPS + 1, 10))
    assert lanes["save"] == [20, 40, 60, 80, 100]
    assert browser.run("find('loss').layout.shapes.map(one => one.x0)") == [60]


@needs_browser
def test_zoom_is_one_for_all_figures(browser: Browser, page: Path) -> None:
    """Dragged in one or typed: every figure of steps follows, the loss fits its height, and all comes back."""
    browser.open(page)
    shown = "[...new Set(onSteps.map(one => find(one.name).layout.xaxis.range.map(Math.round).join()))]"
    browser.run("Plotly.relayout(find('throughput'), {'xaxis.range[0]': 50, 'xaxis.range[1]': 80}).then(() => 0)")
    assert browser.run(shown) == ["50,80"]
    assert browser.run("[document.querySelector('.from').value, document.querySelector('.to').value]") == ["50", "80"]
    low, high = browser.run("find('loss').layout.yaxis.range")
    inside = losses(STEPS)[49:80]
    assert low < inside.min() < inside.max() + 0.1 < high < 1.2 * inside.max()
    browser.run("document.querySelector('.to').value = 60")
    browser.run("document.querySelector('.to').dispatchEvent(new Event('change'))")
    assert browser.run(shown) == ["50,60"]
    browser.run("document.querySelector('.whole').click()")
    assert browser.run("find('loss').layout.xaxis.range.map(Math.round)") == [-1, 102]
    assert browser.errors == []


@needs_browser
def test_events_can_be_filtered_and_sorted(browser: Browser, page: Path) -> None:
    """By words, by kind of mark; sorted by number as numbers; two faults of a step are one row that says two."""
    browser.open(page)
    rows = "[...find('events').tBodies[0].rows].filter(row => row.offsetHeight)"

    def choose(select: int, value: str) -> int:
        place = f"document.querySelectorAll('[data-table=events] select')[{select}]"
        browser.run(
            f"{place}.value = {json.dumps(value)}; {place}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        return browser.run(f"{rows}.length")

    assert choose(0, "save") == 5
    assert choose(0, "fault injected") == 10
    assert browser.run("find('events_shown').textContent") == "10 of 19 rows shown"
    assert set(browser.run(f"{rows}.map(row => row.cells[3].textContent)")) == {"2"}
    search = "document.querySelector('[data-table=events] input')"
    browser.run(f"{search}.value = 'FC1 20'; {search}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert browser.run(f"{rows}.map(row => row.cells[0].textContent)").count("20") == 1
    browser.run(f"{search}.value = ''; {search}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    for wanted in (sorted, lambda values: sorted(values, reverse=True)):
        browser.run("find('events').querySelector('th button').click()")
        found = [int(value) for value in browser.run(f"{rows}.map(row => row.cells[0].textContent)")]
        assert found == wanted(range(10, STEPS + 1, 10))


@needs_browser
def test_an_incident_leads_to_its_page(browser: Browser, page: Path) -> None:
    """The link opens the incident's own page, also from a report in another folder."""
    browser.open(page)
    link = browser.run("document.querySelector('#incidents a').href")
    assert Path(link.removeprefix("file://")).name == "incident_step_00000060.html"
    assert Path(link.removeprefix("file://")).exists()


def test_the_link_holds_from_another_folder(folder: Path, tmp_path: Path) -> None:
    """A relative address, so that both can be moved together."""
    page = run_page(load_run(folder), tmp_path / "deep" / "er" / "report.html", now=0)
    (cell,) = (cell for row in page.tables[0].rows for cell in row if cell.link)
    assert page.state == "different" and page.verdict.endswith(" 1 incident.")
    assert (tmp_path / "deep" / "er" / cell.link).resolve() == folder / "reports" / "incident_step_00000060.html"


@pytest.mark.slow
@needs_browser
def test_it_reads_on_a_phone_and_on_paper(browser: Browser, page: Path) -> None:
    """Nothing is wider than the screen or A4; on paper light colours, no controls, no figure higher than a page."""
    browser.open(page, width=390, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.covered_axes() == []
    right = "[...document.querySelectorAll('.figure, td, h1')].map(one => one.getBoundingClientRect().right)"
    assert browser.run(f"Math.max(...{right})") <= 390
    browser.open(page, width=720, dark=True, media="print")
    assert browser.run("document.documentElement.scrollWidth") <= 720
    assert browser.run("find('loss').layout.paper_bgcolor") == "#ffffff"
    assert browser.run("document.querySelector('.controls').offsetHeight + find('theme').offsetHeight") == 0
    tallest = browser.run("Math.max(...[...document.querySelectorAll('figure')].map(one => one.offsetHeight))")
    assert tallest < 1000, "an A4 page has some 1,050 pixels"
    assert browser.run("getComputedStyle(document.querySelector('figure')).breakInside") == "avoid"
    assert browser.print_pdf().startswith(b"%PDF")
    assert browser.errors == []


@pytest.mark.slow
@needs_browser
def test_what_files_say_is_text_not_markup(browser: Browser, tmp_path: Path) -> None:
    """A host, a field and a setting that look like scripts are shown, and not run."""
    evil = "</script><script>window.acted = 1</script><img src=x onerror='window.acted = 1'>"
    run = write_run(tmp_path / "run", losses(20))
    log = EventLog(run, 0)
    log.host = evil
    log.emit("skip", "optimizer_step", step=5, reason=evil)
    log.close()
    told(run, "--title", evil)
    browser.open(run / "reports" / "report.html")
    assert browser.run("typeof window.acted") == "undefined"
    assert evil in browser.run("find('events').innerText")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.errors == []


def test_every_event_of_health_makes_a_mark(tmp_path: Path) -> None:
    """Each that the reference lists, and a tracker that failed."""
    listed = (DOCS / "reference" / "events.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `(health|metrics)/(\w+)`", listed, flags=re.MULTILINE)
    assert {("health", "agent_restarted"), ("health", "alert_failed"), ("metrics", "sink_failed")} <= set(names)
    log = EventLog(tmp_path, 0)
    events = [log.emit(*name) for name in names]
    log.close()
    assert [(one.kind, one.name) for one in events if not lane_of(one)] == []


def test_hangs_are_shown_with_states_and_stacks(tmp_path: Path) -> None:
    """Every hang is a row and a mark, the last ones have each rank's state, wait and stack; a damaged file is noted."""
    folder = write_run(tmp_path / "run", losses(20), ended=False)
    paths = [add_hang(folder, step, f"start{step}") for step in range(16, 21)]
    for age, path in enumerate(reversed(paths)):
        path.write_text(json.dumps({**json.loads(path.read_text()), "time": 1.7e9 - age}))
    paths[0].write_text("{}")
    written = write_report([folder])
    assert written.page.summary["hangs"] == [str(path) for path in paths[1:]]
    assert counts_of(marks_of(load_run(folder)))["hang"] == 4 and written.page.verdict.endswith(" 4 hangs.")
    assert any("hang_start16.json is left out" in note for note in written.page.notes)
    hangs, *details = [one for one in written.page.sections if one.heading.startswith("Hang")]
    assert [row[1].text for row in hangs.tables[0].rows] == ["20", "19", "18", "17"], "the newest first"
    assert [one.heading for one in details] == [f"Hang in step {step}: rank 1 on node1" for step in (20, 19, 18)]
    states = [[cell.text for cell in row] for row in details[0].tables[0].rows]
    assert states[0][:6] == ["0", "node0", "20", "0", "receive gradient", "31.5"]
    assert "waits for rank 1 in receive gradient of step 20" in states[0][7] and "waits for nobody" in states[1][7]
    page = written.path.read_text()
    assert "<summary>rank 1 MainThread: c.py:3 spin</summary><pre>a.py:1 outer\nc.py:3 spin</pre>" in page
