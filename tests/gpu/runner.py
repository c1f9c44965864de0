"""One part as seen from outside: a process group that is started, let go, watched and killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu.crew import STACK_SIGNAL
from gpu.parts import Part
from gpu.record import read_findings, tail


class PartRun:
    """A part in a process group of its own; it gets ready and waits.

    Args:
        part: which.
        folder: for the files of all parts.
        device: ``cuda`` or ``cpu``.
        cores: processors that there are.
    """

    def __init__(self, part: Part, folder: Path, device: str, cores: int) -> None:
        self._part, self._folder = part, folder / part.name
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier call with the same --out
        self._folder.mkdir(parents=True)
        self._log = self._folder / "output.log"
        self._began = time.monotonic()
        with open(self._log, "wb") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    "gpu.part",
                    json.dumps(asdict(part)),
                    str(self._folder),
                    device,
                    str(cores),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def go(self) -> None:
        """Let it run; its time counts from now."""
        self._began = time.monotonic()
        assert self._process.stdin is not None, "it was given a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"go\n")
            self._process.stdin.flush()

    def finish(self, limit_s: float) -> dict[str, Any]:
        """Wait, kill what is left of it, and return what it found."""
        killed = False
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            killed = True
            self._signal(STACK_SIGNAL)  # all its processes print where they stand
            time.sleep(1.0)
        seconds = round(time.monotonic() - self._began, 1)
        self.end()
        lines = read_findings(self._folder / "findings.jsonl")
        checks = [one for one in lines if one["kind"] == "check"]
        bad = [one for one in checks if not one["ok"]]
        code = self._process.returncode
        crashed = not killed and (code != 0 or not any(one["name"] == "the part runs to its end" for one in checks))
        state = "killed" if killed else "failed" if bad or crashed else "passed" if len(checks) > 1 else "not run"
        reason = f"its time of {limit_s:.0f} s was up" if killed else f"exit code {code}" if crashed else None
        return {
            "name": self._part.name,
            "title": self._part.title,
            "state": state,
            "reason": reason,
            "seconds": seconds,
            "checks": checks,
            "notes": {one["name"]: one["value"] for one in lines if one["kind"] == "note"},
            "not_run": [one for one in lines if one["kind"] == "not run"],
            "output": self._last_words() if killed or crashed or bad else "",
        }

    def end(self) -> None:
        """Kill all its processes, also those that a part that has ended left behind."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        """The end of the part's own output, and of the ranks' that were written last."""
        logs = sorted(self._folder.glob("processes/*.log"), key=lambda one: one.stat().st_mtime)[-2:]
        return "\n".join(f"--- {one.name}\n{tail(one)}" for one in (self._log, *logs))
