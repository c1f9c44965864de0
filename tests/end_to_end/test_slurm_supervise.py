"""Supervised runs inside real SLURM jobs between test hosts end with the bits of a run without a fault."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_launch import ROOT
from test_launch_train import folder, steps_done  # noqa: F401 - a fixture
from test_supervise import STEPS, ended_as_without_faults, history_of, write

from megasdc.ops.cluster import unavailable_reason
from tools.slurm_hosts import SlurmCluster, slurm_unavailable_reason

REASON = unavailable_reason() or slurm_unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(600),
]
SETTINGS = ("SlurmdTimeout=10", "AuthInfo=cred_expire=5")
"""A lost node is known soon, and a job that was requeued starts again soon."""
SLOW = [{"kind": "normal", "mean_s": 0.2, "std_s": 0.0, "steps": [1, 30]}]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmCluster]:
    """Four hosts; SSH is refused."""
    ssh = tmp_path / "refused" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\nexit 255\n")
    ssh.chmod(0o755)
    path = f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    # In a short folder: sockets of slurmd lie in it, whose names may have 108 characters.
    with tempfile.TemporaryDirectory() as short, SlurmCluster(Path(short), 4, env=env, settings=SETTINGS) as cluster:
        yield cluster


def submit(slurm: SlurmCluster, config: Path, *options: str) -> str:
    """Submit launch/supervise.sbatch from the run's folder, with a rank on a node; returns the job's number."""
    small = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=1", f"--output={config.with_suffix('.log')}")
    argv = ["sbatch", "--parsable", *small, *options, str(ROOT / "launch" / "supervise.sbatch"), str(config)]
    done = slurm.run_on_first(*argv, cwd=str(config.parent))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def shown(slurm: SlurmCluster, job: str) -> dict[str, str]:
    """What SLURM says of a job."""
    words = slurm.run_on_first("scontrol", "--oneliner", "show", "job", job).stdout.split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def said_by(slurm: SlurmCluster, config: Path) -> str:
    """Everything that may explain a failure."""
    log = config.with_suffix(".log")
    return f"{log.read_text() if log.exists() else 'no log'}\n{slurm.logs()}"


def wait_until(there: Callable[[], bool], slurm: SlurmCluster, config: Path, timeout_s: float = 150.0) -> None:
    """Wait for something of a run."""
    end = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < end, said_by(slurm, config)
        time.sleep(0.1)


def wait_for_end(slurm: SlurmCluster, config: Path, job: str, timeout_s: float = 240.0) -> None:
    """Wait for the end of a job, which must be a good one."""
    wait_until(lambda: shown(slurm, job)["JobState"] in ("COMPLETED", "FAILED"), slurm, config, timeout_s)
    assert shown(slurm, job)["ExitCode"] == "0:0", said_by(slurm, config)


def has_come_to(folder: Path, step: int) -> Callable[[], bool]:  # noqa: F811
    """Whether a step was reported."""
    return lambda: max(steps_done(folder), default=0) >= step


def attempts(folder: Path) -> list[tuple[str, tuple[str, ...]]]:  # noqa: F811
    """Diagnosis and hosts of each."""
    return [(one.diagnosis.kind, one.used) for one in history_of(folder).failures]


@pytest.mark.full
def test_a_cancelled_step_is_started_again(slurm: SlurmCluster, folder: Path) -> None:  # noqa: F811
    """On the same nodes, and no node is suspected."""
    config = write(folder, "run", delay=SLOW)
    job = submit(slurm, config, "--nodes=3")
    wait_until(has_come_to(folder, 10), slurm, config)
    slurm.run_on_first("scancel", f"{job}.1")  # step 0 watches the first node
    wait_for_end(slurm, config, job)
    nodes = ("node1", "node2")
    assert attempts(folder) == [("preempted", nodes), ("done", nodes)], said_by(slurm, config)
    ended_as_without_faults(folder)


@pytest.mark.full
def test_a_lost_node_is_replaced_by_a_spare_of_the_job(slurm: SlurmCluster, folder: Path) -> None:  # noqa: F811
    """The job lives on, and later steps have no task on that node."""
    config = write(folder, "run", delay=SLOW)
    job = submit(slurm, config, "--nodes=3")
    wait_until(has_come_to(folder, 10), slurm, config)
    slurm.power_off("node2")
    wait_for_end(slurm, config, job)
    assert attempts(folder) == [("host_lost", ("node1", "node2")), ("done", ("node1", "node3"))]
    assert list(history_of(folder).replaced) == ["node2"] and shown(slurm, job)["Restarts"] == "0"
    ended_as_without_faults(folder)


@pytest.mark.full
def test_a_job_that_reaches_its_time_limit_goes_on_requeued(slurm: SlurmCluster, folder: Path) -> None:  # noqa: F811
    """The run saves before the limit, which is no failure, and ends in a later start of the same job."""
    config = write(folder, "run", delay=[{**SLOW[0], "mean_s": 1.0, "steps": [1, STEPS]}])
    job = submit(slurm, config, "--nodes=2", "--time=2", "--signal=B:USR1@60")
    wait_until(lambda: shown(slurm, job)["Restarts"] == "1", slurm, config)
    assert slurm.run_on_first("scontrol", "update", f"JobId={job}", "TimeLimit=20").returncode == 0
    wait_for_end(slurm, config, job)
    found = attempts(folder)
    assert [kind for kind, _ in found] == ["preempted"] * (len(found) - 1) + ["done"] and len(found) > 1
    assert shown(slurm, job)["Restarts"] == "1" and not history_of(folder).replaced
    ended_as_without_faults(folder)


@pytest.mark.full
def test_a_node_that_computes_wrong_results_is_in_no_later_allocation(slurm: SlurmCluster, folder: Path) -> None:  # noqa: F811
    """The job has no spare: it is requeued without the node, and the run goes on from before the fault."""
    sections = {
        "determinism": {"enabled": True},
        "audit": {"enabled": True, "interval": 10, "verify_checkpoints": True},
        "checkpoint": {"interval": 10, "memory": {"interval": 2, "partners": True, "linger_s": 120}},
        "supervise": {"num_hosts": 3, "pause_s": 1.0, "test_rounds": 1},
    }
    harm = {"host": "node2", "submodule": "*.linear_fc2", "kind": "scale", "factor": 1.5, "elements": 3}
    config = write(folder, "run", **sections, faults=[{**harm, "same_elements": True, "steps": [25, None]}])
    job = submit(slurm, config, "--nodes=3")
    wait_for_end(slurm, config, job)
    assert attempts(folder) == [
        ("corrupt_again", ("node1", "node2", "node3")),
        ("done", ("node1", "node3", "node4")),
    ]
    said = shown(slurm, job)
    assert (said["ExcNodeList"], said["NodeList"], said["Restarts"]) == ("node2", "node[1,3-4]", "1")
    ended_as_without_faults(folder, 3, **sections)


@pytest.mark.full
def test_a_job_that_loses_its_first_node_goes_on(slurm: SlurmCluster, folder: Path) -> None:  # noqa: F811
    """The supervisor is gone with it: another node requeues the job, and the next supervisor takes the journal."""
    config = write(folder, "run", delay=SLOW)
    job = submit(slurm, config, "--nodes=2", "--exclude=node1")
    wait_until(has_come_to(folder, 10), slurm, config)
    slurm.power_off("node2")
    wait_for_end(slurm, config, job)
    (first, nodes), (last, others) = attempts(folder)
    assert (first, nodes, last) == ("host_lost", ("node2", "node3"), "done") and "node2" not in others
    assert shown(slurm, job)["Restarts"] == "1"
    ended_as_without_faults(folder)
