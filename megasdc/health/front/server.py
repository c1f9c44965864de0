"""The front's side of health: hears the agents of all hosts, tells people, and judges a standstill.

Once all hosts of a run have connected, the front decides for them: when every host that still speaks is stuck, it
writes the incident and tells all to end their ranks. Each agent is answered with a few bytes, so that the front does
the same work per host however many there are. Until then, and without a front, agents judge by the run folder.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.health.alert import LIMIT_S, alert
from megasdc.health.board import LOST_S
from megasdc.health.front.clocks import CLOCKS_FILE, HostClocks, Reading
from megasdc.health.front.wire import FrontAddress, Hello, Wire, WireError
from megasdc.health.incident import Conclusion, conclude
from megasdc.moment import HostClock

MAX_UNKNOWN = 64
"""Connections at a time that have not shown yet that they know the secret."""
PUBLISH_S = 10.0 + LIMIT_S
"""Seconds for the file of an incident, and for the user's command."""
Say = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass
class HostState:
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


class Standstill:
    """What the front knows of the hosts of a launch, and what it decides; called from many threads.

    Args:
        health: folder of the run, where an incident is written.
        say: tells people.
        alert_command: gets an incident; see ``megasdc.health.alert``.

    An incident is written, and the command run, in a thread of its own: the disk may not answer.
    """

    def __init__(self, health: Path, say: Say, alert_command: Sequence[str] = ()) -> None:
        self._health, self._say, self._alert_command = health, say, alert_command
        self._publishing: threading.Thread | None = None
        self._lock = threading.Lock()
        self._run, self._num_nodes = "", 0
        self._hosts: dict[int, HostState] = {}
        self._conclusion: Conclusion | None = None
        self._clocks = HostClocks(health / CLOCKS_FILE, say)

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
            self._hosts[hello.node] = HostState(hello.host, time.monotonic())

    def hear(self, hello: Hello, message: Mapping[str, Any]) -> dict[str, Any]:
        """Take a host's message, and return the answer to it."""
        with self._lock:
            self._clocks.take(hello.host, message.get("clock"))
            if hello.run != self._run:
                return {"judges": False, "leave": None}
            host = self._hosts[hello.node]
            if host.silent:
                self._say(f"health: {host.host} is heard again")
            host.heard_at, host.silent = time.monotonic(), False
            host.stuck, host.ended = message.get("stuck") is True, message.get("ended") is True
            host.unwatched = message.get("unwatched") is True
            self._take_problem(host, message.get("problem"))
            if "report" in message:
                host.report = self._readable(host, message["report"])
            self._judge()
            leave = None if self._conclusion is None else self._conclusion.leave
            return {"judges": len(self._hosts) == self._num_nodes, "leave": leave}

    def _take_problem(self, host: HostState, problem: object) -> None:
        if isinstance(problem, str) and problem != host.problem:
            host.problem = problem
            self._say(f"health: {host.host}: {problem or 'its agent works again'}")

    def _readable(self, host: HostState, report: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The report; None: there is none, or it cannot be read, then the host counts as stuck without one."""
        if report is None:
            return None
        try:
            conclude(self._health, [host.host], [report], [])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._say(f"health: {host.host}: its report cannot be read: {error!r}")
            return None
        return report

    def look(self) -> None:
        """Tell of hosts that are heard no more, and judge again."""
        with self._lock:
            self._clocks.look()
            for host in self._hosts.values():
                if self._is_lost(host) and not host.silent:
                    host.silent = True
                    self._say(f"health: nothing is heard from {host.host} for {LOST_S:.0f} s")
            self._judge()

    def silent_s(self) -> dict[str, float]:
        """Seconds for which nothing was heard of hosts that are lost, by the names that their agents have for them.

        By no index: ranks that go on without a replica count their hosts anew.
        """
        with self._lock:
            now = time.monotonic()
            return {host.host: now - host.heard_at for host in self._hosts.values() if self._is_lost(host)}

    @staticmethod
    def _is_lost(host: HostState) -> bool:
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

    def _publish(self, conclusion: Conclusion) -> None:
        try:
            conclusion.write()
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


class FrontServer(socketserver.ThreadingTCPServer):
    """Listens for agents on one address, until ``close``.

    Args:
        launch_id: of the launch.
        address: to listen on; agents connect to it.
        health: folder of the run.
        say: tells people.
        alert_command: gets an incident.

    Raises:
        OSError: nothing can listen there.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024  # all hosts connect at once
    block_on_close = False

    def __init__(self, launch_id: str, address: str, health: Path, say: Say, alert_command: Sequence[str] = ()) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Agent)
        self.front = FrontAddress(launch_id, address, self.server_address[1], secrets.token_hex(32))
        self.standstill = Standstill(health, say, alert_command)
        self._unknown = threading.BoundedSemaphore(MAX_UNKNOWN)
        self._say, self._refused = say, 0
        self._thread = threading.Thread(target=self.serve_forever, name="health", daemon=True)
        self._thread.start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is room for another connection that has not shown who it is."""
        return self._unknown.acquire(blocking=False)

    def known(self) -> None:
        """A connection has shown who it is, or has ended without."""
        self._unknown.release()

    def refused(self, client: str, why: str) -> None:
        """Tell, once, of a connection that is not an agent's."""
        self._refused += 1
        if self._refused == 1:
            self._say(f"health: refused a connection from {client}: {why}; further ones are not told")

    def service_actions(self) -> None:
        """Look at the hosts; called about twice a second."""
        self.standstill.look()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection, which ends with it."""
        logger.warning("health: connection from %s failed", client_address, exc_info=True)

    def close(self) -> None:
        """Stop listening; waits for the user's command."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        self.standstill.close()


class _Agent(socketserver.BaseRequestHandler):
    """Connection of one agent."""

    server: FrontServer

    def handle(self) -> None:
        """Check who connects, then answer its messages until it leaves."""
        try:
            wire = Wire(self.request, self.server.front.secret)
            hello = wire.greet_agent()
        except (OSError, ValueError, RecursionError) as error:
            self.server.refused(self.client_address[0], str(error) or type(error).__name__)
            return
        finally:
            self.server.known()
        self.server.standstill.greet(hello)
        with contextlib.suppress(ConnectionError, TimeoutError, WireError):
            while True:
                answer = self.server.standstill.hear(hello, wire.receive(LOST_S))
                now = Reading.now()
                wire.send({**answer, "clock": [now.date, now.monotonic]})
