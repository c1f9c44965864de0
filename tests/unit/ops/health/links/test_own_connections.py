"""What this process's own connections send is counted by the kernel, and looking at them changes nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from megasdc.ops.health.links.own_connections import MOST, SentToHosts, hosts_by_address, own_connections
from megasdc.ops.health.links.tcp_info import SentBytes, sent

Ends = tuple[socket.socket, socket.socket]


def connect(address: str = "127.0.0.1") -> Ends:
    """Both ends of a connection."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        return socket.create_connection(server.getsockname()[:2]), server.accept()[0]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Ends that do not wait, as gloo's."""
    here, there = connect()
    here.setblocking(False)
    yield here, there
    here.close()
    there.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def watch(*connections: socket.socket) -> SentToHosts:
    own = {one.fileno() for one in connections}
    found = [one for one in own_connections() if one.descriptor in own]
    return SentToHosts(found, {"127.0.0.1": "there", "::1": "there"})


def test_segments_with_data_are_counted(ends: Ends) -> None:
    """As many as were sent since the look before; the other direction's are not."""
    here, there = ends
    seen = watch(here)
    assert seen.pop_sent() == {"there": SentBytes(0, 0, 0)}
    for _ in range(3):
        here.sendall(b"one segment")
        there.recv(100)
    there.sendall(bytes(1000))
    assert seen.pop_sent() == {"there": SentBytes(3, 0, 0)} and seen.pop_sent() == {"there": SentBytes(0, 0, 0)}


def test_a_look_changes_nothing(ends: Ends) -> None:
    """The socket stays open and non-blocking, no descriptor is left open, and its owner's close is the last."""
    here, there = ends
    before = open_descriptors()
    seen = watch(here)
    seen.pop_sent()
    assert open_descriptors() == before and not here.getblocking()
    here.close()
    there.settimeout(5)
    assert there.recv(1) == b"", "nothing has kept it open"


def test_closed_and_reused_descriptors_are_forgotten(ends: Ends) -> None:
    """Another connection under the same number is not counted."""
    here, _ = ends
    seen = watch(here)
    other = connect()
    os.dup2(other[0].fileno(), here.fileno())
    other[0].sendall(b"x")
    assert seen.pop_sent() == {} and len(seen) == 0
    for one in other:
        one.close()


def test_of_many_connections_those_that_send_are_looked_at() -> None:
    """So that a look has a bound."""
    pairs = [connect() for _ in range(MOST + 10)]
    pairs[-1][0].sendall(b"x")
    seen = watch(*(one for one, _ in pairs))
    pairs[-1][0].sendall(b"x")
    assert len(seen) == MOST and seen.pop_sent() == {"there": SentBytes(1, 0, 0)}
    for ends in pairs:
        for one in ends:
            one.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_addresses_of_both_families_are_told_alike() -> None:
    """IPv6, and IPv4 over a socket of IPv6."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        mapped = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        accepted, _ = server.accept()
    six = connect("::1")
    found = {one.descriptor: one for one in own_connections()}
    assert found[accepted.fileno()].remote == found[accepted.fileno()].local == "127.0.0.1"
    assert found[six[0].fileno()].remote == "::1"
    for one in (mapped, accepted, *six):
        one.close()


def test_an_address_that_several_hosts_have_is_nobodys() -> None:
    """Ranks of one host may share it."""
    addresses = [["10.0.0.1", "127.0.0.1"], ["10.0.0.1", "10.1.0.1"], ["10.0.0.2", "127.0.0.1"]]
    assert hosts_by_address(addresses, ["a", "a", "b"]) == {"10.0.0.1": "a", "10.1.0.1": "a", "10.0.0.2": "b"}


def test_counters_that_start_again_and_late_segments() -> None:
    """The kernel counts in 32 bits; what was only late is not lost."""
    assert SentBytes(5, 2, 1).since(SentBytes(2**32 - 5, 2**32 - 1, 0)) == SentBytes(10, 3, 1)
    assert SentBytes(1000, 5, 2).loss == 0.003 and SentBytes(10, 1, 2).lost == 0 and SentBytes().loss == 0.0


def test_what_is_no_tcp_connection_is_an_error() -> None:
    """Not zero."""
    here, there = socket.socketpair()
    with here, there, pytest.raises(OSError):
        sent(here)
