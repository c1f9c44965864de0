"""What does not run, stopped by a signal or waiting for a disk, holds nobody up: it is woken or killed from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megasdc.common import host as process_state
from megasdc.common.host import Waker, started_at
from megasdc.common.run_lock import start_ticks
from megasdc.ops.health import agent_process
from megasdc.ops.health.agent import AGENT_FILE, AgentOptions
from megasdc.ops.health.agent_process import AgentProcess
from megasdc.ops.launch import process as process_module
from megasdc.ops.launch import supervision
from megasdc.ops.launch.environment import STOP_GRACE_VARIABLE
from megasdc.ops.launch.hosts import Placement
from megasdc.ops.launch.on_host import running
from megasdc.ops.launch.process import LauncherProcess
from megasdc.ops.launch.records import (
    LAUNCH_ID_VARIABLE,
    DoneRecord,
    LaunchRecords,
    StartedRecord,
    write_done,
    write_started,
)
from megasdc.ops.launch.remote import Transport
from megasdc.ops.launch.supervision import FailureWatch, StoppedProcesses, wait_for_ranks
from megasdc.ops.supervise import launch_backend
from megasdc.ops.supervise.allocation import Allocation
from megasdc.ops.supervise.history import LaunchProcess
from megasdc.ops.supervise.launch_backend import LaunchBackend

PATIENT = "import time; time.sleep(60)"
WAITS = """
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv) {
    if (syscall(SYS_clone, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0) {
        while (argc--) memset(argv[argc], 0, strlen(argv[argc]));
        pause();
    }
    return 0;
}
"""


@contextmanager
def stopped(*more: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that a signal has stopped."""
    with subprocess.Popen([sys.executable, "-S", "-c", PATIENT, *more], env={**os.environ, **variables}) as process:
        time.sleep(0.1)
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process):
            time.sleep(0.01)
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def waits_for_a_disk(folder: Path, *more: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in state D, as where its host swaps: it waits for a child, which has no command line."""
    program = folder / "waits"
    subprocess.run(["cc", "-x", "c", "-o", str(program), "-"], input=WAITS, text=True, check=True)
    process = subprocess.Popen([str(program), *more], env={**os.environ, **variables}, start_new_session=True)
    while psutil.Process(process.pid).status() != psutil.STATUS_DISK_SLEEP:
        time.sleep(0.01)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is, by what the system says."""
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_a_stopped_process_is_woken_and_killed_where_it_stays_so() -> None:
    """Not before its time, and not one that runs again."""
    waker = Waker(0.05)
    with stopped() as process:
        assert waker.check(process.pid) == ""
        time.sleep(0.1)
        assert "is woken" in waker.check(process.pid)
        process.send_signal(signal.SIGSTOP)  # as who stops it again and again
        time.sleep(0.1)
        assert "is killed" in waker.check(process.pid)
        assert process.wait(10) == -signal.SIGKILL
    with stopped() as process:
        assert waker.check(process.pid) == ""
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        assert [waker.check(process.pid) for _ in range(3)] == [""] * 3 and process.poll() is None


def test_a_stopped_front_is_woken_by_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counted as one that runs, for ever."""
    monkeypatch.setattr(launch_backend, "STOPPED_S", 0.05)
    nothing: Any = None
    engine = LaunchBackend(tmp_path, 1, [], 0, nothing, Allocation("hosts", {}), {})
    with stopped() as process:
        ticks = start_ticks(process.pid)
        assert ticks is not None
        while is_stopped(process):
            assert engine.lives(LaunchProcess(process.pid, ticks))
            time.sleep(0.02)
        assert "the front of the launch: process" in capsys.readouterr().err


def test_a_front_that_waits_for_a_disk_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in swap death (state D): it is killed, and where even that does not end it, the run goes on without it."""
    monkeypatch.setattr(launch_backend, "DISK_S", 0.2)
    nothing: Any = None
    for kills in (True, False):
        engine = LaunchBackend(tmp_path, 1, [], 0, nothing, Allocation("hosts", {}), {})
        with waits_for_a_disk(tmp_path) as process, monkeypatch.context() as patch:
            ticks = start_ticks(process.pid)
            assert ticks is not None and engine.lives(LaunchProcess(process.pid, ticks)), "not before its time"
            if not kills:
                patch.setattr(process_state, "_send", lambda pid, number: None)
            end = time.monotonic() + 20
            while engine.lives(LaunchProcess(process.pid, ticks)) and time.monotonic() < end:
                time.sleep(0.02)
            said = capsys.readouterr().err
            assert "waits for a disk, and has for 0.2 s: it is killed" in said and ("given up" in said) == (not kills)
            assert not engine.lives(LaunchProcess(process.pid, ticks)) and (kills or process.poll() is None)


def test_a_process_that_polls_and_does_not_run_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its state is; not one that runs, nor for the time that who looks has stood still itself."""
    polling = "import time\nwhile True: time.sleep(0.01)"
    with subprocess.Popen([sys.executable, "-S", "-c", polling]) as runs, subprocess.Popen(["sleep", "60"]) as still:
        time.sleep(0.3)
        waker, passive = Waker(60, 0.1, polls=True), Waker(60, 0.1)
        monkeypatch.setattr(process_state, "PAUSE_S", 0.15)
        for _ in range(2):
            assert waker.check(still.pid) == waker.check(runs.pid) == ""
            time.sleep(0.2)
        monkeypatch.setattr(process_state, "PAUSE_S", 10.0)
        said = []
        while still.poll() is None:
            said += [waker.check(still.pid), waker.check(runs.pid), passive.check(still.pid)]
            time.sleep(0.02)
        assert [one for one in said if one] == [f"process {still.pid} does not run, and has for 0.1 s: it is killed"]
        assert runs.poll() is None
        runs.kill()


@pytest.mark.slow
def test_a_stopped_launcher_is_woken_by_its_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends as it would have."""
    monkeypatch.setattr(process_module, "STOPPED_S", 0.05)
    said: list[str] = []
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    process = LauncherProcess([sys.executable, "-c", program], os.environ, stdout=None, say=said.append)
    assert process.wait(lambda: None, failure_grace_s=60) == 0
    assert "the launcher: process" in said[0]
    process.close()


@pytest.mark.slow
def test_a_stopped_ssh_of_pdsh_is_woken_by_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher waits for pdsh, which waits for it."""
    monkeypatch.setattr(process_module, "STOPPED_S", 0.05)
    monkeypatch.setattr(process_module, "LOOK_S", 0.1)
    sleep, pdsh = shutil.which("sleep"), tmp_path / "pdsh"
    assert sleep is not None
    shutil.copy(sleep, tmp_path / "ssh")
    pdsh.write_text(f"#!/bin/sh\n{tmp_path}/ssh 0.5 &\nkill -STOP $!\nwait $!\n")
    pdsh.chmod(0o700)
    said: list[str] = []
    program = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    process = LauncherProcess([sys.executable, "-c", program, str(pdsh)], os.environ, stdout=None, say=said.append)
    assert process.wait(lambda: None, failure_grace_s=60) == 0 and "is woken" in said[0]
    process.close()


@pytest.mark.parametrize("kills", [True, False])
def test_a_launcher_that_waits_for_a_disk_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: bool
) -> None:
    """It is killed; the launch does not wait for one that even this does not end, and says so."""
    for name, value in {"DISK_S": 0.1, "LOOK_S": 0.05, "POLL_S": 0.01, "KILL_S": 0.1}.items():
        monkeypatch.setattr(process_module, name, value)
    said: list[str] = []
    with waits_for_a_disk(tmp_path):  # makes the program
        process = LauncherProcess([str(tmp_path / "waits")], os.environ, stdout=None, say=said.append)
        group = os.getpgid(process._process.pid)
        with monkeypatch.context() as patch:
            if not kills:
                patch.setattr(process_state, "_send", lambda pid, number: None)
                patch.setattr(process, "_kill", lambda: None)
            assert process.wait(lambda: None, failure_grace_s=60) == -signal.SIGKILL
            process.close()
        os.killpg(group, signal.SIGKILL)
    assert "waits for a disk, and has for 0.1 s: it is killed" in said[0]
    assert [("does not end" in one) for one in said[1:]] == ([] if kills else [True, True])


def test_an_agent_that_waits_for_a_disk_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed; where even that does not end it, another one is started beside it, and the run is told."""
    monkeypatch.setattr(agent_process, "STILL_S", 0.1)
    monkeypatch.setattr(agent_process, "LOOK_S", 0.0)
    monkeypatch.setattr(process_state, "_send", lambda pid, number: None)
    options = AgentOptions(tmp_path, tmp_path, 0, (0,), ("a",), 5.0, 5.0, 10.0, ())
    started: list[str] = []

    def start(_: AgentProcess) -> bool:
        started.append("again")
        return True

    monkeypatch.setattr(AgentProcess, "start", start)
    agent = AgentProcess(options, None, "r")
    with waits_for_a_disk(tmp_path) as process:
        (tmp_path / AGENT_FILE).write_text(json.dumps({"pid": process.pid, "started_at": started_at(process.pid)}))
        end = time.monotonic() + 20
        while not started and time.monotonic() < end:
            agent.check()
            time.sleep(0.02)
    assert started and [name for name, _ in agent.news] == ["agent_stopped", "agent_stopped", "agent_restarted"]
    assert "it is killed" in agent.news[0][1] and "given up" in agent.news[1][1]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launch of two ranks on this host, looked at all the time."""
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "none of these")
    monkeypatch.setattr(supervision, "LOOK_STOPPED_S", 0.01)
    monkeypatch.setattr(supervision, "DONE_S", 0.01)
    placement, program = Placement({"a": [0, 1]}, remote=False), SimpleNamespace(hang_floor_s=5.0)
    plan = SimpleNamespace(run_dir=tmp_path, launch_id=f"id{os.getpid()}", placement=placement, program=program)
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, plan.launch_id)
    for rank in (0, 1):
        write_started(tmp_path, rank)
    plan.transport = Transport(remote=False)
    monkeypatch.delenv(LAUNCH_ID_VARIABLE)
    return plan


def done(plan: Any, *codes: int) -> None:
    """Ranks leave their records."""
    os.environ[LAUNCH_ID_VARIABLE] = plan.launch_id
    for rank, code in enumerate(codes):
        write_done(plan.run_dir, rank, code)
    del os.environ[LAUNCH_ID_VARIABLE]


@pytest.mark.slow
@pytest.mark.parametrize("silent_s", [4.0, 6.0])
def test_a_stopped_rank_is_killed_once_its_agent_is_silent_for_as_long_as_a_hang(
    launched: Any, silent_s: float
) -> None:
    """And not before; of another launch none is."""
    watch = FailureWatch(launched, silent=lambda: {socket.gethostname(): silent_s})
    with stopped(**{LAUNCH_ID_VARIABLE: launched.launch_id}) as rank, stopped(**{LAUNCH_ID_VARIABLE: "other"}) as other:
        end = time.monotonic() + (1.0 if silent_s < 5 else 30)
        while rank.poll() is None and time.monotonic() < end:
            assert watch() is None
            time.sleep(0.02)
        assert rank.poll() == (None if silent_s < 5 else -signal.SIGKILL) and other.poll() is None


def test_a_silent_host_is_known_by_its_name_after_hosts_were_counted_anew(launched: Any) -> None:
    """The replica on the first host was left out, so that its agent's index is that of another one."""
    launched.placement = Placement({"user@a": [0], "10.0.0.2": [1], "c": [2]}, remote=False)
    silent = {"a": 9.0}
    watch = FailureWatch(launched, silent=lambda: silent)
    records = LaunchRecords(started={1: StartedRecord(1, "b", 1, 0.0), 2: StartedRecord(2, "c.local", 1, 0.0)})
    watch._record_names(records)
    for name, host in (("a", "user@a"), ("b", "10.0.0.2"), ("c", "c"), ("c.local", "c")):
        silent.clear()
        silent[name] = 9.0
        assert watch._awaited(records, has_failed=False) == [host]
    silent["b"] = 1.0
    assert watch._awaited(records, has_failed=False) == ["c"], "one that was heard of is left alone"
    records.done[1] = DoneRecord(1, "b", 75, None, None, 0.0, None)
    assert watch._awaited(records, has_failed=True) == ["user@a", "10.0.0.2", "c"], "for their launchers"


def test_a_stopped_rank_is_killed_once_another_has_failed(launched: Any) -> None:
    """Its launcher is woken, to end the rest."""
    watch = FailureWatch(launched)
    launcher = ("megasdc.ops.launch.node", launched.launch_id)
    with stopped(**{LAUNCH_ID_VARIABLE: launched.launch_id}) as rank, stopped(*launcher) as node:
        for _ in range(20):
            assert watch() is None
            time.sleep(0.02)
        assert is_stopped(rank) and is_stopped(node), "nothing waits for them yet"
        done(launched, 79)
        while rank.poll() is None or is_stopped(node):
            assert watch() is signal.SIGINT
            time.sleep(0.02)
        assert rank.poll() == -signal.SIGKILL and node.poll() is None


@pytest.mark.slow
def test_a_stopped_launcher_of_ranks_that_are_done_is_woken(launched: Any) -> None:
    """The launch waits for it alone; likewise where what started it has ended."""
    watch = FailureWatch(launched)
    launcher = ("megasdc.ops.launch.node", launched.launch_id)
    done(launched, 0, 0)
    with stopped(*launcher) as node:
        while is_stopped(node):
            assert watch() is None
            time.sleep(0.02)
    with stopped(**{LAUNCH_ID_VARIABLE: launched.launch_id}) as rank:
        assert wait_for_ranks(launched, set()) and rank.poll() == -signal.SIGKILL


def test_what_was_seen_long_ago_kills_nothing(launched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It is woken first, as any other; at the next look after that it is killed."""
    found = StoppedProcesses(launched)
    with stopped("megasdc.ops.launch.node", launched.launch_id) as node:
        for age_s in (0.0, 60.0):
            for one in found._stopped.get("a", {}).values():
                one.since, one.looked_at = one.since - age_s, one.looked_at - age_s
            node.send_signal(signal.SIGSTOP)
            while not is_stopped(node):
                time.sleep(0.01)
            found._check_hosts(["a"])
            while is_stopped(node):
                time.sleep(0.01)
            assert node.poll() is None and f"stopped by a signal: a: process {node.pid}" in capsys.readouterr().err
        node.send_signal(signal.SIGSTOP)
        found._check_hosts(["a"])
        assert node.wait(10) == -signal.SIGKILL


@pytest.mark.slow
def test_a_launcher_that_waits_for_a_disk_is_killed_once_others_wait_for_it(
    tmp_path: Path, launched: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failure, once it has at each look for the limit; the launch ends without one that does not end so.

    A rank is left alone: it may save.
    """
    launcher = ("megasdc.ops.launch.node", launched.launch_id)
    monkeypatch.setattr(supervision, "DISK_S", 0.5)
    done(launched, 79)
    with (
        waits_for_a_disk(tmp_path, *launcher) as node,
        waits_for_a_disk(tmp_path, **{LAUNCH_ID_VARIABLE: launched.launch_id}) as rank,
    ):
        watch, began = FailureWatch(launched), time.monotonic()
        while node.poll() is None and time.monotonic() < began + 30:
            assert watch() is signal.SIGINT
            time.sleep(0.02)
        assert node.poll() == -signal.SIGKILL and rank.poll() is None and time.monotonic() - began > 0.5
    launched.transport = Powerless(remote=False)
    with waits_for_a_disk(tmp_path, *launcher) as node:
        assert wait_for_ranks(launched, set()) and node.poll() is None
    said = capsys.readouterr().err
    assert "killed since they did not run" in said and "do not end, and are given up" in said


class Powerless(Transport):
    """Its programs kill nothing, as where the kernel does not end a process."""

    def run(self, hosts: Any, program: Path, request: Any, *, timeout_s: float, watch: Any = None) -> Any:
        """See ``Transport``."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / program.name
            copy.write_text(program.read_text().replace("os.kill(pid, number)", "pass"))
            return super().run(hosts, copy, request, timeout_s=timeout_s, watch=watch)


@pytest.mark.slow
def test_what_outlives_its_time_to_end_is_killed(
    launched: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it does: the launch left it running, and told somebody to end it by hand."""
    monkeypatch.setattr(supervision, "STOP_GRACE_S", 0.0)
    monkeypatch.setenv(STOP_GRACE_VARIABLE, "0.1")
    environment = {**os.environ, LAUNCH_ID_VARIABLE: launched.launch_id}
    with subprocess.Popen([sys.executable, "-S", "-c", PATIENT], env=environment) as rank:
        assert wait_for_ranks(launched, set()) and rank.wait(10) == -signal.SIGKILL
    assert f"still running after 0.1 s, and killed: this host: process {rank.pid}" in capsys.readouterr().err


def test_a_name_that_is_no_text_hides_no_process() -> None:
    """A process that has named itself by bytes that end inside a character is found as any other."""
    program = r"import ctypes, time; ctypes.CDLL(None).prctl(15, b'\xc3'); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as named:
        try:
            assert named.stdout and named.stdout.readline()
            assert b"(\xc3)" in Path(f"/proc/{named.pid}/stat").read_bytes()
            assert started_at(named.pid) >= started_at(os.getpid()) and running._state(named.pid) in ("R", "S")
        finally:
            named.kill()
