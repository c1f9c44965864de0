"""Processes of a host and the connections to many hosts: tasks go to processes, their answers come back.

The caller's end (``HostLinks``) sends tasks over one connection per host, and answers arrive in one queue. It opens no
port, and every wait has a timeout: a host that dies, hangs or is unreachable is recorded as lost, and the others
continue.

The end on a host (``HostWorkers``) is an agent that starts its processes, forwards tasks to them and their answers
back. It is started as ``python -m megasdc.ops.stress.host SLOTS``, over SSH or directly. When its standard input is
closed, it kills all processes, so that none remain after the caller or the connection is gone. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megasdc.ops.launch.environment import forwarded_environment
from megasdc.ops.launch.remote import Transport
from megasdc.parallel.local_ranks import base_environment

MARK = "megasdc-stress:"
"""Prefix of each line of the protocol; a login shell may print other lines."""
TAIL_CHARACTERS = 2000


class HostWorkers:
    """The processes of this host; ``slots``: devices to test, 0: all accelerators, or 1 where there is none."""

    def __init__(self, slots: int) -> None:
        devices = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else len(list(Path("/dev").glob("nvidia[0-9]*")))
        self.slots = slots or max(1, devices)
        self.processes = self.slots if devices else max(2, self.slots)
        self._lock = threading.Lock()
        self._logs = [tempfile.TemporaryFile() for _ in range(self.processes)]  # noqa: SIM115 - as long as the host
        self._running = [self._start(number) for number in range(self.processes)]
        for number in range(self.processes):
            threading.Thread(target=self._listen, args=(number,), daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends one line to the caller."""
        with self._lock:
            sys.stdout.write(MARK + json.dumps(message) + "\n")
            sys.stdout.flush()

    def hand_on(self, line: str) -> None:
        """Forward a task to the process number ``slot`` of its line."""
        process = self._running[json.loads(line)["slot"]]
        assert process.stdin is not None, "it was given a pipe"
        with contextlib.suppress(OSError):  # it has ended, which its listener reports
            process.stdin.write(line.encode())
            process.stdin.flush()

    def close(self) -> None:
        """Kills all processes."""
        for process in self._running:
            process.kill()
            process.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        environment = {**base_environment(1), "LOCAL_RANK": str(number)}
        command = [sys.executable, "-m", "megasdc.ops.stress.worker", str(number)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._logs[number]}
        return subprocess.Popen(command, env=environment, **pipes)

    def _listen(self, number: int) -> None:
        process = self._running[number]
        assert process.stdout is not None, "it was given a pipe"
        for line in process.stdout:
            self.send({"slot": number, **json.loads(line)})
        code = process.wait()
        self.send({"slot": number, "ended": code, "tail": _tail(self._logs[number])})


def _tail(log: BinaryIO) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - TAIL_CHARACTERS))
    return " | ".join(log.read().decode(errors="replace").splitlines()[-3:])


UNREACHABLE, DIED, HUNG, FAILED = "unreachable", "died", "hung", "failed"
STDERR_BYTES = 4000
GRACE_S = 5.0
"""Seconds for a host's connection to end by itself before it is killed."""
Place = tuple[str, int]
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
        self._answers: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._tasks = 0
        self._errors = {host: tempfile.TemporaryFile() for host in slots}  # noqa: SIM115 - as long as the connection
        self._running = {host: self._connect(host, number) for host, number in slots.items()}
        for host in slots:
            threading.Thread(target=self._listen, args=(host,), daemon=True).start()

    def start(self) -> None:
        """Waits until every host has started its processes, or is lost."""
        deadline = time.monotonic() + self.timeout_s
        while waiting := set(self._running) - set(self.processes) - set(self.lost):
            self._next_message(deadline, waiting)

    @property
    def alive(self) -> list[str]:
        """Hosts that are not lost, in order."""
        return [host for host in self._running if host not in self.lost]

    def places(self, hosts: Sequence[str], every: bool = False) -> list[Place]:
        """Processes of hosts: those that test a device, or with ``every`` also those that only join collectives."""
        numbers = self.processes if every else self.slots
        return [(host, number) for host in hosts for number in range(numbers[host])]

    def run_tasks(self, tasks: Mapping[Place, Mapping[str, Any]]) -> dict[Place, dict[str, Any]]:
        """Sends tasks, each ``do`` and its arguments, to hosts that are alive, and waits for the answers.

        Returns by place ``{"ok": ...}`` or ``{"error": text}``; without those of hosts that were lost meanwhile.
        """
        waiting: dict[int, Place] = {}
        for place, task in tasks.items():
            self._tasks += 1
            waiting[self._tasks] = place
            self._send(place[0], {**task, "slot": place[1], "id": self._tasks})
        answers: dict[Place, dict[str, Any]] = {}
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
            _let_go(process)
        for process in self._running.values():
            _end(process)

    def _connect(self, host: str, slots: int) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "megasdc.ops.stress.host", str(slots)]
        if self._transport.remote:
            variables = {**forwarded_environment(os.environ, set()), "PYTHONPATH": _python_path()}
            argv = ["env", *(f"{name}={value}" for name, value in variables.items()), *argv]
        return subprocess.Popen(
            self._transport.command(host, argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors[host],
            start_new_session=True,  # Ctrl-C must reach this process alone, which then closes the connections in order
        )

    def _listen(self, host: str) -> None:
        stream = self._running[host].stdout
        assert stream is not None, "it was given a pipe"
        for line in stream:
            text = line.decode(errors="replace")
            if text.startswith(MARK):
                self._answers.put((host, json.loads(text.removeprefix(MARK))))
        self._answers.put((host, {"closed": True}))

    def _send(self, host: str, task: Mapping[str, Any]) -> None:
        stream = self._running[host].stdin
        assert stream is not None, "it was given a pipe"
        with contextlib.suppress(OSError):  # its listener reports that it is closed
            stream.write(json.dumps(task).encode() + b"\n")
            stream.flush()

    def _next_message(self, deadline: float, waiting: set[str]) -> dict[str, Any]:
        """The next message, after recording what it reports on its host; empty for lost hosts and on a timeout."""
        try:
            host, message = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            for one in waiting:
                self._lose(one, HUNG, f"gave no answer in {self.timeout_s:g} s; see whether it hangs")
            return {}
        if "started" in message:
            self.processes[host], self.slots[host] = message["processes"], message["slots"]
        elif "ended" in message:
            self._lose(host, DIED, f"process {message['slot']} ended with code {message['ended']}; {message['tail']}")
        elif "closed" in message:
            self._lose(host, DIED if host in self.processes else UNREACHABLE, self._why_closed(host))
        return message if host not in self.lost else {}

    def _lose(self, host: str, how: str, detail: str) -> None:
        if host not in self.lost:
            self.lost[host] = LostHost(how, detail)
            _end(self._running[host])

    def _why_closed(self, host: str) -> str:
        code = _end(self._running[host])
        errors = self._errors[host]
        errors.seek(0, os.SEEK_END)
        errors.seek(max(0, errors.tell() - STDERR_BYTES))
        text = self._transport.failure(host, code, errors.read().decode(errors="replace"))
        return text.removeprefix(f"{host}: ")


def _python_path() -> str:
    """PYTHONPATH with this package's parent folder, absolute, in front."""
    import megasdc

    own = str(Path(megasdc.__file__).resolve().parents[1])
    return os.pathsep.join([own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Closes a host's standard input, at which it ends."""
    assert process.stdin is not None, "it was given a pipe"
    with contextlib.suppress(OSError):  # the reader of unsent data is gone
        process.stdin.close()


def _end(process: subprocess.Popen[bytes]) -> int:
    """Closes a connection, kills it if it does not end within ``GRACE_S``, and returns its exit code."""
    _let_go(process)
    try:
        return process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main() -> None:
    """Serves until the caller has gone."""
    host = HostWorkers(int(sys.argv[1]))
    try:
        host.send({"started": socket.gethostname(), "slots": host.slots, "processes": host.processes})
        for line in sys.stdin:
            host.hand_on(line)
    finally:
        host.close()


if __name__ == "__main__":
    main()
