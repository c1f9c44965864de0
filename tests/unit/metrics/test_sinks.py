"""What sinks show is what metrics.jsonl holds, also after a run went back, and each can be rebuilt from it."""

from __future__ import annotations

import csv
import json
import math
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasdc.common.errors import DataError, LaunchError, StorageError
from megasdc.common.imports import is_installed
from megasdc.metrics.export import export_metrics
from megasdc.metrics.sinks import CsvSink, PrometheusSink, Sink, TensorBoardSink, open_sinks, read_incident
from megasdc.metrics.writer import PLACE, MetricsWriter, cut_back, read_metrics
from megasdc.parallel.local_ranks import free_port


def go_back(folder: Path, make) -> None:
    """Write six steps, then go on from step 4 to step 8 with other values."""
    for first, last, factor in ((1, 6, 1.0), (5, 8, 10.0)):
        cut_back(folder, first - 1)
        writer = MetricsWriter(folder, make(first - 1))
        for step in range(first, last + 1):
            writer.write(step, {"train/loss": factor / step, "train/tokens": 100 * step})
            if step in (2, 6):
                writer.write(step, {"train/grad_norm": math.inf, "eval/loss": factor})
        writer.close()


def truth(folder: Path) -> dict[str, dict[int, float]]:
    """Values of metrics.jsonl by name and step; NaN for null."""
    values: dict[str, dict[int, float]] = {}
    for row in read_metrics(folder):
        for name, value in row.items():
            if name not in PLACE:
                assert row["step"] not in values.setdefault(name, {}), "once a step"
                values[name][row["step"]] = math.nan if value is None else value
    return values


def board(folder: Path) -> dict[str, list[tuple[int, float, str]]]:
    """Step, time and value of all scalars of TensorBoard's files, by tag."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(one.step, one.wall_time, repr(one.value)) for one in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def test_tensorboard_equals_the_truth_over_a_rewind_and_can_be_rebuilt(tmp_path):
    """Every value once, in single precision, with its time; files rebuilt from metrics.jsonl show the same."""
    go_back(tmp_path, lambda step: [TensorBoardSink(tmp_path / "board", step)])
    shown = board(tmp_path / "board")
    times = {(row["step"], name): row["time"] for row in read_metrics(tmp_path) for name in row}
    assert shown == {
        name: [(step, times[step, name], repr(float(np.float32(value)))) for step, value in values.items()]
        for name, values in truth(tmp_path).items()
    }
    done = export_metrics(tmp_path, "tensorboard", tmp_path / "again", lambda what, number, total: None)
    assert board(tmp_path / "again") == shown and (done.lines, done.values) == (10, 20)


def test_csv_equals_the_truth_over_a_rewind_and_can_be_rebuilt(tmp_path):
    """One head line, every value exactly and once; a torn last row of a killed run is no part of it."""
    folder = tmp_path / "csv"

    def make(step: int) -> list[Sink]:
        if step:
            with open(folder / "train_loss.csv", "a") as file:
                file.write("step,loss\r\n7,")
        return [CsvSink(folder, step)]

    go_back(tmp_path, make)
    for name, values in truth(tmp_path).items():
        with open(folder / f"{name.replace('/', '_')}.csv", newline="") as file:
            head, *rows = csv.reader(file)
        assert head == ["step", name.split("/")[1]]
        assert [(int(step), value) for step, value in rows] == [(step, str(value)) for step, value in values.items()]
    export_metrics(tmp_path, "csv", tmp_path / "again", lambda what, number, total: None)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == files


@pytest.mark.slow
def test_prometheus_serves_and_exports_the_last_values(tmp_path):
    """Its own parser reads, at the port and in the exported text, the last value of each metric; then it is gone."""
    address = f"127.0.0.1:{free_port()}"
    pages = []

    class Reading(PrometheusSink):
        def close(self) -> None:
            pages.append(urllib.request.urlopen(f"http://{address}/metrics").read().decode())
            super().close()

    go_back(tmp_path, lambda step: [Reading("r", 1 + bool(step), address)])
    (tmp_path / "run.json").write_text(json.dumps({"format": "megasdc.run.v1", "run": "r", "attempt": 2}))
    export_metrics(tmp_path, "prometheus", tmp_path / "again", lambda what, number, total: None)
    ends = {name: float(values[max(values)]) for name, values in truth(tmp_path).items()}
    last = {f"megasdc_{name.replace('/', '_')}": repr(value) for name, value in ends.items()}
    for page in (pages[-1], (tmp_path / "again" / "metrics.prom").read_text()):
        samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
        assert {one.labels["run"] for one in samples} == {"r"}
        found = {one.name: one.value for one in samples}
        assert found.pop("megasdc_written_timestamp_seconds") == read_metrics(tmp_path)[-1]["time"]
        assert (found.pop("megasdc_step"), found.pop("megasdc_attempt")) == (8, 2)
        assert {name: repr(value) for name, value in found.items()} == last
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://{address}/metrics")


def test_a_replica_of_local_sgd_is_a_label(tmp_path):
    """Live and rebuilt, so that the replicas of a run are told apart; an incident of one says round and why."""
    live = PrometheusSink("r", 1, replica=1)
    live.write(3, 0.0, {"local_sgd/outer_norm": 2.5})
    writer = MetricsWriter(tmp_path)
    writer.write(3, {"local_sgd/outer_norm": 2.5})
    writer.close()
    (tmp_path / "resolved.json").write_text(json.dumps({"megasdc": {"local_sgd": {"replicas": 2, "replica": 1}}}))
    export_metrics(tmp_path, "prometheus", tmp_path / "again", lambda what, number, total: None)
    for text in (live.text().decode(), (tmp_path / "again" / "metrics.prom").read_text()):
        (one,) = [line for line in text.splitlines() if line.startswith("megasdc_local_sgd_outer_norm{")]
        assert 'replica="1"' in one and one.endswith(" 2.5")
    incident = {"step": 9, "tier": "round", "disputed": [{"rank": 0, "host": "n1"}], "done": "left out"}
    found = {**incident, "round": {"replica": 1, "round": 3, "reason": "its weights are not finite"}}
    (tmp_path / "incident.json").write_text(json.dumps(found))
    told = "step 9, round 3 without replica 1 (rank 0 on n1): its weights are not finite; left out"
    assert read_incident(tmp_path / "incident.json").text == told


class Broken(Sink):
    """Fails at its second line."""

    name = "broken"

    def __init__(self) -> None:
        self.lines = 0

    def write(self, step, at, values) -> None:
        self.lines += 1
        if self.lines == 2:
            raise RuntimeError("no network\nand more")

    def close(self) -> None:
        raise AssertionError("it failed before")


def test_a_sink_that_fails_is_reported_once_and_stops_nothing(tmp_path):
    """The file and the other sinks get all lines; a sink that cannot be opened is left out."""
    failed: list[tuple[str, str]] = []

    def report(name: str, problem: str) -> None:
        failed.append((name, problem))

    broken = Broken()
    openers = {
        "broken": lambda: broken,
        "csv_monitor": lambda: CsvSink(tmp_path / "csv", 0),
        "tensorboard": lambda: TensorBoardSink(tmp_path / "csv" / "file" / "x", 0),
    }
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "file").write_text("in the way")
    writer = MetricsWriter(tmp_path, open_sinks(openers, report), report)
    for step in (1, 2, 3):
        writer.write(step, {"train/loss": 1.0})
    writer.close()
    assert [name for name, _ in failed] == ["tensorboard", "broken"]
    assert failed[1][1] == "RuntimeError: no network" and broken.lines == 2
    assert (tmp_path / "csv" / "train_loss.csv").read_text().count("1.0") == len(read_metrics(tmp_path)) == 3


@pytest.mark.skipif(is_installed("wandb"), reason="wandb is installed")
def test_an_export_to_wandb_without_it_is_refused(tmp_path, monkeypatch):
    """Also where a mere folder of that name lies, as its runs leave in a working folder; nothing is written."""
    go_back(tmp_path, lambda step: [])
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LaunchError, match="pip install wandb"):
        export_metrics(tmp_path, "wandb", tmp_path / "out", lambda what, number, total: None)
    assert not (tmp_path / "out").exists()


def test_an_export_replaces_nothing_and_needs_metrics(tmp_path):
    """A run without metrics and a folder that holds something are refused before anything is written."""
    quiet = lambda what, number, total: None  # noqa: E731
    with pytest.raises(DataError, match="has no metrics"):
        export_metrics(tmp_path, "csv", tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()
    go_back(tmp_path, lambda step: [])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(StorageError, match="is not empty"):
        export_metrics(tmp_path, "csv", tmp_path / "out", quiet)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
