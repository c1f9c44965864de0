"""Processes of a host and the connections to many hosts: tasks go to processes, their answers come back.

The caller's end (``HostLinks``) sends tasks over one connection per host. It opens no port, and every wait has a
timeout: a host that dies, hangs or is unreachable is recorded as lost, and the others continue.

The end on a host (``HostWorkers``) is an agent that starts its processes, forwards tasks to them and their answers
back. It is started as ``python -m megasdc.ops.stress.host SLOTS``, over SSH or directly. When its standard input is
closed, it kills all processes, so that none remain after the caller or the connection is gone. No torch.

Between them, and between an agent and its processes, messages travel as everywhere (``megasdc.common.wire``).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megasdc.ops.launch.environment import forwarded_environment
from megasdc.ops.launch.host_process import Channel, HostProcess, exchange
from megasdc.ops.launch.remote import HostModule, Transport
from megasdc.parallel.local_ranks import base_environment

TAIL_CHARACTERS = 2000


class HostWorkers:
    """The processes of this host.

    Args:
        slots: devices to test; 0: all accelerators, or 1 where there is none.
        caller: from which tasks come.
    """

    def __init__(self, slots: int, caller: Channel) -> None:
        devices = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else len(list(Path("/dev").glob("nvidia[0-9]*")))
        slots = slots or max(1, devices)
        self._caller = caller
        self._running = dict(enumerate(map(_start, range(slots if devices else max(2, slots)))))
        caller.send({"started": socket.gethostname(), "slots": slots, "processes": len(self._running)})

    def serve(self) -> None:
        """Forward tasks and answers until the caller has gone."""
        running = dict(self._running)
        while self._caller.is_open:
            exchange([self._caller, *running.values()], None)
            for task in self._caller.received():
                self._running[task["slot"]].send(task)
            for number, process in list(running.items()):
                for answer in process.received():
                    self._caller.send({"slot": number, **answer})
                if not process.is_open:
                    del running[number]
                    self._caller.send({"slot": number, "ended": process.end(GRACE_S), "tail": _tail(process)})

    def close(self) -> None:
        """Kills all processes."""
        for process in self._running.values():
            process.kill()


def _start(number: int) -> HostProcess:
    environment = {**base_environment(1), "LOCAL_RANK": str(number)}
    return HostProcess([sys.executable, "-m", "megasdc.ops.stress.worker", str(number)], environment)


def _tail(process: HostProcess) -> str:
    """The end of what a process that has ended has printed, or why its message was refused."""
    return " | ".join(process.errors[-TAIL_CHARACTERS:].splitlines()[-3:] + [process.problem] * bool(process.problem))


UNREACHABLE, DIED, HUNG, FAILED = "unreachable", "died", "hung", "failed"
GRACE_S = 5.0
"""Seconds for a host's connection to end by itself before it is killed."""
WorkerId = tuple[str, int]
"""Host, and number of a process on it."""


@dataclass(frozen=True)
class LostHost:
    """Why a host no longer answers: ``UNREACHABLE``, ``DIED``, ``HUNG`` or ``FAILED``, and a detail for display."""

    how: str
    detail: str


class HostLinks:
    """Connections to hosts; ``slots``: number of devices by host, 0: all that it has; ``timeout_s`` is of a task."""

    def __init__(self, slots: Mapping[str, int], transport: Transport, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.lost: dict[str, LostHost] = {}
        self.processes: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self._transport = transport
        self._answers: deque[tuple[str, dict[str, Any]]] = deque()
        self._tasks, self._hosts = 0, list(slots)
        self._running: dict[str, HostProcess] = {}
        for host, number in slots.items():
            self._connect(host, number)

    def start(self) -> None:
        """Waits until every host has started its processes, or is lost."""
        deadline = time.monotonic() + self.timeout_s
        while waiting := set(self._hosts) - set(self.processes) - set(self.lost):
            self._next_message(deadline, waiting)

    @property
    def alive(self) -> list[str]:
        """Hosts that are not lost, in order."""
        return [host for host in self._hosts if host not in self.lost]

    def places(self, hosts: Sequence[str], every: bool = False) -> list[WorkerId]:
        """Processes of hosts: those that test a device, or with ``every`` also those that only join collectives."""
        numbers = self.processes if every else self.slots
        return [(host, number) for host in hosts for number in range(numbers[host])]

    def run_tasks(self, tasks: Mapping[WorkerId, Mapping[str, Any]]) -> dict[WorkerId, dict[str, Any]]:
        """Sends tasks, each ``do`` and its arguments, to hosts that are alive, and waits for the answers.

        Returns by place ``{"ok": ...}`` or ``{"error": text}``; without those of hosts that were lost meanwhile.
        """
        waiting: dict[int, WorkerId] = {}
        for place, task in tasks.items():
            self._tasks += 1
            waiting[self._tasks] = place
            if place[0] not in self.lost:
                self._running[place[0]].send({**task, "slot": place[1], "id": self._tasks})
        answers: dict[WorkerId, dict[str, Any]] = {}
        deadline = time.monotonic() + self.timeout_s
        while waiting := {number: place for number, place in waiting.items() if place[0] not in self.lost}:
            message = self._next_message(deadline, {host for host, _ in waiting.values()})
            if message.get("id") in waiting:
                answers[waiting.pop(message["id"])] = message
        return {place: answer for place, answer in answers.items() if place[0] not in self.lost}

    def mark_lost(self, host: str, why: str) -> None:
        """Records a host as lost that reported why it cannot continue."""
        self._lose(host, FAILED, why)

    def close(self) -> None:
        """Closes all connections; the hosts then kill their processes."""
        for process in self._running.values():
            process.finish()
        for process in self._running.values():
            process.end(GRACE_S)

    def _connect(self, host: str, slots: int) -> None:
        module = HostModule("megasdc.ops.stress.host", [str(slots)])
        if self._transport.remote:
            environment = forwarded_environment(os.environ, set())
            module = replace(module, environment=environment, python_path=_python_path())
        try:
            self._running[host] = self._transport.start(host, module.argv)
        except OSError as error:
            self._lose(host, UNREACHABLE, self._transport.not_started(error))

    def _next_message(self, deadline: float, waiting: set[str]) -> dict[str, Any]:
        """The next message, after recording what it reports on its host; empty for lost hosts and on a timeout."""
        if not self._answers:
            running = {host: self._running[host] for host in self.alive}
            exchange(running.values(), max(0.01, deadline - time.monotonic()))
            for host, process in running.items():
                self._answers.extend((host, message) for message in process.received())
                if not process.is_open:
                    self._answers.append((host, {"closed": True}))
        if not self._answers:
            for one in waiting if time.monotonic() >= deadline else ():
                self._lose(one, HUNG, f"gave no answer in {self.timeout_s:g} s; see whether it hangs")
            return {}
        host, message = self._answers.popleft()
        if host in self.lost:
            return {}
        if "started" in message:
            self.processes[host], self.slots[host] = message["processes"], message["slots"]
        elif "ended" in message:
            self._lose(host, DIED, f"process {message['slot']} ended with code {message['ended']}; {message['tail']}")
        elif "closed" in message:
            self._lose_closed(host)
        return message if host not in self.lost else {}

    def _lose(self, host: str, how: str, detail: str) -> None:
        if host not in self.lost:
            self.lost[host] = LostHost(how, detail)
            if host in self._running:
                self._running[host].end(GRACE_S)

    def _lose_closed(self, host: str) -> None:
        """Records a host as lost from which nothing more comes."""
        process = self._running[host]
        why = self._transport.why_ended(host, process).removeprefix(f"{host}: ")
        how = DIED if host in self.processes else UNREACHABLE
        self._lose(host, FAILED if process.problem else how, why)


def _python_path() -> list[str]:
    """Folders of PYTHONPATH, with this package's parent folder, absolute, in front."""
    import megasdc

    own = str(Path(megasdc.__file__).resolve().parents[1])
    return [own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def main() -> None:
    """Serves until the caller has gone."""
    host = HostWorkers(int(sys.argv[1]), Channel(sys.stdin.buffer, sys.stdout.buffer))
    try:
        host.serve()
    finally:
        host.close()


if __name__ == "__main__":
    main()
