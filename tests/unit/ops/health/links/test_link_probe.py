"""The measurement itself, over real connections of this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megasdc.common.wire import SECRET_BYTES, Door, connect
from megasdc.ops.health.links.probe import ProbePlan, follow, lead

PLAN = ProbePlan(pings=5, transfers=3, payload_bytes=300_001)
TOKEN = bytes(range(SECRET_BYTES))
WHO = {"rank": 3}


@contextlib.contextmanager
def two_ends(answer: ProbePlan | None) -> Iterator[socket.socket]:
    """The leading end; the other one measures by ``answer``, or leaves at once."""
    with Door("127.0.0.1", TOKEN) as door:

        def other() -> None:
            hello, connection = door.accept(10.0)
            assert hello == WHO
            with connection:
                if answer is not None:
                    follow(connection, answer, 10.0)

        thread = threading.Thread(target=other)
        thread.start()
        with connect("127.0.0.1", door.port, TOKEN, WHO, 10.0) as connection:
            yield connection
        thread.join()


def test_a_link_is_measured_both_ways() -> None:
    """Times are positive, clocks of one machine agree, and the kernel counted segments each way."""
    with two_ends(PLAN) as connection:
        found = lead(connection, PLAN, "a", "b", 10.0)
    assert found.pair == ("a", "b") and 0 < found.rtt_s < 1 and abs(found.skew_s) < 1
    for way in found.ways().values():
        assert 0 < way.seconds < 1 and way.segments >= 4 * PLAN.payload_bytes // 65536 and way.resent == 0


def test_an_end_that_leaves_is_an_error() -> None:
    """Not a wait until the timeout."""
    with two_ends(None) as connection, pytest.raises(OSError):
        lead(connection, PLAN, "a", "b", 10.0)


@pytest.mark.slow
def test_a_measurement_ends_at_its_limit() -> None:
    """An answer that comes byte by byte, each in time, does not prolong it; nor does one that never comes."""
    for pause_s in (0.05, 60.0):
        here, there = _connected()
        done = threading.Event()

        def trickle(pause_s: float = pause_s, there: socket.socket = there, done: threading.Event = done) -> None:
            with contextlib.suppress(OSError):
                while not done.wait(pause_s):
                    there.sendall(b"!")

        thread = threading.Thread(target=trickle)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            lead(here, PLAN, "a", "b", 1.0)
        assert 0.9 < time.monotonic() - began < 30
        done.set()
        thread.join()
        here.close()
        there.close()


def test_idle_connections_are_kept_alive() -> None:
    """By the kernel, at both ends, more often than firewalls forget them, which they do after minutes."""
    for connection in _connected():
        with connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def _connected() -> tuple[socket.socket, socket.socket]:
    with Door("127.0.0.1", TOKEN) as door:
        here = connect("127.0.0.1", door.port, TOKEN, WHO, 10.0)
        return here, door.accept(10.0)[1]
