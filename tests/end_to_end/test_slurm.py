"""Runs and sweeps under real SLURM between test hosts: what jobs end with, what they say, what a signal does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_launch import ROOT, WORKER, write_small_config
from test_launch_train import folder  # noqa: F401 - a fixture

from megasdc.events import read_events
from megasdc.lab.sweeps.results import read_sweep
from megasdc.ops.cluster import unavailable_reason
from megasdc.ops.launch.records import collect
from tools.slurm_hosts import SlurmCluster, slurm_unavailable_reason

REASON = unavailable_reason() or slurm_unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(240),
]
SMALL = ("--nodes=2", "--cpus-per-task=1", "--gpus-per-node=1")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two hosts."""
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "SCRIPT": str(WORKER)}
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), 2, env=env) as cluster:
        yield cluster


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration in a folder with a space; its run folder is ``run dir`` beside it."""
    return write_small_config(tmp_path / "my runs")


def submit(slurm: SlurmCluster, config: Path, behaviour: str) -> str:
    """Submit launch/slurm.sbatch from the project's folder, and return the job's number."""
    log = f"--output={config.parent}/job.log"
    argv = ["sbatch", "--parsable", *SMALL, log, "launch/slurm.sbatch", str(config)]
    done = slurm.run_on_first(*argv, env={"MEGASDC_TEST_BEHAVIOUR": behaviour}, cwd=str(ROOT))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def code_of(slurm: SlurmCluster, job: str) -> int:
    """The exit code of a job, when it has ended."""
    end = time.monotonic() + 200
    while True:
        shown = slurm.run_on_first("scontrol", "--oneliner", "show", "job", job).stdout.split()
        said = dict(word.split("=", 1) for word in shown if "=" in word)
        if said.get("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"):
            return int(said["ExitCode"].split(":")[0])
        assert time.monotonic() < end, said
        time.sleep(0.3)


def wait_for(place: Path, pattern: str, count: int) -> None:
    """Wait until so many files are there."""
    end = time.monotonic() + 180
    while len(list(place.glob(pattern))) < count:
        assert time.monotonic() < end, f"fewer than {count} files {pattern} in {place}"
        time.sleep(0.05)


@pytest.mark.parametrize(("behaviour", "code"), [("sum", 0), ("fail:1", 71)])
def test_a_job_starts_every_node_and_is_judged(slurm: SlurmCluster, config: Path, behaviour: str, code: int) -> None:
    """A rank on each host, one world; the job ends with the code of the rank that failed first, and says which."""
    job = submit(slurm, config, behaviour)
    found_code = code_of(slurm, job)
    log = (config.parent / "job.log").read_text()
    assert found_code == code, log + slurm.logs()
    (launch,) = (config.parent / "run dir" / "done").iterdir()
    found = collect(config.parent / "run dir", launch.name)
    assert {rank: done.exit_code for rank, done in found.done.items()} == {0: 79 if code else 0, 1: code}
    assert ("rank 1 on node2 failed first with exit code 71 (DataError)" in log) == (code != 0)
    assert not list(ROOT.glob("hostfile.*"))


def test_a_signal_to_the_job_reaches_the_ranks(slurm: SlurmCluster, config: Path) -> None:
    """SIGTERM to the batch script, as SLURM sends before the time limit: all ranks save and end, and the job with 0."""
    job = submit(slurm, config, "sleep")
    wait_for(config.parent / "run dir", "asleep_*", 2)
    slurm.run_on_first("scancel", "--batch", "--signal=TERM", job)
    assert code_of(slurm, job) == 0, (config.parent / "job.log").read_text()


def launch(slurm: SlurmCluster, config: Path, behaviour: str) -> subprocess.Popen[str]:
    """Start `megasdc launch --launcher slurm` in an allocation of both hosts; ranks have 3 s after SIGTERM."""
    chosen = ["--hostfile", str(slurm.hostfile()), "--config", str(config), "--script", str(WORKER)]
    argv = ["salloc", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "megasdc", "launch", *chosen]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    env = {"MEGASDC_TEST_BEHAVIOUR": behaviour, "MEGASDC_STOP_GRACE_S": "3"}
    return slurm.popen("node1", [*argv, "--launcher", "slurm"], env=env, cwd=str(config.parent), **pipes)


@pytest.mark.parametrize(("behaviour", "code"), [pytest.param("sum", 0, marks=pytest.mark.full), ("fail:1", 71)])
def test_the_front_in_an_allocation(slurm: SlurmCluster, config: Path, behaviour: str, code: int) -> None:
    """One srun for all ranks, and the verdict is that of pdsh."""
    process = launch(slurm, config, behaviour)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == code, said
    assert ("rank 1 on node2 failed first with exit code 71 (DataError)" in said) == (code != 0)


def test_a_killed_rank_says_that_memory_may_be_the_cause(slurm: SlurmCluster, config: Path) -> None:
    """SLURM starts it, and tells the front neither how it has ended nor what the kernel has counted there."""
    process = launch(slurm, config, "sums")
    wait_for(config.parent / "run dir", "summing_*", 2)
    slurm.run("node2", ["pkill", "-KILL", "-f", "^[^ ]*python -u .*launch_worker.py"])
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 78, said
    assert "rank 1 on node2: no done record" in said and "srun says `task N: Out Of Memory`" in said


@pytest.mark.parametrize(
    ("behaviour", "number", "code"),
    [
        ("sleep", signal.SIGTERM, 0),
        pytest.param("sleep", signal.SIGINT, 0, marks=pytest.mark.full),
        pytest.param("deaf", signal.SIGTERM, 143, marks=pytest.mark.full),
    ],
)
def test_a_signal_to_the_front_reaches_the_ranks(
    slurm: SlurmCluster, config: Path, behaviour: str, number: signal.Signals, code: int
) -> None:
    """All ranks save and end, though srun would kill them or only tell its state; those that do not are killed."""
    process = launch(slurm, config, behaviour)
    wait_for(config.parent / "run dir", "asleep_*", 2)
    words = {one: one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])}  # of a zombie: none
    (front,) = (one for one, said in words.items() if str(config) in said and "launch" in said[:4])
    front.send_signal(number)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == code, said


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_sweep_as_an_array_job(slurm: SlurmCluster, folder: Path, programs: Path, times: int) -> None:  # noqa: F811
    """Awaited runs come first, nodes side by side on any host, then the tables. A second job repeats nothing."""
    out = folder / "out folder"
    content = {"name": "study", "base": "config.json", "final_steps": 2, "diverged_above_frequencies": False}
    content |= {"set": {"megasdc.training.steps": 6}, "cells": [{"name": "a", "start": {"step": 3}}]}
    content |= {"nodes": [{"name": name, "profile": "node_11", "seed": seed} for seed, name in enumerate("nm")]}
    (folder / "sweep.json").write_text(json.dumps(content))
    argv = [str(programs / "python"), "-m", "megasdc", "sweep", "sweep.json", "--out", str(out), "--slurm"]
    written = slurm.run_on_first(*argv, cwd=str(folder))
    assert written.returncode == 0, written.stderr
    for _ in range(times):
        submitted = slurm.run_on_first("bash", str(out / "submit.sh"), "--time=10", "--cpus-per-task=2")
        assert submitted.returncode == 0, submitted.stderr
        end = time.monotonic() + 200
        while slurm.run_on_first("squeue", "--noheader").stdout:
            assert time.monotonic() < end, slurm.run_on_first("squeue").stdout
            time.sleep(0.2)
        logs = {path.name: path.read_text() for path in out.glob("slurm-*.log")}
        found = [(row["node"], row["status"], row["steps"]) for row in read_sweep(out).rows]
        assert found == [("healthy", "done", 6), ("n", "done", 6), ("m", "done", 6)], logs
    jobs = slurm.run_on_first("scontrol", "--oneliner", "show", "job").stdout.split()
    assert {"BatchHost=node1", "BatchHost=node2"} <= set(jobs)
    starts = [event for run in (out / "runs").iterdir() for event in read_events(run, kind="start", name="run")]
    assert len(starts) == 4, "the donor, and three that go on from it"
    assert "healthy" in logs["slurm-tables.log"]


@pytest.mark.full
def test_memory_is_kept_between_steps_of_a_job(slurm: SlurmCluster, folder: Path) -> None:  # noqa: F811 - the fixture
    """A rank dies in the first step of a job; the second goes on from memory, and leaves none behind."""
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["data"]["path"], run = str(folder / "data"), folder / "run dir"
    raw["megasdc"]["logging"] |= {"run_dir": str(run)}
    raw["megasdc"]["training"] |= {"steps": 60, "eval_interval": 0}
    raw["megasdc"]["checkpoint"] = {"interval": 0, "memory": {"interval": 2, "linger_s": 30}}
    raw["megasdc"]["process_faults"] = [{"kind": "exit", "exit_code": 71, "rank": 1, "steps": [30, 30]}]
    raw["megasdc"]["health"] = {"enabled": True}
    (folder / "memory.json").write_text(json.dumps(raw))
    step = f"bash launch/slurm.sbatch {folder}/memory.json; echo ended with $?"
    argv = ["sbatch", "--parsable", *SMALL, f"--output={folder}/job.log", "--wrap", f"{step}; {step}"]
    done = slurm.run_on_first(*argv, cwd=str(ROOT), env={"SCRIPT": str(ROOT / "launch" / "pretrain_gpt.py")})
    assert done.returncode == 0, done.stderr
    code_of(slurm, done.stdout.strip())
    log = (folder / "job.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("ended with")] == ["ended with 78", "ended with 0"], (
        log
    )
    (event,) = read_events(run, kind="resume", name="memory")
    assert event.step is not None and 20 <= event.step <= 28 and event.fields["disk_step"] is None
    assert (run / "checkpoints" / "step_00000060").is_dir()
    identity = json.loads((run / "run.json").read_text())
    assert not list(Path("/dev/shm").glob(f"*memory-{identity['run']}-*"))
