"""Address of this host on the network by which it reaches another one."""

from __future__ import annotations

import socket


def own_address_towards(host: str) -> str:
    """This host's address on the route to another host; nothing is sent.

    Args:
        host: name or address.

    Raises:
        OSError: the name is not known, or there is no route.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
