"""The file system of the run folder is full for a while: the run goes on, and ends as one that had room."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_launch_train import folder, steps_done  # noqa: F401 - a fixture
from test_supervise import (
    STEPS,
    ended_as_without_faults,
    have_equal_checkpoints,
    history_of,
    supervise,
    train_without_faults,
    wait_until,
    write,
)

from megasdc.events import read_events
from megasdc.ops.cluster import Cluster, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(400),
]
CHUNK = 1 << 16


@contextmanager
def small_file_system(path: Path, size: str) -> Iterator[None]:
    """A file system of its own at a path, for this machine and all test hosts that are started within."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    """Take all room that there is, and what others give back within a second."""
    end = time.monotonic() + 1.0
    with open(path, "ab", buffering=0) as file:
        while time.monotonic() < end:
            try:
                file.write(bytes(CHUNK))
            except OSError:
                time.sleep(0.02)
    used = os.statvfs(path.parent)
    assert used.f_bavail == 0


def config_of(folder: Path, wait_s: float, **sections: Any) -> Path:  # noqa: F811
    """A run that saves on disk and in memory, at some steps a second."""
    slow = [{"kind": "normal", "mean_s": 0.3, "std_s": 0.0, "steps": [10, STEPS]}]
    memory = {"interval": 2, "partners": True, "linger_s": 300}
    checkpoint = {"interval": 10, "keep_last": 2, "memory": memory}
    config = write(folder, "run", delay=slow, checkpoint=checkpoint, **sections)
    raw = json.loads(config.read_text())
    raw["megasdc"]["logging"]["wait_for_room_s"] = wait_s
    config.write_text(json.dumps(raw))
    return config


@pytest.mark.parametrize(("full_s", "writing"), [(15, "auto"), pytest.param(75, "sync", marks=pytest.mark.full)])
def test_a_run_goes_on_while_its_folder_has_no_room(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    programs: Path,
    full_s: float,
    writing: str,
) -> None:
    """It is filled in mid-run, and freed: one attempt, the right bits, and no line of events or metrics is lost."""
    hosts = Cluster(tmp_path / "cluster", 2, env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"})
    with small_file_system(folder / "run", "24m"), hosts:
        config = config_of(folder, 300)
        process, log = supervise(hosts, config, programs / "python"), config.with_suffix(".log")
        wait_until(lambda: len(steps_done(folder)) > 15, process, log)
        fill(folder / "run" / "filler")
        time.sleep(full_s)
        assert process.poll() is None, log.read_text()
        (folder / "run" / "filler").unlink()
        assert process.wait(timeout=200) == 0, log.read_text()
        history = history_of(folder)
        assert [one.diagnosis.kind for one in history.failures] == ["done"], log.read_text()
        told = [(one.name, one.fields) for one in read_events(folder / "run", kind="storage", rank=0)]
        assert [name for name, _ in told] == ["no_room", "has_room"], told
        assert told[1][1]["waited_s"] > full_s - 5 and told[1][1]["lost_lines"] == 0
        assert "has no room" in log.read_text()
        ended_as_without_faults(folder)
        assert [one.step for one in read_events(folder / "run", kind="save", name="checkpoint")][-1] == STEPS


@pytest.mark.full  # the folder is full for a while in every run
def test_a_run_whose_folder_stays_full_ends_with_77_and_goes_on_from_memory(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    """After the limit all ranks stop, and so does the supervisor; with room the same command ends as it should."""
    hosts = Cluster(tmp_path / "cluster", 2, env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"})
    with small_file_system(folder / "run", "24m"), hosts:
        config = config_of(folder, 8)
        process, log = supervise(hosts, config), config.with_suffix(".log")
        wait_until(lambda: len(steps_done(folder)) > 15, process, log)
        fill(folder / "run" / "filler")
        assert process.wait(timeout=120) == 77, log.read_text()
        assert "has no room" in log.read_text()
        (folder / "run" / "filler").unlink()
        again = supervise(hosts, config)
        assert again.wait(timeout=200) == 0, log.read_text()
        kinds = [one.diagnosis.kind for one in history_of(folder).failures]
        assert kinds == ["folder_full", "done"], log.read_text()
        begun = list(read_events(folder / "run", kind="resume", name="memory", rank=0))
        assert begun and (begun[-1].step or 0) > 15, log.read_text()
        train_without_faults(folder)
        have_equal_checkpoints(folder)
        assert "lines could not be written and are lost" in log.read_text()
