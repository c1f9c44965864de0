"""Measurement of the link between two processes over a TCP connection of their own; no torch.

One side leads: it sends small messages that the other answers with its clock, then payloads that the other answers with
one byte, then takes payloads that the other times. Segments that were sent again are the kernel's count for the
connection, on the side that sent them (``TCP_INFO``).
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from megasdc.health.links.judgement import Direction, LinkFigures, lower_quartile

HELLO_BYTES = 32
_CLOCK, _RESULT, _NUMBER = struct.Struct("<d"), struct.Struct("<dII"), struct.Struct("<I")
_RESENT_AT, _SEGMENTS_AT, _INFO_BYTES = 100, 156, 160
"""Offsets of ``tcpi_total_retrans`` and ``tcpi_data_segs_out`` in Linux's ``struct tcp_info`` (linux/tcp.h)."""
_CHUNK = 1 << 18
GONE = "the peer has closed the connection"


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


def listen() -> socket.socket:
    """A socket on a free port of this host, all addresses."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def connect(host: str, port: int, token: bytes, number: int, timeout_s: float) -> socket.socket:
    """Connect to a peer that listens, and say who it is.

    Args:
        token: ``HELLO_BYTES`` that only the two processes know.
        number: of the caller, which ``accept`` returns.

    Raises:
        OSError: it cannot be reached in time.
    """
    connection = socket.create_connection((host, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        connection.settimeout(max(0.01, min(5.0, deadline - time.monotonic())))
        try:
            hello = _take(connection, HELLO_BYTES + _NUMBER.size)
        except OSError:
            connection.close()
            continue
        if hmac.compare_digest(hello[:HELLO_BYTES], token):
            connection.settimeout(timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _NUMBER.unpack(hello[HELLO_BYTES:])[0], connection
        connection.close()


def lead(connection: socket.socket, plan: ProbePlan, first: str, second: str) -> LinkFigures:
    """Measure the link to the peer, which calls ``follow`` at the same time.

    Args:
        first: name of this host.
        second: name of the peer's.

    Raises:
        OSError: the peer has gone, or did not answer in time.
    """
    before, payload, scratch = _sent(connection), bytes(plan.payload_bytes), bytearray(_CHUNK)
    connection.sendall(b"?")
    _take(connection, 1)  # the peer has come
    pings = [_ping(connection) for _ in range(plan.pings)]
    forward = []
    for _ in range(plan.transfers + 1):
        forward.append(_timed(lambda: _give(connection, payload)))
        connection.sendall(b">")
        _receive(connection, plan.payload_bytes, scratch)
        connection.sendall(b"<")
    seconds, resent, segments = _RESULT.unpack(_take(connection, _RESULT.size))
    after = _sent(connection)
    return LinkFigures(
        first,
        second,
        rtt_s=lower_quartile(rtt for rtt, _ in pings),
        skew_s=min(pings)[1],
        payload_bytes=plan.payload_bytes,
        forward=Direction(lower_quartile(forward[1:]), after[1] - before[1], after[0] - before[0]),
        backward=Direction(seconds, segments, resent),
    )


def follow(connection: socket.socket, plan: ProbePlan) -> None:
    """Answer the peer, which calls ``lead`` with the same plan.

    Raises:
        OSError: the peer has gone, or did not answer in time.
    """
    before, payload, scratch = _sent(connection), bytes(plan.payload_bytes), bytearray(_CHUNK)
    _take(connection, 1)
    connection.sendall(b"!")
    for _ in range(plan.pings):
        _take(connection, 1)
        connection.sendall(_CLOCK.pack(time.monotonic()))
    backward = []
    for _ in range(plan.transfers + 1):
        _receive(connection, plan.payload_bytes, scratch)
        connection.sendall(b"<")
        _take(connection, 1)
        backward.append(_timed(lambda: _give(connection, payload)))
    after = _sent(connection)
    result = lower_quartile(backward[1:]), after[0] - before[0], after[1] - before[1]
    connection.sendall(_RESULT.pack(*result))


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Round trip, and the peer's clock against the middle of it, both in seconds."""
    began = time.monotonic()
    connection.sendall(b".")
    there = _CLOCK.unpack(_take(connection, _CLOCK.size))[0]
    ended = time.monotonic()
    return ended - began, there - (began + ended) / 2


def _give(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(payload)
    _take(connection, 1)


def _timed(action: Callable[[], None]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def _take(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, few; ``ConnectionError`` where the peer has closed."""
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise ConnectionError(GONE)
        content += part
    return content


def _receive(connection: socket.socket, size: int, scratch: bytearray) -> None:
    """So many bytes, which are not kept."""
    view = memoryview(scratch)
    while size:
        got = connection.recv_into(view[:size])
        if not got:
            raise ConnectionError(GONE)
        size -= got


def _sent(connection: socket.socket) -> tuple[int, int]:
    """Segments sent again, and segments with data, since the connection began."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return _NUMBER.unpack_from(info, _RESENT_AT)[0], _NUMBER.unpack_from(info, _SEGMENTS_AT)[0]
