"""A run whose checkpoints tests archive, and the commands that do it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megasdc.cli import app
from megasdc.common.durable import write_durably
from megasdc.common.errors import MegasdcError

RUN = "20261125-100000-abcdef"


def write_identity(folder: Path) -> None:
    """Make a folder that of the run, as its first start does."""
    write_durably(folder / "run.json", f'{{"format": "megasdc.run.v1", "run": "{RUN}", "attempt": 1}}\n')


def write_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run with the checkpoints 2 and 4: 3 MB each in two replicas, with tensors that have blocks of their own.

    Returns:
        The folder of its checkpoints.
    """
    import hand_made

    monkeypatch.setitem(hand_made.MODEL, "hidden_size", 96)
    monkeypatch.setitem(hand_made.MODEL, "ffn_hidden_size", 192)
    for step in (2, 4):
        hand_made.write_checkpoint(folder / "checkpoints", step, layout=(1, 1, 2))
    write_identity(folder)
    return folder / "checkpoints"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def invoke(*arguments: Any) -> tuple[int, str]:
    """Exit code and message of ``megasdc archive``."""
    done = CliRunner().invoke(app, ["archive", *map(str, arguments)])
    if isinstance(done.exception, MegasdcError):
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, done.output


def killed_command(arguments: list[Any], moment: Callable[[], bool]) -> int:
    """Run ``megasdc archive`` in a process that works slowly, kill it at a moment, and return its exit code."""
    code = (
        "import os, sys, time\n"
        "from megasdc.ops.archive import pull, store\n"
        "write, slow = store.Store.write, pull._write\n"
        "store.Store.write = lambda *a: (time.sleep(0.05), write(*a))[1]\n"
        "pull._write = lambda *a: (time.sleep(0.05), slow(*a))[1]\n"
        "delete = store.Store.delete\n"
        "store.Store.delete = lambda self, names: [(time.sleep(0.05), delete(self, [name])) for name in names]\n"
        "from megasdc.cli import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "archive", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not moment() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    return process.wait()
