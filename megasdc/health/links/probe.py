"""Measurement of the link between two processes over a TCP connection of their own; no torch.

One side leads: it sends small messages that the other answers with its clock, then payloads that the other answers with
one byte, then takes payloads that the other times. Segments that were lost are the kernel's count for the connection,
on the side that sent them.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from dataclasses import dataclass

from megasdc.health.links.judgement import Direction, LinkFigures, lower_quartile
from megasdc.health.links.tcp_info import sent

HELLO_BYTES = 32
_CLOCK, _RESULT, _NUMBER = struct.Struct("<d"), struct.Struct("<dII"), struct.Struct("<I")
_CHUNK = 1 << 18
GONE = "the peer has closed the connection"
KEEP_ALIVE_S, KEEP_INTERVAL_S = 30, 10
"""Idle seconds after which the kernel asks the peer for a sign of life, and between two: firewalls forget idle ones."""
BROKEN_S = 60
"""Seconds without an acknowledgement after which the kernel closes a connection."""


@dataclass(frozen=True)
class ProbePlan:
    """What is sent; the same on both sides.

    Args:
        pings: small messages.
        transfers: payloads each way that are timed, after one that opens TCP's window.
        payload_bytes: of a transfer.
    """

    pings: int
    transfers: int
    payload_bytes: int


def listen(address: str) -> socket.socket:
    """A socket on a free port of an address of this host.

    Raises:
        OSError: the address is none of this host's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def connect(host: str, port: int, token: bytes, number: int, timeout_s: float) -> socket.socket:
    """Connect to a peer that listens, and say who it is.

    Args:
        token: ``HELLO_BYTES`` that only the two processes know.
        number: of the caller, which ``accept`` returns.

    Raises:
        OSError: it cannot be reached in time.
    """
    connection = socket.create_connection((host, port), timeout_s)
    _set_options(connection)
    connection.sendall(token + _NUMBER.pack(number))
    return connection


def accept(server: socket.socket, token: bytes, timeout_s: float) -> tuple[int, socket.socket]:
    """Wait for a peer that knows the token; others are turned away. Returns the peer's number and the connection.

    Raises:
        OSError: nobody came in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = server.accept()
        limit_s = max(0.01, min(5.0, deadline - time.monotonic()))
        try:
            hello = _Exchange(connection, limit_s).take(HELLO_BYTES + _NUMBER.size)
        except OSError:
            connection.close()
            continue
        if hmac.compare_digest(hello[:HELLO_BYTES], token):
            _set_options(connection)
            return _NUMBER.unpack(hello[HELLO_BYTES:])[0], connection
        connection.close()


def lead(connection: socket.socket, plan: ProbePlan, first: str, second: str, limit_s: float) -> LinkFigures:
    """Measure the link to the peer, which calls ``follow`` at the same time.

    Args:
        first: name of this host.
        second: name of the peer's.
        limit_s: seconds within which all must be done.

    Raises:
        OSError: the peer has gone, or it was not done in time.
    """
    exchange, payload = _Exchange(connection, limit_s), bytes(plan.payload_bytes)
    before = sent(connection)
    exchange.send(b"?")
    exchange.take(1)  # the peer has come
    pings = [_ping(exchange) for _ in range(plan.pings)]
    forward = []
    for _ in range(plan.transfers + 1):
        forward.append(_transfer_s(exchange, payload))
        exchange.send(b">")
        exchange.discard(plan.payload_bytes)
        exchange.send(b"<")
    seconds, lost, segments = _RESULT.unpack(exchange.take(_RESULT.size))
    own = sent(connection).since(before)
    return LinkFigures(
        first,
        second,
        rtt_s=lower_quartile(rtt for rtt, _ in pings),
        skew_s=min(pings)[1],
        payload_bytes=plan.payload_bytes,
        forward=Direction(lower_quartile(forward[1:]), own.segments, own.lost),
        backward=Direction(seconds, segments, lost),
    )


def follow(connection: socket.socket, plan: ProbePlan, limit_s: float) -> None:
    """Answer the peer, which calls ``lead`` with the same plan.

    Args:
        limit_s: seconds within which all must be done.

    Raises:
        OSError: the peer has gone, or it was not done in time.
    """
    exchange, payload = _Exchange(connection, limit_s), bytes(plan.payload_bytes)
    before = sent(connection)
    exchange.take(1)
    exchange.send(b"!")
    for _ in range(plan.pings):
        exchange.take(1)
        exchange.send(_CLOCK.pack(time.monotonic()))
    backward = []
    for _ in range(plan.transfers + 1):
        exchange.discard(plan.payload_bytes)
        exchange.send(b"<")
        exchange.take(1)
        backward.append(_transfer_s(exchange, payload))
    own = sent(connection).since(before)
    exchange.send(_RESULT.pack(lower_quartile(backward[1:]), own.lost, own.segments))


class _Exchange:
    """Bytes over a connection, all of them within a limit: no wait for a part prolongs it.

    Raises:
        OSError: by each method, where the peer has closed the connection or the time is up.
    """

    def __init__(self, connection: socket.socket, limit_s: float) -> None:
        self._connection, self._limit_s = connection, limit_s
        self._ends_at = time.monotonic() + limit_s
        self._scratch = memoryview(bytearray(_CHUNK))

    def send(self, content: bytes) -> None:
        """Send all of it."""
        self._in_time().sendall(content)

    def take(self, size: int) -> bytes:
        """Exactly so many bytes, few."""
        content = b""
        while len(content) < size:
            part = self._in_time().recv(size - len(content))
            if not part:
                raise ConnectionError(GONE)
            content += part
        return content

    def discard(self, size: int) -> None:
        """So many bytes, which are not kept."""
        while size:
            got = self._in_time().recv_into(self._scratch[:size])
            if not got:
                raise ConnectionError(GONE)
            size -= got

    def _in_time(self) -> socket.socket:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"not done within {self._limit_s:g} s")
        self._connection.settimeout(left_s)
        return self._connection


def _ping(exchange: _Exchange) -> tuple[float, float]:
    """Round trip, and the peer's clock against the middle of it, both in seconds."""
    began = time.monotonic()
    exchange.send(b".")
    there = _CLOCK.unpack(exchange.take(_CLOCK.size))[0]
    ended = time.monotonic()
    return ended - began, there - (began + ended) / 2


def _transfer_s(exchange: _Exchange, payload: bytes) -> float:
    """Seconds until the peer has a payload and answers."""
    began = time.monotonic()
    exchange.send(payload)
    exchange.take(1)
    return time.monotonic() - began


def _set_options(connection: socket.socket) -> None:
    """No delay of small messages, and signs of life while nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, KEEP_ALIVE_S),
        (socket.TCP_KEEPINTVL, KEEP_INTERVAL_S),
        (socket.TCP_USER_TIMEOUT, 1000 * BROKEN_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
