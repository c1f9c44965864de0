"""What killed runs leave in shared memory goes, what others use stays."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasdc.parallel import shared_buffers
from megasdc.parallel.shared_buffers import PREFIX, remove_unused

HOLD = """
import ctypes, mmap, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR)
if sys.argv[2] == "mapped":
    ctypes.CDLL(None).mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(0))
    os.close(file)
print("ready", flush=True)
time.sleep(600)
"""


def buffer(folder: Path, name: str, uid: int | None = None) -> Path:
    """A small one, as DeepSpeed names it."""
    path = folder / f"{PREFIX}_{os.getuid() if uid is None else uid}_{name}"
    path.write_bytes(b"x" * 4096)
    return path


@pytest.mark.parametrize("how", ["mapped", "open"])
def test_only_what_nobody_uses_is_removed(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A buffer that a process has mapped or open stays until that process has ended; other names always stay."""
    stale, used = buffer(tmp_path, "127.0.0.1_1_0"), buffer(tmp_path, "127.0.0.1_2_0")
    others = [buffer(tmp_path, "127.0.0.1_1_0", uid=os.getuid() + 1), tmp_path / "psm_of_somebody"]
    others[1].write_bytes(b"")
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(used), how], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        with caplog.at_level(logging.INFO):
            assert remove_unused(tmp_path) == [stale]
        assert "removed 1 unused buffers" in caplog.text
        assert used.exists()
    finally:
        process.kill()
        process.wait()
    assert remove_unused(tmp_path) == [used]
    assert all(path.exists() for path in others)


def test_nothing_is_removed_while_another_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be about to take that very buffer; that is told."""
    monkeypatch.setattr(shared_buffers, "CLEANING_S", 0.1)
    stale = buffer(tmp_path, "127.0.0.1_1_0")
    starting = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(starting, fcntl.LOCK_SH)
    with caplog.at_level(logging.INFO):
        assert remove_unused(tmp_path) == []
    assert "other runs are starting" in caplog.text and stale.exists()
    os.close(starting)
    assert remove_unused(tmp_path) == [stale]
