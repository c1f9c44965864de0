"""Processes that megasdc starts itself: forks and fresh ones do the same, and a fork ends with its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megasdc.parallel.processes import Descriptor, Fork, start_module

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

MODULE = """
import os, sys
print(sys.argv[1], sorted(name for name in os.environ if name.startswith("MINE")), sys.stdin.readline().strip())
print("wrong", file=sys.stderr)
os.write(int(sys.argv[2]), b"through the pipe")
sys.exit(7)
"""
STARTER = """
import os, subprocess, sys, time
from pathlib import Path
from megasdc.parallel.processes import Fork, start_module
env = {**os.environ, "OMP_NUM_THREADS": "1"}
process = start_module("waits", [], env, *[subprocess.DEVNULL] * 3)
assert isinstance(process, Fork)
Path(sys.argv[1]).write_text(str(process.pid))
os._exit(0)
"""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool) -> tuple[int, str, bytes]:
    """Exit code, what was printed, and what came through a pipe."""
    (folder / "answers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("MINE_BEFORE", "not passed on")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MINE": "1", "OMP_NUM_THREADS": "1"}
    del environment["MINE_BEFORE"]
    reading, writing = os.pipe()
    log, question = folder / f"{fresh}.log", folder / "question"
    question.write_text("asked\n")
    with open(log, "wb") as out, open(question) as asked:
        streams = (asked.fileno(), out.fileno(), out.fileno())
        process = start_module("answers", ["a b", Descriptor(writing)], environment, *streams, fresh)
    assert isinstance(process, Fork) is not fresh
    os.close(writing)
    code = process.wait(60)
    with os.fdopen(reading, "rb") as pipe:
        return code, "".join(sorted(log.read_text().splitlines(keepends=True))), pipe.read()


def test_a_fork_does_what_a_fresh_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments, environment, streams, a passed file and the exit code."""
    fork = run(tmp_path, monkeypatch, False)
    assert fork == (7, "a b ['MINE'] asked\nwrong\n", b"through the pipe")
    assert run(tmp_path, monkeypatch, True) == fork


def test_a_fork_ends_with_its_starter(tmp_path: Path) -> None:
    """Nobody would read its results; a kill of the starter gives it no chance to end it."""
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\n")
    note = tmp_path / "pid"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", STARTER, str(note)], env=environment, check=True)
    pid = int(note.read_text())
    deadline = time.monotonic() + 20
    try:
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, "it goes on alone"
            time.sleep(0.1)
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def test_all_who_wait_for_a_fork_get_its_exit_code() -> None:
    """The code comes through a pipe once; a thread that watches, and one that waits, both get it each time."""
    for _ in range(5):
        process = start_module(
            "this",
            [],
            os.environ | {"OMP_NUM_THREADS": "1"},
            subprocess.DEVNULL,
            subprocess.DEVNULL,
            subprocess.DEVNULL,
        )
        assert isinstance(process, Fork)
        with ThreadPoolExecutor(3) as pool:
            codes = [pool.submit(_watch, process), pool.submit(_watch, process), pool.submit(process.wait)]
        assert [one.result() for one in codes] == [0, 0, 0]


def _watch(process: Fork) -> int:
    while (code := process.poll()) is None:
        pass
    return code
