"""What a signal has stopped (SIGSTOP) holds nobody up: it is woken, or killed, from outside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megasdc.health import process_state
from megasdc.health.process_state import Waker
from megasdc.launcher import process as process_module
from megasdc.launcher import supervision
from megasdc.launcher.hosts import Placement
from megasdc.launcher.process import LauncherProcess
from megasdc.launcher.records import LAUNCH_ID_VARIABLE, LaunchRecords, StartedRecord, write_done, write_started
from megasdc.launcher.remote import Transport
from megasdc.launcher.supervision import FailureWatch, wait_for_ranks
from megasdc.run_lock import start_ticks
from megasdc.supervisor import engine as engine_module
from megasdc.supervisor.allocation import Allocation
from megasdc.supervisor.engine import FrontEngine
from megasdc.supervisor.history import Process

PATIENT = "import time; time.sleep(60)"


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


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is, by what the system says."""
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_a_stopped_process_is_woken_and_killed_where_it_stays_so() -> None:
    """Not before its time, and not one that runs again."""
    waker = Waker(0.05)
    with stopped() as process:
        assert waker.look(process.pid) == ""
        time.sleep(0.1)
        assert "is woken" in waker.look(process.pid)
        process.send_signal(signal.SIGSTOP)  # as who stops it again and again
        time.sleep(0.1)
        assert "is killed" in waker.look(process.pid)
        assert process.wait(10) == -signal.SIGKILL
    with stopped() as process:
        assert waker.look(process.pid) == ""
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)
        assert [waker.look(process.pid) for _ in range(3)] == [""] * 3 and process.poll() is None


def test_a_stopped_front_is_woken_by_its_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counted as one that runs, for ever."""
    monkeypatch.setattr(engine_module, "STOPPED_S", 0.05)
    nothing: Any = None
    engine = FrontEngine(tmp_path, 1, [], 0, nothing, Allocation("hosts", {}), {})
    with stopped() as process:
        ticks = start_ticks(process.pid)
        assert ticks is not None
        while is_stopped(process):
            assert engine.lives(Process(process.pid, ticks))
            time.sleep(0.02)
        assert "the front of the launch: process" in capsys.readouterr().err


def test_a_front_that_waits_for_a_disk_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in swap death (state D): it is killed, and where even that does not end it, the run goes on without it."""
    monkeypatch.setattr(engine_module, "DISK_S", 0.2)
    program = tmp_path / "waits"
    source = "#include <unistd.h>\nint main(void) { if (!vfork()) { pause(); _exit(0); } return 0; }"
    subprocess.run(["cc", "-x", "c", "-o", str(program), "-"], input=source, text=True, check=True)
    nothing: Any = None
    for kills in (True, False):
        engine = FrontEngine(tmp_path, 1, [], 0, nothing, Allocation("hosts", {}), {})
        process = subprocess.Popen([str(program)], start_new_session=True)
        while psutil.Process(process.pid).status() != psutil.STATUS_DISK_SLEEP:
            time.sleep(0.01)
        ticks = start_ticks(process.pid)
        assert ticks is not None and engine.lives(Process(process.pid, ticks)), "not before its time"
        with monkeypatch.context() as patch:
            if not kills:
                patch.setattr(process_state, "_send", lambda pid, number: None)
            end = time.monotonic() + 20
            while engine.lives(Process(process.pid, ticks)) and time.monotonic() < end:
                time.sleep(0.02)
        said = capsys.readouterr().err
        assert "waits for a disk, has for 0.2 s, and is killed" in said and ("given up" in said) == (not kills)
        assert not engine.lives(Process(process.pid, ticks)) and (kills or process.poll() is None)
        os.killpg(process.pid, signal.SIGKILL)


def test_a_stopped_launcher_is_woken_by_its_front(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends as it would have."""
    monkeypatch.setattr(process_module, "STOPPED_S", 0.05)
    said: list[str] = []
    program = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    process = LauncherProcess([sys.executable, "-c", program], os.environ, stdout=None, say=said.append)
    assert process.wait(lambda: None, failure_grace_s=60) == 0
    assert "the launcher: process" in said[0]
    process.close()


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
    watch._learn_names(records)
    for name, host in (("a", "user@a"), ("b", "10.0.0.2"), ("c", "c"), ("c.local", "c")):
        silent.clear()
        silent[name] = 9.0
        assert watch._awaited(records, has_failed=False) == [host]
    silent["b"] = 1.0
    assert watch._awaited(records, has_failed=False) == ["c"], "one that was heard of is left alone"


def test_a_stopped_rank_is_killed_once_another_has_failed(launched: Any) -> None:
    """Its launcher is woken, to end the rest."""
    watch = FailureWatch(launched)
    launcher = ("megasdc.launcher.node", launched.launch_id)
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


def test_a_stopped_launcher_of_ranks_that_are_done_is_woken(launched: Any) -> None:
    """The launch waits for it alone; likewise where what started it has ended."""
    watch = FailureWatch(launched)
    launcher = ("megasdc.launcher.node", launched.launch_id)
    done(launched, 0, 0)
    with stopped(*launcher) as node:
        while is_stopped(node):
            assert watch() is None
            time.sleep(0.02)
    with stopped(**{LAUNCH_ID_VARIABLE: launched.launch_id}) as rank:
        assert wait_for_ranks(launched, set()) and rank.poll() == -signal.SIGKILL
