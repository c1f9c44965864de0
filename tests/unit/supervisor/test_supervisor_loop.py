"""The loop of a supervisor goes on from every point at which it can be killed, and never starts an attempt twice."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from megasdc.run_lock import start_ticks
from megasdc.supervisor.diagnosis import Evidence
from megasdc.supervisor.history import ENDED, Attempt, History, Process
from megasdc.supervisor.journal import Entry, Journal
from megasdc.supervisor.policy import Limits
from megasdc.supervisor.supervise import Supervisor

STEPS = 50
LIMITS = Limits(pause_s=0.01)
SLOTS = {"z": 1, "b": 1, "c": 1, "a": 1}
"""Not in the order of the alphabet."""


class Killed(BaseException):
    """The supervisor was killed."""


class SmallProcesses:
    """Attempts that are small processes, and end as it is written down for each.

    Args:
        folder: where it keeps which were started.
        ends: (exit code, failed host, unreachable hosts, last step) of each attempt.
    """

    def __init__(self, folder: Path, ends: list[tuple[int | None, str | None, tuple[str, ...], int]]) -> None:
        self._log, self._ends = folder / "started", ends
        self._children: list[subprocess.Popen[bytes]] = []
        self.stopped = False

    @property
    def started(self) -> list[str]:
        """Launch ids of all starts, with their hosts."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def was_started(self, attempt: Attempt) -> bool:
        """See ``Engine``."""
        return any(attempt.launch_id in line for line in self.started)

    def find(self, attempt: Attempt) -> Process:
        """See ``Engine``."""
        end = time.monotonic() + 2
        while time.monotonic() < end:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if attempt.launch_id.encode() in path.read_bytes().split(b"\0"):
                        ticks = start_ticks(int(path.parent.name))
                        return ENDED if ticks is None else Process(int(path.parent.name), ticks)
            time.sleep(0.02)
        return ENDED

    def start(self, attempt: Attempt) -> Process:
        """See ``Engine``."""
        with open(self._log, "a") as log:
            log.write(f"{attempt.launch_id} {','.join(attempt.hosts)}\n")
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.3)", attempt.launch_id])
        self._children.append(child)
        ticks = start_ticks(child.pid)
        assert ticks is not None
        return Process(child.pid, ticks)

    def show(self, attempt: Attempt) -> None:
        """See ``Engine``."""

    def lives(self, process: Process) -> bool:
        """See ``Engine``."""
        for child in self._children:
            child.poll()
        return process != ENDED and start_ticks(process.pid) == process.ticks

    def stop(self, process: Process) -> None:
        """See ``Engine``."""
        self.stopped = True

    def evidence(self, attempt: Attempt) -> Evidence:
        """See ``Engine``."""
        code, host, unreachable, reached = self._ends[attempt.number - 1]
        rank = None if host is None else attempt.hosts.index(host)
        return Evidence(code, rank, host, ["it ended"], attempt.hosts, unreachable, reached=reached, steps=STEPS)


def supervise(folder: Path, engine: SmallProcesses, on_write: Callable[[Journal, bool], None] | None = None) -> int:
    """Supervise two of four hosts; ``on_write`` is called before and after each entry."""
    with Journal(folder, lambda line: None) as journal:
        if on_write is not None:
            write = journal.write

            def watched(kind: str, **fields: object) -> Entry:
                on_write(journal, False)
                entry = write(kind, **fields)
                on_write(journal, True)
                return entry

            journal.write = watched  # type: ignore[method-assign]
        if len(journal.entries) < 1:
            journal.write("hosts", slots=SLOTS, num_hosts=2)
        if len(journal.entries) < 2:
            journal.write("opened", config="c.json")
        return Supervisor(journal, engine, LIMITS, Event(), lambda line: None).run()


ENDS = [(78, None, ("b",), 10), (79, "z", (), 20), (79, "z", (), 25), (None, None, (), 25), (0, None, (), STEPS)]
"""A host is lost, a rank is killed twice on one, the front is killed; then it is done."""


def test_a_run_goes_on_until_it_is_done(tmp_path: Path) -> None:
    """Spares take the places of the lost host, and of the one that failed twice; the others keep their ranks."""
    engine = SmallProcesses(tmp_path, ENDS)
    assert supervise(tmp_path, engine) == 0
    assert [one.split()[1] for one in engine.started] == ["z,b", "z,c", "z,c", "c,a", "c,a"]
    with Journal(tmp_path, lambda line: None) as journal:
        history = History.of(journal.entries)
        turns = ["planned", "started", "ended", "decided"]
        assert [one.kind for one in journal.entries] == ["hosts", "opened", *turns * 5, "finished"]
    assert list(history.replaced) == ["b", "z"] and history.usable == ["c", "a"]


@pytest.mark.parametrize("after", [False, True])
def test_it_goes_on_wherever_it_was_killed(tmp_path: Path, after: bool) -> None:
    """Before and after each line of the journal, in turn: each attempt is started once, on the same hosts."""
    engine = SmallProcesses(tmp_path, ENDS)
    killed: list[int] = []

    def kill_once(journal: Journal, written: bool) -> None:
        if written is after and len(journal.entries) not in killed:
            killed.append(len(journal.entries))
            raise Killed

    code = None
    while code is None:
        with contextlib.suppress(Killed):
            code = supervise(tmp_path, engine, kill_once)
    assert code == 0 and len(killed) == 23
    assert [one.split()[1] for one in engine.started] == ["z,b", "z,c", "z,c", "c,a", "c,a"]
    assert len(set(engine.started)) == 5


def test_a_run_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    """Wrong results without a spare: the exit code is that of the attempt, and the journal has the reason."""
    engine = SmallProcesses(tmp_path, [(70, None, (), 0)])
    assert supervise(tmp_path, engine) == 70
    entry = json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[-1])
    assert entry["kind"] == "finished" and entry["fields"] == {"exit_code": 70, "text": "it ended"}
    assert supervise(tmp_path, engine) == 70, "nothing is started again"


def test_without_spares_a_lost_host_is_waited_for(tmp_path: Path) -> None:
    """Three hosts are lost, and two are needed: the third may come back."""
    engine = SmallProcesses(
        tmp_path, [(78, None, ("z", "b"), 1), (78, None, ("c",), 2), (78, None, ("c",), 3), (0, None, (), 50)]
    )
    assert supervise(tmp_path, engine) == 0
    assert [one.split()[1] for one in engine.started] == ["z,b", "c,a", "c,a", "c,a"], "a lost host may come back"


def test_a_request_to_stop_reaches_the_attempt_and_ends_a_pause(tmp_path: Path) -> None:
    """It is asked once; a pause ends at once, and nothing is started any more."""
    stop = Event()
    engine = SmallProcesses(tmp_path, [(79, "z", (), 5), (79, "b", (), 5)])
    with Journal(tmp_path, lambda line: None) as journal:
        journal.write("hosts", slots=SLOTS, num_hosts=2)
        journal.write("opened", config="c.json")

        def say(line: str) -> None:
            if line.startswith("attempt 2 ended"):
                stop.set()

        assert Supervisor(journal, engine, Limits(pause_s=1000, longest_pause_s=1000), stop, say).run() == 79
    assert len(engine.started) == 2 and not engine.stopped
