"""The front's side of health: hears the agents of all hosts, tells people, and judges a standstill.

Once all hosts of a run have connected, the front decides for them: when every host that still speaks is stuck, it
writes the incident and tells all to end their ranks. Each agent is answered with a few bytes, so that the front does
the same work per host however many there are. Until then, and without a front, agents judge by the run folder.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.common import durable
from megasdc.common.host import PAUSE_S
from megasdc.common.origin import HostClock
from megasdc.common.user_code import LIMIT_S, alert
from megasdc.common.wire import SECRET_BYTES, Door, MessageChannel, WireError
from megasdc.ops.health.front.address import ANSWER_S, FrontAddress, Hello
from megasdc.ops.health.front.clocks import CLOCKS_FILE, ClockReading, HostClocks
from megasdc.ops.health.incident import HangConclusion, conclude
from megasdc.ops.health.shared_folder_heartbeat import LOST_S

LOOK_S = 0.5
"""Seconds between two looks at the hosts."""
PUBLISH_S = 10.0 + durable.END_S + LIMIT_S
"""Seconds for the file of an incident, also where it waits for room, and for the user's command."""
Say = Callable[[str], None]


@dataclass
class AgentState:
    """A host as the front knows it, from its agent's last message.

    Args:
        heard_at: when that came, on the front's monotonic clock.
        problem: that its agent has; empty: none.
        unwatched: its agent has ended for good, its ranks have not.
    """

    host: str
    heard_at: float
    stuck: bool = False
    ended: bool = False
    report: Mapping[str, Any] | None = None
    silent: bool = False
    problem: str = ""
    unwatched: bool = False


class HangMonitor:
    """What the front knows of the hosts of a launch, and what it decides; called from many threads.

    Args:
        health: folder of the run, where an incident is written.
        say: tells people.
        alert_command: gets an incident; see ``megasdc.common.user_code``.

    An incident is written, and the command run, in a thread of its own: the disk may not answer.
    """

    def __init__(self, health: Path, say: Say, alert_command: Sequence[str] = ()) -> None:
        self._health, self._say, self._alert_command = health, say, alert_command
        self._publishing: threading.Thread | None = None
        self._lock = threading.Lock()
        self._run, self._num_nodes = "", 0
        self._hosts: dict[int, AgentState] = {}
        self._conclusion: HangConclusion | None = None
        self._clocks = HostClocks(health / CLOCKS_FILE, say)
        self._looked_at = time.monotonic()

    @property
    def clocks(self) -> dict[str, HostClock]:
        """Clocks of hosts against that of this one, by their boot, as far as agents have measured them."""
        with self._lock:
            return {one.boot_id: one for one in self._clocks.of_host.values()}

    @property
    def has_met_agents(self) -> bool:
        """Whether one has connected."""
        return bool(self._run)

    def greet(self, hello: Hello) -> None:
        """An agent has connected; a run that is started again begins from nothing."""
        with self._lock:
            if hello.run != self._run:
                self._run, self._num_nodes, self._hosts, self._conclusion = hello.run, hello.num_nodes, {}, None
            self._hosts[hello.node] = AgentState(hello.host, time.monotonic())

    def handle_message(self, hello: Hello, message: Mapping[str, Any]) -> dict[str, Any]:
        """Record a host's message, and return the answer to it."""
        with self._lock:
            self._after_pause()
            self._clocks.update(hello.host, message.get("clock"))
            if hello.run != self._run:
                return {"judges": False, "leave": None}
            host = self._hosts[hello.node]
            if host.silent:
                self._say(f"health: {host.host} is heard again")
            host.heard_at, host.silent = time.monotonic(), False
            host.stuck, host.ended = message.get("stuck") is True, message.get("ended") is True
            host.unwatched = message.get("unwatched") is True
            self._record_problem(host, message.get("problem"))
            if "report" in message:
                host.report = self._readable(host, message["report"])
            self._judge()
            leave = None if self._conclusion is None else self._conclusion.leave
            return {"judges": len(self._hosts) == self._num_nodes, "leave": leave}

    def _record_problem(self, host: AgentState, problem: object) -> None:
        if isinstance(problem, str) and problem != host.problem:
            host.problem = problem
            self._say(f"health: {host.host}: {problem or 'its agent works again'}")

    def _readable(self, host: AgentState, report: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The report; None: there is none, or it cannot be read, then the host counts as stuck without one."""
        if report is None:
            return None
        try:
            conclude(self._health, [host.host], [report], [])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._say(f"health: {host.host}: its report cannot be read: {error!r}")
            return None
        return report

    def check(self) -> None:
        """Report hosts without a sign of life, and judge again."""
        with self._lock:
            self._after_pause()
            self._looked_at = time.monotonic()
            self._clocks.check_own_date()
            for host in self._hosts.values():
                if self._is_lost(host) and not host.silent:
                    host.silent = True
                    self._say(f"health: nothing is heard from {host.host} for {LOST_S:.0f} s")
            self._judge()

    def _after_pause(self) -> None:
        """What was not heard while this process stood still, as where a signal has stopped it, does not count."""
        if (now := time.monotonic()) - self._looked_at > PAUSE_S:
            self._looked_at = now
            for host in self._hosts.values():
                host.heard_at = now

    def silent_s(self) -> dict[str, float]:
        """Seconds for which nothing was heard of hosts that are lost, by the names that their agents have for them.

        By no index: ranks that go on without a replica count their hosts anew.
        """
        with self._lock:
            self._after_pause()
            now = time.monotonic()
            return {host.host: now - host.heard_at for host in self._hosts.values() if self._is_lost(host)}

    @staticmethod
    def _is_lost(host: AgentState) -> bool:
        return not host.ended and not host.unwatched and time.monotonic() - host.heard_at > LOST_S

    def _judge(self) -> None:
        if self._conclusion is not None or len(self._hosts) < self._num_nodes:
            return
        speaking = [
            one for one in self._hosts.values() if not one.ended and not one.unwatched and not self._is_lost(one)
        ]
        reports = [one.report for one in self._hosts.values() if one.report is not None]
        if not speaking or not reports or not all(one.stuck for one in speaking):
            return
        lost = [one.host for one in self._hosts.values() if self._is_lost(one)]
        nodes = [self._hosts[node].host for node in sorted(self._hosts)]
        self._conclusion = conclude(self._health, nodes, reports, lost)
        self._say(f"health: {self._conclusion.leave['message']}")
        publish = threading.Thread(target=self._publish, args=(self._conclusion,), name="incident", daemon=True)
        self._publishing = publish
        publish.start()

    def _publish(self, conclusion: HangConclusion) -> None:
        try:
            durable.wait_for_room(conclusion.write, conclusion.path, self._say, at_most_s=durable.END_S)
        except OSError as error:
            self._say(f"health: the incident could not be written: {error}")
        if problem := alert(self._alert_command, conclusion.path, conclusion.text):
            self._say(f"health: {problem}")

    def close(self) -> None:
        """Wait until an incident is written and the user's command has ended, as long as that may take."""
        if self._publishing is not None:
            self._publishing.join(PUBLISH_S)
            if self._publishing.is_alive():
                self._say(f"health: the incident could not be written within {PUBLISH_S:.0f} s")


class Coordinator:
    """Listens for agents on one address, until ``close``.

    Args:
        launch_id: of the launch.
        address: to listen on; agents connect to it.
        health: folder of the run.
        say: tells people.
        alert_command: gets an incident.

    Raises:
        OSError: nothing can listen there, or there is no further thread.
    """

    def __init__(self, launch_id: str, address: str, health: Path, say: Say, alert_command: Sequence[str] = ()) -> None:
        secret = secrets.token_bytes(SECRET_BYTES)
        self.standstill = HangMonitor(health, say, alert_command)
        self._door = Door(address, secret, self._serve, lambda text: say(f"health: {text}"))
        self.front = FrontAddress(launch_id, address, self._door.port, secret.hex())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._check_periodically, name="health", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no further thread
            self._door.close()
            raise OSError(f"nothing can judge on {address}: {error}") from error

    def _check_periodically(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.standstill.check()

    def _serve(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        """Answer an agent's messages until it leaves."""
        agent, messages = Hello.read(hello), MessageChannel(connection)
        self.standstill.greet(agent)
        with contextlib.suppress(ConnectionError, TimeoutError, WireError):
            while True:
                answer = self.standstill.handle_message(agent, messages.receive(LOST_S))
                now = ClockReading.now()
                messages.send({**answer, "clock": [now.date, now.monotonic]}, ANSWER_S)

    def close(self) -> None:
        """Stop listening; waits for the user's command."""
        self._door.close()
        self._closed.set()
        self._thread.join()
        self.standstill.close()
