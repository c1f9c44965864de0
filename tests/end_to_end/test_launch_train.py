"""Real training through `megasdc launch` between test hosts: a node is lost, and the run goes on without it."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slow_link import limit_rate, slow_link

from megasdc.config.load import parse_config
from megasdc.events import read_events
from megasdc.ops.cluster import Cluster, unavailable_reason

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
            "protect": "off",
            "training": {"steps": STEPS},
            "checkpoint": {"interval": 5},
            "logging": {"run_dir": "run", "interval": 1},
        },
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with prepared data and a configuration."""
    prepare_tiny(tmp_path, tiny_config())
    return tmp_path


def prepare_tiny(folder: Path, raw: dict[str, Any]) -> None:
    """Write a configuration into a folder, and the data that it names."""
    from megasdc.data.prepare import prepare

    (folder / "text").mkdir()
    source = inspect.getsource(textwrap) + inspect.getsource(inspect)
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(source[number * 2000 : (number + 1) * 2000])
    raw["megasdc"]["data"]["sources"][0]["path"] = str(folder / "text")
    prepare(parse_config(raw).megasdc.data, folder / "data", 1, progress=False)
    (folder / "config.json").write_text(json.dumps(raw))


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


@pytest.mark.full  # ``test_supervise.py`` and ``test_memory_hosts.py`` lose hosts in every run
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


@pytest.mark.full  # two starts of fresh processes; ranks that torchrun starts differ in their environment alone
def test_torchrun_starts_ranks_and_again_after_a_kill(folder: Path) -> None:
    """With its own launcher's variables and store; the second start goes on from the newest checkpoint."""
    kill = {"kind": "sigkill", "rank": 1, "steps": [7, 7]}
    settings = ("megasdc.training.steps=10", f"megasdc.process_faults={json.dumps([kill])}")
    chosen = [word for one in settings for word in ("--set", one)]
    argv = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "megasdc.entry.pretrain_gpt"]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    command = [*argv, "--config", "config.json", *chosen]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_done(folder) == list(range(1, 11))
    (resumed,) = read_events(folder / "run", kind="resume", name="checkpoint")
    assert resumed.fields["path"] == "run/checkpoints/step_00000005"


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


def link_events(folder: Path) -> list[tuple[str, str, set[str]]]:
    """Name, place and kinds of each event of links, in order."""
    path = folder / "run" / "events" / "rank_00000.jsonl"
    found = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    names = ("slow_link", "link_recovered", "link_unmeasured")
    return [
        (
            one["name"],
            one["fields"].get("place"),
            {kind for pair in one["fields"].get("pairs", []) for kind in pair["kinds"]},
        )
        for one in found
        if one["name"] in names
    ]


def pings(folder: Path) -> int:
    """How often links were measured."""
    path = folder / "run" / "metrics.jsonl"
    return path.read_text().count("health/ping_ms") if path.exists() else 0


@contextlib.contextmanager
def training_with_pings(
    cluster: Cluster, folder: Path, hosts: int, python: str | Path = sys.executable
) -> Iterator[Callable[..., None]]:
    """Inside, training goes on and measures links every 5 steps; gives a function that waits for a condition."""
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["health"] = {"enabled": True, "ping_interval": 5}
    raw["megasdc"]["training"]["steps"] = 10 * STEPS
    raw["megasdc"]["checkpoint"] = {"interval": 0}
    (folder / "config.json").write_text(json.dumps(raw))
    argv = [str(python), "-m", "megasdc", "launch", "--hostfile", str(cluster.hostfile(cluster.names[:hosts]))]
    run = cluster.popen("node1", [*argv, "--config", str(folder / "config.json")], cwd=str(folder))

    def wait(condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end and run.poll() is None, link_events(folder)
            time.sleep(0.1)

    limit_rate(cluster, 200)
    try:
        yield wait
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 0
    finally:
        run.kill()
        run.wait()


def test_a_slow_link_is_named_while_training(cluster: Cluster, folder: Path, programs: Path) -> None:
    """5 ms from one of three hosts to another: an event says so after two measurements, and no other pair is named."""
    training = training_with_pings(cluster, folder, 3, programs / "python")
    with slow_link(cluster, "node2", "node3", delay_s=5e-3), training as wait:
        wait(lambda: link_events(folder))
        assert pings(folder) <= 4
        wait(lambda: pings(folder) >= 5)
    assert link_events(folder) == [("slow_link", "node2 -> node3", {"latency"})]


SLOW_LINKS = [
    ({"delay_s": 5e-3}, 2, "latency", 4),
    ({"bytes_per_s": 2.5e6}, 2, "bandwidth", 4),
    ({"loss": 0.01}, 2, "loss", 6),
    ({"delay_s": 5e-3}, 1, "latency", 4),
    ({"bytes_per_s": 2.5e6}, 1, "bandwidth", 4),
    ({"loss": 0.01}, 1, "loss", 6),
]
"""What is wrong, in how many directions, what it is called, and measurements until it is named at the latest."""


@pytest.mark.full
@pytest.mark.parametrize("hosts", [2, 3])
def test_links_become_slow_and_recover(cluster: Cluster, folder: Path, hosts: int) -> None:
    """One after the other in one run, also of two hosts, by their past: named, then reported as recovered.

    Two hosts have no third clock: which way a delay lies is not told.
    """
    with training_with_pings(cluster, folder, hosts) as wait:
        wait(lambda: pings(folder) >= 8)
        for number, (slow, ways, kind, within) in enumerate(SLOW_LINKS):
            told, before = 2 * number, pings(folder)
            with contextlib.ExitStack() as links:
                for way in [("node1", "node2"), ("node2", "node1")][:ways]:
                    links.enter_context(slow_link(cluster, *way, **slow))
                wait(lambda told=told: len(link_events(folder)) > told)
            took = pings(folder) - before
            one_way = ways == 1 and not (hosts == 2 and kind == "latency")
            place = "node1 -> node2" if one_way else "node1 - node2"
            assert link_events(folder)[told] == ("slow_link", place, {kind}) and took <= within, (slow, ways, took)
            print(f"{hosts} hosts, {slow}, {ways} directions: {place} named after {took} measurements")
            wait(lambda told=told: len(link_events(folder)) > told + 1)
            assert link_events(folder)[told + 1][:2] == ("link_recovered", place)
    assert len(link_events(folder)) == 2 * len(SLOW_LINKS)
