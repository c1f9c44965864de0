"""What a run's folder says does not depend on the dates of its hosts: which start is the last, what belongs to it."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from run_folder import SMOKE, add_hang, add_incident

from megasdc.common.origin import Origin
from megasdc.config.load import load_config
from megasdc.events import Event, EventLog, in_time_order
from megasdc.lab.report.run_pages.facts import places
from megasdc.metrics.writer import MetricsWriter
from megasdc.ops.health.hosts import FileClock
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE
from megasdc.ops.run_folder.record import load_run
from megasdc.ops.run_folder.status import status_of
from megasdc.ops.run_folder.summary import summarize_run
from megasdc.ops.top.view import RunFollower, RunWatcher

NOW = 1.8e9
OFFSETS = [sign * seconds for seconds in (2.0, 300.0, 7200.0, 259200.0) for sign in (1, -1)]


class Hosts:
    """Two hosts and the seconds that pass on them; the date of the first is off."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, offset_s: float) -> None:
        self._folder, self._patch, self._offset_s, self._passed_s = folder, patch, offset_s, 0.0

    def start(self, attempt: int, *ranks: int) -> None:
        """Ranks begin a start, in a launch of its own."""
        self._attempt = attempt
        self._patch.setenv(LAUNCH_ID_VARIABLE, f"launch_{attempt}")
        for rank in ranks:
            self.emit(rank, "start", "run", layout={}, world_size=2, versions={})

    def emit(self, rank: int, kind: str, name: str, *, step: int | None = None, **fields: Any) -> None:
        """A second later an event of a rank, each on a host of its own."""
        self._passed_s += 1.0
        now_s, host = NOW + self._passed_s, f"host{rank}"
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(time, "time", lambda: now_s + (0.0 if rank else self._offset_s))
            patch.setattr(time, "monotonic", lambda: self._passed_s + 1000.0 * rank)
            patch.setattr("socket.gethostname", lambda: host)
            log = stack.enter_context(closing(EventLog(self._folder, rank, Origin("r", self._attempt))))
            log.emit(kind, name, step=step, **fields)
            if (kind, name) == ("end", "failed"):
                return
            if rank == 0:
                writer = stack.enter_context(closing(MetricsWriter(self._folder, attempt=self._attempt)))
                writer.write(step or 0, {"train/loss": 1.0, "speed/tokens_per_s": 1.0})

    def front(self, attempt: int, code: int, text: str) -> None:
        """The front of a launch leaves how that has ended, by the file system's clock."""
        path = self._folder / "done" / f"launch_{attempt}" / "launch.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"exit_code": code, "lines": [text]}))
        os.utime(path, (NOW + self._passed_s,) * 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with a configuration."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "resolved.json").write_text(json.dumps(load_config(SMOKE, []).resolved()))
    return run


def of_launch(path: Path, attempt: int, at: float) -> None:
    """An incident's file is of a start, with a date."""
    content = json.loads(path.with_suffix(".json").read_text()) | {"launch": f"launch_{attempt}", "attempt": attempt}
    content |= {"time": at} if "ranks" in content else {}
    path.with_suffix(".json").write_text(json.dumps(content))


@pytest.mark.parametrize("offset_s", OFFSETS)
def test_the_last_start_is_the_one_that_began_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    """The first start failed, with its evidence; the second runs, elsewhere, with a date that is ahead or behind."""
    hosts = Hosts(folder, monkeypatch, offset_s)
    hosts.start(1, 0, 1)
    hosts.emit(1, "health", "straggler", step=2, replica=0, stage=0, message="slow")
    hosts.emit(0, "skip", "optimizer_step", step=3, reason="NaN")
    of_launch(add_incident(folder, 4), 1, NOW)
    of_launch(add_hang(folder, 4, "r.1.x"), 1, NOW + 4)
    hosts.emit(1, "end", "failed", exit_code=73, message="wrong", process_started=0.0)
    hosts.front(1, 73, "corruption")
    assert status_of(load_run(folder)).state == "failed"
    monkeypatch.setattr(hosts, "_offset_s", -offset_s)  # rank 0 is on another host
    hosts.start(2, 1)
    hosts.emit(1, "stop", "requested", step=4)
    run, live = load_run(folder), RunFollower(folder, FileClock(folder)).read().run
    for one in (run, live):
        assert status_of(one).state == "running" and one.attempt == 2, "the first start's end is not this one's"
    assert places(run)["hosts"] == "host1", "of the first start others have written, too"
    assert summarize_run(folder).stragglers == [] and summarize_run(folder).failure is None
    hosts.emit(0, "end", "failed", exit_code=74, message="not finite", process_started=0.0)
    found = summarize_run(folder).failure
    assert found is not None and found.exit_code == 74 and found.incident is None, "no evidence of the first start"
    hosts.front(2, 75, "nothing moved")
    of_launch(add_hang(folder, 4, "r.2.x"), 2, NOW + 4 - offset_s)
    found = summarize_run(folder).failure
    assert found is not None and found.incident is not None and found.incident.endswith("r.2.x.json")
    last = RunWatcher(folder).read().last_incident
    assert last is not None and last.kind.startswith("hang"), "that of the later start, whatever its date"


@pytest.mark.parametrize("offset_s", OFFSETS)
def test_events_are_in_the_order_in_which_they_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    """Of hosts whose dates differ, and jump; what names no start is put where its launch, or its file, has it."""
    hosts = Hosts(folder, monkeypatch, offset_s)
    hosts.start(1, 0, 1)
    hosts.emit(1, "save", "a", step=1)
    hosts.emit(0, "save", "b", step=2)
    hosts._offset_s = -offset_s
    hosts.emit(1, "save", "c", step=3)
    hosts.emit(0, "save", "d", step=4)
    hosts.start(2, 0, 1)
    hosts.emit(0, "save", "e", step=1)
    assert [one.name for one in load_run(folder).of("save")] == [*"abcde"]
    pace_s = RunFollower(folder, FileClock(folder)).read().pace_s
    assert pace_s is not None and 0 < pace_s < 10

    def event(name: str, **more: Any) -> Event:
        return Event(NOW, 0, "h", None, None, "x", name, **more)

    first, second = event("1", attempt=1, launch="a"), event("2", attempt=2, launch="b")
    unnumbered = [event("early", launch="b"), event("after", launch=None)]
    assert [one.name for one in in_time_order([[second, unnumbered[1]], [unnumbered[0], first]])] == [
        *("1", "2", "after", "early")
    ]
