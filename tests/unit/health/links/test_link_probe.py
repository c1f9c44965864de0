"""The measurement itself, over real connections of this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from megasdc.health.links.probe import HELLO_BYTES, ProbePlan, accept, connect, follow, lead, listen

PLAN = ProbePlan(pings=5, transfers=3, payload_bytes=300_001)
TOKEN = bytes(range(HELLO_BYTES))


@contextlib.contextmanager
def two_ends(answer: ProbePlan | None) -> Iterator[socket.socket]:
    """The leading end; the other one measures by ``answer``, or leaves at once."""
    with listen("127.0.0.1") as server:

        def other() -> None:
            number, connection = accept(server, TOKEN, 10.0)
            assert number == 3
            with connection:
                if answer is not None:
                    follow(connection, answer, 10.0)

        thread = threading.Thread(target=other)
        thread.start()
        with connect("127.0.0.1", server.getsockname()[1], TOKEN, 3, 10.0) as connection:
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


def test_who_does_not_know_the_token_is_turned_away() -> None:
    """A stranger is disconnected, and the peer that comes after it is taken."""
    with listen("127.0.0.1") as server:
        port = server.getsockname()[1]
        stranger = connect("127.0.0.1", port, bytes(HELLO_BYTES), 1, 5.0)
        silent = socket.create_connection(("127.0.0.1", port))
        silent.close()
        peer = connect("127.0.0.1", port, TOKEN, 7, 5.0)
        number, connection = accept(server, TOKEN, 5.0)
        assert number == 7 and stranger.recv(1) == b""
        for one in (stranger, peer, connection):
            one.close()


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
    with listen("127.0.0.1") as server:
        here = connect("127.0.0.1", server.getsockname()[1], TOKEN, 3, 10.0)
        return here, accept(server, TOKEN, 10.0)[1]


def test_who_listens_on_an_address_is_not_reached_by_another() -> None:
    """A socket bound to one address takes nothing that comes to another of this host's."""
    with listen("127.0.0.1") as server, pytest.raises(OSError):
        connect("127.0.0.2", server.getsockname()[1], TOKEN, 3, 5.0)


def test_waiting_for_nobody_ends() -> None:
    """After the timeout, with an error."""
    began = time.monotonic()
    with listen("127.0.0.1") as server, pytest.raises(OSError):
        accept(server, TOKEN, 0.2)
    assert time.monotonic() - began < 60
