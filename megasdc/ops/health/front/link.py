"""The agent's connection to the front of its launch, which hears of all hosts and judges a standstill."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from megasdc.common.wire import MessageChannel, connect
from megasdc.ops.health.front.address import ANSWER_S, FrontAddress, Hello
from megasdc.ops.health.front.clocks import ClockMeasurement, ClockReading
from megasdc.ops.health.shared_folder_heartbeat import LOST_S, OwnState

RETRY_S = 10.0


class CoordinatorClient:
    """Tells the front where this host is, and hears what it decides; connects again where that breaks.

    Args:
        address: of the front.
        hello: who this agent is.
    """

    def __init__(self, address: FrontAddress, hello: Hello) -> None:
        self._address, self._hello = address, hello
        self._messages: MessageChannel | None = None
        self._try_at, self._heard_at = 0.0, -LOST_S
        self._told: OwnState | None = None
        self._answer: dict[str, Any] = {}
        self._clocks = ClockMeasurement()
        self.own = OwnState()

    @property
    def judges(self) -> bool:
        """Whether the front knows all hosts of this run, so that it decides what happens."""
        return bool(self._answer.get("judges")) and time.monotonic() - self._heard_at < LOST_S

    @property
    def leave(self) -> dict[str, Any] | None:
        """With which code and message the ranks must leave; None: they may go on."""
        leave = self._answer.get("leave")
        return leave if self.judges and isinstance(leave, dict) else None

    @property
    def clock(self) -> dict[str, Any] | None:
        """How the clocks of this host differ from those of the front; None: not measured yet."""
        return self._clocks.clock

    def exchange(self) -> None:
        """Send this host's state, and receive the answer; may wait for the network.

        Raises:
            OSError: it cannot be reached; it is tried again after some seconds.
        """
        if self._messages is None and time.monotonic() < self._try_at:
            return
        try:
            if self._messages is None:
                self._messages, self._told = self._connect(), None
            self._send_state(self._messages)
        except OSError:
            self.close()
            self._try_at = time.monotonic() + RETRY_S
            raise

    def _connect(self) -> MessageChannel:
        front = self._address
        return MessageChannel(
            connect(front.address, front.port, bytes.fromhex(front.secret), asdict(self._hello), ANSWER_S)
        )

    def _send_state(self, messages: MessageChannel) -> None:
        own = self.own
        message: dict[str, Any] = {"ended": own.ended, "stuck": own.report is not None, "problem": own.problem}
        if own.unwatched:
            message["unwatched"] = True
        if self._told is None or own.report != self._told.report:
            message["report"] = own.report
        if (clock := self._clocks.clock) is not None:
            message["clock"] = clock
        sent = ClockReading.now()
        messages.send(message, ANSWER_S)
        self._answer = messages.receive(ANSWER_S)
        self._clocks.add_exchange(sent, self._answer, ClockReading.now())
        self._told, self._heard_at = own, time.monotonic()

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._messages is not None:
            self._messages.close()
            self._messages = None
