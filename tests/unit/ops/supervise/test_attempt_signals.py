"""Signals to an attempt: to its front while that is loaded, after its ranks have ended, and to ranks that start."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megasdc.common import durable
from megasdc.common.origin import LAUNCH_ID_VARIABLE
from megasdc.ops.launch.front import LaunchResult
from megasdc.ops.launch.records import write_done
from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise import attempt_process
from megasdc.ops.supervise.allocation import Allocation
from megasdc.ops.supervise.attempt_process import FrontResult
from megasdc.ops.supervise.diagnosis import diagnose
from megasdc.ops.supervise.history import Attempt
from megasdc.ops.supervise.journal import FOLDER
from megasdc.ops.supervise.launch_backend import LaunchBackend
from megasdc.ops.supervise.policy import RULES, Action, Rule
from megasdc.train.signals import STOPPED_START


class Here(Allocation):
    """Hosts that can be reached."""

    def unreachable(self, attempt: Attempt) -> tuple[str, ...]:
        """None."""
        return ()


def test_a_front_that_is_stopped_while_it_is_loaded_tells_so(tmp_path: Path) -> None:
    """It is no failure of the launch; nothing is started again if the supervisor was asked to stop."""
    (tmp_path / FOLDER).mkdir()
    attempt = Attempt(1, {"localhost": 1}, "20270115-first", time.time())
    request = LaunchRequest(tmp_path / "absent.json")
    engine = LaunchBackend(tmp_path, 5, [], 1, request, Here("hosts", attempt.slots), {})
    process = engine.start(attempt, lambda: None)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    engine.stop(process)
    while engine.lives(process):
        time.sleep(0.05)
    for is_asked, kind in ((True, "stopped"), (False, "preempted")):
        found = engine.evidence(attempt, {}, lambda is_asked=is_asked: is_asked)
        assert (found.exit_code, diagnose(found).kind) == (128 + signal.SIGTERM, kind), found.lines


@pytest.mark.parametrize(("code", "steps"), [(0, 5), (128 + signal.SIGHUP, 5), (0, 0)])
def test_a_signal_to_the_front_alone_is_no_request(tmp_path: Path, code: int, steps: int) -> None:
    """Nobody has asked the supervisor: the run is started again, and it counts as no failure; also a program's."""
    attempt = Attempt(1, {"a": 1, "b": 1}, "20270115-first", time.time())
    engine = LaunchBackend(tmp_path, steps, [], 1, LaunchRequest(Path("c.json")), Here("hosts", attempt.slots), {})
    path = attempt_process.attempt_file(tmp_path / FOLDER, attempt.number, attempt.launch_id, "json")
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(FrontResult(code, None, None, ["stopped"], stopped_by=signal.SIGHUP))))
    found = diagnose(engine.evidence(attempt, {}))
    assert found.kind == "preempted" and "SIGHUP, which was not the supervisor's" in found.text
    assert RULES[found.kind] == Rule(Action.AGAIN, fails=False)


@pytest.mark.parametrize(("ends", "kind"), [([STOPPED_START] * 2, "preempted"), ([STOPPED_START, None], "launch")])
def test_a_start_that_all_ranks_leave_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str | None], kind: str
) -> None:
    """By a signal that was not the supervisor's: no rank has come so far as to write an event of it."""
    attempt = Attempt(1, {"a": 1, "b": 1}, "20270115-first", time.time())
    engine = LaunchBackend(tmp_path, 5, [], 1, LaunchRequest(Path("c.json")), Here("hosts", attempt.slots), {})
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, attempt.launch_id)
    for rank, end in enumerate(ends):
        write_done(tmp_path, rank, 0, end=end)
    path = attempt_process.attempt_file(tmp_path / FOLDER, attempt.number, attempt.launch_id, "json")
    path.parent.mkdir()
    path.write_text(json.dumps(asdict(FrontResult(0, None, None, ["all 2 ranks are done"]))))
    found = diagnose(engine.evidence(attempt, {}))
    assert found.kind == kind
    assert RULES[found.kind].fails is (kind == "launch")


@pytest.mark.slow
def test_a_signal_after_the_ranks_have_ended_does_not_hide_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a launch comes to its end, and while its result waits for room, which it gets."""
    result, tries = tmp_path / "result.json", list[Path]()
    launch = {"launch_id": "a", "run_dir": str(tmp_path), "hosts": {}, "command": [], "launcher_code": 0, "met": []}
    done = LaunchResult(0, None, None, ["all 2 ranks are done"], **launch)

    def launched(*_: Any, on_verdict: Any = lambda: None) -> LaunchResult:
        on_verdict()
        os.kill(os.getpid(), signal.SIGTERM)
        return done

    def write(path: Path, text: str) -> None:
        tries.append(path)
        if len(tries) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_text(text)

    monkeypatch.setattr(attempt_process, "launch_run", launched)
    monkeypatch.setattr(attempt_process, "write_durably", write)
    request = {"launch": asdict(LaunchRequest(Path("c.json"))), "result": str(result)}
    monkeypatch.setattr(sys, "argv", ["front", json.dumps(request, default=str)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert attempt_process.main() == 0 and len(tries) == 2
    finally:
        durable.end_waits_when(bool)
    assert signal.getsignal(signal.SIGTERM) == before
    found = attempt_process.load_result(result)
    assert found is not None and (found.exit_code, found.stopped_by, found.lines) == (0, None, done.lines)
