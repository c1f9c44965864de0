"""TCP connections between pairs of ranks, over which the links of their hosts are measured."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from megasdc.health.front.own_address import own_address_towards
from megasdc.health.links.probe import HELLO_BYTES, accept, connect, listen
from megasdc.health.links.rings import RankPair
from megasdc.parallel.collectives import gather_objects

CONNECT_S = 5.0
"""Seconds that a connection may take to be made: one that a firewall drops holds up the start for so long."""


@dataclass(frozen=True)
class _Door:
    """Where a rank listens; ``token``: what its peers show."""

    address: str
    port: int
    token: bytes = field(repr=False)


def connect_pairs(
    pairs: Sequence[RankPair], rank: int, group: dist.ProcessGroup
) -> tuple[dict[int, socket.socket], dict[RankPair, str]]:
    """Connect the ranks of pairs, the first to the second.

    Ranks listen on the address by which they reach the launch's first host, until their peers have come.

    Args:
        rank: this one.

    Returns:
        This rank's connections by the other rank, and what failed, the same on all ranks.

    Collective: all ranks of the group.
    """
    following = [pair for pair in pairs if pair[1] == rank]
    server, own = _open() if following else (None, "")
    doors = gather_objects(own, group)
    connections: dict[int, socket.socket] = {}
    failed: dict[RankPair, str] = {}
    for pair in pairs:
        if pair[0] == rank:
            door = doors[pair[1]]
            try:
                connections[pair[1]] = _enter(door, rank)
            except OSError as error:
                failed[pair] = f"rank {pair[1]} cannot be reached: {error}"
    failed = _gathered(failed, group)  # who has connected waits in the other's queue
    if server is not None and isinstance(own, _Door):
        expected = [pair[0] for pair in following if pair not in failed]
        with server:
            connections |= _admit(server, own.token, len(expected))
        failed |= {pair: "it did not connect" for pair in following if pair[0] not in connections}
    return connections, _gathered(failed, group)


def _open() -> tuple[socket.socket | None, _Door | str]:
    """Listen; returns where, or in a sentence why that is not possible."""
    try:
        address = own_address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        server = listen(address)
    except OSError as error:
        return None, f"it cannot listen on the route to the first host: {error}"
    return server, _Door(address, server.getsockname()[1], secrets.token_bytes(HELLO_BYTES))


def _enter(door: _Door | str, rank: int) -> socket.socket:
    """Connect as this rank.

    Raises:
        OSError: it was not possible, or nobody listens.
    """
    if isinstance(door, str):
        raise ConnectionError(door)
    try:
        return connect(door.address, door.port, door.token, rank, CONNECT_S)
    except OSError as error:
        raise ConnectionError(f"{door.address} port {door.port}: {error}") from error


def _admit(server: socket.socket, token: bytes, number: int) -> dict[int, socket.socket]:
    """So many connections by the rank that made them, or those that came in time."""
    found: dict[int, socket.socket] = {}
    for _ in range(number):
        try:
            first, connection = accept(server, token, CONNECT_S)
        except OSError:
            break  # it is reported as not connected
        found[first] = connection
    return found


def _gathered(failed: dict[RankPair, str], group: dist.ProcessGroup) -> dict[RankPair, str]:
    """What failed on any rank; where both ends tell it, by the lower rank."""
    return {pair: said[pair] for said in reversed(gather_objects(failed, group)) for pair in said}
