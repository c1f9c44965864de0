"""An incident reaches the user's command once and whole; whatever the command does, the caller goes on."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from megasdc.common import user_code
from megasdc.common.user_code import alert
from megasdc.ops.health import incident as incident_module
from megasdc.ops.health.front.server import HangMonitor
from megasdc.ops.health.incident import HangConclusion


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """An incident that is larger than a pipe."""
    path = tmp_path / "incident.json"
    path.write_text('{"kind": "' + "x" * 200_000 + '"}\n')
    return path


def test_the_command_gets_the_incident_once_and_no_shell(tmp_path: Path, incident: Path) -> None:
    """All bytes arrive on standard input; arguments are taken as they are; a second host that alerts does nothing."""
    out = tmp_path / "out; touch made"
    command = ["tee", "-a", str(out)]
    assert alert(command, incident, incident.read_text()) == "" and out.read_text() == incident.read_text()
    assert alert(command, incident, incident.read_text()) == "" and out.read_text() == incident.read_text()
    assert not list(tmp_path.glob("made"))


def test_without_a_command_nothing_is_written(incident: Path) -> None:
    """Alerts are off by default, and then leave no trace."""
    assert alert([], incident, "") == "" and [path.name for path in incident.parent.iterdir()] == ["incident.json"]


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["/no/such/program"], "could not be run: .*No such file"),
        (["a\0b"], "could not be run: .*null byte"),
        ([sys.executable, "-c", "import sys; sys.exit('no server')"], "ended with 1: no server"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "ended with -9"),
        (["true"], None),
    ],
)
def test_what_goes_wrong_is_told(incident: Path, command: list[str], problem: str | None) -> None:
    """Nothing is raised; the problem names the incident, and a command that does not read its input is none."""
    told = alert(command, incident, incident.read_text())
    assert told == "" if problem is None else re.search(f"{incident}: .*{problem}", told, re.DOTALL), told


def test_a_command_that_does_not_end_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, incident: Path
) -> None:
    """At the time limit, which is what the caller waits at most."""
    monkeypatch.setattr(user_code, "LIMIT_S", 0.5)
    began = time.monotonic()
    told = alert(["sh", "-c", f"sleep 600 & echo $! >{tmp_path}/child; wait"], incident, "{}")
    assert "did not end within" in told and time.monotonic() - began < 60
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_command_that_does_not_end_though_it_was_killed_is_given_up(
    monkeypatch: pytest.MonkeyPatch, incident: Path
) -> None:
    """As one that waits for a disk: who alerts ends a run, and must not wait for it."""
    killed, killpg = list[int](), os.killpg
    monkeypatch.setattr(user_code, "LIMIT_S", 0.1)
    monkeypatch.setattr(user_code, "KILLED_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda group, number: killed.append(group))
        told = alert(["sleep", "30"], incident, "{}")
    killpg(killed[0], signal.SIGKILL)
    assert told.endswith(f"was killed, does not end, and is given up (process {killed[0]})")


def test_an_incident_that_could_not_be_written_is_alerted_of(tmp_path: Path) -> None:
    """The folder is not there: the command gets the incident all the same."""
    command = ["tee", str(tmp_path / "alerted")]
    assert alert(command, tmp_path / "nowhere" / "incident.json", "{}") == ""
    assert (tmp_path / "alerted").read_text() == "{}"


@pytest.mark.slow
def test_the_incident_of_the_front_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a full folder it is written once there is room: without it a supervisor cannot name the host."""
    write, full, said = incident_module.write_durably, [OSError(errno.ENOSPC, "No space left on device")], list[str]()

    def write_durably(path: Path, text: str) -> None:
        if full:
            raise full.pop()
        write(path, text)

    monkeypatch.setattr(incident_module, "write_durably", write_durably)
    path = tmp_path / "incidents" / "hang.json"
    HangMonitor(tmp_path, said.append)._publish(HangConclusion({}, path, {"kind": "hang/behind"}))
    assert "hang/behind" in path.read_text() and not full and not any("could not be written" in line for line in said)
