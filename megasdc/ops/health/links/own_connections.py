"""TCP connections that this process has open to other hosts, those of training among them, and what they send.

They belong to libraries (gloo's transport, the key-value store). Each look duplicates a descriptor for as long as it
takes to ask the kernel: a copy that stayed open would keep a connection alive that its owner has closed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megasdc.ops.health.links.tcp_info import SentBytes, sent

MOST = 128
"""Connections at most that are looked at, a few microseconds each; those that have sent most."""
_DESCRIPTORS = "/proc/self/fd"
_SO_COOKIE = 57
"""Linux's option for a number that no other socket has: descriptors are used again."""


@dataclass(frozen=True)
class OwnConnection:
    """A connection as it was found.

    Args:
        descriptor: of this process.
        cookie: the kernel's name for it.
        local: address of this host.
        remote: address of the other end.
        sent: until then.
    """

    descriptor: int
    cookie: bytes
    local: str
    remote: str
    sent: SentBytes


def own_connections() -> list[OwnConnection]:
    """TCP connections of this process; empty where the system does not list descriptors."""
    try:
        descriptors = sorted(int(name) for name in os.listdir(_DESCRIPTORS))
    except OSError:
        return []
    return [one for descriptor in descriptors if (one := _find(descriptor)) is not None]


def hosts_by_address(addresses: Sequence[Iterable[str]], hosts: Sequence[str]) -> dict[str, str]:
    """Host of each address that only one host has: those of loopbacks and of bridges of containers are many hosts'.

    Args:
        addresses: of each rank's own ends of its connections.
        hosts: of each rank.
    """
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for own, host in zip(addresses, hosts, strict=True):
        for address in own:
            owners[address].add(host)
    return {address: next(iter(names)) for address, names in owners.items() if len(names) == 1}


class SentToHosts:
    """Counts what connections send to hosts, from one look to the next.

    Args:
        connections: of this process.
        hosts: by address; connections to others are not looked at.
    """

    def __init__(self, connections: Iterable[OwnConnection], hosts: Mapping[str, str]) -> None:
        known = [one for one in connections if one.remote in hosts]
        known = sorted(known, key=lambda one: -one.sent.segments)[:MOST]
        self._known = {one.descriptor: (hosts[one.remote], one.cookie, one.sent) for one in known}

    def __len__(self) -> int:
        return len(self._known)

    def pop_sent(self) -> dict[str, SentBytes]:
        """What was sent to each host since the look before; connections that are closed by now do not count."""
        counts: dict[str, SentBytes] = {}
        for descriptor, (host, cookie, before) in list(self._known.items()):
            try:
                with _copy(descriptor) as copy:
                    if _cookie(copy) != cookie:
                        raise ConnectionError("the descriptor is another socket's by now")
                    now = sent(copy)
            except OSError:
                del self._known[descriptor]
                continue
            counts[host] = counts.get(host, SentBytes()) + now.since(before)
            self._known[descriptor] = host, cookie, now
        return counts


def _find(descriptor: int) -> OwnConnection | None:
    """The TCP connection behind a descriptor; None: it is something else, not connected, or closed."""
    try:
        with _copy(descriptor) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                return None
            local, remote = (_address(name[0]) for name in (copy.getsockname(), copy.getpeername()))
            return OwnConnection(descriptor, _cookie(copy), local, remote, sent(copy))
    except OSError:
        return None


@contextmanager
def _copy(descriptor: int) -> Iterator[socket.socket]:
    """A socket of its own for a descriptor, closed in the end; OSError: it is closed, or no socket."""
    duplicate = os.dup(descriptor)
    try:
        copy = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with copy:
        yield copy


def _cookie(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)


def _address(text: str) -> str:
    """An address without its interface; IPv4 in IPv6 as IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)
