"""The example scripts under launch/ start what they promise, between test hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch import ROOT, WORKER, write_small_config

from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.launch import gather
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, collect

REASON = unavailable_reason()
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]
on_cluster = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LAUNCH_ID = "by-hand"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Two hosts."""
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 2, env=env) as hosts:
        yield hosts


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration in a folder with a space; its run folder is ``run dir`` beside it."""
    return write_small_config(tmp_path / "my runs")


def start_by_hand(cluster: Cluster, config: Path, behaviour: str) -> list[int]:
    """Call no_ssh.sh once on every host and return the exit codes."""
    hostfile = cluster.hostfile()
    env = {"MEGASDC_TEST_BEHAVIOUR": behaviour, LAUNCH_ID_VARIABLE: LAUNCH_ID, "SCRIPT": str(WORKER)}
    processes = []
    for number, name in enumerate(cluster.names):
        argv = ["bash", str(ROOT / "launch" / "no_ssh.sh"), str(number), str(hostfile), str(config)]
        processes.append(cluster.popen(name, argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    for process in processes:
        process.communicate(timeout=200)
    return [process.returncode for process in processes]


@on_cluster
@pytest.mark.cluster
@pytest.mark.parametrize(("behaviour", "codes", "verdict"), [("sum", [0, 0], 0), ("fail:1", [79, 71], 71)])
def test_no_ssh_gives_each_host_its_code(
    cluster: Cluster,
    config: Path,
    behaviour: str,
    codes: list[int],
    verdict: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks of both hosts meet, every host returns its own code, and the records give one verdict."""
    assert start_by_hand(cluster, config, behaviour) == codes
    assert sorted(collect(config.parent / "run dir", LAUNCH_ID).done) == [0, 1]
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, LAUNCH_ID)
    argv = ["--hostfile", str(cluster.hostfile()), "--launcher-code", str(max(codes)), "--config", str(config)]
    assert gather.main(argv) == verdict
    assert ("rank 1 on node2 failed first" in capsys.readouterr().out) == (verdict != 0)


@on_cluster
@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="missing Debian package: openmpi-bin")
@pytest.mark.parametrize(("behaviour", "verdict"), [("signed", 0), ("fail:1", 71)])
def test_openmpi_needs_no_mpi4py(cluster: Cluster, config: Path, behaviour: str, verdict: int) -> None:
    """Mpirun starts the ranks, the environment reaches them, and the verdict is that of pdsh."""
    argv = ["bash", str(ROOT / "launch" / "openmpi.sh"), str(cluster.hostfile()), str(config), "--script", str(WORKER)]
    done = cluster.run("node1", argv, env={"MEGASDC_TEST_BEHAVIOUR": behaviour}, cwd=str(config.parent))
    assert done.returncode == verdict, done.stderr + done.stdout
    if verdict:
        assert "rank 1 on node2 failed first with exit code 71 (DataError)" in done.stderr


@pytest.mark.parametrize("script", ["no_ssh.sh", "openmpi.sh", "slurm.sbatch", "supervise.sbatch"])
def test_scripts_are_valid_and_say_how_to_call_them(script: str) -> None:
    """Bash can parse them, and without arguments they explain themselves and end with 2."""
    path = str(ROOT / "launch" / script)
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    done = subprocess.run(["bash", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "CONFIG [--set a.b.c=value ...]" in done.stderr


def test_hostfile_example_is_valid() -> None:
    """The front reads it."""
    from megasdc.ops.launch.hosts import read_hostfile

    assert read_hostfile(ROOT / "launch" / "hostfile.example") == {"node1": 8, "node2": 8}
