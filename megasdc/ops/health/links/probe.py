"""Measurement of the link between two processes over a TCP connection of their own; no torch.

One side leads: it sends small messages that the other answers with its clock, then payloads that the other answers with
one byte, then takes payloads that the other times. Segments that were lost are the kernel's count for the connection,
on the side that sent them.
"""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

from megasdc.common.wire import BoundedExchange
from megasdc.ops.health.links.judgement import Direction, LinkFigures, lower_quartile
from megasdc.ops.health.links.tcp_info import sent

_CLOCK, _RESULT = struct.Struct("<d"), struct.Struct("<dII")


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


def lead(connection: socket.socket, plan: ProbePlan, first: str, second: str, limit_s: float) -> LinkFigures:
    """Measure the link to the peer, which calls ``follow`` at the same time.

    Args:
        first: name of this host.
        second: name of the peer's.
        limit_s: seconds within which all must be done.

    Raises:
        OSError: the peer has gone, or it was not done in time.
    """
    exchange, payload = BoundedExchange(connection, limit_s), bytes(plan.payload_bytes)
    scratch = memoryview(bytearray(plan.payload_bytes))
    before = sent(connection)
    exchange.send(b"?")
    exchange.receive(1)  # the peer has come
    pings = [_ping(exchange) for _ in range(plan.pings)]
    forward = []
    for _ in range(plan.transfers + 1):
        forward.append(_transfer_s(exchange, payload))
        exchange.send(b">")
        exchange.fill(scratch)
        exchange.send(b"<")
    seconds, lost, segments = _RESULT.unpack(exchange.receive(_RESULT.size))
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
    exchange, payload = BoundedExchange(connection, limit_s), bytes(plan.payload_bytes)
    scratch = memoryview(bytearray(plan.payload_bytes))
    before = sent(connection)
    exchange.receive(1)
    exchange.send(b"!")
    for _ in range(plan.pings):
        exchange.receive(1)
        exchange.send(_CLOCK.pack(time.monotonic()))
    backward = []
    for _ in range(plan.transfers + 1):
        exchange.fill(scratch)
        exchange.send(b"<")
        exchange.receive(1)
        backward.append(_transfer_s(exchange, payload))
    own = sent(connection).since(before)
    exchange.send(_RESULT.pack(lower_quartile(backward[1:]), own.lost, own.segments))


def _ping(exchange: BoundedExchange) -> tuple[float, float]:
    """Round trip, and the peer's clock against the middle of it, both in seconds."""
    began = time.monotonic()
    exchange.send(b".")
    there = _CLOCK.unpack(exchange.receive(_CLOCK.size))[0]
    ended = time.monotonic()
    return ended - began, there - (began + ended) / 2


def _transfer_s(exchange: BoundedExchange, payload: bytes) -> float:
    """Seconds until the peer has a payload and answers."""
    began = time.monotonic()
    exchange.send(payload)
    exchange.receive(1)
    return time.monotonic() - began
