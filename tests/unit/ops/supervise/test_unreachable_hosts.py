"""Hosts that cannot be reached once an attempt has failed are what it failed of, and are asked nothing more."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise import attempt_process
from megasdc.ops.supervise.allocation import Allocation
from megasdc.ops.supervise.attempt_process import FrontResult
from megasdc.ops.supervise.command import _allocation
from megasdc.ops.supervise.diagnosis import AttemptEvidence, diagnose
from megasdc.ops.supervise.fitness import HostChecks
from megasdc.ops.supervise.history import Attempt
from megasdc.ops.supervise.host_tests import StressTests
from megasdc.ops.supervise.journal import FOLDER
from megasdc.ops.supervise.launch_backend import LaunchBackend

SSH = """#!/bin/sh
echo "$*" >> {asked}
for word; do
    [ "$word" = n1 ] && echo "ssh: connect to host n1 port 22: Connection timed out" >&2 && exit 255
    command=$word
done
exec sh -c "$command"
"""
"""A program in the place of ssh: it reaches this host by all names but one."""


@pytest.fixture(name="after")
def _after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], AttemptEvidence]:
    """What is known of an attempt on three hosts, of which n1 is away, by its front's code; None: it was killed."""
    (folder := tmp_path / "run" / FOLDER).mkdir(parents=True)
    (ssh := tmp_path / "ssh").write_text(SSH.format(asked=tmp_path / "asked"))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    attempt = Attempt(1, {"n0": 1, "n1": 1, "n2": 1}, "20270115-first", 1.8e9)
    allocation = Allocation("hosts", attempt.slots)

    def ended(code: int | None) -> AttemptEvidence:
        if code is not None:
            result = FrontResult(code, None, None, [f"ended with {code}"])
            attempt_process.attempt_file(folder, 1, attempt.launch_id, "json").write_text(json.dumps(asdict(result)))
        request = LaunchRequest(tmp_path / "config.json")
        return LaunchBackend(tmp_path / "run", 30, [], 1, request, allocation, {}).evidence(attempt, {"n3": 1})

    return ended


@pytest.mark.parametrize("code", [None, 1, 75, 79, 137])
def test_the_host_that_cannot_be_reached_was_lost(
    after: Callable[[int | None], AttemptEvidence], code: int | None
) -> None:
    """However the attempt has ended; those that answer are not."""
    found = after(code)
    assert found.unreachable == ("n1",)
    assert (diagnose(found).kind, diagnose(found).hosts) == ("host_lost", ("n1",))


def test_a_host_that_is_away_is_not_checked(
    after: Callable[[int | None], AttemptEvidence], capsys: pytest.CaptureFixture[str]
) -> None:
    """After an error that a host alone may have: the others are, and those that wait."""
    assert diagnose(after(78)).hosts == ("n1",)
    assert "n0, n2, n3 are checked" in capsys.readouterr().err


def test_nobody_is_asked_after_a_good_end(after: Callable[[int | None], AttemptEvidence], tmp_path: Path) -> None:
    """The run is done, or goes on: a host that is away then is found at the next start."""
    assert after(0).unreachable == () and not (tmp_path / "asked").exists()


@pytest.mark.parametrize("words", [("--ssh_port", "2222"), ("--ssh_port=2222",)])
def test_hosts_are_asked_at_the_port_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Those that answer there alone were all lost otherwise, and the memory of a host that left stayed."""
    (ssh := tmp_path / "ssh").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nexit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (hostfile := tmp_path / "hosts").write_text("n0 slots=1\nn1 slots=1\n")
    allocation = _allocation(hostfile, words)
    allocation.unreachable(Attempt(1, allocation.slots, "20270115-first", 1.8e9))
    allocation.release(["n0"], "run")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3 and all(" -p 2222 -- n" in line for line in asked), asked


def test_a_host_that_may_come_back_is_tested_at_the_port_of_the_launch(tmp_path: Path) -> None:
    """Else it gives no answer, and never comes back."""
    request = LaunchRequest(tmp_path / "config.json", launcher_args=("--ssh_port", "2222"))
    tests = StressTests(tmp_path, 1, None, HostChecks(request, tmp_path / "run"))
    commands: list[list[str]] = []
    tests._process = lambda host, command: commands.append(list(command))  # type: ignore[assignment, method-assign]
    tests._stress("n0", 1)
    assert commands[0][-2:] == ["--ssh-port", "2222"]
