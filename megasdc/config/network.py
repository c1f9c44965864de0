"""Addresses on which a run listens."""

from __future__ import annotations


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; brackets around an IPv6 address are removed.

    Raises:
        ValueError: it is none, or the port is not in 1 to 65535.
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f'got "{text}"; needed: "ADDRESS:PORT" with a port from 1 to 65535, such as "127.0.0.1:9400"')
    return host.removeprefix("[").removesuffix("]"), int(port)
