"""Commands of megasdc that a preflight runs, each a process of its own, which ends with it."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common.errors import LaunchError
from megasdc.ops.supervise.host_tests import start_command
from megasdc.parallel.processes import kill_all

logger = logging.getLogger(__name__)

POLL_S = 0.2
TOLD_S, GRACE_S = 5.0, 60.0
"""For a command that was interrupted, to end what it has started: until it is told, and then until it is killed."""
MEGASDC = ("-m", "megasdc")
COMPARE = (*MEGASDC, "compare")
"""What Python is given to compare checkpoints."""
_ERROR = re.compile(r"^\w+: error: ", re.MULTILINE)


@dataclass(frozen=True)
class Done:
    """A command that has ended.

    Args:
        exit_code: its own; of one that was killed that of a launch without a record.
        value: what it printed, JSON; None: nothing.
        said: its standard error.
    """

    exit_code: int
    value: Any
    said: str

    @property
    def cause(self) -> str:
        """Why it failed: what the launch found, or its error message, else its last line."""
        if isinstance(self.value, dict) and self.value.get("lines"):
            return "; ".join(self.value["lines"])
        if errors := list(_ERROR.finditer(self.said)):
            return self.said[errors[-1].end() :].strip()
        lines = self.said.strip().splitlines()
        return f"it ended with exit code {self.exit_code}: {lines[-1] if lines else 'nothing was said'}"


class Commands:
    """Runs commands, one at a time.

    Args:
        folder: for what they print and say.

    Attributes:
        started: names of those that were run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[str] = []

    def run(
        self,
        name: str,
        arguments: Sequence[str],
        program: Sequence[str] = MEGASDC,
        watch: Callable[[], None] = lambda: None,
    ) -> Done:
        """Run a command, which prints JSON, to its end; an exception meanwhile, such as Ctrl-C, ends it too.

        Args:
            name: of its files.
            program: what Python is given before the arguments.
            watch: called now and then.
        """
        self.started.append(name)
        out, log = (self._folder / f"{name}.{ending}" for ending in ("json", "log"))
        with open(out, "wb") as stdout, open(log, "wb") as stderr:
            process = start_command([sys.executable, *program, *arguments], stdout, stderr)
        try:
            while process.poll() is None:
                watch()
                time.sleep(POLL_S)
        finally:
            _end(process)
        printed = out.read_text(encoding="utf-8", errors="replace")
        try:
            value = json.loads(printed)
        except ValueError:  # it was refused before it had a result
            value = None
        code = process.returncode if process.returncode >= 0 else LaunchError.exit_code
        return Done(code, value, log.read_text(encoding="utf-8", errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a command that still runs, so that it ends what it has started; kill it if it does not end."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(TOLD_S)
    except subprocess.TimeoutExpired:
        logger.warning("a command (pid %d) ends what it has started, for at most %g s more", process.pid, GRACE_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        if process.poll() is None:
            kill_all([process])
