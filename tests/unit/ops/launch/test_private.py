"""What is secret of a launch is left on hosts that are only busy, and does not stay where a launch ends early."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.cli import run
from megasdc.common.errors import LaunchError
from megasdc.ops.launch import front
from megasdc.ops.launch.hosts import Placement
from megasdc.ops.launch.on_host import private
from megasdc.ops.launch.remote import Transport


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the front says; variables of the user's have no secret."""
    said: list[str] = []
    monkeypatch.setattr(front, "print_front_message", said.append)
    monkeypatch.setattr(front.environment, "private_environment", lambda _: {})
    return said


def plan_of(**prefixes: tuple[str, ...]) -> Any:
    """A launch on hosts that are reached by these words before a command."""
    placement = Placement({host: [0] for host in prefixes}, remote=True)
    transport = Transport(remote=True, prefixes=prefixes, load_command=("printf", "9 1 1\n1\n"))
    return SimpleNamespace(transport=transport, placement=placement, request=SimpleNamespace(backend="pdsh"))


@pytest.mark.slow
def test_a_busy_host_gets_the_time_that_it_needs(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the checks before, which is told."""
    monkeypatch.setattr(front, "PRIVATE_TIMEOUT_S", 0.5)
    with front._private_on_hosts(plan_of(a=("sh", "-c", 'sleep 1; exec "$@"', "sh")), {}) as name:
        assert stat.S_IMODE((private.path_of(name) / front.SECRET_FILE).stat().st_mode) == 0o600
    assert len(lines) == 1 and lines[0].startswith("a: busy, 9 processes want its 1 cores")
    assert not private.path_of(name).exists()


def test_a_host_that_refuses_is_asked_once(lines: list[str], tmp_path: Path) -> None:
    """And named; where the others have taken the secret it is removed, without a word."""
    asked = tmp_path / "asked"
    b = ("sh", "-c", f"echo b >> {asked}; exit 3")
    before = set(private.path_of("x").parent.glob("megasdc-launch-*"))
    with pytest.raises(LaunchError, match="not taken: b: the check ended with exit code 3"):
        front._private_on_hosts(plan_of(a=("env",), b=b), {}).__enter__()
    assert asked.read_text() == "b\n" and lines == []
    assert set(private.path_of("x").parent.glob("megasdc-launch-*")) <= before


def test_two_names_of_one_machine_are_told(lines: list[str]) -> None:
    """With what to do about it."""
    with pytest.raises(LaunchError, match=r"not taken: [ab]: .*another host of the launch.*list each machine once"):
        front._private_on_hosts(plan_of(a=("env",), b=("env",)), {}).__enter__()
    assert lines == []


def test_variables_that_a_killed_launch_has_left_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the next one, once no launcher can still take them; what belongs to a launch that runs stays."""
    monkeypatch.setattr(private, "path_of", lambda name: tmp_path / f"megasdc-launch-{name}-{os.uname().nodename}")
    variables = {"files": {private.ENVIRONMENT: "{}", "secret": "s"}}
    for name in ("old", "new", "taken"):
        private.answer({"name": name, **variables})
    long_ago = time.time() - private.FORGOTTEN_S - 60
    for name in ("old", "taken"):
        for path in (private.path_of(name) / private.ENVIRONMENT, private.path_of(name)):
            os.utime(path, (long_ago, long_ago))
    assert private.pop_environment("taken") == {}
    private.answer({"name": "next", **variables})
    assert sorted(path.name.split("-")[2] for path in tmp_path.iterdir()) == ["new", "next", "taken"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("has_verdict", [False, True])
def test_a_launch_that_is_stopped_undoes_what_it_has_done(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, has_verdict: bool
) -> None:
    """However often it is; from the verdict on nothing hides how it has ended."""
    launch = {"launch_id": "id", "run_dir": "run", "hosts": {}, "command": [], "launcher_code": 0, "met": []}
    undone, ended = [], front.LaunchResult(79, None, None, [], **launch)

    def launched(_request: object, on_verdict: Any = lambda: None, **_options: object) -> front.LaunchResult:
        try:
            if has_verdict:
                on_verdict()
            os.kill(os.getpid(), number)
            return ended
        finally:
            os.kill(os.getpid(), number)
            undone.append(True)

    monkeypatch.setattr(front, "launch_run", launched)
    before = signal.getsignal(number)
    with pytest.raises((SystemExit, run.typer.Exit)) as exit_:
        run.launch_command(run.LaunchOptions(Path("x.json")))
    code = getattr(exit_.value, "exit_code", getattr(exit_.value, "code", None))
    assert (code, undone) == (79 if has_verdict else 128 + number, [True])
    assert signal.getsignal(number) is before
