"""TCP connections between pairs of ranks, over which the links of their hosts are measured."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from megasdc.common.own_address import own_address_towards
from megasdc.common.wire import SECRET_BYTES, Door, connect
from megasdc.ops.health.links.rings import RankPair
from megasdc.parallel.collectives import gather_objects

CONNECT_S = 5.0
"""Seconds that a connection may take to be made: one that a firewall drops holds up the start for so long."""


@dataclass(frozen=True)
class _Place:
    """Where a rank listens; ``token``: the secret that its peers know."""

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
    door, own = _open() if following else (None, "")
    places = gather_objects(own, group)
    connections: dict[int, socket.socket] = {}
    failed: dict[RankPair, str] = {}
    for pair in pairs:
        if pair[0] == rank:
            try:
                connections[pair[1]] = _enter(places[pair[1]], rank)
            except OSError as error:
                failed[pair] = f"rank {pair[1]} cannot be reached: {error}"
    failed = _gathered(failed, group)  # who has connected waits in the other's queue
    if door is not None:
        expected = {pair[0] for pair in following if pair not in failed}
        with door:
            connections |= _admit(door, expected)
        failed |= {pair: "it did not connect" for pair in following if pair[0] not in connections}
    return connections, _gathered(failed, group)


def _open() -> tuple[Door | None, _Place | str]:
    """Listen; returns where, or in a sentence why that is not possible."""
    token = secrets.token_bytes(SECRET_BYTES)
    try:
        address = own_address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        door = Door(address, token)
    except OSError as error:
        return None, f"it cannot listen on the route to the first host: {error}"
    return door, _Place(address, door.port, token)


def _enter(place: _Place | str, rank: int) -> socket.socket:
    """Connect as this rank.

    Raises:
        OSError: it was not possible, or nobody listens.
    """
    if isinstance(place, str):
        raise ConnectionError(place)
    try:
        return connect(place.address, place.port, place.token, {"rank": rank}, CONNECT_S)
    except OSError as error:
        raise ConnectionError(f"{place.address} port {place.port}: {error}") from error


def _admit(door: Door, expected: Collection[int]) -> dict[int, socket.socket]:
    """Connections by the rank that made them, those that came in time."""
    found: dict[int, socket.socket] = {}
    while len(found) < len(expected):
        try:
            hello, connection = door.take(CONNECT_S)
        except TimeoutError:
            break  # it is reported as not connected
        first = hello.get("rank")
        if isinstance(first, int) and first in expected and first not in found:
            found[first] = connection
        else:
            connection.close()
    return found


def _gathered(failed: dict[RankPair, str], group: dist.ProcessGroup) -> dict[RankPair, str]:
    """What failed on any rank; where both ends tell it, by the lower rank."""
    return {pair: said[pair] for said in reversed(gather_objects(failed, group)) for pair in said}
