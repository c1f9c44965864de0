"""What W&B keeps on this machine is what metrics.jsonl holds; incidents are alerts and artifacts, once each."""

from __future__ import annotations

import importlib
import json
import struct
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import megasdc
from megasdc.common.imports import is_installed
from megasdc.metrics import sinks
from megasdc.metrics.export import export_metrics
from megasdc.metrics.sinks import WandbRun, WandbSink, shown_config, source_commit
from megasdc.metrics.writer import PLACE, MetricsWriter, cut_back, reached_step, read_metrics, set_metrics_aside

if not is_installed("wandb"):
    pytest.skip("the package wandb is not installed: pip install wandb", allow_module_level=True)
wandb = importlib.import_module("wandb")
HANG = {"kind": "hang/behind", "message": "nothing moved for 60 s: rank 1"}
FLIP = {"step": 3, "tier": "audit", "verdict": "persistent", "done": "halted", "flagged": [{"rank": 1, "host": "b"}]}


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Nothing leaves this machine, and nothing is kept outside the test's folder."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.teardown()


def records(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """Records of all offline runs of a folder, by the run's id and by their type."""
    return dict(records_of_starts(folder))


def records_of_starts(folder: Path) -> list[tuple[str, dict[str, list[Any]]]]:
    """The same in the order of their starts, of which several may be of one id."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        kinds = defaultdict(list)
        for data in messages_of(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            kinds[kind].append(getattr(record, kind))
        found.append((path.stem.removeprefix("run-"), kinds))
    return found


def messages_of(content: bytes) -> Iterator[bytes]:
    """Messages of a ``.wandb`` file: 7 bytes, then LevelDB's log of blocks of 32 KiB; W&B has no reader since 0.31."""
    assert content[:4] == b":W&B"
    place, message = 7, b""
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        message += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part of one
            yield message
            message = b""


def points(history: list[Any]) -> dict[tuple[str, int], str]:
    """Values by name and step; W&B's own names, which begin with an underscore, left out."""
    found = {}
    for line in history:
        for item in line.item:
            name = item.key or "/".join(item.nested_key)
            if not name.startswith("_") and name != "step":
                assert (name, line.step.num) not in found
                found[name, line.step.num] = repr(float(json.loads(item.value_json)))
    return found


def truth(folder: Path) -> dict[tuple[str, int], str]:
    """The same of metrics.jsonl."""
    rows = read_metrics(folder)
    return {
        (name, row["step"]): repr(float("nan" if value is None else value))
        for row in rows
        for name, value in row.items()
        if name not in PLACE
    }


def where(folder: Path, name: str | None) -> WandbRun:
    return WandbRun(folder, "r", name, "p", None, None, {"megasdc": {"model": {"layers": 2}}}, ("tp1",))


def write_incident(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.mark.slow
def test_offline_runs_equal_the_truth_over_a_rewind(tmp_path):
    """A run of W&B a start, in a group; the points of the later one and the earlier one's before it are all of them."""
    for first, last, name in ((1, 6, "1"), (5, 8, "2")):
        cut_back(tmp_path, first - 1)
        writer = MetricsWriter(tmp_path, [WandbSink(where(tmp_path, name), tmp_path)])
        for step in range(first, last + 1):
            writer.write(step, {"train/loss": int(name) / step, "train/tokens": 100 * step})
            if step in (2, 6):
                writer.write(step, {"train/grad_norm": float("inf"), "eval/loss": 2.5})
            if step == 3:
                write_incident(tmp_path / "reports" / "incident_step_00000003.json", FLIP)
                (tmp_path / "reports" / "incident_step_00000003.html").write_text("page")
        writer.close()
        write_incident(tmp_path / "health" / "incidents" / "hang_1.json", HANG)  # after the end, as of a killed run
        (tmp_path / "health" / "incidents" / "hang_0.json").write_text('{"ki')
    kept = records(tmp_path)
    assert list(kept) == ["r-1", "r-2"]
    earlier, later = (points(kept[name]["history"]) for name in kept)
    assert {key: value for key, value in earlier.items() if key[1] <= 4} | later == truth(tmp_path)
    for kinds in kept.values():
        (run, *_) = kinds["run"]
        config = {item.key: item.value_json for item in run.config.update}
        assert (run.run_group, run.project, list(run.tags)) == ("r", "p", ["tp1"])
        assert json.loads(config["megasdc"]) == {"model": {"layers": 2}}
        assert json.loads(config["megasdc_commit"]) == source_commit()
        axes = {one.name or one.glob_name: one.step_metric for one in kinds["metric"] if one.options.defined}
        assert axes == {"train/tokens": "", "step": "", "*": "step"}
    (flip,), (damaged, hang) = (kept[name]["alert"] for name in kept)
    assert damaged.title == "incident that cannot be read" and "hang_0.json is damaged" in damaged.text
    assert (flip.title, hang.title) == ("silent data corruption", "hang/behind")
    assert "rank 1 on b named as wrong; persistent, halted" in flip.text and hang.text == HANG["message"]
    (page,), (_, report) = (kept[name]["artifact"] for name in kept)
    assert sorted(one.path for one in page.manifest.contents) == [
        "incident_step_00000003.html",
        "incident_step_00000003.json",
    ]
    assert (page.type, report.name) == ("incident", "hang_1")


@pytest.mark.slow
def test_all_starts_are_one_run_and_no_step_is_sent_twice(tmp_path):
    """Three starts, of which two go back: one id, and together they have each step once, the first of its lines."""
    for first, last in ((1, 6), (4, 5), (3, 9)):
        cut_back(tmp_path, first - 1)
        one = replace(where(tmp_path, None), goes_on=True, reached=reached_step(tmp_path))
        writer = MetricsWriter(tmp_path, [WandbSink(one, tmp_path)])
        for step in range(first, last + 1):
            writer.write(step, {"train/loss": 1 / step})
        writer.close()
    names, starts = zip(*records_of_starts(tmp_path), strict=True)
    assert names == ("r",) * 3 and {kinds["run"][0].run_id for kinds in starts} == {"r"}
    shown = [sorted(points(kinds["history"])) for kinds in starts]
    assert shown == [[("train/loss", step) for step in steps] for steps in (range(1, 7), (), range(7, 10))]
    assert {key: value for kinds in starts for key, value in points(kinds["history"]).items()} == truth(tmp_path)
    assert reached_step(tmp_path) == 6
    assert set_metrics_aside(tmp_path) and reached_step(tmp_path) == 0, "what begins anew has nothing behind it"


def test_an_export_has_every_point_and_no_secret(tmp_path):
    """One offline run of all starts, configured as the run is; keys of trackers and of alerts are left out."""
    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(step, {"train/loss": 1 / step} if step != 2 else {"eval/loss": 2.0})
    writer.close()
    secret = {
        "comet": {"api_key": "hidden"},
        "megasdc": {"health": {"alert_command": ["hidden"]}},
        "wandb": {"project": "q"},
    }
    (tmp_path / "resolved.json").write_text(json.dumps(secret))
    export_metrics(tmp_path, "wandb", tmp_path / "out", lambda what, number, total: None)
    ((name, kinds),) = records(tmp_path / "out").items()
    assert name == f"{tmp_path.name}-exported" and points(kinds["history"]) == truth(tmp_path)
    assert kinds["run"][0].project == "q" and "hidden" not in str(kinds["run"])
    assert "hidden" not in str(shown_config(secret)) and "hidden" in str(secret)


@pytest.mark.slow
def test_a_tracker_that_does_not_end_is_given_up(tmp_path, monkeypatch):
    """W&B's own process is stopped: the end waits for a limit, tells what sends the rest, and ends it."""
    monkeypatch.setattr(sinks, "FINISH_S", 2.0)
    told = []
    sink = WandbSink(where(tmp_path, "1"), None)
    (service,) = [one for one in psutil.Process().children() if one.name() == sinks.SERVICE]
    writer = MetricsWriter(tmp_path, [sink], lambda name, problem: told.append((name, problem)))
    writer.write(1, {"train/loss": 1.0})
    service.suspend()
    began = time.monotonic()
    writer.close()
    assert time.monotonic() - began < 60
    ((name, problem),) = told
    assert (
        name == "wandb" and "within 2 s" in problem and f"wandb sync {tmp_path / 'wandb' / 'offline-run-'}" in problem
    )
    service.wait(timeout=30)


def test_the_commit_is_of_the_repository_that_has_megasdc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in an environment within another repository has no commit."""
    package = tmp_path / "environment" / "megasdc"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(megasdc, "__file__", str(package / "__init__.py"))

    def git(*words: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x")
        command = ["git", *identity, *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init")
    git("commit", "--allow-empty", "-m", "somebody else's")
    assert source_commit() is None
    git("add", ".")
    git("commit", "-m", "with megasdc")
    assert source_commit() == git("rev-parse", "HEAD").strip()
