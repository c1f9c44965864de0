"""What is told of stragglers: one event each, hosts, one peer, imbalance, garbage; files that are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megasdc.common.origin import Origin
from megasdc.events import EventLog
from megasdc.lab.report.run_pages.run_page import run_page
from megasdc.ops.health.slow.report import SlowReport, Where
from megasdc.ops.health.slow.stragglers import LONG, Stragglers
from megasdc.ops.run_folder.record import load_run
from megasdc.ops.run_folder.summary import render, summarize_run

SMOKE = Path(__file__).parents[5] / "configs" / "smoke.json"


def told(
    folder: Path, factors: list[list[float]], hosts: list[str], garbage: float = 0.0, steps: int = LONG
) -> list[tuple[str, dict[str, Any]]]:
    """Events of a run whose places, [replica][stage], are so slow; replicas are on ``hosts``; the last collects."""
    slow = np.array(factors)
    replicas, stages = slow.shape
    where = {(r, s): Where((s * replicas + r,), hosts[r]) for r in range(replicas) for s in range(stages)}
    stragglers, report = Stragglers(replicas, stages, 1.05), SlowReport(folder, 1.05, where, LONG, Origin("abc", 2))
    report.write_suspects(stragglers, 0)
    collected = np.zeros_like(slow)
    collected[-1, -1] = garbage
    events, draw = [], np.random.default_rng(1)
    for step in range(1, steps + 1):
        if stragglers.add((slow * np.exp(0.02 * draw.standard_normal(slow.shape))).ravel(), collected.ravel()):
            change = stragglers.judge(step)
            events += list(report.events(change, stragglers))
            report.write(change, stragglers, step)
    return events


def test_one_of_four_is_one_event_and_one_suspect(tmp_path: Path) -> None:
    """With rank, host, peers; a host of a single rank is not said to be slow as a whole."""
    ((name, fields),) = told(tmp_path, [[1.0], [1.3], [1.0], [1.0]], ["a", "b", "c", "d"])
    assert name == "straggler" and (fields["ranks"], fields["host"], fields["num_peers"]) == ([1], "b", 3)
    assert not fields["whole_host"] and "1.3" in fields["message"] and "its 3 peers" in fields["message"]
    found = json.loads((tmp_path / "health" / "suspects.json").read_text())
    assert [one["ranks"] for one in found["suspects"]] == [[1]] and found["num_peers"] == 3
    (line,) = (tmp_path / "health" / "slowness.jsonl").read_text().splitlines()
    assert json.loads(line)["ratios"]["1"] > 1.25 and 0.01 < json.loads(line)["noise"][0] < 0.05


def test_a_start_begins_without_suspects(tmp_path: Path) -> None:
    """Those of the start before are gone before the first step, and the file says of which start it is."""
    told(tmp_path, [[1.0], [1.3], [1.0]], ["a", "b", "c"])
    told(tmp_path, [[1.0], [1.3], [1.0]], ["a", "b", "c"], steps=0)
    found = json.loads((tmp_path / "health" / "suspects.json").read_text())
    assert found["suspects"] == [] and (found["run"], found["attempt"]) == ("abc", 2)


def test_a_host_whose_ranks_are_all_slow_is_named_as_a_whole(tmp_path: Path) -> None:
    """Two of four replicas are on host b, of five in all."""
    events = told(tmp_path, [[1.0], [1.0], [1.0], [1.4], [1.4]], ["a", "a", "a", "b", "b"])
    assert [(fields["host"], fields["whole_host"]) for _, fields in events] == [("b", True)] * 2


def test_one_peer_is_said_to_be_one(tmp_path: Path) -> None:
    """The reader learns that either of the two may be wrong."""
    ((_, fields),) = told(tmp_path, [[1.0], [1.3]], ["a", "b"])
    assert fields["num_peers"] == 1 and "one peer, and which of the two is wrong is not known" in fields["message"]


def test_imbalance_by_design_is_told_once_and_suspects_nobody(tmp_path: Path) -> None:
    """The slowest stage, and that all replicas show it."""
    ((name, fields),) = told(tmp_path, [[1.0, 1.5]] * 3, ["a", "b", "c"], steps=4 * LONG)
    assert name == "imbalance" and fields["slowest_stage"] == 1 and "all replicas show it" in fields["message"]
    assert json.loads((tmp_path / "health" / "suspects.json").read_text())["suspects"] == []


def test_garbage_collection_is_told_apart(tmp_path: Path) -> None:
    """A rank that collects for a tenth of its time is as fast as its peers otherwise, and no straggler."""
    ((name, fields),) = told(tmp_path, [[1.0]] * 3, ["a", "b", "c"], garbage=0.1, steps=4 * LONG)
    assert name == "garbage" and fields["ranks"] == [2] and 0.09 < fields["share"] < 0.11


def test_summary_and_page_show_who_was_slow(tmp_path: Path) -> None:
    """The line of the summary, a mark, and a curve for each rank."""
    from megasdc.config.load import load_config
    from megasdc.metrics.writer import MetricsWriter

    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved.json").write_text(json.dumps(load_config(SMOKE, []).resolved()))
    log = EventLog(run, 0)
    log.emit("start", "run")
    for name, fields in told(run, [[1.0], [1.3], [1.0]], ["a", "b", "c"], steps=3 * LONG):
        log.emit("health", name, step=16, **fields)
    log.emit("health", "recovered", step=90, replica=1, stage=0)
    log.close()
    writer = MetricsWriter(run)
    writer.write(1, {"train/loss": 1.0, "train/tokens": 1, "speed/tokens_per_s": 1.0})
    writer.close()
    (text,) = [line for line in render(summarize_run(run)).splitlines() if line.startswith("straggler")]
    assert "rank 1 on b takes 1.3" in text and text.endswith("since step 16, until step 90")
    page = run_page(load_run(run), tmp_path / "page.html", now=0.0)
    (figure,) = [one for section in page.sections for one in section.figures if one.name == "slowness"]
    assert [trace["name"] for trace in figure.traces] == ["rank 0", "rank 1", "rank 2"]
    assert min(figure.columns["rank 1"]) > 1.25 and len(figure.columns["step"]) == 3
