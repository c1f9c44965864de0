"""Signals to the front of an attempt: while it is loaded they stop it; once ranks have ended they change nothing."""

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

from megasdc import room
from megasdc.launcher.front import LaunchResult
from megasdc.launcher.request import LaunchRequest
from megasdc.supervisor import front
from megasdc.supervisor.allocation import Allocation
from megasdc.supervisor.diagnosis import diagnose
from megasdc.supervisor.engine import FrontEngine
from megasdc.supervisor.history import Attempt
from megasdc.supervisor.journal import FOLDER


class Here(Allocation):
    """Hosts that can be reached."""

    def unreachable(self, attempt: Attempt) -> tuple[str, ...]:
        """None."""
        return ()


def test_a_front_that_is_stopped_while_it_is_loaded_tells_so(tmp_path: Path) -> None:
    """It is no failure of the launch, and nothing is started again."""
    (tmp_path / FOLDER).mkdir()
    attempt = Attempt(1, {"localhost": 1}, "20270115-first", time.time())
    request = LaunchRequest(tmp_path / "absent.json")
    engine = FrontEngine(tmp_path, 5, [], 1, request, Here("hosts", attempt.slots), {})
    process = engine.start(attempt, lambda: None)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    engine.stop(process)
    while engine.lives(process):
        time.sleep(0.05)
    found = engine.evidence(attempt, {})
    assert (found.exit_code, diagnose(found).kind) == (128 + signal.SIGTERM, "stopped"), found.lines


def test_a_signal_after_the_ranks_have_ended_does_not_hide_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a launch comes to its end, and while its result waits for room, which it gets."""
    result, tries = tmp_path / "result.json", list[Path]()
    done = LaunchResult(0, "a", str(tmp_path), {}, [], 0, None, None, ["all 2 ranks are done"], None, None, [])

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

    monkeypatch.setattr(front, "launch_run", launched)
    monkeypatch.setattr(front, "write_durably", write)
    request = {"launch": asdict(LaunchRequest(Path("c.json"))), "result": str(result)}
    monkeypatch.setattr(sys, "argv", ["front", json.dumps(request, default=str)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert front.main() == 0 and len(tries) == 2
    finally:
        room.end_waits_when(bool)
    assert signal.getsignal(signal.SIGTERM) == before
    found = front.load_result(result)
    assert found is not None and (found.exit_code, found.stopped_by, found.lines) == (0, None, done.lines)
