"""Real runs with all sinks: they show what metrics.jsonl holds over a rewind, change no bit, and write alone."""

from __future__ import annotations

import csv
import json
import math
import socket
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.common.imports import is_installed
from megasdc.metrics.writer import PLACE, reached_step, read_metrics
from megasdc.parallel.local_ranks import free_port

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


def truth(run_dir: Path) -> dict[str, dict[int, float]]:
    """Values of metrics.jsonl by name and step."""
    values: dict[str, dict[int, float]] = {}
    for row in read_metrics(run_dir):
        for name in row.keys() - set(PLACE):
            values.setdefault(name, {})[row["step"]] = math.nan if row[name] is None else row[name]
    return values


def test_sinks_show_the_truth_over_a_rewind_and_change_no_bit(tmp_path: Path, data: Path) -> None:
    """A run that goes back to step 4: TensorBoard and CSV equal metrics.jsonl, and nothing else writes beside them.

    W&B has one run for all starts, or here for the second, which asks for it, one of its own in the group.
    """
    run_dir = tmp_path / "run"
    keys = {
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "board"), "job_name": "me"},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "me"},
        "wandb": {"enabled": is_installed("wandb"), "project": "p"},
    }
    shown = {f"deepspeed__{key}": value for key, value in keys.items()}
    shown["logging__prometheus"] = f"127.0.0.1:{free_port()}"
    config = write_config(tmp_path / "c.json", data, run_dir, checkpoint__interval=2, **shown)
    plain = write_config(tmp_path / "plain.json", data, tmp_path / "plain", checkpoint__interval=2)
    local = {f"WANDB_{name}_DIR": str(tmp_path / "home") for name in ("CACHE", "CONFIG", "DATA")}
    offline = {"WANDB_MODE": "offline", **local}
    assert train_run(config, 2, "megasdc.training.stop_step=5", env=offline) == [(0, None)] * 2
    (run_dir / "checkpoints" / "step_00000005" / "manifest.json").unlink()
    assert train_run(config, 2, "megasdc.logging.wandb_runs=each_start", env=offline) == [(0, None)] * 2
    assert train_run(plain, 2) == [(0, None)] * 2
    assert events_of(run_dir, "metrics", "sink_failed") == []
    name = "checkpoints/step_00000006"
    assert metrics_of(run_dir) == metrics_of(tmp_path / "plain")
    assert state_of(run_dir / name) == state_of(tmp_path / "plain" / name)
    values = truth(run_dir)
    reader = EventAccumulator(str(tmp_path / "board" / "me"))
    reader.Reload()
    assert {tag: {one.step: one.value for one in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]} == {
        tag: {step: float(np.float32(value)) for step, value in own.items()} for tag, own in values.items()
    }
    files = {path.stem: path for path in (tmp_path / "csv" / "me").iterdir()}
    assert files.keys() == {tag.replace("/", "_") for tag in values}, "one writer: DeepSpeed's own names are not there"
    for tag, own in values.items():
        with open(files[tag.replace("/", "_")], newline="") as file:
            assert [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]] == list(own.items())
    assert len(list((tmp_path / "board" / "me").iterdir())) == 2, "a file a start"
    run = json.loads((run_dir / "run.json").read_text())["run"]
    if keys["wandb"]["enabled"]:
        kept = sorted(path.stem for path in run_dir.glob("wandb/offline-run-*/run-*.wandb"))
        assert kept == [f"run-{run}", f"run-{run}-2"]
    assert reached_step(run_dir) == 5


def test_a_port_in_use_stops_no_run(tmp_path: Path, data: Path) -> None:
    """The run goes on without that sink, with an event that names it and why."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        changes = {"logging__prometheus": f"127.0.0.1:{taken.getsockname()[1]}", "training__steps": 1}
        config = write_config(tmp_path / "c.json", data, tmp_path / "run", **changes)
        assert train_run(config, 1) == [(0, None)]
    (event,) = events_of(tmp_path / "run", "metrics", "sink_failed")
    assert event["sink"] == "prometheus" and "Address already in use" in event["problem"]
