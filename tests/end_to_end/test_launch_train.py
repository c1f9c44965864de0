"""Real training through `megasdc launch` between test hosts: a node is lost, and the run goes on without it."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, unavailable_reason

from megasdc.config import parse_config

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(400),
]
STEPS = 4000


def tiny_config() -> dict[str, Any]:
    """Return a model that trains many steps a second; paths count from the folder of the run."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "megasdc": {
            "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64},
            "data": {
                "path": "data",
                "sequence_length": 32,
                "split": [90, 5, 5],
                "sources": [{"kind": "files", "path": "text"}],
                "tokenizer": {"vocab_size": 512, "train_characters": 200_000},
            },
            "parallel": {"timeout_s": 60.0},
            "training": {"steps": STEPS},
            "checkpoint": {"interval": 5},
            "logging": {"run_dir": "run", "interval": 1},
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with prepared data and a configuration."""
    from megasdc.data.prepare import prepare

    (tmp_path / "text").mkdir()
    source = inspect.getsource(textwrap) + inspect.getsource(inspect)
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(source[number * 2000 : (number + 1) * 2000])
    raw = tiny_config()
    raw["megasdc"]["data"]["sources"][0]["path"] = str(tmp_path / "text")
    prepare(parse_config(raw).megasdc.data, tmp_path / "data", 1, progress=False)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts."""
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 3, env=env) as hosts:
        yield hosts


def steps_done(folder: Path) -> list[int]:
    """Return the steps whose loss is in the metrics file."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [found["step"] for found in map(json.loads, lines) if "train/loss" in found]


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that are complete."""
    return list((folder / "run" / "checkpoints").glob("*step*/"))


def test_run_loses_a_node_and_goes_on_without_it(cluster: Cluster, folder: Path) -> None:
    """The lost node is named; with it excluded, training resumes on the others and ends with 0."""
    hostfile = ["--hostfile", str(cluster.hostfile())]
    argv = [sys.executable, "-m", "megasdc", "launch", *hostfile, "--config", str(folder / "config.json")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = cluster.popen("node1", [*argv, "--exclude", "node3"], cwd=str(folder), **pipes)
    end = time.monotonic() + 120
    while len(checkpoints(folder)) < 2:
        assert time.monotonic() < end and first.poll() is None, first.communicate()
        time.sleep(0.1)
    cluster.power_off("node2")
    _, err = first.communicate(timeout=120)
    assert first.returncode == 78, err
    assert "rank 1 on node2: no done record (killed or host lost" in err
    assert "as a consequence failed: rank 0 on node1" in err

    reached = max(int("".join(filter(str.isdigit, path.name))) for path in checkpoints(folder))
    last = reached + 3
    options = ["--exclude", "node2", "--set", f"megasdc.training.steps={last}"]
    second = cluster.run("node1", [*argv, *options], cwd=str(folder), timeout_s=150)
    assert second.returncode == 0, second.stderr
    assert "not used: node2" in second.stderr
    assert steps_done(folder) == list(range(1, last + 1))


def test_a_node_that_missed_the_last_save(tmp_path: Path, folder: Path) -> None:
    """With folders local to each node, a step that one node lacks is passed over, and resume is bit-identical."""
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["training"]["steps"] = 6
    raw["megasdc"]["checkpoint"] = {"interval": 2, "keep_last": 0, "storage": "node_local", "folder": "local"}
    (folder / "config.json").write_text(json.dumps(raw))
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    local = folder / "local"
    with Cluster(tmp_path / "cluster", 2, env=env, private=[local]) as hosts:
        argv = [sys.executable, "-m", "megasdc", "launch", "--hostfile", str(hosts.hostfile())]
        argv += ["--config", str(folder / "config.json")]
        whole = hosts.run("node1", argv, cwd=str(folder), timeout_s=150)
        assert whole.returncode == 0, whole.stderr
        expected = (folder / "run" / "metrics.jsonl").read_text().splitlines()

        own = {name: hosts.private_dir(name, local) for name in ("node1", "node2")}
        for name, missing in (("node1", ["step_00000006"]), ("node2", ["step_00000006", "step_00000004"])):
            for step in missing:
                shutil.rmtree(own[name] / step)
        again = hosts.run("node1", argv, cwd=str(folder), timeout_s=150)
        assert again.returncode == 0, again.stderr
    assert "checkpoint of step 4 is skipped" in again.stderr and "node2" in again.stderr
    assert "resumed from local/step_00000002" in again.stderr
    got = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [_losses(line) for line in got] == [_losses(line) for line in expected]


def _losses(line: str) -> dict[str, Any]:
    return {key: value for key, value in json.loads(line).items() if key == "step" or key.startswith("train/")}
