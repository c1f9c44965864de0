"""The process that pushes one checkpoint of a run into its archive, and what it answered."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from megasdc.checkpoint.files import read_lock


class PushProcess:
    """A push in a process of its own, which stop signals of the run's process group do not reach.

    It gets the processor and the disk when nothing else wants them, until somebody waits for it.

    Args:
        checkpoint: its folder.
        keep_last: steps of the run that the archive keeps afterwards; 0: all.

    Raises:
        OSError: it cannot be started.
        CheckpointError: the checkpoint is being deleted.
    """

    def __init__(self, checkpoint: Path, address: str, run: str, keep_last: int) -> None:
        command = [sys.executable, "-m", "megasdc.ops.archive.background", str(checkpoint), address, "--run", run]
        command += ["--keep-last", str(keep_last), "--parent", str(os.getpid())]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the answer
        with read_lock(checkpoint) as held:  # the process inherits it: no save deletes the checkpoint meanwhile
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(held,),
            )
        self._schedule(os.SCHED_IDLE, psutil.IOPRIO_CLASS_IDLE)

    def poll_report(self) -> dict[str, Any] | None:
        """The report of the push or its error; None: it goes on. Not to be called again after an answer."""
        code = self._process.poll()
        if code is None:
            return None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        self._output.close()
        for line in reversed(lines):  # libraries may write after it
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        return {"error": f"the push ended with code {code}: {lines[-1] if lines else 'no output'}", "exit_code": code}

    def wait(self, timeout_s: float) -> None:
        """Wait until it ends, for so long at most; it competes for processor and disk meanwhile, and from then on."""
        self._schedule(os.SCHED_OTHER, psutil.IOPRIO_CLASS_NONE)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return

    def _schedule(self, policy: int, disk: int) -> None:
        """Set its priorities from here: if it set them itself, it might do so after somebody began to wait for it."""
        with contextlib.suppress(OSError, psutil.Error):  # it has ended, or a container does not allow it
            os.sched_setscheduler(self._process.pid, policy, os.sched_param(0))
            psutil.Process(self._process.pid).ionice(disk)

    def kill(self) -> None:
        """End it; what it stored is found by the next push."""
        self._process.kill()
        self._process.wait()
        self._output.close()
