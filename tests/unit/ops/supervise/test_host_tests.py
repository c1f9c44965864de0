"""Tests of hosts end when their supervisor does, with all that they have started; a stop is not waited for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from megasdc.ops.launch.remote import HostWatch
from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise import attempt_process, host_tests
from megasdc.ops.supervise.diagnosis import HostCheckResult
from megasdc.ops.supervise.fitness import HostChecks
from megasdc.ops.supervise.host_tests import StressTests

PORT = ("--master_port", "29418")
PREFIX = """#!/bin/sh
if [ "$1" = {slow} ]; then shift; echo $$ >>{pids}; sleep 600 & echo $! >>{pids}; wait; fi
shift
case "$*" in *stress*) trap "" INT; echo $$ >>{pids}; sleep 600 & echo $! >>{pids}; wait;; esac
exec "$@"
"""


def checks_of(config: Path, pids: Path, *overrides: str) -> HostChecks:
    """Checks of host a, whose checks never end, and of host b, whose stress test never ends and ignores SIGINT."""
    script = pids.with_suffix(".sh")
    script.write_text(PREFIX.format(slow="a", pids=pids))
    script.chmod(0o755)
    prefixes = {host: (str(script), host) for host in ("a", "b")}
    return HostChecks(LaunchRequest(config, overrides=overrides, launcher_args=PORT), config.parent / "run", prefixes)


def pids_in(path: Path, least: int) -> list[int]:
    """Processes that a script has named, once there are so many."""
    while not path.exists() or len(path.read_text().split()) < least:
        time.sleep(0.05)
    return [int(pid) for pid in path.read_text().split()]


def have_ended(pids: list[int]) -> bool:
    """Whether processes end within ten seconds."""
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_tests_of_hosts_end_together_and_leave_nothing(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check that hangs, by itself; a stress test that ignores its interrupt is killed, with what it has started."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(host_tests, "CLOSE_S", 4.0)
    unfit = "megasdc.parallel.pipeline=2"  # of the launch, whose ranks are more; the attempt has its own
    tests = StressTests(tmp_path, 1, None, checks_of(config, tmp_path / "pids", unfit))
    fits = ["megasdc.parallel.pipeline=1"]
    tests.start("b", 1, {"b": 1}, fits)
    while not (tmp_path / "pids").exists():
        assert not tests.pop_ended(), "it is fit, and its test goes on"
        time.sleep(0.1)
    tests.start("a", 1, {"a": 1}, fits)
    pids = pids_in(tmp_path / "pids", 4)
    began = [Path(f"/proc/{pid}").exists() for pid in pids]
    tests.close()
    assert all(began) and have_ended(pids)
    assert not tests.runs("a") and not tests.runs("b")


def test_an_error_of_the_disk_ends_a_test_and_no_supervisor(config: Path, tmp_path: Path) -> None:
    """Without room the test goes on later; after any other error it says why, and is due again after a while."""
    tests = StressTests(tmp_path, 1, None, HostChecks(LaunchRequest(config), config.parent / "run"))
    checked = tmp_path / "test_a.fit.json"
    checked.mkdir()  # it cannot be removed as a file
    tests.start("a", 1, {"b": 1}, [])
    (ended,) = tests.pop_ended()
    assert (ended.host, ended.exit_code, ended.is_conclusive) == ("a", 77, False) and "Is a directory" in ended.text
    assert not tests.runs("a") and tests.pop_ended() == []
    checked.rmdir()
    checked.write_text('{"unfit": [], "silent": {}}')
    process = subprocess.Popen(["true"])
    process.wait()
    tests._checking["a"] = process, 1
    hostfile = tmp_path / "test_a.hosts"
    hostfile.symlink_to("/dev/full")
    assert tests.pop_ended() == [] and tests.runs("a"), "there is no room: later"
    hostfile.unlink()
    hostfile.mkdir()
    assert [one.exit_code for one in tests.pop_ended()] == [77] and not tests.runs("a")
    (tmp_path / "test_a.json").write_text("[" * 100_000)
    tests._running["a"] = process
    (ended,) = tests.pop_ended()
    assert ended.exit_code == 78 and "nothing was said" in ended.text


def test_a_test_that_does_not_end_though_it_was_killed_is_given_up(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of a run does not wait for it, and says so."""
    monkeypatch.setattr(host_tests, "CLOSE_S", 0.1)
    monkeypatch.setattr(host_tests, "KILL_S", 0.1)
    tests = StressTests(tmp_path, 1, None, HostChecks(LaunchRequest(config), config.parent / "run"))
    with monkeypatch.context() as patch, subprocess.Popen(["sh", "-c", "trap '' INT; sleep 30"]) as process:
        patch.setattr(host_tests, "end_launcher", lambda process: None)  # as where the kernel does not end it
        patch.setattr(process, "kill", lambda: None)
        patch.setattr(process, "send_signal", lambda number: None)
        tests._running["a"] = process
        tests.close()
        assert process.poll() is None and not tests.runs("a")
        assert f"process {process.pid}, was killed, does not end, and is given up" in capsys.readouterr().err
        patch.undo()
        process.kill()


@pytest.mark.slow
def test_a_check_is_given_up_once_a_stop_is_asked_for(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it works it is told which hosts are waited for; then nothing is found, and nothing goes on."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    told: list[str] = []
    watch = HostWatch(lambda: bool(told), told.extend)
    checks = checks_of(config, tmp_path / "pids")
    assert checks.check({"a": 1}, {"a": 1}, whole=True, watch=watch) == HostCheckResult(given_up=True)
    assert "a" in told and set(told) <= {"a", "this host"}
    assert have_ended(pids_in(tmp_path / "pids", 2))


@pytest.mark.slow
def test_a_front_that_is_stopped_while_it_looks_at_hosts_says_so(
    config: Path,
    tmp_path: Path,
) -> None:
    """Its result has the signal, and is no front that was killed; the connection to the host is ended."""
    ssh, pids = tmp_path / "ssh", tmp_path / "pids"
    ssh.write_text(f"#!/bin/sh\necho $$ >>{pids}\nsleep 600 & echo $! >>{pids}\nwait\n")
    ssh.chmod(0o755)
    hostfile, result = tmp_path / "hosts", tmp_path / "result.json"
    hostfile.write_text("elsewhere slots=1\n")
    launch = asdict(LaunchRequest(config, hostfile=hostfile, launch_id="one"))
    words = json.dumps({"launch": launch, "result": result}, default=str)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [sys.executable, "-m", attempt_process.MODULE, words]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True) as one:
        started = pids_in(pids, 2)
        one.send_signal(signal.SIGTERM)
        assert one.wait(30) == 128 + signal.SIGTERM
    found = attempt_process.load_result(result)
    assert found is not None and (found.exit_code, found.stopped_by) == (143, signal.SIGTERM)
    assert have_ended(started)
