"""Is a checkpoint archived when it should be, by a process that ends with the run, and every failure told?"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hand_made import write_checkpoint

from megasdc.checkpoint.files import VERIFIED_FILE
from megasdc.checkpoint.records import write_record
from megasdc.checkpoint.verify import VerifiedMark
from megasdc.common.errors import ConfigError, LaunchError
from megasdc.config.sections import CheckpointSection
from megasdc.engine.hooks import RunEnd
from megasdc.events import EventLog, read_events
from megasdc.ops.archive import hook
from megasdc.ops.archive.child import PushProcess
from megasdc.ops.archive.hook import Archiver

RUN = "20261125-100000-abcdef"


class Training:
    """What the hook sees of a run, and the hook; checkpoints lie in ``folder``."""

    def __init__(self, folder: Path, verified_only: bool = False, **archive: Any) -> None:
        self.folder = folder / "checkpoints"
        self.address = folder / "archive"
        self.events = EventLog(folder, 0)
        self.run: Any = SimpleNamespace(
            step=0,
            skipped_checkpoint_steps=set(),
            is_last_step=False,
            end=RunEnd(),
            events=self.events,
            enter=lambda phase: None,
        )
        section = CheckpointSection.model_validate({"archive": {"address": str(self.address), **archive}})
        self.hook = Archiver(section, self.folder, RUN, verified_only=verified_only, prunes=True, writer=None)

    def step(self, step: int, save: bool = False) -> None:
        """Take a step, which may save."""
        self.run.step = step
        if save:
            write_checkpoint(self.folder, step)
        self.hook.after_step(self.run, None)  # type: ignore[arg-type]

    def end(self) -> None:
        """The last step was taken."""
        self.run.is_last_step = True
        self.hook.on_end(self.run)
        self.hook.close()

    def told(self, name: str) -> list[dict[str, Any]]:
        """Events ``archive/NAME``."""
        return [{"step": event.step, **event.fields} for event in read_events(self.events.path.parents[1], name=name)]


@pytest.mark.slow
def test_multiples_and_the_last_are_archived(tmp_path: Path) -> None:
    """Every second of the steps 2, 4, 5; a process at idle priority, whose answer is an event."""
    training = Training(tmp_path, every=4)
    training.step(2, save=True)
    assert training.hook._going is None, "2 is no multiple"
    training.step(4, save=True)
    assert training.hook._going is not None
    child = training.hook._going.process._process.pid
    _wait_for(lambda: os.sched_getscheduler(child) == os.SCHED_IDLE)
    training.run.is_last_step = True
    training.step(5, save=True)
    training.end()
    assert [event["step"] for event in training.told("pushed")] == [4, 5]
    assert training.told("failed") == training.told("skipped") == []


@pytest.mark.slow
def test_a_push_that_is_waited_for_is_not_idle(tmp_path: Path) -> None:
    """At the end of a run, on a host whose other processes would never let it come to its turn."""
    training = Training(tmp_path)
    training.step(2, save=True)
    assert training.hook._going is not None
    process = training.hook._going.process
    child = process._process.pid
    _wait_for(lambda: os.sched_getscheduler(child) == os.SCHED_IDLE)
    process.wait(0.0)
    assert os.sched_getscheduler(child) == os.SCHED_OTHER
    training.end()
    assert [event["step"] for event in training.told("pushed")] == [2]


@pytest.mark.slow
def test_a_candidate_waits_for_its_mark(tmp_path: Path) -> None:
    """Where audits are in use."""
    training = Training(tmp_path, verified_only=True)
    training.step(2, save=True)
    training.step(3)
    assert training.hook._going is None
    mark = VerifiedMark(format_version=1, save_id="0123", step=2, audit_step=3, time=0.0)
    write_record(training.folder / "step_00000002" / VERIFIED_FILE, mark)
    training.step(4)
    training.end()
    assert [event["step"] for event in training.told("pushed")] == [2]


def test_the_end_waits_no_longer_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the push is ended, and what is left is told with the command that archives it."""
    monkeypatch.setattr(hook, "END_WAIT_S", 0.0)
    training = Training(tmp_path)
    training.step(2, save=True)
    training.step(4, save=True)
    assert training.hook._going is not None
    child = training.hook._going.process._process.pid
    training.end()
    (failed,) = training.told("failed")
    assert "steps 2, 4 not archived" in failed["problem"] and "megasdc archive push" in failed["problem"]
    assert not psutil.pid_exists(child)


def test_a_run_that_must_leave_waits_for_nothing(tmp_path: Path) -> None:
    """After a signal or a time limit: nothing has failed, and a later start archives what was left."""
    training = Training(tmp_path)
    training.step(2, save=True)
    training.run.end.must_stop_soon = True
    assert training.hook._going is not None
    child = training.hook._going.process._process.pid
    training.end()
    assert not training.told("failed") and not psutil.pid_exists(child)


@pytest.mark.slow
def test_what_is_gone_or_killed_is_told(tmp_path: Path) -> None:
    """A checkpoint that was deleted before its turn, a push that was killed; the next one is archived."""
    training = Training(tmp_path)
    for step in (2, 4, 6):
        training.step(step, save=True)
    shutil.rmtree(training.folder / "step_00000004")
    assert training.hook._going is not None
    training.hook._going.process._process.kill()
    training.end()
    assert [event["step"] for event in training.told("failed")] == [2]
    assert training.told("failed")[0]["exit_code"] == -9
    assert [event["step"] for event in training.told("skipped")] == [4]
    assert [event["step"] for event in training.told("pushed")] == [6]


@pytest.mark.slow
def test_a_later_start_archives_what_was_left(tmp_path: Path) -> None:
    """The checkpoints of an earlier start that are in the folder, but none that the resume passed over."""
    for step in (2, 4, 6):
        write_checkpoint(tmp_path / "checkpoints", step)
    training = Training(tmp_path)
    training.run.step, training.run.skipped_checkpoint_steps = 4, {2}
    training.hook.on_start(training.run)
    training.end()
    assert [event["step"] for event in training.told("pushed")] == [4], "6 is later than where the run went on"


def test_a_push_ends_with_its_run(tmp_path: Path) -> None:
    """A run that is killed leaves no process."""
    path = write_checkpoint(tmp_path / "checkpoints", 2)
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom megasdc.ops.archive.child import PushProcess\n"
        "process = PushProcess(Path(sys.argv[1]), sys.argv[2], 'r', 0)\n"
        "print(process._process.pid, flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(path), "s3://bucket-of-no-server/a"]
    environ = {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
    assert run.stdout is not None
    child = psutil.Process(int(run.stdout.readline()))
    run.kill()
    run.wait()
    _wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.slow
def test_an_error_of_any_kind_is_an_answer(tmp_path: Path) -> None:
    """A push that ends without a line of JSON, as after an import that fails."""
    path = write_checkpoint(tmp_path / "checkpoints", 2)
    process = PushProcess(path, str(tmp_path / "archive"), "no/name", 0)
    assert os.sched_getscheduler(process._process.pid) == os.SCHED_IDLE
    process.wait(0.0)  # before it has begun to do anything: it must not make itself idle later
    seen = set()
    while process._process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            seen.add(os.sched_getscheduler(process._process.pid))
        time.sleep(0.02)
    assert seen == {os.SCHED_OTHER}
    answer = process.poll_report()
    assert answer is not None and answer["exit_code"] == 70 and "the id of a run" in answer["error"]


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("address", "kind", "said"),
    [
        ("nothing://bucket/x", ConfigError, "checkpoint.archive.address: got .* needed: a folder, or a URL"),
        ("{folder}/checkpoints/archive", ConfigError, "lies in the checkpoint folder"),
        ("dropbox://x", LaunchError, "checkpoint.archive.address: .*need a package that is not installed"),
    ],
)
def test_addresses_that_no_push_could_use_end_the_start(
    tmp_path: Path, address: str, kind: type[Exception], said: str
) -> None:
    """Before anything is trained, and with the field that is wrong."""
    with pytest.raises(kind, match=said):
        Training(tmp_path, address=address.format(folder=tmp_path))
