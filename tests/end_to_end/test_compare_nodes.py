"""Does one command over real SSH say which of several hosts holds something else, also when a host is gone?"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_launch_train import tiny_config

from megasdc.config.load import parse_config
from megasdc.data.prepare import prepare
from megasdc.events import read_events
from megasdc.ops.cluster import Cluster, unavailable_reason

REASON = unavailable_reason()
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "compare_nodes.sh"
on_cluster = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600)]
NODES = ["node1", "node2", "node3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path that is a folder of its own on each host."""
    return tmp_path_factory.mktemp("hosts") / "my runs"


@pytest.fixture
def cluster(tmp_path: Path, runs: Path, programs: Path) -> Iterator[Cluster]:
    """Three hosts, each with the same two steps of a model in its own folder."""
    env = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(programs / "python"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
    }
    with Cluster(tmp_path / "cluster", 3, env=env, private=[runs]) as hosts:
        for name in NODES:
            for step in (2, 3):
                folder = hosts.private_dir(name, runs) / f"step_{step:08d}"
                folder.mkdir()
                generator = torch.Generator().manual_seed(step)
                weight = torch.randn(1500, 1000, generator=generator)
                torch.save({"w": weight, "b": weight[0].clone()}, folder / "layer_03-model_00-model_states.pt")
        yield hosts


def compare(cluster: Cluster, path: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Call the script on the first host."""
    argv = ["bash", str(SCRIPT), "--hostfile", str(cluster.hostfile()), "--path", str(path), "--out", str(out)]
    return cluster.run("node1", [*argv, *options], cwd="/", timeout_s=300)


def harm(cluster: Cluster, name: str, runs: Path, step: int) -> None:
    """Flip one bit of element 1,200,000 of the larger tensor on one host: in its second block."""
    file = cluster.private_dir(name, runs) / f"step_{step:08d}" / "layer_03-model_00-model_states.pt"
    state = torch.load(file)
    state["w"].view(-1).view(torch.int32)[1_200_000] ^= 1 << 20
    torch.save(state, file)


@on_cluster
@pytest.mark.cluster
def test_the_odd_host_is_named_and_a_dead_one_too(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    """0 while all are the same; 1 with the odd host, step, tensor and block; 2 with a host off, the rest compared."""
    out = tmp_path / "out put"
    done = compare(cluster, runs, out)
    assert done.returncode == 0, done.stderr + done.stdout
    assert sorted(path.name for path in out.glob("*.manifest")) == [f"{name}.manifest" for name in NODES]

    harm(cluster, "node3", runs, 3)
    done = compare(cluster, runs, out, "--json")
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert said["odd"] == [f"node3:{runs}"]
    assert (said["checkpoints"], said["first_different"]) == (
        {"step_00000002": True, "step_00000003": False},
        "step_00000003",
    )
    (only,) = said["differences"]
    assert (only["name"], only["what"], only["num_blocks"]) == ("w", "blocks", 1)
    assert only["ranges"][0]["parameters"] == ["3.w/weight"]
    first, last = only["ranges"][0]["elements"]
    assert (first, last) == (4 << 18, 1_500_000 - 1)
    assert "what most checkpoints hold" in only["basis"]

    cluster.power_off("node2")
    done = compare(cluster, runs / "step_00000003", out)
    assert done.returncode == 2
    assert "node2 gave no manifest: ssh: connect to host node2" in done.stderr
    assert "node3" in done.stdout and "Different" in done.stdout
    assert not (out / "node2.manifest").exists()


@pytest.mark.full  # the test above names hosts in every run
@on_cluster
@pytest.mark.cluster
def test_a_host_without_the_folder_is_named(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    """What a host says against its manifest is told with its name; a file that is not there on one host is told."""
    shutil.rmtree(cluster.private_dir("node2", runs) / "step_00000003")
    done = compare(cluster, runs / "step_00000003", tmp_path / "out")
    assert done.returncode == 2
    assert f"node2 gave no manifest: megasdc: error: {runs}/step_00000003 is not there" in done.stderr
    assert "Same" in done.stdout
    argv = ["bash", str(SCRIPT), "--hostfile", str(tmp_path / "none"), "--path", str(runs)]
    done = cluster.run("node1", argv, cwd=str(tmp_path))
    assert done.returncode == 2 and "none cannot be read" in done.stderr


@on_cluster
@pytest.mark.cluster
@pytest.mark.full
def test_a_host_that_hangs_is_given_up(cluster: Cluster, runs: Path, tmp_path: Path) -> None:
    """A host that takes longer than --timeout is named; the others are compared."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/bash\n[ "$(hostname)" = node3 ] && sleep 600\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    started = time.monotonic()
    argv = ["bash", str(SCRIPT), "--hostfile", str(cluster.hostfile()), "--path", str(runs / "step_00000002")]
    argv += ["--out", str(tmp_path / "out"), "--timeout", "60"]
    done = cluster.run("node1", argv, env={"PYTHON": str(wrapper)}, timeout_s=300)
    assert done.returncode == 2
    assert "node3 gave no manifest: gave no answer in 60 s" in done.stderr
    assert time.monotonic() - started < 250
    assert "node1" in done.stdout and "node2" in done.stdout and done.stdout.startswith("Same\n")


@on_cluster
@pytest.mark.cluster
@pytest.mark.full
def test_the_first_step_that_differs_between_two_runs(tmp_path: Path) -> None:
    """Two hosts run one configuration, one with a node's published faults: steps before the first fault are the same.

    The first kept step that differs is the first one from the injector's first event on.
    """
    data, run = tmp_path / "shared", tmp_path / "run"
    data.mkdir()
    raw = tiny_config()
    (data / "text").mkdir()
    for number in range(40):
        (data / "text" / f"{number}.txt").write_text(inspect.getsource(inspect)[number * 2000 : (number + 1) * 2000])
    raw["megasdc"]["data"] |= {"path": str(data / "data")}
    raw["megasdc"]["data"]["sources"][0]["path"] = str(data / "text")
    raw["megasdc"] |= {
        "protect": "off",
        "training": {"steps": 12},
        "checkpoint": {"interval": 2, "keep_last": 0},
        "logging": {"run_dir": str(run)},
    }
    prepare(parse_config(raw).megasdc.data, data / "data", 1, progress=False)
    (data / "config.json").write_text(json.dumps(raw))
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with Cluster(tmp_path / "cluster", 2, env=env, private=[run]) as cluster:
        argv = [sys.executable, "-m", "megasdc", "launch", "--num-ranks", "1", "--config", str(data / "config.json")]
        profile = json.dumps([{"profile": "node_10", "steps": [5, None]}])
        harmed = [*argv, "--set", f"megasdc.faults={profile}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        for process in [cluster.popen("node1", argv, **pipes), cluster.popen("node2", harmed, **pipes)]:
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, said
        fired = [one.step for one in read_events(cluster.private_dir("node2", run), kind="fault")]
        steps = list(range(2, 14, 2))
        first = next(step for step in steps if step >= min(step for step in fired if step))
        done = compare(cluster, run / "checkpoints", tmp_path / "out", "--json")
        assert done.returncode == 1, done.stderr
        found = json.loads(done.stdout)
        assert found["checkpoints"] == {f"step_{step:08d}": step < first for step in steps}
        assert found["first_different"] == f"step_{first:08d}"
        tensors = {name for one in found["differences"] for part in one["ranges"] for name in part["parameters"]}
        assert any(name.endswith("/weight") for name in tensors) and any(name.endswith("/master") for name in tensors)


def test_the_script_says_how_it_is_called() -> None:
    """Without arguments, or with wrong ones, it explains itself and ends with 2."""
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    for arguments in ([], ["--hostfile"], ["--hostfile", "x"], ["--what", "x"]):
        done = subprocess.run(["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "--hostfile HOSTFILE --path PATH" in done.stderr
