"""A rank never waits for its writer, and a writer that something waits for is not starved."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megasdc.checkpoint.writer_process import Act, TaskResult, WriterProcess


@pytest.fixture
def writer() -> Iterator[WriterProcess]:
    """A writer that runs."""
    writer = WriterProcess(describes=False)
    writer.start()
    yield writer
    writer.close()


def _answer(writer: WriterProcess, timeout_s: float = 60.0) -> TaskResult:
    until = time.monotonic() + timeout_s
    while (found := writer.poll_result()) is None:
        assert time.monotonic() < until, "no answer"
        time.sleep(0.01)
    return found


def test_a_rank_does_not_wait_for_a_writer_that_reads_nothing(tmp_path: Path, writer: WriterProcess) -> None:
    """Tasks larger than the pipe are taken at once while the writer stands still, and done in turn afterwards."""
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    began = time.monotonic()
    for text in ("first ", "second "):
        writer.send(Act({tmp_path / "file": text * 1_000_000}))
    assert time.monotonic() - began < 30.0, "it stands still: whoever waits for it waits for ever"
    os.kill(writer.pid, signal.SIGCONT)
    assert [_answer(writer).problem for _ in range(2)] == ["", ""]
    assert (tmp_path / "file").read_text() == "second " * 1_000_000


def test_a_writer_that_is_ended_while_a_task_is_sent_is_told_and_started_anew(
    tmp_path: Path, writer: WriterProcess
) -> None:
    """Nothing of the task is done; the next one finds a new writer."""
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGSTOP)
    writer.send(Act({tmp_path / "lost": "text " * 1_000_000}))
    os.kill(writer.pid, signal.SIGKILL)
    assert "was killed by signal 9" in _answer(writer).problem
    assert writer.run_task(Act({tmp_path / "file": "text"})).problem == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_writer_runs_where_a_processor_is_idle_until_something_waits_for_it(
    tmp_path: Path, writer: WriterProcess
) -> None:
    """It begins at idle priority; from ``hurry`` on it competes."""
    assert writer.pid is not None
    assert writer.run_task(Act({tmp_path / "file": "text"})).problem == ""
    assert os.sched_getscheduler(writer.pid) == os.SCHED_IDLE
    writer.hurry()
    assert os.sched_getscheduler(writer.pid) == os.SCHED_OTHER
    os.kill(writer.pid, signal.SIGKILL)
    _answer(writer)
    writer.hurry()  # one that has ended cannot
    writer.start()
    writer.hurry()  # one that does not listen yet, which must not make itself idle later
    assert writer.run_task(Act({tmp_path / "other": "text"})).problem == ""
    assert writer.pid is not None and os.sched_getscheduler(writer.pid) == os.SCHED_OTHER
