"""Connection between the agents of hosts and the front of their launch: JSON lines over TCP.

The front listens on one address and one port; agents connect. Both show with an HMAC (RFC 2104, SHA-256) over each
other's random numbers that they know the secret of the launch, which never travels on this connection. Then the agent
sends a message a second, and gets one back for each. Lines have a greatest length; nothing but JSON is read. What is
sent is neither secret nor encrypted: the network between a run's hosts is taken for one that nobody else writes on.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HANDSHAKE_S = 5.0
ANSWER_S = 5.0
HELLO_BYTES = 4 << 10
MESSAGE_BYTES = 8 << 20


class WireError(OSError):
    """The other side is not who it should be, or says what cannot be read."""


@dataclass(frozen=True)
class FrontAddress:
    """How agents reach the front of their launch.

    Args:
        launch_id: of the launch.
        secret: of the launch, hexadecimal; shown nowhere.
    """

    launch_id: str
    address: str
    port: int
    secret: str

    def __repr__(self) -> str:
        return f"FrontAddress({self.address}:{self.port})"


def front_path(health: Path, launch_id: str) -> Path:
    """File in which the front of a launch tells rank 0 where it is; readable by its user alone."""
    return health / f"front_{launch_id}.json"


_fronts: dict[str, FrontAddress] = {}
"""Fronts that this process knows, by launch: there is no file any more when its ranks begin again."""


def keep_front(front: FrontAddress) -> None:
    """Remember a front for when the ranks of its launch begin again in these processes."""
    _fronts[front.launch_id] = front


def take_front(health: Path, launch_id: str | None) -> FrontAddress | None:
    """The front of this launch, by its file in the run folder, which is then removed, or as kept; None: there is none.

    Args:
        health: folder of the run.
        launch_id: of this launch; None: without ``megasdc launch``.
    """
    if launch_id is None:
        return None
    if launch_id in _fronts:
        return _fronts[launch_id]
    path = front_path(health, launch_id)
    try:
        front = FrontAddress(**json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    except (OSError, ValueError, TypeError):
        return None
    return front


@dataclass(frozen=True)
class Hello:
    """Who an agent is: run, index and name of its host, number of hosts of the run."""

    run: str
    node: int
    host: str
    num_nodes: int


class Wire:
    """JSON lines over a connected socket.

    Args:
        connection: closed by ``close``.
    """

    def __init__(self, connection: socket.socket, secret: str) -> None:
        self._socket, self._secret = connection, bytes.fromhex(secret)
        self._file = connection.makefile("rb")
        connection.settimeout(HANDSHAKE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: object) -> None:
        """Send one message.

        Raises:
            WireError: it is too long.
            OSError: the connection is broken, or nothing is taken from it in time.
        """
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MESSAGE_BYTES:
            raise WireError(f"a message of {len(line)} bytes is too long, {MESSAGE_BYTES} are allowed")
        self._socket.sendall(line)

    def receive(self, timeout_s: float, limit: int = MESSAGE_BYTES) -> dict[str, Any]:
        """Receive one message.

        Raises:
            WireError: it is no JSON object, or too long.
            OSError: the connection is broken, or nothing comes in time.
        """
        self._socket.settimeout(timeout_s)
        line = self._file.readline(limit)
        if not line:
            raise ConnectionError("the other side has closed the connection")
        if not line.endswith(b"\n"):
            raise WireError(f"no line of at most {limit} bytes")
        try:
            found = json.loads(line)
        except ValueError as error:
            raise WireError(f"no JSON: {error}") from error
        if not isinstance(found, dict):
            raise WireError("no JSON object")
        return found

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()

    def greet_front(self, hello: Hello) -> None:
        """Agent's part of the beginning: say who it is, prove that it knows the secret, and let the front prove it.

        Raises:
            WireError: the front does not know the secret.
            OSError: no connection.
        """
        theirs, own = self._text(self.receive(HANDSHAKE_S, HELLO_BYTES), "number"), secrets.token_hex(16)
        text = json.dumps(asdict(hello))
        self.send({"number": own, "hello": text, "proof": self._proof("agent", theirs, own, text)})
        answer = self.receive(HANDSHAKE_S, HELLO_BYTES)
        if not hmac.compare_digest(self._text(answer, "proof"), self._proof("front", own, theirs, text)):
            raise WireError("who answers at the front's address does not know the secret of the launch")

    def greet_agent(self) -> Hello:
        """Front's part of the beginning; returns who the agent is.

        Raises:
            WireError: it does not know the secret, or speaks something else.
            OSError: the connection is broken, or nothing comes in time.
        """
        own = secrets.token_hex(16)
        self.send({"number": own})
        answer = self.receive(HANDSHAKE_S, HELLO_BYTES)
        theirs, text = self._text(answer, "number"), self._text(answer, "hello")
        if not hmac.compare_digest(self._text(answer, "proof"), self._proof("agent", own, theirs, text)):
            raise WireError("does not know the secret of the launch")
        try:
            hello = Hello(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise WireError(f"no greeting: {error}") from error
        self.send({"proof": self._proof("front", theirs, own, text)})
        return hello

    @staticmethod
    def _text(message: dict[str, Any], name: str) -> str:
        value = message.get(name)
        if not isinstance(value, str) or not value.isascii():
            raise WireError(f"a message without `{name}`")
        return value

    def _proof(self, *words: str) -> str:
        return hmac.new(self._secret, "\n".join(words).encode(), hashlib.sha256).hexdigest()
