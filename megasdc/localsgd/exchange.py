"""How ranks at the same place of several replicas fetch each other's shards: one connection for each fetch.

Who has a shard offers it at a door (``megasdc.common.wire``); who needs it connects and says which one. The answer is a
message with sizes and digests, and then the bytes, whose digests are compared as they have come.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.common.wire import BoundedExchange, Door, WireError, connect

MASTERS, AGREED = "masters", "agreed"
"""What is offered: the weights at the end of a round, before and after replicas have agreed on them."""
HEADER_BYTES = 1 << 20


class ShardDoor:
    """Offers this rank's shards to the ranks at the same place of other replicas.

    Args:
        address: address of this host on which it listens.
        secret: secret of the launch.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float) -> None:
        self._lock = threading.Lock()
        self._offered: dict[str, tuple[int, list[Tensor]]] = {}
        self._timeout_s = timeout_s
        self._door = Door(address, secret, self._serve)
        self.place = self._door.address, self._door.port

    def offer(self, what: str, number: int, tensors: Sequence[Tensor]) -> None:
        """Offer flat fp32 tensors of a round in the place of those of an earlier one; they must not change meanwhile.

        Tensors of a device are copied to the host.
        """
        held = [one.detach().to("cpu") for one in tensors]
        with self._lock:
            self._offered[what] = number, held

    def withdraw(self, what: str) -> None:
        """Offer nothing of a kind any more, so that it may change.

        A fetch of weights before they were agreed on that has begun may get what has changed, and finds that out.
        """
        with self._lock:
            self._offered.pop(what, None)

    def close(self) -> None:
        """Stop listening."""
        self._door.close()

    def _serve(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        what = str(hello.get("what"))
        with self._lock:
            number, held = self._offered.get(what, (0, []))
            if what == AGREED:  # the next round may be agreed on before these have been sent
                held = [one.clone() for one in held]
        exchange = BoundedExchange(connection, self._timeout_s)
        views = [bytes_of(one) for one in held]
        header = {"round": number, "sizes": [len(one) for one in views], "digests": list(map(_digest, views))}
        exchange.send_json(header, HEADER_BYTES)
        for view in views:
            exchange.send(view)  # type: ignore[arg-type]


def fetch(
    place: tuple[str, int], secret: bytes, what: str, number: int | None, like: Sequence[Tensor], timeout_s: float
) -> tuple[int, list[Tensor]]:
    """Fetch the shards that another rank offers; returns their round, and the tensors, on the host.

    Args:
        number: the round that is wanted; None: whichever it has.
        like: tensors of the same sizes, fp32, flat.

    Raises:
        OSError: it cannot be reached in time, has no such shard, or one that does not fit, or has not come whole.
    """
    with connect(*place, secret, {"what": what}, timeout_s) as connection:
        exchange = BoundedExchange(connection, timeout_s)
        header = exchange.message(HEADER_BYTES)
        own, digests = int(header["round"]), header["digests"]
        if number is not None and own != number:
            raise WireError(f"has weights of round {own}, not of round {number}")
        found = [torch.empty(one.numel(), dtype=torch.float32) for one in like]
        views = [bytes_of(one) for one in found]
        if header["sizes"] != [len(one) for one in views]:
            raise WireError(f"has shards of {header['sizes']} bytes, here they have {[len(one) for one in views]}")
        for place_, view in enumerate(views):
            exchange.fill(view)
            if _digest(view) != digests[place_]:
                raise WireError("a shard has come with other bytes than were sent")
        return own, found


def fetch_all(
    doors: dict[int, tuple[str, int]], secret: bytes, number: int, like: Sequence[Tensor], timeout_s: float
) -> dict[int, list[Tensor]]:
    """Fetch the weights of several replicas at the end of a round, at once; those that came, by replica."""

    def one(item: tuple[int, tuple[str, int]]) -> tuple[int, list[Tensor] | None]:
        replica, place = item
        try:
            return replica, fetch(place, secret, MASTERS, number, like, timeout_s)[1]
        except OSError:
            return replica, None

    if not doors:
        return {}
    with ThreadPoolExecutor(len(doors), "fetch") as pool:
        return {replica: found for replica, found in pool.map(one, doors.items()) if found is not None}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, not copied."""
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def _digest(view: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(view)
