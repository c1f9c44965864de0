"""Does the front learn of a failure whose record lies on another host's disk?"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.ops.launch import host_failed
from megasdc.ops.launch.hosts import Placement
from megasdc.ops.launch.orphans import NODE_PID_VARIABLE
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, collect, records_dir, write_done, write_started
from megasdc.ops.launch.remote import HostAnswer, Transport
from megasdc.ops.launch.supervision import FailureWatch


@dataclass(frozen=True)
class OtherDisks(Transport):
    """Runs programs here, each host with a folder of its own in place of the front's."""

    front: Path = Path()
    disks: Path = Path()
    asked: list[str] = field(default_factory=list)

    def command(self, host: str, argv: Any) -> list[str]:
        return [sys.executable, "-"] if host != "down" else ["false"]

    def run(self, hosts: Any, program: Path, request: Any, *, timeout_s: float) -> list[HostAnswer]:
        if "folder" not in request:  # for processes that are stopped, of which there are none
            return [HostAnswer(host, []) for host in hosts]
        self.asked.extend(hosts)
        folder = request["folder"]
        found = []
        for host in hosts:
            there = {"folder": folder.replace(str(self.front), str(self.disks / host))}
            found += super().run([host], program, there, timeout_s=timeout_s)
        return found


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launch of two ranks here, one on host b, one on a host that does not answer."""
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "id")
    front = tmp_path / "front"
    placement = Placement({"a": [0, 1], "b": [0], "down": [0]}, remote=True)
    transport = OtherDisks(remote=True, front=front, disks=tmp_path / "disks")
    for rank in (0, 1):
        write_started(front, rank)
    write_started(tmp_path / "disks" / "b", 2)
    program = SimpleNamespace(hang_floor_s=0.0)
    return SimpleNamespace(run_dir=front, launch_id="id", placement=placement, transport=transport, program=program)


def wait_until_asked(watch: FailureWatch, plan: Any, times: int) -> signal.Signals | None:
    """Call the watch until host b was asked so many times and has answered."""
    while plan.transport.asked.count("b") < times:
        if found := watch():
            return found  # it was asked and has answered since the line above
        time.sleep(0.01)
    assert watch._asking is not None
    watch._asking.join()
    return watch()


def test_a_failure_on_another_host_is_seen(launched: Any, tmp_path: Path) -> None:
    """Hosts without a record here are asked, also while one does not answer; those with records here are not."""
    watch = FailureWatch(launched, interval_s=0.0)
    assert not wait_until_asked(watch, launched, 1)
    write_done(tmp_path / "disks" / "b", 2, 0)
    assert not wait_until_asked(watch, launched, 2)
    write_done(tmp_path / "disks" / "b", 2, 71, ValueError("bad"))
    assert wait_until_asked(watch, launched, 3) is signal.SIGINT
    assert set(launched.transport.asked) == {"b", "down"}


def test_a_host_that_failed_before_its_ranks_is_seen(launched: Any, tmp_path: Path) -> None:
    """Its shell leaves a record, past which the exit code goes; so does a rank that has seen its launcher go."""
    watch = FailureWatch(launched, interval_s=0.0)
    assert not wait_until_asked(watch, launched, 1)
    shell_ended(records_dir(tmp_path / "disks" / "b", "id"), code=137)
    assert wait_until_asked(watch, launched, 3) is signal.SIGTERM  # the second question may be on its way
    (there,) = collect(tmp_path / "disks" / "b", "id").failed_hosts.values()
    assert there.exit_code == 137


def shell_ended(folder: Path, code: int) -> None:
    """Run what the shell of a host does when the launcher there has ended with a code."""
    words = shlex.join([sys.executable, *host_failed.words(f"{folder}")[:-1]])
    done = subprocess.run(["sh", "-c", f"(exit {code}) || {words} $?"], check=False)
    assert done.returncode == code


def test_ranks_whose_launcher_has_gone_are_a_failure(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They save and end with 0, and those of other hosts are asked to; where a rank has failed they are ended."""
    for rank in (2, 3):
        write_started(launched.run_dir, rank)
    watch = FailureWatch(launched, interval_s=0.0)
    write_done(launched.run_dir, 2, 0)
    assert not watch()
    monkeypatch.setenv(NODE_PID_VARIABLE, str(1 << 22))
    write_done(launched.run_dir, 3, 0)
    assert watch() is signal.SIGTERM
    write_done(launched.run_dir, 0, 79)
    assert watch() is signal.SIGINT


def test_a_shared_run_folder_asks_nobody(launched: Any) -> None:
    """Where the records of all hosts are seen here, no connection is made; a failure is seen at once."""
    watch = FailureWatch(launched, interval_s=0.0)
    for rank in (2, 3):
        write_started(launched.run_dir, rank)
    assert not any(watch() for _ in range(20))
    write_done(launched.run_dir, 3, 79)
    assert watch()
    assert not launched.transport.asked


def test_hosts_that_never_answer_are_asked_less_and_less(launched: Any) -> None:
    """As under SLURM, where hosts often refuse SSH."""
    write_started(launched.run_dir, 2)
    watch = FailureWatch(launched, interval_s=1e-4)
    for _ in range(3):
        watch._ask_at = 0.0
        watch()
        assert watch._asking is not None
        watch._asking.join()
    assert watch._interval_s == pytest.approx(8e-4)
