"""Where the replicas of a Local-SGD run meet: the server of their rounds, and a replica's connection to it.

The first rank of each replica keeps one connection (``megasdc.common.wire``), on which it asks, and waits for each
answer. What it asks is a JSON object with the name of a method of ``megasdc.localsgd.rounds.Meeting``.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from megasdc.common.errors import LaunchError
from megasdc.common.wire import Door, MessageChannel, WireError, connect, shut, split_address
from megasdc.localsgd.rounds import Doors, Meeting, NothingLeftError, ReplayError, Report
from megasdc.parallel.rendezvous import ROUNDS_VARIABLE

START_S = 600.0
"""Seconds after the first replica has joined until training begins without the others."""
EXCHANGE_S = 600.0
"""Seconds beyond the deadline of a round for which one that is done waits for another to fetch its weights."""
ANSWER_S = 10.0
WAITS_S = 5.0
"""Seconds after which a replica that waits for an answer shows that it is not stuck, again and again."""
CONNECT_S = 60.0
_LOOK_S = 0.1

logger = logging.getLogger(__name__)


class MeetingServer:
    """Serves a meeting to the first ranks of all replicas, each in a thread of its own, until ``close``.

    Args:
        address: address of this host on which it listens.
        secret: secret of the launch.
        start_s: seconds after the first replica has joined until training begins without the others.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        meeting: Meeting,
        replicas: int,
        address: str,
        secret: bytes,
        *,
        start_s: float = START_S,
    ) -> None:
        self._meeting, self._replicas = meeting, replicas
        self._start_s = start_s
        self._lines: dict[int, socket.socket] = {}
        """The newest connection of each replica."""
        self._changed = threading.Condition()
        self._loaded: dict[int, tuple[int, str]] = {}
        """What replicas have loaded that have joined before the first round; kept until training begins."""
        self._ended: set[int] = set()
        """Replicas that are done, and wait for the others; and whose processes have ended for good."""
        self._is_last = False
        self.has_begun = self.is_stopping = False
        """Whether training has begun, with all replicas that are waited for; and whether all are told to stop."""
        self.joined: set[int] = set()
        """Replicas that have been there."""
        self._failed: NothingLeftError | ReplayError | None = None
        self._is_over = False
        self._door = Door(address, secret, self._serve)
        self.address, self.port = self._door.address, self._door.port

    def stop(self) -> None:
        """Have no more rounds begin to be made: who waits for one stops where it is, and goes on there another time."""
        with self._changed:
            self.is_stopping = True
            self._changed.notify_all()

    def has_ended(self, replica: int) -> None:
        """Wait for a replica no longer: its process has ended for good."""
        with self._changed:
            self._ended.add(replica)
            self._meeting.end(replica)
            self._look()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop listening; connections end."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._door.close()

    def _serve(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        replica, channel = hello.get("replica"), MessageChannel(connection)
        if type(replica) is not int or not 0 <= replica < self._replicas:
            raise WireError(f"no replica of this run: {hello}")
        with self._changed:
            if (earlier := self._lines.get(replica)) is not None:  # of a process that has gone, as nobody has noticed
                shut(earlier)
                self._gone(replica)
            self._lines[replica] = connection
        try:
            while not self._is_over:
                message = channel.receive(float("inf"))
                with self._changed:
                    answer = self._answer(replica, message, connection)
                channel.send(answer, ANSWER_S)
        except OSError as error:
            logger.info("replica %d has left: %s", replica, error)
        finally:
            with self._changed:
                if self._lines.get(replica) is connection:
                    del self._lines[replica]
                    self._gone(replica)

    def _gone(self, replica: int) -> None:
        self._loaded.pop(replica, None)
        self._meeting.leave(replica)
        self._look()
        self._changed.notify_all()

    def _answer(self, replica: int, message: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        asked = {
            "join": self._join,
            "report": self._report,
            "have": self._have,
            "agree": self._agree,
            "newest": lambda replica, fields, connection: self._newest(replica),
            "done": self._done,
            "stop": self._stop_asked,
        }
        name, fields = str(message.pop("ask", "")), message
        if name not in asked:
            raise WireError(f"asked for {name!r}")
        return asked[name](replica, fields, connection)

    def _wait(self, connection: socket.socket, is_done: Callable[[], bool], at_most_s: float = float("inf")) -> None:
        """Wait until a condition holds, the time is up or the run has failed; OSError where the caller has gone."""
        ends_at = time.monotonic() + at_most_s
        while not (is_done() or self._failed or self._is_over or time.monotonic() >= ends_at):
            self._changed.wait(_LOOK_S)
            self._look()
            if select.select([connection], [], [], 0)[0] and not connection.recv(1, socket.MSG_PEEK):
                raise ConnectionError("its process has ended")
        if self._is_over and not is_done():
            raise ConnectionError("the meeting is over")

    def _look(self) -> None:
        """Let the meeting go on where it can, and wake who waits for that."""
        before = self._meeting.plan
        try:
            if not self.is_stopping or self._is_last:
                self._meeting.look()
        except (NothingLeftError, ReplayError) as error:
            self._failed = error
        if self._failed is not None or self._meeting.plan is not before:
            self._changed.notify_all()

    def _join(self, replica: int, fields: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        number, digest = int(fields["round"]), str(fields["digest"])
        doors = [(str(host), int(port)) for host, port in fields["doors"]]
        window, known = self._meeting.window, fields.get("threshold_s")
        if window is not None and window.threshold_s is None and known is not None:
            window.threshold_s = float(known)  # chosen at an earlier start
        if not self.has_begun:
            self._loaded[replica] = number, digest
            self._wait(connection, self._may_begin, self._start_s)
            if self.is_stopping:
                return {"stopping": True}
            if not self.has_begun:
                self._meeting.begin(self._loaded)
                self.has_begun = True
                self._changed.notify_all()
        self.joined.add(replica)
        goes_on = self._meeting.join(replica, number, digest, doors)
        self._look()
        return {"goes_on": goes_on, **self._newest(replica)}

    def _may_begin(self) -> bool:
        is_complete = len(self._loaded.keys() | self._ended) == self._replicas
        return self.has_begun or self.is_stopping or is_complete

    def _threshold(self) -> dict[str, Any]:
        """The chosen threshold, where there is one."""
        window = self._meeting.window
        return {} if window is None or window.threshold_s is None else {"threshold_s": window.threshold_s}

    def _newest(self, replica: int) -> dict[str, Any]:
        """The newest round, and where another replica's weights after it are."""
        meeting = self._meeting
        others = [one for one in meeting.there if one != replica and meeting.doors(one)]
        sources = [[one, meeting.doors(one)] for one in others]
        return {"round": meeting.round, "sources": sources, **self._threshold()}

    def _report(self, replica: int, fields: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        is_last, report = bool(fields.pop("is_last")), Report(**fields)
        meeting = self._meeting
        while meeting.round < report.round and self._failed is None:
            if meeting.report(replica, report):
                self._is_last = is_last
                self._look()
                self._wait(connection, lambda: self._is_made(report.round) or (self.is_stopping and not is_last))
                if not self._is_made(report.round):
                    return self._or_failed(replica, {"stopping": True})
                plan = meeting.plan
                if plan is not None and plan.round == report.round and replica in plan.members:
                    members = [[one, meeting.doors(one), of.tokens] for one, of in plan.members.items()]
                    return self._or_failed(replica, {"members": members, "deadline_s": meeting.deadline_s})
            elif meeting.plan is None:
                return {"left_out": "the others go on from an earlier round", **self._newest(replica)}
            self._wait(connection, lambda: meeting.plan is None)  # it is over, or given up, and begins anew
        made = meeting.made.get(report.round)
        wrong = {} if made is None else made.left_out
        told: dict[str, Any] = {"left_out": wrong.get(replica, "it was late"), "wrong": replica in wrong}
        if made is not None and replica in made.looks:
            told["look"] = asdict(made.looks[replica])
        return self._or_failed(replica, {**told, **self._newest(replica)})

    def _is_made(self, number: int) -> bool:
        """Whether the members of a round are fixed, or it is over."""
        return self._meeting.plan is not None or self._meeting.round >= number

    def _have(self, replica: int, fields: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        number, received = int(fields["round"]), set(map(int, fields["received"]))
        meeting = self._meeting
        meeting.have(replica, received)

        def is_closed() -> bool:
            meeting.close(now=False)
            return meeting.round >= number

        self._wait(connection, is_closed, float(fields["at_most_s"]))
        if self._failed is None and not is_closed():
            meeting.close(now=True)
        self._changed.notify_all()
        made = meeting.made.get(number)
        members = made.members if made is not None else ()
        if not members or not received.issuperset(members):
            told = {"left_out": "it could not fetch what the others have", **self._newest(replica)}
            return self._or_failed(replica, told)
        assert made is not None, "it has members"
        without = {"left_out": dict(made.left_out), "absent": list(made.absent)}
        return self._or_failed(replica, {"members": list(members), "without": without, **self._threshold()})

    def _agree(self, replica: int, fields: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        self._meeting.agree(replica, int(fields["round"]), str(fields["digest"]))
        return {}

    def _done(self, replica: int, fields: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        """Wait until all replicas that are connected are done: one that was late may need the weights of another."""
        self._ended.add(replica)
        self._changed.notify_all()
        everybody, at_most_s = self._ended.issuperset, self._meeting.deadline_s + EXCHANGE_S
        self._wait(connection, lambda: self.is_stopping or everybody(self._meeting.there), at_most_s)
        return {}

    def _stop_asked(self, replica: int, fields: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        self.is_stopping = True
        self._changed.notify_all()
        return {}

    def _or_failed(self, replica: int, answer: dict[str, Any]) -> dict[str, Any]:
        """The answer, or that no replica can be relied on, and why this one cannot."""
        failed = self._failed
        if failed is None:
            return answer
        if isinstance(failed, ReplayError):
            return {"failed": str(failed), "ended": True}
        look = failed.looks.get(replica)
        return {
            "failed": str(failed),
            "left_out": failed.wrong.get(replica),
            "look": None if look is None else asdict(look),
        }


class MeetingLine:
    """A replica's connection to the meeting, on its first rank.

    Args:
        replica: number of the replica.
        secret: secret of the launch.
        waits: called every ``WAITS_S`` seconds while it waits for an answer.

    Raises:
        LaunchError: nobody listens there who knows the secret.
    """

    def __init__(self, replica: int, secret: bytes, waits: Callable[[], None] = lambda: None) -> None:
        self._waits = waits
        address = os.environ.get(ROUNDS_VARIABLE, "")
        try:
            host, port = split_address(address)
            self._connection = connect(host, port, secret, {"replica": replica}, CONNECT_S)
            self._channel = MessageChannel(self._connection)
        except (OSError, ValueError) as error:
            raise LaunchError(
                f"replica {replica} does not reach the others' meeting at {address or 'no address'} (environment "
                f"variable {ROUNDS_VARIABLE}): {error}; start all replicas with megasdc launch --replicas"
            ) from error

    def close(self) -> None:
        """Leave the meeting."""
        self._channel.close()

    def ask(self, name: str, **fields: Any) -> dict[str, Any]:
        """Ask, and wait for the answer, as long as it takes; ``failed`` in it: the rounds have ended for all.

        Raises:
            LaunchError: the meeting has ended.
        """
        try:
            self._channel.send({"ask": name, **fields}, ANSWER_S)
            while not select.select([self._connection], [], [], WAITS_S)[0]:
                self._waits()
            answer = self._channel.receive(ANSWER_S)
        except OSError as error:
            raise LaunchError(f"the meeting of the replicas has ended: {error}") from error
        return answer

    def join(self, number: int, digest: str, doors: Doors, threshold_s: float | None = None) -> dict[str, Any]:
        """Say which weights this replica has; the answer says whether it goes on with them.

        Args:
            threshold_s: threshold that was chosen before; None: none was.
        """
        return self.ask("join", round=number, digest=digest, doors=list(doors), threshold_s=threshold_s)

    def report(self, report: Report, *, is_last: bool) -> dict[str, Any]:
        """Report the local steps of a round; the answer has its members, or why this replica is none.

        Or that all are told to stop, which does not keep the last round of a run from being made.
        """
        return self.ask("report", is_last=is_last, **asdict(report))

    def have(self, number: int, received: Sequence[int], at_most_s: float) -> dict[str, Any]:
        """Say whose weights all ranks of this replica have; the answer has those that the round is made of.

        Args:
            at_most_s: seconds after which it is made without members that have not said it.
        """
        return self.ask("have", round=number, received=list(received), at_most_s=at_most_s)

    def agree(self, number: int, digest: str) -> None:
        """Say what the weights after a round are."""
        self.ask("agree", round=number, digest=digest)
