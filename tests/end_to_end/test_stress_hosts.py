"""Does a stress test over real SSH pass healthy hosts, name the one that a profile harms, and slow links?"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slow_link import limit_rate, slow_link

from megasdc.ops.cluster import Cluster, unavailable_reason

REASON = unavailable_reason()
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts, and a third one that only tests of links use."""
    env = {
        "PATH": os.environ["PATH"],
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with Cluster(tmp_path_factory.mktemp("cluster"), 3, env=env) as hosts:
        yield hosts


def start(cluster: Cluster, folder: Path, *options: str, python: str | Path = sys.executable) -> subprocess.Popen[str]:
    """Call the command on the first host."""
    argv = [str(python), "-m", "megasdc", "stress", "--json", "--timeout", "120", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return cluster.popen("node1", argv, cwd=str(folder), **pipes)


def stress(
    cluster: Cluster, folder: Path, *options: str, hosts: int = 2, python: str | Path = sys.executable
) -> tuple[int, dict[str, Any]]:
    hostfile = cluster.hostfile(cluster.names[:hosts])
    process = start(cluster, folder, "--hostfile", str(hostfile), *options, python=python)
    said, errors = process.communicate(timeout=400)
    assert said, errors
    return process.returncode, json.loads(said)


def verdicts(said: dict[str, Any]) -> dict[str, str]:
    return {host["host"]: host["status"] for host in said["hosts"]}


def test_the_harmed_host_is_named(cluster: Cluster, tmp_path: Path, programs: Path) -> None:
    """A profile on one host: 73, that host unhealthy with what was wrong, the other healthy in all tests."""
    options = ("--rounds", "1", "--drill", "node_10@node2", "--out", "said.json")
    code, said = stress(cluster, tmp_path, *options, python=programs / "python")
    assert (code, verdicts(said)) == (73, {"node1": "healthy", "node2": "unhealthy"})
    assert said["drill"]["found"] and json.loads((tmp_path / "said.json").read_text()) == said
    healthy, harmed = said["hosts"]
    assert set(healthy["rates"]) == {"collectives", "gemm", "training"}
    assert all(rate["compared"] and not rate["wrong"] for rate in healthy["rates"].values())
    assert {reason["test"] for reason in harmed["reasons"]} == {"gemm", "training"}
    assert any(finding.get("bits") for finding in harmed["findings"])
    kept = {file.name for file in (tmp_path / "said.json.hosts").iterdir()}
    assert kept == {"node1.json", "node2.json"}


RATE = 200
"""Mbit per second of each host's network card in tests of links."""
BOTH = [("node1", "node2"), ("node2", "node1")]


@pytest.mark.full  # ``test_pair_links.py`` has the rule in every run
def test_a_link_with_a_delay_in_one_direction_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """5 ms more from one host to another: 78, from which to which, hosts healthy, and the other pairs not slow."""
    limit_rate(cluster, RATE)
    with slow_link(cluster, "node3", "node1", delay_s=5e-3):
        code, said = stress(cluster, tmp_path, "--rounds", "1", "--only", "links", hosts=3)
    assert (code, set(verdicts(said).values())) == (78, {"healthy"})
    assert said["links"]["pairs"] == len(said["links"]["measured"]) == 3
    assert set(said["links"]["slow"]) == {"node3 -> node1"}, said["links"]
    assert said["links"]["slow"]["node3 -> node1"][0]["kinds"] == ["latency"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("slow", "ways", "place", "kind"),
    [
        ({}, [("node1", "node2")], None, None),
        ({"delay_s": 5e-3}, BOTH, "node1 - node2", "latency"),
        ({"delay_s": 5e-3}, BOTH[:1], "node1 -> node2", "latency"),
        ({"loss": 0.01}, BOTH, "node1 - node2", "loss"),
        ({"loss": 0.01}, BOTH[1:], "node2 -> node1", "loss"),
        ({"bytes_per_s": RATE * 1e6 / 80}, BOTH, "node1 - node2", "bandwidth"),
        ({"bytes_per_s": RATE * 1e6 / 80}, BOTH[:1], "node1 -> node2", "bandwidth"),
        ({"delay_s": 5e-3}, [*BOTH, ("node2", "node3"), ("node3", "node2")], "node2", "latency"),
    ],
)
def test_every_kind_of_slow_link_is_named(
    cluster: Cluster, tmp_path: Path, slow: dict[str, float], ways: list[tuple[str, str]], place: str, kind: str
) -> None:
    """A pair, one direction, or the host that slow pairs share; nobody where frames only take the same detour."""
    limit_rate(cluster, RATE)
    with contextlib.ExitStack() as links:
        for way in ways:
            links.enter_context(slow_link(cluster, *way, **slow))
        code, said = stress(cluster, tmp_path, "--only", "links", hosts=3)
    found = {name: {one for each in links for one in each["kinds"]} for name, links in said["links"]["slow"].items()}
    assert (code, found) == ((0, {}) if place is None else (78, {place: {kind}})), said["links"]["slow"]


@pytest.mark.full
def test_a_healthy_pair_passes(cluster: Cluster, tmp_path: Path) -> None:
    """Without golden values by repetition, fp64, each other and known sums; with them by those; 0 both times."""
    code, said = stress(cluster, tmp_path, "--rounds", "2")
    assert (code, said["counts"]["healthy"]) == (0, 2)
    assert said["hosts"][0]["rests_on"] == {
        "collectives": "sums known beforehand, with its own processes and 1 host",
        "gemm": "repetition, fp64 within rounding (108), 1 host of an equal key",
        "training": "repetition, 1 host of an equal key",
    }
    recording = start(cluster, tmp_path, "--rounds", "1", "--record", "--golden", "golden")
    assert recording.wait(300) == 0
    assert sorted(file.suffix for file in (tmp_path / "golden").iterdir()) == [".golden", ".json"]
    code, said = stress(cluster, tmp_path, "--rounds", "1", "--golden", "golden", "--out", "stress.json")
    assert json.loads((tmp_path / "stress.json").read_text()) == said
    assert (code, said["counts"]["healthy"]) == (0, 2)
    assert [host["rests_on"]["gemm"] for host in said["hosts"]] == ["golden values"] * 2
    assert [host["rests_on"]["training"] for host in said["hosts"]] == ["golden values"] * 2
    code, said = stress(cluster, tmp_path, "--rounds", "1", "--golden", "golden", "--drill", "node_10@node1")
    assert (code, verdicts(said)) == (73, {"node1": "unhealthy", "node2": "healthy"})
    assert {reason["evidence"] for reason in said["hosts"][0]["reasons"]} == {"golden"}


@pytest.mark.full
@pytest.mark.parametrize("profile", ["node_1", "node_4", "node_10", "node_11", "aegis", "gate_level"])
def test_every_profile_that_shows_in_its_time_is_found(cluster: Cluster, tmp_path: Path, profile: str) -> None:
    """In so many rounds that 3 or more results are expected to be harmed: named, and nobody else."""
    rounds = "6" if profile in ("aegis", "gate_level") else "2"
    code, said = stress(cluster, tmp_path, "--rounds", rounds, "--drill", f"{profile}@node2")
    assert (code, verdicts(said)) == (73, {"node1": "healthy", "node2": "unhealthy"})
    assert sum(fault["expected"] for fault in said["drill"]["faults"]) >= 3


@pytest.mark.full
def test_a_profile_that_cannot_show_says_why(cluster: Cluster, tmp_path: Path) -> None:
    """Silent until step 450: both hosts pass, and the drill says that it was not found, and why."""
    code, said = stress(cluster, tmp_path, "--rounds", "1", "--only", "gemm", "--drill", "node_13@node2")
    assert (code, verdicts(said)) == (0, {"node1": "healthy", "node2": "healthy"})
    assert not said["drill"]["found"]
    assert {fault["unfired"] for fault in said["drill"]["faults"]} == {
        "it is silent until step 450, and this test ended before that"
    }


@pytest.mark.full
def test_a_host_that_cannot_be_reached(cluster: Cluster, tmp_path: Path) -> None:
    """A host without power is named with the reason, the other is tested: 78."""
    cluster.power_off("node2")
    code, said = stress(cluster, tmp_path, "--rounds", "1", "--only", "gemm,collectives")
    assert (code, verdicts(said)) == (78, {"node1": "healthy", "node2": "not tested"})
    assert "cannot be reached over SSH" in said["hosts"][1]["reasons"][0]["text"]
    cluster.reboot("node2")
