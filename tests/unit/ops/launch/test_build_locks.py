"""Locks of extensions whose compilation was ended: those of this host's own ranks go, no others."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megasdc.ops.launch.on_host.build_locks import BuildLocks

TORCH = importlib.util.find_spec("torch")
assert TORCH is not None and TORCH.submodule_search_locations is not None
BATON = Path(TORCH.submodule_search_locations[0]) / "utils" / "file_baton.py"
COMPILES = f"""
import runpy, subprocess, sys, time
baton = runpy.run_path({str(BATON)!r})["FileBaton"](sys.argv[1] + "/lock")
assert baton.try_acquire()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], cwd=sys.argv[1])
print("compiles", flush=True)
sys.stdin.readline()
baton.release()
print("done", flush=True)
time.sleep(120)
"""
"""A rank that compiles, as torch.utils.cpp_extension does, until it is told to end that."""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """One that compiles in ``tmp_path/op``."""
    (tmp_path / "op").mkdir()
    argv = [sys.executable, "-c", COMPILES, str(tmp_path / "op")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "compiles\n"
        yield process
        process.kill()
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if one.cwd() == str(tmp_path / "op"):
                    one.kill()


@pytest.mark.slow
def test_the_lock_of_a_rank_that_was_ended_is_removed(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    """Also where its process is not collected yet; its compiler, which went on alone, is ended."""
    locks, told = BuildLocks(str(tmp_path)), list[str]()
    locks.record_open([rank.pid, os.getpid()])
    (compiler,) = psutil.Process(rank.pid).children()
    lock = tmp_path / "op" / "lock"
    locks.remove_left(lambda: [compiler.pid], told.append)
    assert lock.exists() and compiler.is_running() and not told, "its rank compiles"
    os.kill(rank.pid, 9)
    while psutil.Process(rank.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    locks.remove_left(lambda: [compiler.pid, os.getpid()], told.append)
    assert not lock.exists() and len(told) == 1 and str(lock) in told[0]
    assert not compiler.is_running() or compiler.status() == psutil.STATUS_ZOMBIE


def test_a_lock_that_somebody_else_has_made_since_stays(tmp_path: Path, rank: subprocess.Popen[str]) -> None:
    """And one that no rank was seen to have."""
    locks, told = BuildLocks(str(tmp_path)), list[str]()
    locks.record_open([rank.pid])
    assert rank.stdin is not None and rank.stdout is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "done\n"
    (tmp_path / "other").mkdir()
    for folder in ("op", "other"):
        (tmp_path / folder / "lock").touch()
    rank.kill()
    rank.wait()
    locks.remove_left(list, told.append)
    assert sorted(tmp_path.glob("*/lock")) == [tmp_path / "op" / "lock", tmp_path / "other" / "lock"] and not told
    BuildLocks(None).record_open([os.getpid()])
