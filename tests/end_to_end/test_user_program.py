"""``megasdc run``: a training that is not megasdc's own is checked, watched, judged, and started again by itself."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.host import SHARED_MEMORY
from megasdc.events import read_events
from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.supervise.history import JournalHistory
from megasdc.ops.supervise.journal import read_journal
from megasdc.parallel.local_ranks import free_port
from megasdc.sdc.incident import load_incidents

REASON = unavailable_reason()
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(600), pytest.mark.usefixtures("shm_operator")]
SCRIPT = Path(__file__).with_name("user_training.py")
QUICK = {"health": {"slow_floor_s": 8}, "supervise": {"pause_s": 1.0, "spare_test_s": 0, "returns": 0}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the script alone."""
    shutil.copy(SCRIPT, tmp_path / "train.py")
    return tmp_path


def settings(folder: Path, **sections: Any) -> str:
    """A file for guard and launch."""
    path = folder / "guard.json"
    path.write_text(json.dumps({"logging": {"run_dir": "runs/train"}, **QUICK, **sections}))
    return str(path)


def words(*options: str, command: tuple[str, ...], python: str | Path = sys.executable) -> list[str]:
    """A command line of ``megasdc run``: a user's own, or that of another Python."""
    own = python == sys.executable
    program = [str(Path(sys.executable).with_name("megasdc"))] if own else [str(python), "-m", "megasdc"]
    return [*program, "run", *options, "--", "deepspeed", *command]


def run(folder: Path, *options: str, python: str | Path = sys.executable, ranks: int = 2) -> Any:
    """Run ranks on this host."""
    command = words(*options, command=("--num_gpus", str(ranks), "train.py"), python=python)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def digest_of(text: str) -> str:
    """What a training has ended with."""
    (found,) = re.findall(r"trained to (\w+)", text)
    return str(found)


@pytest.fixture(scope="module")
def without_megasdc(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """How the same training of so many ranks ends by DeepSpeed's own launcher, without a fault."""

    @functools.cache
    def train(ranks: int) -> str:
        plain = tmp_path_factory.mktemp("plain")
        port = str(free_port())  # other tests run beside this one
        launcher = [str(Path(sys.executable).with_name("deepspeed")), "--master_port", port, "--num_gpus", str(ranks)]
        shutil.copy(SCRIPT, plain / "train.py")
        done = subprocess.run(
            [*launcher, "train.py"], cwd=plain, capture_output=True, text=True, check=True, timeout=300
        )
        left = [f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_{rank}" for rank in range(ranks)]
        assert all((SHARED_MEMORY / name).exists() for name in left), "DeepSpeed leaves buffers"
        for name in left:
            (SHARED_MEMORY / name).unlink()
        return digest_of(done.stdout)

    return train


def test_a_training_ends_as_without_megasdc_and_its_failures_are_named(
    folder: Path, without_megasdc: Callable[[int], str], programs: Path
) -> None:
    """Bits and arguments as with ``deepspeed``; a rank that raises, and one that hangs, is named, with a true code.

    The first in fresh processes, those that fail as forks.
    """
    done = run(folder)
    assert done.returncode == 0 and "all 2 ranks are done" in done.stderr, done.stderr
    assert digest_of(done.stdout) == without_megasdc(2)
    shutil.rmtree(folder / "checkpoints")
    (folder / "fault_fail_1_3").touch()
    failed = run(folder, "--json", python=programs / "python")
    found = json.loads(failed.stdout)
    assert (failed.returncode, found["exit_code"], found["failed_rank"]) == (1, 1, 1)
    assert "ValueError): a bug of the user's" in found["lines"][0]
    assert "user_program.py" not in failed.stderr, "the traceback begins in the script"
    (folder / "fault_hang_1_7").touch()
    hung = run(folder, "--config", settings(folder), python=programs / "python")
    assert hung.returncode == 75, hung.stderr
    assert re.search(r"rank 1 on localhost .*\(training of step 8 at train.py:\d+ <module>\): others wait", hung.stderr)
    shown = subprocess.run(
        [programs / "megasdc", "summary", "runs/train"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "exit code 75" in shown.stdout and "steps             7\n" in shown.stdout
    buffers = [json.loads(path.read_text())["buffer"] for path in folder.glob("runs/train/done/*/started_*.json")]
    assert len(buffers) == 6 and all(buffers)
    assert not [name for name in buffers if (SHARED_MEMORY / name).exists()]


def test_one_word_protects_a_script_that_knows_no_megasdc(
    folder: Path, without_megasdc: Callable[[int], str], programs: Path
) -> None:
    """Audited and checked it ends with the bits of `deepspeed` alone; a weight that changes on one rank of three ends
    it, by a documented code, with that rank's name. A bug of its own ends the guard as failed. What cannot be guarded
    is refused. Those that fail are forks.
    A folder beside the script that has the package's name, as a clone may, is not taken for it, and DeepSpeed may be
    looked for before it is imported, as transformers does. A script without an engine is told that it is unprotected.
    """
    (folder / "megasdc").mkdir()
    text = (folder / "train.py").read_text()
    looks = "import importlib.util\nassert importlib.util.find_spec('deepspeed')\n"
    (folder / "train.py").write_text(text.replace("import deepspeed\n", f"{looks}import deepspeed\n"))
    done = run(folder, "--protect", "standard")
    assert done.returncode == 0 and digest_of(done.stdout) == without_megasdc(2), done.stderr
    (start,) = read_events(folder / "runs" / "train", kind="start", name="protection")
    assert start.fields["word"] == "standard" and "protect standard, not covered: " in done.stderr
    (closed,) = read_events(folder / "runs" / "train", kind="guard", name="closed")
    assert closed.fields == {"steps": 30, "audits": 1, "agreed": 1, "findings": 0}
    shutil.rmtree(folder / "checkpoints")
    (folder / "fault_flip_1_7").touch()
    found = run(folder, "--protect", "strict", ranks=3, python=programs / "python")
    assert found.returncode == 73, found.stderr
    ((_, incident),) = load_incidents(folder / "runs" / "train" / "reports", [])
    assert (incident.step, [one.rank for one in incident.flagged], incident.done) == (8, [1], "halted")
    shutil.rmtree(folder / "checkpoints")
    (folder / "fault_fail_0_3").touch()
    failed = run(folder, "--protect", "standard", ranks=1, python=programs / "python")
    assert failed.returncode == 1 and "guard: closed" not in failed.stdout + failed.stderr, failed.stderr
    (*_, ended) = read_events(folder / "runs" / "train", kind="end", name="failed")
    assert ended.fields["message"] == "ValueError: a bug of the user's"
    (folder / "train.py").write_text(text.replace('"stage": 1', '"stage": 3'))
    refused = run(folder, "--protect", "standard", python=programs / "python")
    assert refused.returncode == 70 and "zero_optimization.stage: got 3; allowed: 0 to 2" in refused.stderr
    (folder / "train.py").write_text("print('nothing')")
    idle = run(folder, "--protect", "standard", ranks=1, python=programs / "python")
    assert idle.returncode == 70 and "nothing was protected, since the program has made no engine" in idle.stderr
    (launch,) = re.findall(r"launch (\d{8}-\d{6}-\w{6})", idle.stderr)
    assert not [path.name for path in SHARED_MEMORY.iterdir() if launch in path.name]


def test_what_cannot_be_launched_is_refused(folder: Path) -> None:
    """Each with its reason, the remedy, and a documented exit code; nothing is started."""
    cases = (
        (words(command=("--num_gpus", "2", "no.py")), 78, "no.py: no such file"),
        (words(command=("--no_python", "train.py")), 78, "--no_python: ranks are Python programs"),
        (words(command=("--num_gpus", "2")), 78, "the following arguments are required: script"),
        ([sys.executable, "-m", "megasdc", "run", "--", "torchrun", "train.py"], 78, "need deepspeed's command line"),
        (words("--set", "supervise.min_hosts=2", command=("train.py",)), 70, "supervise.min_hosts: got 2"),
        (words("--set", "health.slow_floor=2", command=("train.py",)), 70, "slow_floor_s"),
        (words("--supervise", command=("--hostfile", "h", "--num_gpus", "2", "train.py")), 78, "not with --supervise"),
    )
    for command, code, text in cases:
        refused = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=100)
        assert (refused.returncode, text in refused.stderr) == (code, True), refused.stderr
    assert not (folder / "runs").exists()


@pytest.mark.full  # over SSH a training goes on in every run
def test_a_training_on_this_host_goes_on_by_itself(folder: Path, without_megasdc: Callable[[int], str]) -> None:
    """Without SSH, by a number of ranks, and to the bits of a training without a fault."""
    (folder / "fault_kill_1_7").touch()
    path = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    (folder / "ssh").write_text(f"#!/bin/sh\ntouch {folder}/asked\nexit 255\n")
    (folder / "ssh").chmod(0o755)
    done = subprocess.run(
        words("--config", settings(folder, health={}), "--supervise", command=("--num_gpus", "2", "train.py")),
        cwd=folder,
        env=path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    assert kinds_of(folder) == [("rank_lost", ("localhost",)), ("done", ())]
    assert digest_of(done.stdout) == without_megasdc(2) and not (folder / "asked").exists()


@pytest.mark.full
def test_two_runs_of_a_script_are_compared(folder: Path) -> None:
    """Equal ones are, of one that looks at the clock the first result that differs is named; none saves anything."""
    given = settings(folder, determinism={"enabled": True})
    check = [sys.executable, "-m", "megasdc", "check-determinism", "--config", given, "--steps", "6", "--json", "--"]
    script = ("deepspeed", "--num_gpus", "2", "train.py", "--guard", given)
    done = subprocess.run([*check, *script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["difference"] is None and not (folder / "checkpoints").exists()
    text = (folder / "train.py").read_text()
    assert text.count("loss = engine(") == 1
    odd = "model[0].bias.data += time.time() % 1 * (engine.global_steps == 3)\n    loss = engine("
    (folder / "train.py").write_text(text.replace("loss = engine(", odd))
    done = subprocess.run([*check, *script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "step 4, micro-batch 0, forward of 0" in json.loads(done.stdout)["difference"]["address"]
    unguarded = subprocess.run([*check, *script[:-2]], cwd=folder, capture_output=True, text=True, check=False)
    assert unguarded.returncode == 78 and "must attach a guard" in unguarded.stderr, unguarded.stderr


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Cluster]:
    """Four hosts."""
    if REASON is not None:
        pytest.skip(REASON)
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 4, env=env) as cluster:
        yield cluster


def supervise(
    hosts: Cluster, folder: Path, ranks: int, *script: str, protect: str = "off"
) -> tuple[subprocess.Popen[str], Path]:
    """Start a supervised training on the first hosts; what it says goes to a file."""
    command = ("--hostfile", str(hosts.hostfile()), "--num_nodes", str(ranks), "train.py", "--steps", "30", *script)
    log = folder / "log"
    with open(log, "ab") as file:
        options = ("--config", settings(folder), "--set", "health.slow_floor_s=9", "--supervise")
        options += () if protect == "off" else ("--protect", protect)
        argv = words(*options, command=command)
        return hosts.popen("node1", argv, cwd=str(folder), stdout=file, stderr=file), log


def kinds_of(folder: Path) -> list[tuple[str, tuple[str, ...]]]:
    """What each attempt ended with, and whom that named."""
    history = JournalHistory.of(read_journal(folder / "runs" / "train" / "supervise"))
    return [(one.diagnosis.kind, one.diagnosis.hosts) for one in history.failures]


@pytest.mark.cluster
def test_a_training_goes_on_by_itself_after_a_lost_host(
    hosts: Cluster, folder: Path, without_megasdc: Callable[[int], str]
) -> None:
    """A host is powered off: a spare takes its place, the script goes on from its checkpoint, to the same bits; the
    word protects it in each attempt.
    """
    process, log = supervise(hosts, folder, 2, protect="standard")
    end = time.monotonic() + 120
    while "took step 12" not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    hosts.power_off("node2")
    assert process.wait(timeout=300) == 0, log.read_text()
    assert kinds_of(folder) == [("host_lost", ("node2",)), ("done", ())]
    assert digest_of(log.read_text()) == without_megasdc(2)
    told = [one.fields["word"] for one in read_events(folder / "runs" / "train", kind="start", name="protection")]
    *_, closed = read_events(folder / "runs" / "train", kind="guard", name="closed")
    assert told == ["standard", "standard"]
    assert (closed.fields["audits"], closed.fields["findings"]) == (1, 0)  # of the first step after the load


@pytest.mark.full
@pytest.mark.cluster
def test_a_training_goes_on_by_itself_after_faults_of_each_kind(
    hosts: Cluster, folder: Path, without_megasdc: Callable[[int], str]
) -> None:
    """A rank is killed, one hangs, one computes wrong results, which the guard finds; the end has the same bits."""
    for name in ("fault_kill_1_7", "fault_hang_2_12"):
        (folder / name).touch()
    (folder / "wrong").write_text("node2")
    process, log = supervise(hosts, folder, 3, "--guard", settings(folder, audit={"interval": 3}))
    assert process.wait(timeout=500) == 0, log.read_text()
    found = kinds_of(folder)
    assert found[0] == ("corrupt_again", ("node2",)), log.read_text()
    assert sorted(kind for kind, _ in found[1:]) == ["done", "hang", "rank_lost"]
    assert digest_of(log.read_text()) == without_megasdc(3)
