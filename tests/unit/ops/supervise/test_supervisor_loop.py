"""The loop of a supervisor goes on from every point at which it can be killed, and never starts an attempt twice."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from threading import Event, Timer

import pytest

from megasdc.common import durable
from megasdc.common.errors import LaunchError, StorageError
from megasdc.common.run_lock import start_ticks
from megasdc.ops.launch.launch_verdict import Met
from megasdc.ops.supervise.allocation import Allocation
from megasdc.ops.supervise.attempt_process import attempt_file
from megasdc.ops.supervise.attempt_progress import AttemptProgress
from megasdc.ops.supervise.command import complete
from megasdc.ops.supervise.diagnosis import AttemptEvidence
from megasdc.ops.supervise.history import ENDED, Attempt, JournalHistory, LaunchProcess
from megasdc.ops.supervise.host_reliability_log import HostReliabilityLog
from megasdc.ops.supervise.host_tests import HostTest
from megasdc.ops.supervise.journal import Journal, JournalEntry
from megasdc.ops.supervise.launch_backend import overrides_of
from megasdc.ops.supervise.policy import RestartLimits, may_return
from megasdc.ops.supervise.supervise import Supervisor

STEPS = 50
LIMITS = RestartLimits(pause_s=0.01, returns=0)
SLOTS = {"z": 1, "b": 1, "c": 1, "a": 1}
"""Not in the order of the alphabet."""


class Killed(BaseException):
    """The supervisor was killed."""


class SmallProcesses:
    """Attempts that are small processes, and end as it is written down for each.

    Args:
        folder: where it keeps which were started.
        ends: (exit code, failed host, unreachable hosts, last step) of each attempt.
        seconds: that each lasts, if it is not stopped.
    """

    def __init__(
        self, folder: Path, ends: list[tuple[int | None, str | None, tuple[str, ...], int]], seconds: float = 0.3
    ) -> None:
        self._log, self._ends, self._seconds = folder / "started", ends, seconds
        self._children: list[subprocess.Popen[bytes]] = []
        self.stopped = False
        self.wrong = ""
        self.before_start: Callable[[], None] = lambda: None
        self.released: list[str] = []
        self.alerts: dict[str, list[str]] = {}
        self.ended: list[str] = []

    @property
    def started(self) -> list[str]:
        """Launch ids of all starts, with their hosts."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def was_started(self, attempt: Attempt) -> bool:
        """See ``Engine``."""
        return any(attempt.launch_id in line for line in self.started)

    def find_process(self, attempt: Attempt) -> LaunchProcess:
        """See ``Engine``."""
        end = time.monotonic() + 2
        while time.monotonic() < end:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if attempt.launch_id.encode() in path.read_bytes().split(b"\0"):
                        ticks = start_ticks(int(path.parent.name))
                        return ENDED if ticks is None else LaunchProcess(int(path.parent.name), ticks)
            time.sleep(0.02)
        return ENDED

    def start(self, attempt: Attempt, check: Callable[[], None]) -> LaunchProcess:
        """See ``Engine``."""
        self.before_start()
        check()
        self.ended = list(attempt.ended)
        hostfile = attempt_file(self._log.parent, attempt.number, attempt.launch_id, "hosts")
        hostfile.write_text("".join(f"{host} slots={slots}\n" for host, slots in attempt.slots.items()))
        with open(self._log, "a") as log:
            log.write(f"{attempt.launch_id} {','.join(attempt.hosts)}\n")
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", f"import time; time.sleep({self._seconds})", attempt.launch_id]
        )
        self._children.append(child)
        ticks = start_ticks(child.pid)
        assert ticks is not None
        return LaunchProcess(child.pid, ticks)

    def print_output(self, attempt: Attempt) -> None:
        """See ``Engine``."""

    def lives(self, process: LaunchProcess) -> bool:
        """See ``Engine``."""
        for child in self._children:
            child.poll()
        return process != ENDED and start_ticks(process.pid) == process.ticks

    def stop(self, process: LaunchProcess) -> None:
        """See ``Engine``."""
        self.stopped = True
        os.kill(process.pid, signal.SIGTERM)

    def overrides(self, attempt: Attempt) -> tuple[str, ...]:
        """See ``Engine``."""
        return tuple(overrides_of(attempt, []))

    def left_out(self, attempt: Attempt) -> tuple[str, ...]:
        """See ``Engine``."""
        return tuple(host for host in attempt.hosts if host == self.wrong)

    def release(self, hosts: Sequence[str]) -> None:
        """See ``Engine``."""
        self.released += hosts

    def alert(self, name: str, some: Sequence[Met]) -> str:
        """See ``Engine``."""
        told = [str(one) for one in some]
        assert self.alerts.setdefault(name, told) == told, "whoever tells it again"
        return ""

    def evidence(self, attempt: Attempt, waiting: Mapping[str, int], stops: Callable[[], bool]) -> AttemptEvidence:
        """See ``Engine``."""
        code, host, unreachable, reached = self._ends[attempt.number - 1]
        rank = None if host is None else attempt.hosts.index(host)
        said, grows, left_out = ["it ended"], attempt.grows, self.left_out(attempt)
        more = {"reached": reached, "steps": STEPS, "left_out": left_out}
        return AttemptEvidence(code, rank, host, said, attempt.hosts, unreachable, grows, **more)  # type: ignore[arg-type]


class SmallJob(Allocation):
    """A scheduler's job that can be left, and remembers for which hosts it was.

    Args:
        job: number and start.
        hosts: its nodes.
        problem: why it cannot be left; empty: it can.
    """

    can_be_left = True

    def __init__(self, job: str, hosts: str, problem: str = "") -> None:
        super().__init__(f"job {job}", dict.fromkeys(hosts, 1))
        self.job, self._problem = job, problem
        self.away: list[list[str]] = []

    def requeue(self, away: Sequence[str]) -> str:
        """See ``Allocation``."""
        self.away.append(list(away))
        return self._problem


class _Stop(Event):
    """Set while an allocation is ending."""

    def __init__(self, allocation: Allocation) -> None:
        super().__init__()
        self._allocation = allocation

    def is_set(self) -> bool:
        return self._allocation.is_ending

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(timeout or 0.0)
        return self.is_set()


class SmallTests:
    """Tests of hosts that end at once, as it is written down.

    Args:
        codes: exit codes of the tests of each host, in turn; a host without one is not tested to the end.
        unfit: exit codes of hosts that are found unfit once, when they are looked at.
    """

    def __init__(self, codes: dict[str, list[int]] | None = None, unfit: dict[str, int] | None = None) -> None:
        self.codes = {} if codes is None else codes
        self.unfit = {} if unfit is None else unfit
        self.started: list[str] = []
        self.overrides: dict[str, list[str]] = {}
        self.looked: list[str] = []
        self._running: list[str] = []

    def runs(self, host: str) -> bool:
        """See ``Tests``."""
        return host in self._running

    def start(self, host: str, slots: int, run: Mapping[str, int], overrides: Sequence[str]) -> None:
        """See ``Tests``."""
        self.started.append(host)
        self.overrides[host] = list(overrides)
        self._running.append(host)

    def check(self, slots: Mapping[str, int], run: Mapping[str, int], stops: Callable[[], bool]) -> list[HostTest]:
        """See ``Tests``."""
        assert slots.keys() <= run.keys()
        self.looked += slots
        return [HostTest(host, self.unfit.pop(host), "unfit") for host in slots if host in self.unfit]

    def pop_ended(self) -> list[HostTest]:
        """See ``Tests``."""
        running, self._running = self._running, []
        return [HostTest(host, self.codes[host].pop(0) if self.codes.get(host) else 78, "said") for host in running]

    def close(self) -> None:
        """See ``Tests``."""
        self._running = []


def supervise(
    folder: Path,
    engine: SmallProcesses,
    on_write: Callable[[Journal, bool], None] | None = None,
    tests: SmallTests | None = None,
    limits: RestartLimits = LIMITS,
    ledger: HostReliabilityLog | None = None,
    allocation: Allocation | None = None,
    sizes: Sequence[int] = (2,),
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Supervise two of four hosts, or as many as can be; ``on_write`` is called before and after each entry."""
    allocation = Allocation("hosts", SLOTS) if allocation is None else allocation
    with Journal(folder, lambda line: None, partial(complete, folder, "c.json", allocation.job)) as journal:
        if on_write is not None:
            write = journal.write

            def watched(kind: str, **fields: object) -> JournalEntry:
                on_write(journal, False)
                entry = write(kind, **fields)
                on_write(journal, True)
                return entry

            journal.write = watched  # type: ignore[method-assign]
        if JournalHistory.of(journal.entries).slots != allocation.slots:
            journal.write("hosts", slots=allocation.slots, num_hosts=2, sizes=sizes)
        if not JournalHistory.of(journal.entries).stage:
            journal.write("opened", config="c.json")
        tests = SmallTests() if tests is None else tests
        stop = _Stop(allocation)
        return Supervisor(journal, engine, tests, limits, allocation, stop, say, ledger).run()


ENDS = [(78, None, ("b",), 10), (79, "z", (), 20), (79, "z", (), 25), (None, None, (), 25), (0, None, (), STEPS)]
"""A host is lost, a rank is killed twice on one, the front is killed; then it is done."""


@pytest.mark.slow
def test_a_run_goes_on_until_it_is_done(tmp_path: Path) -> None:
    """Spares take the places of the lost host, and of the one that failed twice; the others keep their ranks."""
    engine, said = SmallProcesses(tmp_path, ENDS), list[str]()
    assert supervise(tmp_path, engine, say=said.append) == 0
    assert [one.split()[1] for one in engine.started] == ["z,b", "z,c", "z,c", "c,a", "c,a"]
    assert engine.released == ["b", "z", *SLOTS], "hosts that were replaced, and all at the end, keep nothing"
    assert engine.ended == [one.split()[0] for one in engine.started][:-1], (
        "whose locks the last one takes over at once"
    )
    with Journal(tmp_path, lambda line: None) as journal:
        history = JournalHistory.of(journal.entries)
        turns = ["planned", "started", "ended", "decided"]
        assert [one.kind for one in journal.entries] == ["hosts", "opened", *turns * 5, "finished"]
        launches = [one.fields["launch_id"] for one in journal.entries if one.kind == "planned"]
    assert list(history.replaced) == ["b", "z"] and history.usable == ["c", "a"]
    lost, killed = said[-2:]
    assert said[-3] == "the run met 2 faults:"
    assert "b: a host cannot be reached" in lost and "drain b, test with `megasdc stress`" in lost
    assert killed.startswith("step 25 of attempt 3: z: a rank was killed")
    assert engine.alerts == {f"decision_0001_{launches[0]}": [lost], f"decision_0003_{launches[2]}": [killed]}


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_it_goes_on_wherever_a_line_of_its_journal_is_damaged(tmp_path: Path, seed: int) -> None:
    """Killed after each entry in turn, a bit of any line flipped each time: no attempt is started twice or forgotten.

    The lost host is not used again, and each damaged journal is kept as it was.
    """
    engine, draw, path = SmallProcesses(tmp_path, ENDS, seconds=0.1), Random(seed), tmp_path / "journal.jsonl"
    killed: list[int] = []
    damaged: list[bytes] = []

    def kill_once(journal: Journal, written: bool) -> None:
        turns = [one.kind for one in journal.entries if one.kind != "damaged"]
        if written and len(turns) not in killed:
            killed.append(len(turns))
            raise Killed

    code = None
    while code is None:
        with contextlib.suppress(Killed):
            code = supervise(tmp_path, engine, kill_once)
            continue
        content = bytearray(path.read_bytes())
        at = draw.choice([len(content) - 1, draw.randrange(len(content)), draw.randrange(len(content))])
        content[at] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        damaged.append(bytes(content))
    assert code == 0 and len(damaged) > 15
    attempts = [one.split() for one in engine.started]
    assert len(attempts) == 5 == len({launch_id for launch_id, _ in attempts})
    assert attempts[0][1] == "z,b" and not any("b" in hosts for _, hosts in attempts[1:])
    assert [one.read_bytes() for one in sorted(tmp_path.glob("journal_damaged_*"))] == damaged
    history = _history_in(tmp_path)
    assert history.config == "c.json" and "b" in history.replaced and len(history.failures) == 5
    assert len(engine.ended) == 4, "whose locks the last one takes over at once"


@pytest.mark.slow
def test_a_supervisor_whose_run_another_has_taken_over_starts_nothing(tmp_path: Path) -> None:
    """After a network split, when a file server has given its lock away; the other one goes on with the run."""
    engine = SmallProcesses(tmp_path, ENDS)

    def lose(journal: Journal, written: bool) -> None:
        if not written and len(journal.entries) == 4:
            fcntl.flock(journal._lock, fcntl.LOCK_UN)
            with Journal(tmp_path, print) as other:
                other.write("taken_over")

    with pytest.raises(LaunchError, match="changed by another supervisor"):
        supervise(tmp_path, engine, lose)
    assert len(engine.started) == 1
    assert supervise(tmp_path, engine) == 0 and len(engine.started) == 5


def test_a_supervisor_that_waited_before_a_start_looks_again_whose_run_it_is(tmp_path: Path) -> None:
    """Another one has gone on with it meanwhile, so that two launches would run."""
    engine = SmallProcesses(tmp_path, ENDS)

    def lose() -> None:
        journal = (tmp_path / "journal.jsonl").read_text().splitlines()[-1]
        if json.loads(journal)["kind"] == "planned" and len(engine.started) == 1:
            engine.before_start = lambda: None
            (tmp_path / "journal.jsonl").open("a").write("what another one has written\n")

    engine.before_start = lose
    with pytest.raises(LaunchError, match="changed by another supervisor"):
        supervise(tmp_path, engine)
    assert len(engine.started) == 1


@pytest.mark.slow
def test_a_request_to_stop_is_heard_while_the_journal_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt is asked to save and end, and then the supervisor ends; with room the next one finds out how."""
    monkeypatch.setattr(durable, "END_S", 0.5)
    monkeypatch.setattr(durable._process, "limit_s", 15.0)
    engine, stop, append = SmallProcesses(tmp_path, [(0, None, (), STEPS)], seconds=60.0), Event(), Journal._append
    durable.end_waits_when(stop.is_set)
    with Journal(tmp_path, lambda line: None) as journal:
        journal.write("hosts", slots=SLOTS, num_hosts=2)
        journal.write("opened", config="c.json")

        def without_room(self: Journal, line: bytes) -> None:
            if json.loads(line)["kind"] == "tested":
                stop.set()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            append(self, line)

        monkeypatch.setattr(Journal, "_append", without_room)
        began, limits = time.monotonic(), RestartLimits(pause_s=0.01, spare_test_s=60.0)
        hosts = Allocation("hosts", SLOTS)
        with pytest.raises(StorageError, match="No space left"):
            Supervisor(journal, engine, SmallTests(), limits, hosts, stop, lambda line: None).run()
        assert time.monotonic() - began < 10.0 and engine.stopped
        assert not any(engine.lives(LaunchProcess(child.pid, 1)) for child in engine._children)
    durable.end_waits_when(bool)
    monkeypatch.undo()
    assert supervise(tmp_path, engine) == 0 and len(engine.started) == 1


def test_a_run_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    """Wrong results without a spare: the exit code is that of the attempt, and the journal has the reason."""
    engine = SmallProcesses(tmp_path, [(70, None, (), 0)])
    assert supervise(tmp_path, engine) == 70
    entry = json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[-1])
    assert entry["kind"] == "finished" and entry["fields"] == {"exit_code": 70, "text": "it ended"}
    assert supervise(tmp_path, engine) == 70, "nothing is started again"


@pytest.mark.slow
def test_without_spares_a_lost_host_is_waited_for(tmp_path: Path) -> None:
    """Three hosts are lost, and two are needed: the third may come back."""
    engine = SmallProcesses(
        tmp_path, [(78, None, ("z", "b"), 1), (78, None, ("c",), 2), (78, None, ("c",), 3), (0, None, (), 50)]
    )
    assert supervise(tmp_path, engine) == 0
    assert [one.split()[1] for one in engine.started] == ["z,b", "c,a", "c,a", "c,a"], "a lost host may come back"


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", ["", "growing", "ended"])
def test_a_run_goes_on_with_fewer_hosts_and_grows_again(tmp_path: Path, killed_at: str) -> None:
    """Without a spare the lost host is done without; it passes its test, and the attempt ends for one with both."""
    ends = [(78, None, ("b",), 10), (0, None, (), 20), (0, None, (), STEPS)]
    engine = SmallProcesses(tmp_path, ends, seconds=2.0)
    hosts, tests = Allocation("hosts", {"z": 1, "b": 1}), SmallTests({"b": [0]})
    killed: list[str] = []

    def kill_once(journal: Journal, written: bool) -> None:
        if (
            written
            and journal.entries[-1].kind == killed_at
            and engine.stopped is (killed_at == "ended")
            and not killed
        ):
            killed.append(killed_at)
            raise Killed

    code = None
    while code is None:
        with contextlib.suppress(Killed):
            code = supervise(tmp_path, engine, kill_once, tests, RestartLimits(pause_s=0.01), None, hosts, (1, 2))
    assert code == 0 and [one.split()[1] for one in engine.started] == ["z,b", "z", "z,b"] and engine.stopped
    assert [one.diagnosis.kind for one in _history_in(tmp_path).failures] == ["host_lost", "grown", "done"]
    assert len(killed) == bool(killed_at)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_host_whose_replica_is_left_out(tmp_path: Path) -> None:
    """The attempt is asked to save and end, and goes on with the spare; without one it goes on as it is."""
    engine = SmallProcesses(tmp_path, [(0, None, (), 20), (0, None, (), STEPS)], seconds=2.0)
    engine.wrong = "b"
    assert supervise(tmp_path, engine) == 0
    assert [one.split()[1] for one in engine.started] == ["z,b", "z,c"] and engine.stopped
    assert [one.diagnosis.kind for one in _history_in(tmp_path).failures] == ["corrupt_again", "done"]
    assert "b" in _history_in(tmp_path).replaced
    alone = tmp_path / "alone"
    alone.mkdir()
    engine = SmallProcesses(alone, [(0, None, (), STEPS)], seconds=2.0)
    engine.wrong = "b"
    hosts = Allocation("hosts", {"z": 1, "b": 1})
    assert supervise(alone, engine, None, SmallTests(), RestartLimits(pause_s=0.01), None, hosts) == 0
    assert len(engine.started) == 1 and not engine.stopped


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

        limits = RestartLimits(pause_s=1000, longest_pause_s=1000)
        hosts = Allocation("hosts", SLOTS)
        assert Supervisor(journal, engine, SmallTests(), limits, hosts, stop, say).run() == 79
    assert len(engine.started) == 2 and not engine.stopped


@pytest.mark.parametrize("begins", [True, False])
def test_a_request_to_stop_before_a_start_starts_nothing(tmp_path: Path, begins: bool) -> None:
    """The first one, or one for which a spare is looked at; it is finished by that, and by no failure of the launch."""
    stop, engine = Event(), SmallProcesses(tmp_path, [(78, None, ("b",), 10)])

    class Asked(SmallTests):
        def check(self, slots: Mapping[str, int], run: Mapping[str, int], stops: Callable[[], bool]) -> list[HostTest]:
            stop.set()
            return super().check(slots, run, stops)

    with Journal(tmp_path, lambda line: None) as journal:
        journal.write("hosts", slots=SLOTS, num_hosts=2)
        journal.write("opened", config="c.json")
        if begins:
            stop.set()
        code = Supervisor(journal, engine, Asked(), LIMITS, Allocation("hosts", SLOTS), stop, lambda line: None).run()
        last = journal.entries[-1]
    assert code == (128 + signal.SIGTERM if begins else 78) and len(engine.started) == (0 if begins else 1)
    assert last.kind == "finished" and last.fields["text"].startswith("stopped on request")


def _history_in(folder: Path) -> JournalHistory:
    with Journal(folder, lambda line: None) as journal:
        return JournalHistory.of(journal.entries)


@pytest.mark.slow
def test_hosts_that_pass_their_test_come_back_after_all_others(tmp_path: Path) -> None:
    """Once each: the first to be lost is used again when no other is left, and not a second time."""
    ends = [(78, None, (host,), step) for step, host in enumerate("bca", 1)]
    engine = SmallProcesses(tmp_path, [*ends, (78, None, ("b",), 9), (0, None, (), STEPS)])
    tests = SmallTests({host: [0, 0] for host in SLOTS})
    assert supervise(tmp_path, engine, tests=tests, limits=RestartLimits(pause_s=0.01, returns=1)) == 0
    assert [one.split()[1] for one in engine.started] == ["z,b", "z,c", "z,a", "z,b", "z,c"]
    history = _history_in(tmp_path)
    assert list(history.replaced) == ["b"] and history.given_back == {"b": 1, "c": 1, "a": 1}
    assert tests.started == ["b", "c", "a"]


@pytest.mark.slow
def test_a_host_that_fails_its_test_stays_away_and_one_that_is_away_is_tested_again(tmp_path: Path) -> None:
    """What failed is not tested again; what could not be tested is, after a while."""
    ends = [(79, "b", (), 1), (79, "b", (), 2), (78, None, ("c",), 3)]
    engine = SmallProcesses(tmp_path, [*ends, *((1, None, (), step) for step in range(4, 9)), (0, None, (), STEPS)])
    tests = SmallTests({"b": [73], "c": [78, 78, 0]})
    assert supervise(tmp_path, engine, tests=tests, limits=RestartLimits(pause_s=0.01, retest_s=0.05)) == 0
    history = _history_in(tmp_path)
    assert {host: one.kind for host, one in history.replaced.items()} == {"b": "rank_lost"}
    assert tests.started.count("b") == 1 and tests.started.count("c") == 3


@pytest.mark.parametrize("passes", [True, False])
def test_a_run_without_hosts_waits_for_tests_that_may_give_some_back(tmp_path: Path, passes: bool) -> None:
    """One of two computes wrong results, then one of the other two: it goes on if both of the first pass."""
    engine = SmallProcesses(tmp_path, [(1, None, (), 0), (1, None, (), 0), (0, None, (), STEPS)])
    with Journal(tmp_path, lambda line: None) as journal:
        journal.write("hosts", slots=SLOTS, num_hosts=2)
        journal.write("opened", config="c.json")
        for number, hosts in enumerate((["z", "b"], ["c", "a"]), 1):
            said = {"kind": "corrupt_one_of", "hosts": hosts, "step": number, "text": "one is wrong", "incident": None}
            journal.write("planned", attempt=number, slots=dict.fromkeys(hosts, 1), launch_id=f"launch{number}")
            journal.write("started", pid=0, ticks=0)
            journal.write("ended", exit_code=73, diagnosis=said)
            if number == 1:
                journal.write("decided", action="replace hosts", text="one is wrong", replaced=hosts, pause_s=0.0)
    tests = SmallTests({"z": [0 if passes else 73], "b": [0], "c": [0], "a": [0]})
    code = supervise(tmp_path, engine, tests=tests, limits=RestartLimits(pause_s=0.01))
    if passes:
        assert code == 0 and [one.split()[1] for one in engine.started] == ["z,b"]
    else:
        assert code == 73 and not engine.started, "one host is left, and two are needed"
    assert "b" in _history_in(tmp_path).given_back


def test_a_host_that_repeats_wrong_results_is_never_given_back() -> None:
    """A test is short, and the evidence is not: the same wrong result of the same step."""
    assert not may_return("corrupt_again", 0, RestartLimits(returns=9)) and may_return(
        "corrupt_one_of", 0, RestartLimits()
    )
    assert not may_return("host_lost", 1, RestartLimits()) and not may_return("host_lost", 0, RestartLimits(returns=0))


@pytest.mark.slow
def test_spares_are_tested_while_they_wait(tmp_path: Path) -> None:
    """One that fails is never used; one that cannot be reached may come back; those of the attempt are left alone."""
    ends = [(1, None, (), 1), (1, None, (), 2), (78, None, ("z",), 3), (78, None, ("b",), 4), (0, None, (), STEPS)]
    engine = SmallProcesses(tmp_path, ends)
    tests = SmallTests({"c": [73], "a": [78, 0], "z": [0]})
    limits = RestartLimits(pause_s=0.01, returns=1, retest_s=0.05, spare_test_s=60.0)
    assert supervise(tmp_path, engine, tests=tests, limits=limits) == 0
    assert [one.split()[1] for one in engine.started] == ["z,b", "z,b", "z,b", "b,a", "a,z"]
    history = _history_in(tmp_path)
    assert {host: one.text for host, one in history.replaced.items() if one.kind is None} == {"c": "as a spare: said"}
    told = [text.partition(": ")[2] for some in engine.alerts.values() for text in some if "was tested" in text]
    assert told[:2] == [
        "c was tested: said; it is not used as a spare; to do: drain c, test with `megasdc stress`, return what passes",
        "a was tested: said; it is not used as a spare; to do: look at a; it is tested again",
    ]
    assert "a was tested: said; it is a spare again" in told and len(engine.alerts) >= 5
    assert tests.started[:2] == ["c", "a"] and tests.started.count("c") == 1


@pytest.mark.slow
def test_what_hosts_did_is_in_the_ledger(tmp_path: Path) -> None:
    """Each attempt and each test once, with the host that was the cause, if one was."""
    ledger = HostReliabilityLog(tmp_path / "ledger.jsonl")
    engine = SmallProcesses(tmp_path, [(78, None, ("b",), 1), (1, None, (), 2), (0, None, (), STEPS)])
    tests = SmallTests({"b": [73]})
    limits = RestartLimits(pause_s=0.01, returns=1)
    assert supervise(tmp_path, engine, tests=tests, limits=limits, ledger=ledger) == 0
    uses = ledger.read()
    assert [(one.hosts, one.failed) for one in uses if len(one.hosts) == 2][:2] == [
        (("z", "b"), "b"),
        (("z", "c"), None),
    ]
    assert {one.hosts[0]: one.failed for one in uses if len(one.hosts) == 1} == {"b": "b"}
    assert all(0 < one.hours < 0.01 for one in uses if len(one.hosts) == 2)


@pytest.mark.slow
def test_a_job_without_enough_hosts_is_left_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """Hosts of two diagnoses are away; the next job has other ones, and attempts go on from their number."""
    ends = [(78, None, ("b",), 10), (78, None, ("c",), 20), (0, None, (), STEPS)]
    engine, first = SmallProcesses(tmp_path, ends), SmallJob("7.0", "abc")
    assert supervise(tmp_path, engine, allocation=first) == 0 and first.away == [["b", "c"]]
    assert _history_in(tmp_path).exit_code is None, "the run is not finished"
    assert supervise(tmp_path, engine, allocation=SmallJob("7.1", "ad")) == 0
    assert [one.split()[1] for one in engine.started] == ["a,b", "a,c", "a,d"]
    history = _history_in(tmp_path)
    assert history.exit_code == 0 and history.attempt is not None and history.attempt.job == "7.1"


@pytest.mark.slow
def test_a_job_that_is_about_to_end_is_left_after_the_attempt(tmp_path: Path) -> None:
    """Whatever it is doing then, also in a pause; the attempt is asked to save, and nothing is started any more."""
    for kind in ("started", "decided"):
        folder = tmp_path / kind
        folder.mkdir()
        engine, ending = SmallProcesses(folder, [(1, None, (), 9)] * 2), SmallJob("7.0", "ab")

        def warn(journal: Journal, written: bool, kind: str = kind, ending: SmallJob = ending) -> None:
            if written and journal.entries[-1].kind == kind and journal.entries[-1].number > 5:
                ending.is_ending = True

        assert supervise(folder, engine, warn, limits=RestartLimits(pause_s=1000), allocation=ending) == 0
        assert engine.stopped == (kind == "started") and ending.away == [[]]
        assert _history_in(folder).stage == "left" and _history_in(folder).exit_code is None


def test_an_attempt_of_a_job_that_has_ended_is_over(tmp_path: Path) -> None:
    """Its supervisor was killed with its job, before and after it wrote down the start: the next one starts anew."""
    for number, kind in enumerate(("planned", "started"), 1):
        folder = tmp_path / kind
        folder.mkdir()
        engine = SmallProcesses(folder, [(None, None, (), 5), (0, None, (), STEPS)])

        def kill(journal: Journal, written: bool, kind: str = kind) -> None:
            if written and journal.entries[-1].kind == kind:
                raise Killed

        with contextlib.suppress(Killed):
            supervise(folder, engine, kill, allocation=SmallJob(f"{number}.0", "ab"))
        assert supervise(folder, engine, allocation=SmallJob(f"{number}.1", "bc")) == 0
        with Journal(folder, lambda line: None) as journal:
            (first, second) = [one.fields["slots"] for one in journal.entries if one.kind == "planned"]
        assert (list(first), list(second)) == (["a", "b"], ["b", "c"])
        assert not _history_in(folder).replaced


def test_a_job_that_cannot_be_left_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    """Exit code 78; the same where the next job has too few hosts from its start."""
    ends = [(78, None, ("b",), 10), (0, None, (), STEPS)]
    engine = SmallProcesses(tmp_path, ends)
    assert supervise(tmp_path, engine, allocation=SmallJob("7.0", "ab", "it was cancelled")) == 78
    entry = json.loads((tmp_path / "journal.jsonl").read_text().splitlines()[-1])
    assert entry["fields"] == {"exit_code": 78, "text": "it was cancelled"}
    (tmp_path / "again").mkdir()
    engine = SmallProcesses(tmp_path / "again", ends)
    for job in ("8.0", "8.1"):
        code = supervise(tmp_path / "again", engine, allocation=SmallJob(job, "ab"))
    assert code == 78 and len(engine.started) == 1
    text = json.loads((tmp_path / "again" / "journal.jsonl").read_text().splitlines()[-1])["fields"]["text"]
    assert text == "2 hosts are needed, and 1 of job 8.1 are left"


@pytest.mark.slow
def test_a_spare_is_looked_at_before_it_is_taken(tmp_path: Path) -> None:
    """One that is unfit is passed over, and is a spare again once it has passed its test."""
    ends = [(78, None, ("b",), 1), (78, None, ("a",), 2), (0, None, (), STEPS)]
    engine, tests = SmallProcesses(tmp_path, ends), SmallTests({"c": [0], "b": [73]}, unfit={"c": 71})
    limits = RestartLimits(pause_s=0.01, retest_s=0.0)  # due at the first turn, however fast that comes
    assert supervise(tmp_path, engine, tests=tests, limits=limits) == 0
    assert [one.split()[1] for one in engine.started] == ["z,b", "z,a", "z,c"]
    assert tests.looked == ["c", "a", "c"]


@pytest.mark.slow
def test_the_run_waits_while_a_host_has_a_test_to_come(tmp_path: Path) -> None:
    """Of two hosts one computes wrong results; the spare, which cannot be tested, is tested again until it can."""
    engine = SmallProcesses(tmp_path, [(1, None, (), 0), (0, None, (), STEPS)])
    hosts = {"z": 1, "b": 1, "c": 1}
    with Journal(tmp_path, lambda line: None) as journal:
        journal.write("hosts", slots=hosts, num_hosts=2)
        journal.write("opened", config="c.json")
        said = {"kind": "corrupt_again", "hosts": ["b"], "step": 3, "text": "b is wrong", "incident": None}
        journal.write("planned", attempt=1, slots={"z": 1, "b": 1}, launch_id="launch1")
        journal.write("started", pid=0, ticks=0)
        journal.write("tested", host="c", exit_code=71, text="c: no data")
        journal.write("ended", exit_code=73, diagnosis=said)
    tests, limits = SmallTests({"c": [77, 71, 0]}), RestartLimits(pause_s=0.01, retest_s=0.3)
    assert supervise(tmp_path, engine, tests=tests, limits=limits, allocation=Allocation("hosts", hosts)) == 0
    assert [one.split()[1] for one in engine.started] == ["z,c"] and tests.started == ["c"] * 3


@pytest.mark.slow
def test_a_run_without_hosts_and_room_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that cannot tell what it finds is no test to come; the exit code is that of a full folder."""
    engine, stop = SmallProcesses(tmp_path, []), Event()

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Journal(tmp_path, lambda line: None) as journal:
        journal.write("hosts", slots={"z": 1, "b": 1}, num_hosts=2)
        journal.write("opened", config="c.json")
        journal.write("tested", host="b", exit_code=71, text="b: no data")
        monkeypatch.setattr(durable, "probe", full)
        monkeypatch.setattr(durable._process, "limit_s", 1.0)
        Timer(6.0, stop.set).start()
        hosts, limits = Allocation("hosts", {"z": 1, "b": 1}), RestartLimits(pause_s=0.01, retest_s=3600.0)
        supervisor = Supervisor(journal, engine, SmallTests(), limits, hosts, stop, lambda line: None)
        with pytest.raises(StorageError, match="has had no room for") as caught:
            supervisor.run()
    assert caught.value.no_room and not engine.started
    durable._process.since.clear()


def test_a_run_whose_folder_is_full_again_and_again_ends(tmp_path: Path) -> None:
    """Each attempt has waited for as long as it may; the third went on from where the second did."""

    class Full(SmallProcesses):
        def evidence(self, attempt: Attempt, waiting: Mapping[str, int], stops: Callable[[], bool]) -> AttemptEvidence:
            trained = AttemptProgress(min(attempt.number, 2) * 10, 0.0, 40, 1.0)
            return replace(super().evidence(attempt, waiting, stops), without_room=True, trained=trained)

    engine = Full(tmp_path, [(77, None, (), 40 + number) for number in range(8)], seconds=0.1)
    assert supervise(tmp_path, engine) == 77 and len(engine.started) == 3


@pytest.mark.parametrize(("num_hosts", "skips"), [(2, True), (1, False)])
def test_without_another_host_the_run_goes_on_without_snapshots(tmp_path: Path, num_hosts: int, skips: bool) -> None:
    """From the attempt on that follows; with a spare all is as it was."""
    engine = SmallProcesses(tmp_path, [(1, None, (), 0), (1, None, (), 4), (0, None, (), STEPS)])
    hosts, tests = {"b": 1, "z": 1, "s": 1}, SmallTests()
    with Journal(tmp_path, lambda line: None) as journal:
        journal.write("hosts", slots=hosts, num_hosts=num_hosts)
        journal.write("opened", config="c.json")
        journal.write("tested", host="s", exit_code=70, text="no room")
        said = {"kind": "no_room", "hosts": ["b"], "step": 3, "text": "no room", "incident": None}
        journal.write("planned", attempt=1, slots=dict.fromkeys(list(hosts)[:num_hosts], 1), launch_id="launch1")
        journal.write("started", pid=0, ticks=0)
        journal.write("ended", exit_code=70, diagnosis=said)
    limits = replace(LIMITS, returns=1, retest_s=0.0)
    assert supervise(tmp_path, engine, allocation=Allocation("hosts", hosts), tests=tests, limits=limits) == 0
    with Journal(tmp_path, lambda line: None) as journal:
        planned = [one.fields for one in journal.entries if one.kind == "planned"][1:]
    go_on = ["megasdc.checkpoint.memory.without_room=go_on"] if skips else []
    assert tests.overrides["s"] == go_on, "a spare without room is tested again, and can be used then"
    assert [one["skips_snapshots"] for one in planned] == [skips] * 2
    assert list(planned[0]["slots"]) == (["b", "z"] if skips else ["z"])
    attempt = _history_in(tmp_path).attempt
    assert attempt is not None
    assert overrides_of(attempt, []) == go_on


@pytest.mark.parametrize("last", [0, 5])
def test_an_attempt_that_is_stopped_before_its_first_step_leaves_memory(tmp_path: Path, last: int) -> None:
    """It has saved nothing, and hosts may hold what no disk has; after steps all is on the disk."""

    class Stopped(SmallProcesses):
        def evidence(self, attempt: Attempt, waiting: Mapping[str, int], stops: Callable[[], bool]) -> AttemptEvidence:
            return replace(super().evidence(attempt, waiting, stops), asked="SIGTERM", last=last)

    engine = Stopped(tmp_path, [(0, None, (), 5)])
    assert supervise(tmp_path, engine) == 0
    assert engine.released == ([*SLOTS] if last else [])


class _Killed(BaseException):
    """As SIGKILL, nothing is done after it."""


@pytest.mark.parametrize("kind", ["decided", "finished"])
def test_a_supervisor_that_is_killed_at_a_decision_has_its_hosts_released_nevertheless(
    tmp_path: Path, kind: str
) -> None:
    """By the next one, if it comes to it."""
    engine, kills = SmallProcesses(tmp_path, [(78, None, ("b",), 10), (0, None, (), STEPS)]), [kind]

    def kill(journal: Journal, written: bool) -> None:
        if written and [journal.entries[-1].kind] == kills:
            kills.clear()
            raise _Killed

    with pytest.raises(_Killed):
        supervise(tmp_path, engine, on_write=kill)
    assert supervise(tmp_path, engine) == 0
    assert engine.released == ["b", *SLOTS]


def test_a_lost_host_that_is_asked_for_its_memory_holds_up_no_start(tmp_path: Path) -> None:
    """It gives no answer for seconds: the next attempt is begun meanwhile, and all ends after it has been given up."""
    seen: list[int] = []

    class Slow(SmallProcesses):
        def release(self, hosts: Sequence[str]) -> None:
            end = time.monotonic() + 10
            while list(hosts) == ["b"] and len(self.started) < 2 and time.monotonic() < end:
                time.sleep(0.01)
            seen.append(len(self.started))
            super().release(hosts)

    engine = Slow(tmp_path, [(78, None, ("b",), 10), (0, None, (), STEPS)])
    assert supervise(tmp_path, engine) == 0
    assert (engine.released, seen) == (["b", *SLOTS], [2, 2])
