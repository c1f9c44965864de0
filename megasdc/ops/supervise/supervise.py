"""The loop of a supervisor: each turn adds one entry to the journal, from the last one that is there.

Killed at any point, the next supervisor reads the journal and makes the turn that is due: a start that was planned is
looked for before it is made, an attempt that runs is taken over, a decision that was made is followed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from threading import Event, Thread

from megasdc.common.durable import RoomProbe
from megasdc.common.errors import LaunchError, StorageError
from megasdc.ops.launch.launch_verdict import lines_of
from megasdc.ops.launch.plan import new_launch_id
from megasdc.ops.supervise.allocation import Allocation
from megasdc.ops.supervise.diagnosis import KINDS, MENDABLE, SIGNALS, diagnose
from megasdc.ops.supervise.history import ENDED, GROWING, TESTED, Attempt, JournalHistory
from megasdc.ops.supervise.host_reliability_log import HOUR_S, HostReliabilityLog, HostUsage
from megasdc.ops.supervise.host_tests import HostTest, Tests
from megasdc.ops.supervise.journal import Journal
from megasdc.ops.supervise.launch_backend import Engine
from megasdc.ops.supervise.met import by_entry, entry_name, with_journal
from megasdc.ops.supervise.policy import Action, Decision, RestartLimits, decide, may_return

POLL_S = 0.2
LOOK_S = 3.0
"""Seconds between two looks whether an attempt has left a replica out."""

Say = Callable[[str], None]


class Supervisor:
    """Runs attempts until the run is done, or a person is needed.

    Args:
        journal: of the run, with its first entry at least.
        allocation: of the hosts; where it is ending, ``stop`` is set too.
        stop: set where the run is to be stopped; from a signal handler too.
        say: receives what happens, a line each.
        ledger: of the cluster; None: nothing is kept over runs.
    """

    def __init__(
        self,
        journal: Journal,
        engine: Engine,
        tests: Tests,
        limits: RestartLimits,
        allocation: Allocation,
        stop: Event,
        say: Say,
        ledger: HostReliabilityLog | None = None,
    ) -> None:
        self._journal, self._engine, self._tests, self._limits = journal, engine, tests, limits
        self._allocation, self._stop, self._say, self._ledger = allocation, stop, say, ledger
        self._has_left = False
        self._process = self._asked = ENDED
        self._look_at, self._num_alerted = 0.0, 0
        self._releasing, self._released = Thread(), frozenset[str]()
        self._room = RoomProbe(journal.path.parent, say)
        self._history = JournalHistory.of(journal.entries)

    def run(self) -> int:
        """Run to the end, or until the allocation was left for another one; returns the exit code.

        Raises:
            LaunchError: the scheduler does not answer.
            StorageError: the journal cannot be written.
        """
        turns = {
            "opened": self._plan,
            "planned": self._start,
            "started": self._wait,
            "ended": self._decide,
            "decided": self._follow,
            "left": self._leave,
        }
        try:
            self._alert()
            while self._history.exit_code is None and not self._has_left:
                turns[self._history.stage]()
        except StorageError:
            self._end_without_journal()
            raise
        finally:
            self._tests.close()
            self._close_ledger()
        return 0 if self._history.exit_code is None else self._history.exit_code

    def _end_without_journal(self) -> None:
        """Let what runs save and end where that is asked for and nothing can be written down any more.

        The next supervisor finds out how it has ended.
        """
        if not self._stop.is_set() or not self._engine.lives(self._process):
            return
        self._request_stop()
        while self._engine.lives(self._process):
            self._show()
            time.sleep(POLL_S)
        self._show()

    def _request_stop(self) -> None:
        """Request that what runs saves and ends, once."""
        if self._asked != self._process:
            self._asked = self._process
            self._say("the run is asked to save and end")
            self._engine.stop(self._process)

    def _show(self) -> None:
        if self._history.attempt is not None:
            self._engine.print_output(self._history.attempt)

    def _write(self, kind: str, **fields: object) -> None:
        self._history.add(self._journal.write(kind, **fields))

    def _plan(self) -> None:
        history = self._history
        number = 1 if history.attempt is None else history.attempt.number + 1
        self._check_new_hosts()
        self._wait_for_hosts(lambda: self._are_lacking and not self._allocation.can_be_left)
        are_lacking = self._are_lacking
        text = f"{min(history.sizes)} hosts are needed, and {len(history.chosen)} of {self._allocation.name} are left"
        is_new = history.stage == "left"
        if self._stop.is_set() and not self._allocation.is_ending:
            self._finish_on_request()
        elif self._allocation.is_ending or (are_lacking and self._allocation.can_be_left and not is_new):
            text = f"{self._allocation.name} is about to end" if self._allocation.is_ending else text
            self._write("left", job=self._allocation.job, away=list(history.replaced), text=text)
        elif are_lacking:
            self._finish(LaunchError.exit_code, text)
        else:
            self._write(
                "planned",
                attempt=number,
                slots=history.chosen,
                launch_id=new_launch_id(),
                job=self._allocation.job,
                at_most=history.at_most,
                skip=history.skip,
                skips_snapshots=history.skips_snapshots,
            )

    def _wait_for_hosts(self, are_lacking: Callable[[], bool]) -> None:
        """Wait as long as hosts are lacking and one that is tested may help, or until the run is to stop.

        Raises:
            StorageError: the run folder has had no room for too long, and without it no test can tell what it finds.
        """
        waits = False
        while are_lacking() and self._test_hosts():
            if not waits:
                waits = True
                hosts, when = ", ".join(self._history.replaced), f"every {self._limits.retest_s:g} s"
                self._say(f"there are too few hosts: the run waits until one passes its test, {when}: {hosts}")
            self._room.need()
            if self._stop.wait(POLL_S):
                return

    @property
    def _are_lacking(self) -> bool:
        return len(self._history.chosen) < min(self._history.sizes)

    def _check_new_hosts(self) -> None:
        """Check hosts that the next attempt takes instead of others; those that are not fit are not used."""
        history = self._history
        while history.attempt is not None and not self._stop.is_set():
            new = {host: count for host, count in history.chosen.items() if host not in history.attempt.slots}
            unfit = self._tests.check(new, history.chosen, self._stop.is_set) if new else []
            if not unfit:
                return
            for test in unfit:
                self._record_test(test)

    def _record_test(self, test: HostTest) -> None:
        """Write down how the test of a host has ended."""
        again = "; it is a spare again" if test.passed and test.host in self._history.replaced else ""
        failed = None if test.passed or not test.is_conclusive else test.host
        self._add_use(HostUsage(f"test {new_launch_id()}", time.time(), 0.0, (test.host,), failed, test.text))
        self._write(TESTED, **asdict(test))
        self._say(f"{test.host} was tested: {test.text}{again}")
        self._alert()

    def _leave(self) -> None:
        if self._history.left != self._allocation.job:
            self._plan()
            return
        away = list(self._history.replaced)
        without = f", without {', '.join(away)}" if away else ""
        self._say(f"the run goes on in another allocation{without}")
        if problem := self._allocation.requeue(away):
            self._finish(LaunchError.exit_code, problem)
        else:
            self._has_left = True

    def _start(self) -> None:
        attempt = self._history.attempt
        assert attempt is not None, "it is planned"
        if attempt.job != self._allocation.job:  # of a supervisor that has ended with its job, as all that it started
            process = ENDED
        elif self._engine.was_started(attempt):  # by a supervisor that was killed before it wrote that down
            process = self._engine.find_process(attempt)
        else:
            fewer = len(attempt.hosts) < self._history.num_hosts
            of_all = f", {len(attempt.hosts)} of {self._history.num_hosts} hosts" if fewer else ""
            self._say(f"attempt {attempt.number} on {', '.join(attempt.hosts)}{of_all}")
            if self._released & set(attempt.hosts):  # else a late one would take the memory of this attempt
                self._wait_for_release()
            process = self._engine.start(attempt, self._journal.check_owned)
        self._process = process
        self._write("started", pid=process.pid, ticks=process.ticks)

    def _wait(self) -> None:
        attempt = self._history.attempt
        assert attempt is not None and attempt.process is not None, "it is started"
        self._process = ENDED if attempt.job != self._allocation.job else attempt.process
        while self._runs(attempt):
            self._engine.print_output(attempt)
            if self._stop.is_set() or self._grows(attempt):
                self._request_stop()
            self._test_hosts()
            time.sleep(POLL_S)
        self._engine.print_output(attempt)
        waiting = {host: self._history.slots[host] for host in self._history.waiting}
        evidence = self._engine.evidence(self._history.attempt or attempt, waiting, self._stop.is_set)
        if evidence.by_time:
            self._say("an incident does not name its launch, as of an earlier version; its host's date was believed")
        diagnosis = diagnose(evidence)
        named = f": {', '.join(diagnosis.hosts)}" if diagnosis.hosts else ""
        self._say(f"attempt {attempt.number} ended at step {diagnosis.step}: {KINDS[diagnosis.kind].title}{named}")
        hours = (self._history.now - self._history.attempt_at) / HOUR_S
        is_mendable = diagnosis.kind in MENDABLE  # what a host lacks says nothing of its hardware
        failed = diagnosis.hosts[0] if len(diagnosis.hosts) == 1 and not is_mendable else None
        self._add_use(HostUsage(attempt.launch_id, time.time(), hours, attempt.hosts, failed, diagnosis.text))
        trained = None if evidence.trained is None else asdict(evidence.trained)
        said = asdict(diagnosis)
        self._write("ended", exit_code=evidence.exit_code, diagnosis=said, trained=trained, last=evidence.last)

    def _grows(self, attempt: Attempt) -> bool:
        """Whether an attempt is to end, so that the next one has more hosts; the first time that is written down."""
        history = self._history
        if history.attempt == attempt and (text := self._why_more(attempt)):
            self._write(GROWING)
            self._say(text)
        return history.attempt is not None and history.attempt.grows

    def _why_more(self, attempt: Attempt) -> str:
        """Why the next attempt would have more hosts, or other ones for those that were left out; empty: it would not.

        Without a spare a run goes on without its replica.
        """
        history = self._history
        if history.size > len(attempt.hosts):
            return f"{history.size} of {history.num_hosts} hosts can be used again"
        if not history.waiting or time.monotonic() < self._look_at:
            return ""
        self._look_at = time.monotonic() + LOOK_S
        wrong = self._engine.left_out(attempt)
        return f"a spare can be used instead of {', '.join(wrong)}, whose replica is left out" if wrong else ""

    def _decide(self) -> None:
        history = self._history

        def decided() -> Decision:
            return decide(history.failures, self._num_others, self._limits, history.went_back)

        self._wait_for_hosts(lambda: decided().lacking)
        decision = decided()
        self._say(f"{decision.action.value}: {decision.text}")
        self._write("decided", **{**asdict(decision), "action": decision.action.value})

    def _follow(self) -> None:
        history, decision = self._history, self._history.decision
        assert decision is not None, "it is made"
        self._alert()
        self._release(decision.replaced)  # here, so that also a supervisor does it that was started meanwhile
        if decision.action in (Action.FINISH, Action.STOP):
            self._finish(self._last_code, decision.text)
            return
        passed_s = history.now - history.decided_at  # also that of an earlier supervisor
        end = time.monotonic() + decision.pause_s - passed_s
        while not self._stop.is_set() and (left_s := end - time.monotonic()) > 0:
            self._test_hosts()
            self._stop.wait(min(POLL_S, left_s))
        self._plan()

    def _release(self, hosts: Sequence[str]) -> None:
        """Release hosts beside what follows: one that cannot be reached is given up after ten seconds."""
        self._wait_for_release()
        if hosts:
            self._released = frozenset(hosts)
            self._releasing = Thread(target=self._engine.release, args=(hosts,), name="release", daemon=True)
            self._releasing.start()

    def _wait_for_release(self) -> None:
        if self._released:
            self._releasing.join()
            self._released = frozenset()

    def _finish_on_request(self) -> None:
        """Finish before another start: as the attempt before has ended, if there was one, else as a front does."""
        history = self._history
        if not history.failures or history.decision is None:
            self._finish(SIGNALS + signal.SIGTERM, "stopped on request before a start")
            return
        text = f"stopped on request, after an attempt that ended so: {history.decision.text}"
        self._finish(self._last_code, text)

    @property
    def _last_code(self) -> int:
        """Exit code of the last attempt."""
        code = self._history.failures[-1].exit_code
        return LaunchError.exit_code if code is None else code

    def _alert(self) -> None:
        """Alert of what the journal tells of hosts and steps back since the last attempt was planned; of each once.

        Also of what a supervisor has written down that was killed before it could.
        """
        entries = self._journal.entries
        last = max((place for place, entry in enumerate(entries) if entry.kind == "planned"), default=0)
        for entry, some in list(by_entry(entries))[max(last, self._num_alerted) :]:
            if some and (problem := self._engine.alert(entry_name(entry, some), some)):
                self._say(problem)
        self._num_alerted = len(entries)

    @property
    def _num_others(self) -> int:
        """Hosts that could be used instead of others, or done without; and those of another allocation."""
        history = self._history
        return history.num_dispensable + (history.num_hosts if self._allocation.can_be_left else 0)

    def _runs(self, attempt: Attempt) -> bool:
        if attempt.process is None or attempt.job != self._allocation.job:
            return False
        return self._engine.lives(attempt.process)

    def _test_hosts(self) -> bool:
        """Go on with tests of hosts that wait or were replaced.

        Returns:
            Whether a test of one that was replaced has just ended, is under way, or is still to come.
        """
        history, limits = self._history, self._limits
        run = history.chosen if history.attempt is None else history.attempt.slots
        now = None if history.attempt is None else replace(history.attempt, skips_snapshots=history.skips_snapshots)
        overrides = () if now is None else self._engine.overrides(now)
        ended, to_come = self._tests.pop_ended(), False
        for test in ended:
            self._record_test(test)
        for host, one in history.replaced.items():
            is_due = one.test is None or (not one.test.is_conclusive and history.now - one.tested_at >= limits.retest_s)
            worth = host in history.slots and may_return(one.kind, history.given_back.get(host, 0), limits)
            to_come |= worth and (one.test is None or not one.test.is_conclusive)
            if is_due and worth and not self._tests.runs(host):
                self._tests.start(host, history.slots[host], run, overrides)
        for host in history.waiting if limits.spare_test_s else ():
            is_due = history.now - history.passed_at.get(host, 0.0) >= limits.spare_test_s
            if is_due and not self._tests.runs(host):
                self._tests.start(host, history.slots[host], run, overrides)
        return bool(ended) or to_come

    def _add_use(self, use: HostUsage) -> None:
        """Add a use of hosts to the ledger; where that fails, or there is no room, the run goes on."""
        if self._ledger is None:
            return
        try:
            if self._ledger.add(use) == 1:
                self._say(f"the ledger {self._ledger.path} cannot be written now: what hosts did is kept meanwhile")
        except StorageError as error:
            self._say(str(error))

    def _close_ledger(self) -> None:
        try:
            if self._ledger is not None:
                self._ledger.close()
        except StorageError as error:
            self._say(str(error))

    def _finish(self, code: int, text: str) -> None:
        self._say(f"finished with exit code {code}: {text}")
        for line in lines_of(with_journal(self._journal.path.parents[1], self._journal.entries)):
            self._say(line)
        last = self._history.failures[-1] if self._history.failures else None
        has_trained = last is None or last.last != 0 or last.diagnosis.kind == "done"
        # Else a person may go on from memory, which may have what no disk has; before it is written down, after which
        # nobody does it.
        self._wait_for_release()
        if code == 0 and has_trained:
            self._engine.release(list(self._history.slots))
        self._write("finished", exit_code=code, text=text)
