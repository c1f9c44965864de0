"""Supervision of a launch's ranks by its front, here and over SSH: failures, records, processes that still run."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megasdc.common.credentials import without_credentials
from megasdc.common.host import DISK_S, PAUSE_S
from megasdc.common.program import line_start
from megasdc.ops.launch import environment
from megasdc.ops.launch.hosts import without_user
from megasdc.ops.launch.on_host import files, running
from megasdc.ops.launch.plan import LaunchPlan
from megasdc.ops.launch.records import LaunchRecords, collect, parse_records, records_dir

GATHER_TIMEOUT_S = 30.0
ASK_HOSTS_S = 20.0
MAX_ASK_HOSTS_S = 320.0
LOOK_STOPPED_S = 3.0
DONE_S = 10.0
"""A launcher may take so long to end when all of its ranks have."""
# Added to limits: records of other hosts may appear shortly after the launcher's end.
STOP_GRACE_S = 35.0
KILLED_S = 10.0
"""What was killed has so long to end."""
WAIT_POLL_S = 0.5
TELL_S = 10.0


def print_front_message(line: str) -> None:
    """Print a message of the front to standard error; where its terminal has gone, nobody can be told."""
    with suppress(OSError):
        start = line_start(sys.stderr)
        print(f"{start}megasdc launch: {without_credentials(line)}", file=sys.stderr, flush=True)


@dataclass
class _StoppedProcess:
    """A process that a signal has stopped, or that waits for a disk (T or D), since when, and whether it was killed.

    What it was at a look that is older than ``PAUSE_S`` and the time that a look takes says nothing.
    """

    state: str
    since: float
    looked_at: float
    killed: bool = False

    @property
    def is_due(self) -> bool:
        """Whether it is killed at the next look."""
        return self.state == "T" or time.monotonic() - self.since >= DISK_S


class StoppedProcesses:
    """Ends processes of a launch that do not run, from outside, where others wait for them.

    A launcher or an agent that a signal has stopped (SIGSTOP) is woken first; whatever is still stopped at the next
    look, seconds later, is killed; so is one of them that waits for a disk at each look for ``DISK_S`` (swap death).
    What does not end though it was killed is given up.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self._stopped: dict[str, dict[int, _StoppedProcess]] = {}
        self._unseen: set[str] = set()
        self._looks_at = -math.inf
        self._looking: threading.Thread | None = None
        self.given_up: dict[str, set[int]] = {}
        """Processes that do not end though they were killed, by host."""

    def check(self, hosts: Sequence[str]) -> None:
        """Check some hosts, not more often than every ``LOOK_STOPPED_S``, in a thread."""
        is_looking = self._looking is not None and self._looking.is_alive()
        if hosts and not is_looking and time.monotonic() >= self._looks_at + LOOK_STOPPED_S:
            self._looks_at = time.monotonic()
            self._looking = threading.Thread(target=self._check_hosts, args=(hosts,), name="stopped", daemon=True)
            self._looking.start()

    def _check_hosts(self, hosts: Sequence[str]) -> None:
        program, transport = Path(running.__file__), self._plan.transport
        request: dict[str, object] = {"launch_id": self._plan.launch_id, "run_dir": str(self._plan.run_dir.resolve())}
        oldest = time.monotonic() - PAUSE_S - GATHER_TIMEOUT_S
        self._stopped = {
            host: {pid: one for pid, one in held.items() if one.looked_at >= oldest}
            for host, held in self._stopped.items()
        }
        due = {host: [pid for pid, one in self._stopped.get(host, {}).items() if one.is_due] for host in hosts}
        fresh = [host for host in hosts if not due[host]]
        for alike in (fresh, *([host] for host in hosts if due[host])):
            kill = due[alike[0]] if alike else []  # an id says nothing on another host
            asked = request | {"kill": kill}
            for answer in transport.run(alike, program, asked, timeout_s=GATHER_TIMEOUT_S) if alike else []:
                if answer.problem is None:
                    self._update_host(answer.host, dict(answer.value), kill)
                elif answer.host not in self._unseen:
                    self._unseen.add(answer.host)
                    print_front_message(
                        f"what does not run on {answer.host} cannot be ended from here: {answer.problem}"
                    )

    def _update_host(self, host: str, found: dict[int, str], kill: Sequence[int]) -> None:
        """Record what does not run on a host, of which some were killed just now, and report what is new."""
        before, now = self._stopped.get(host, {}), time.monotonic()
        held = {
            pid: replace(before[pid], looked_at=now)
            if pid in before and before[pid].state == state
            else _StoppedProcess(state, now, now)
            for pid, state in found.items()
        }
        given_up = self.given_up.setdefault(host, set())
        lost = [pid for pid, one in held.items() if one.killed and pid not in given_up]
        killed = [pid for pid in held if pid in kill and not held[pid].killed]
        stopped = [pid for pid, one in held.items() if one.state == "T" and pid not in before]
        for pid in killed:
            held[pid].killed = True
        given_up.update(lost)
        self._stopped[host] = held
        for what, pids in (
            ("stopped by a signal", stopped),
            ("killed since they did not run, stopped by a signal or waiting for a disk", killed),
            ("they were killed, do not end, and are given up", lost),
        ):
            if pids:
                print_front_message(f"{what}: {_list({host: pids})}")


class FailureWatch:
    """Checks periodically for a failed rank or host, and selects the signal to end the rest of the launch.

    Records that this host does not see (node-local run folders) are read over SSH in a background thread, so that a
    slow host does not block, every ``interval_s`` seconds, doubled while no host answers.

    What a signal has stopped is ended on hosts that others wait for: once something has failed, where all ranks are
    done and their launcher is not, and where an agent is silent for as long as no rank may stand still.

    Args:
        silent: seconds for which nothing was heard of the agents of hosts, by the names that these have for them.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        interval_s: float = ASK_HOSTS_S,
        silent: Callable[[], Mapping[str, float]] = lambda: {},
    ) -> None:
        self._plan, self._silent = plan, silent
        self._named = {without_user(host): host for host in plan.placement.hosts}
        """Hosts of the hostfile, by their names there, and those that ranks have for them."""
        self._stopped, self._all_done_at = StoppedProcesses(plan), math.inf
        self._interval_s = interval_s
        self._ask_at = time.monotonic() + interval_s
        self._asking: threading.Thread | None = None
        self._there: signal.Signals | None = None

    def __call__(self) -> signal.Signals | None:
        """Check the records here, and start reading those of other hosts when due."""
        records = collect(self._plan.run_dir, self._plan.launch_id)
        self._record_names(records)
        found = {self._there, _how_to_end(records)}
        self._stopped.check(self._awaited(records, has_failed=found != {None}))
        if signal.SIGINT in found:
            return signal.SIGINT
        waiting = self._asking is not None and self._asking.is_alive()
        if self._plan.transport.remote and not waiting and time.monotonic() >= self._ask_at:
            hosts = _hosts_without(self._plan, records.started)
            if hosts:
                self._asking = threading.Thread(target=self._read_hosts, args=(hosts,), daemon=True)
                self._asking.start()
        return next(filter(None, found), None)

    def _awaited(self, records: LaunchRecords, *, has_failed: bool) -> list[str]:
        """Hosts on which what is stopped is ended, since others wait for it."""
        hosts = self._plan.placement.hosts
        if has_failed:
            return hosts  # also where all ranks are done, since the launch waits for their launcher
        if len(records.done) == len(self._plan.placement.host_of_rank):
            self._all_done_at = min(self._all_done_at, time.monotonic())
            return hosts if time.monotonic() > self._all_done_at + DONE_S else []
        limit_s = max(self._plan.program.hang_floor_s, LOOK_STOPPED_S)
        long = [name for name, seconds in self._silent().items() if seconds > limit_s]
        return [self._named[name] for name in long if name in self._named]

    def _record_names(self, records: LaunchRecords) -> None:
        host_of_rank = self._plan.placement.host_of_rank
        for rank, one in records.started.items():
            if rank < len(host_of_rank):
                self._named[one.host] = host_of_rank[rank]

    def _read_hosts(self, hosts: list[str]) -> None:
        records = LaunchRecords()
        unreachable = _read_from(self._plan, hosts, records)
        self._record_names(records)
        self._there = _how_to_end(records) or self._there
        if len(unreachable) == len(hosts):
            self._interval_s = min(2 * self._interval_s, MAX_ASK_HOSTS_S)
        self._ask_at = time.monotonic() + self._interval_s


def _how_to_end(records: LaunchRecords) -> signal.Signals | None:
    """Signal for the other ranks: SIGINT if a rank failed, as they wait for it; SIGTERM, to save, if a launcher did."""
    done = records.done.values()
    if any(record.exit_code != 0 for record in done):
        return signal.SIGINT
    return signal.SIGTERM if records.failed_hosts or any(record.launcher_gone for record in done) else None


def _hosts_without(plan: LaunchPlan, seen: Collection[int]) -> list[str]:
    """Hosts with ranks that are not in ``seen``."""
    missing = {host for rank, host in enumerate(plan.placement.host_of_rank) if rank not in seen}
    return [host for host in plan.placement.hosts if host in missing]


def gather_records(plan: LaunchPlan) -> tuple[LaunchRecords, dict[str, str]]:
    """Read the records here, and over SSH those of node-local run folders; also return hosts' read errors."""
    records = collect(plan.run_dir, plan.launch_id)
    hosts = _hosts_without(plan, records.done)
    if not plan.transport.remote or not hosts:
        return records, {}
    return records, _read_from(plan, hosts, records)


def _read_from(plan: LaunchPlan, hosts: list[str], records: LaunchRecords) -> dict[str, str]:
    """Add the records of hosts to ``records``; return the problem of each host that gave none."""
    request = {"folder": str(records_dir(plan.run_dir, plan.launch_id))}
    unreachable = {}
    for answer in plan.transport.run(hosts, Path(files.__file__), request, timeout_s=GATHER_TIMEOUT_S):
        if answer.problem:
            unreachable[answer.host] = answer.problem
            continue
        found = parse_records(answer.value)
        records.started.update(found.started)
        records.done.update(found.done)
        records.failed_hosts.update(found.failed_hosts)
        records.ended.update(found.ended)
        records.unreadable.extend(found.unreadable)
    return unreachable


def wait_for_ranks(plan: LaunchPlan, unreachable: set[str]) -> bool:
    """Wait until no process of this launch is left; return whether there was one.

    If their launcher was killed, ranks save and end by themselves, and hold the port and the run folder until then.
    After the time that they have for that they are killed; those that even that does not end are given up.
    """
    started = time.monotonic()
    limit_s = environment.stop_grace_s(os.environ) + STOP_GRACE_S
    said_at, was_killed = -math.inf, False
    stopped = StoppedProcesses(plan)
    while running := _running(plan, unreachable, stopped.given_up):
        now = time.monotonic()
        if now - started > limit_s + KILLED_S:
            print_front_message(f"they were killed, do not end, and are given up: {_list(running)}")
            return True
        if now - started > limit_s and not was_killed:
            print_front_message(f"still running after {limit_s:g} s, and killed: {_list(running)}")
            was_killed = bool(_running(plan, unreachable, {}, kill=True))
        if now - said_at > TELL_S:
            said_at = now
            print_front_message(
                f"the launcher has ended, but not all processes that it started; waiting for {_list(running)}"
            )
        stopped.check([host for host in plan.placement.hosts if host not in unreachable])
        time.sleep(WAIT_POLL_S)
    return said_at > -math.inf


def _running(
    plan: LaunchPlan, unreachable: set[str], given_up: Mapping[str, Collection[int]], *, kill: bool = False
) -> dict[str, list[int]]:
    """Processes of this launch by host, which are killed if asked; without those that are given up, or out of reach."""
    hosts = [host for host in plan.placement.hosts if host not in unreachable]
    request = {"launch_id": plan.launch_id, "all": kill}
    if not plan.transport.remote:
        found, given_up = {"this host": running.answer(request)}, {"this host": set[int]().union(*given_up.values())}
    else:
        program = Path(running.__file__)
        answers = plan.transport.run(hosts, program, request, timeout_s=GATHER_TIMEOUT_S) if hosts else []
        found = {answer.host: answer.value for answer in answers if not answer.problem}
    left = {host: [pid for pid in pids if pid not in given_up.get(host, ())] for host, pids in found.items()}
    return {host: pids for host, pids in left.items() if pids}


def _list(running: dict[str, list[int]]) -> str:
    return "; ".join(f"{host}: process {', '.join(map(str, pids))}" for host, pids in running.items())
