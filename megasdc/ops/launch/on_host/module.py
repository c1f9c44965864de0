"""Runs a module of megasdc on one host; its source is sent there, so it imports nothing from megasdc."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

PROGRESS_MARK = "megasdc-progress:"
"""Begins a line in which a module says on standard error how far it is."""
TELL_S = 0.5


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run ``python -m module argument`` as ranks are run here, and return its ``code``, ``out`` and ``err``.

    What it says of its progress is printed. Once nobody reads that, or at SIGTERM, it is ended with all it has started.

    Args:
        request: ``module``, ``argument``, ``cwd``, ``python_path`` (list), ``environment``, ``timeout_s``.
    """
    environment = {**os.environ, **request["environment"], "PYTHONPATH": os.pathsep.join(request["python_path"])}
    process = subprocess.Popen(
        [sys.executable, "-m", request["module"], request["argument"]],
        cwd=request["cwd"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    assert process.stdout is not None and process.stderr is not None, "they are pipes"
    lines: dict[IO[str], list[str]] = {process.stdout: [], process.stderr: []}
    progress = [""]
    readers = [threading.Thread(target=_read, args=(pipe, lines[pipe], progress), daemon=True) for pipe in lines]
    for reader in readers:
        reader.start()
    end = time.monotonic() + request["timeout_s"]
    try:
        while process.poll() is None:
            print(PROGRESS_MARK, progress[0], flush=True)
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(request["module"], request["timeout_s"])
            try:
                process.wait(TELL_S)
            except subprocess.TimeoutExpired:
                continue
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for reader in readers:
        reader.join()
    out, err = ("".join(lines[pipe]) for pipe in (process.stdout, process.stderr))
    return {"code": process.returncode, "out": out, "err": err[-2000:]}


def _read(pipe: IO[str], lines: list[str], progress: list[str]) -> None:
    """Read all lines of a pipe; those that tell progress are kept apart, the last one alone."""
    for line in pipe:
        if line.startswith(PROGRESS_MARK):
            progress[0] = line.removeprefix(PROGRESS_MARK).strip()
        else:
            lines.append(line)
