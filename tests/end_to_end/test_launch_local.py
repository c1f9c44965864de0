"""`megasdc launch` on one host: signals, killed ranks, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_launch import WORKER, write_small_config

from megasdc.common.run_lock import LOCK_FILE, Holder, acquire_lock
from megasdc.ops.launch.records import collect
from megasdc.parallel.local_ranks import UNASSIGNED_PORTS, free_port

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]


RUNNER_TOO = ["--log_level=info"]
"""An option that only DeepSpeed's runner knows; without one its launch.py is started at once."""

SLEEPER = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
pathlib.Path("pid_" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""
"""A program that knows no megasdc."""


class LocalLaunch:
    """One launch of two ranks on this host."""

    def __init__(self, folder: Path) -> None:
        self.config = write_small_config(folder)
        self.run_dir = folder / "run dir"
        self.process: subprocess.Popen[str] | None = None

    def start(self, behaviour: str, *launcher_args: str) -> subprocess.Popen[str]:
        """Start it on a free port."""
        argv = [sys.executable, "-m", "megasdc", "launch", "--num-gpus", "2", "--config", str(self.config)]
        argv += ["--script", str(WORKER), "--", "--master_port", str(free_port()), *launcher_args]
        env = {**os.environ, "MEGASDC_TEST_BEHAVIOUR": behaviour, "OMP_NUM_THREADS": "1"}
        env.pop("DS_ACCELERATOR", None)  # tests of ranks set it; without it DeepSpeed says what it has found
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self.process

    def start_asleep(
        self, behaviour: str = "sleep", sign: str = "asleep", *launcher_args: str
    ) -> tuple[subprocess.Popen[str], dict[int, int]]:
        """Start ranks that sleep, and return the process and the process id of each rank."""
        process = self.start(behaviour, *launcher_args)
        end = time.monotonic() + 100
        while len(list(self.run_dir.glob(f"{sign}_*"))) < 2:
            assert time.monotonic() < end and process.poll() is None, process.communicate()
            time.sleep(0.05)
        return process, {rank: found.pid for rank, found in self.records().started.items()}

    def records(self):
        """Return the records of the only launch."""
        (launch_dir,) = (self.run_dir / "done").iterdir()
        return collect(self.run_dir, launch_dir.name)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[LocalLaunch]:
    """A launch that is over when the test is."""
    found = LocalLaunch(tmp_path)
    yield found
    if found.process and found.process.poll() is None:
        for child in psutil.Process(found.process.pid).children(recursive=True):
            child.kill()
        found.process.kill()
        found.process.wait()
    if (found.run_dir / "done").exists():
        for started in found.records().started.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.pid, signal.SIGKILL)  # a test that failed after its front was killed


def running(pid: int) -> bool:
    """Whether a process lives; one that is only not reaped yet holds nothing."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int]) -> bool:
    """Wait until none of the processes runs."""
    end = time.monotonic() + 40
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("runner", [False, True], ids=["launch.py alone", "with the runner"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_reaches_ranks_which_save(launch: LocalLaunch, number: int, runner: bool) -> None:
    """DeepSpeed alone would leave its ranks behind; through the front they end by themselves.

    What DeepSpeed's launcher says of all that is in a file.
    """
    process, pids = launch.start_asleep("sleep", "asleep", *RUNNER_TOO[:runner])
    assert psutil.Process(pids[0]).parents()[1 + runner].pid == process.pid  # above launch.py, and the runner if any
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    again = f"no step was saved; to start again: megasdc {shlex.join(map(str, process.args[3:]))}"
    assert err.splitlines()[-1] == f"megasdc launch: {again}"
    (log,) = (launch.run_dir / "logs").iterdir()
    for own in ("megasdc.ops.launch.rank", "launch.py", *(("runner.py", "get_accelerator") if runner else ())):
        assert own in log.read_text() and own not in out + err
    assert {rank: done.exit_code for rank, done in launch.records().done.items()} == {0: 0, 1: 0}
    assert gone(list(pids.values()))


def test_killed_rank_is_named(launch: LocalLaunch) -> None:
    """A rank that is killed leaves no record, and that is what the front reports; it started, so no more is shown."""
    process, pids = launch.start_asleep()
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 78, err
    assert "rank 1 on localhost: no done record (killed by SIGKILL; launcher said exit code 247" in err
    again = f"no step was saved; to start again: megasdc {shlex.join(map(str, process.args[3:]))}"
    assert err.splitlines()[-1] == f"megasdc launch: {again}"
    assert "DeepSpeed's launcher said" not in err


def test_killed_front_leaves_no_ranks(launch: LocalLaunch) -> None:
    """With the front gone nobody watches, so the ranks are told to save and end."""
    process, pids = launch.start_asleep()
    process.kill()
    assert gone(list(pids.values()))
    assert {rank: done.exit_code for rank, done in launch.records().done.items()} == {0: 0, 1: 0}


def test_killed_runner_is_waited_for(launch: LocalLaunch) -> None:
    """The front returns when the ranks have saved, not while they still hold port and run folder."""
    process, pids = launch.start_asleep("save:4", "asleep", *RUNNER_TOO)
    (runner,) = psutil.Process(process.pid).children()
    runner.kill()
    _, err = process.communicate(timeout=100)
    assert not any(running(pid) for pid in pids.values())
    assert {rank: done.exit_code for rank, done in launch.records().done.items()} == {0: 0, 1: 0}
    assert "waiting for this host: process" in err
    assert process.returncode == 78, err
    assert "the launcher was killed, or ended before its ranks (exit code -9 (a process was ended by SIGKILL))" in err


def test_killed_node_process_leaves_no_ranks(launch: LocalLaunch) -> None:
    """DeepSpeed's launcher on the host is killed: its ranks save and end, which is no success of the launch."""
    process, pids = launch.start_asleep()
    psutil.Process(pids[0]).parent().kill()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 78, err
    assert "the launcher of ranks 0 on localhost, 1 on localhost was killed" in err
    assert not any(running(pid) for pid in pids.values())
    assert {rank: done.exit_code for rank, done in launch.records().done.items()} == {0: 0, 1: 0}


@pytest.mark.parametrize("victim", ["rank", "front"])
def test_a_rank_that_waits_for_the_others_ends(launch: LocalLaunch, victim: str) -> None:
    """A rank is killed before all have met, or the front: nobody is left, long before the ranks' timeout of 600 s."""
    process, pids = launch.start_asleep("meet:1", "meeting")
    os.kill(pids[1] if victim == "rank" else process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=25)
    assert gone(list(pids.values()))
    if victim == "rank":
        assert process.returncode == 78, err
        assert err.count("killed by SIGKILL") == 1 and "rank 1 on localhost: no done record (killed by SIGKILL" in err
        assert "ended too" not in err, "the verdict was at hand"


def test_a_launch_without_a_port_takes_a_free_one(launch: LocalLaunch) -> None:
    """Not DeepSpeed's 29500 for all, which two launches at the same moment would both find free."""
    argv = [sys.executable, "-m", "megasdc", "launch", "--num-gpus", "2", "--config", str(launch.config), "--dry-run"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stderr
    assert int(said.partition("--master_port ")[2].split()[0]) in UNASSIGNED_PORTS


def test_busy_port_is_told_before_the_start(launch: LocalLaunch) -> None:
    """Another run on the port: 78, with the option that helps."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        process = launch.start("sum", "--master_port", str(server.getsockname()[1]))
        _, err = process.communicate(timeout=60)
    assert process.returncode == 78
    assert "(EADDRINUSE)" in err
    assert "--master_port" in err
    assert not (launch.run_dir / "done").exists()


def test_a_folder_in_use_is_told_before_the_start(launch: LocalLaunch) -> None:
    """Another launch in the run folder: 78, who it is, and nothing is written."""
    lock = acquire_lock(launch.run_dir, Holder.this_process("theirs", "20260102-030405-abcdef"), print)
    process = launch.start("sum")
    _, err = process.communicate(timeout=60)
    lock.release()
    assert process.returncode == 78
    assert f"in use by launch 20260102-030405-abcdef (host {socket.gethostname()}, process {os.getpid()}, since" in err
    assert [path.name for path in launch.run_dir.iterdir()] == [LOCK_FILE]


def test_a_launcher_that_fails_is_heard(launch: LocalLaunch) -> None:
    """Where no rank started, the last lines of DeepSpeed's launcher are shown beside its traceback."""
    process = launch.start("sum", "--bind_cores_to_rank", "--bind_core_list", "9999999")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 78, err
    assert "megasdc launch: DeepSpeed's launcher said: " in err
    assert f"its whole log is in {launch.run_dir / 'logs'}" in err


@pytest.mark.parametrize("supervised", [False, True], ids=["killed", "supervised, stopped"])
def test_what_was_cut_short_ends_with_the_command_that_goes_on(tmp_path: Path, *, supervised: bool) -> None:
    """A rank is killed; a supervised training is stopped."""
    (tmp_path / "train.py").write_text(SLEEPER)
    command = [sys.executable, "-m", "megasdc", "run", *["--supervise"][:supervised]]
    command += ["--", "deepspeed", "--num_gpus", "2", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not all((path := tmp_path / f"pid_{rank}").exists() and path.read_text() for rank in (0, 1)):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    if supervised:
        process.terminate()
    else:
        os.kill(int((tmp_path / "pid_1").read_text()), signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    who = "supervise" if supervised else "launch"
    again = f"to start again, from what the script has saved: megasdc {shlex.join(command[3:])}"
    assert said.splitlines()[-1] == f"megasdc {who}: {again}", said
