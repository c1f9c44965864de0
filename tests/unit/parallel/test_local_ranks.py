"""Where do ranks meet that this process starts? At a port that nobody else has, or nowhere."""

from __future__ import annotations

import socket

import pytest

from megasdc.errors import MegasdcError
from megasdc.parallel import local_ranks
from megasdc.parallel.local_ranks import free_port, held_port, hold_store, rank_environment


def test_a_free_port_is_no_port_of_connections() -> None:
    """What Linux hands out by itself starts above it, and it can be listened on."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        first = int(file.read().split()[0])
    port = free_port()
    assert port < first
    with socket.create_server(("", port)):
        pass


def test_a_taken_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is passed over, and where there is no other, the range is named."""
    with socket.create_server(("", free_port())) as server:
        taken = server.getsockname()[1]
        monkeypatch.setattr(local_ranks, "UNASSIGNED_PORTS", range(taken, taken + 1))
        with pytest.raises(MegasdcError, match=f"no port from {taken} to {taken} is free"):
            free_port()
    assert free_port() == taken


def test_ranks_connect_to_the_store_that_is_held() -> None:
    """Stores side by side have ports of their own; rank 0 is told not to listen itself."""
    stores = [hold_store(), hold_store()]
    assert stores[0].port != stores[1].port
    environment = rank_environment(0, 2, 1, "127.0.0.1", stores[0].port)
    assert (environment["MASTER_PORT"], environment["TORCHELASTIC_USE_AGENT_STORE"]) == (str(stores[0].port), "True")


def test_a_held_port_is_for_one_listener() -> None:
    """While it is held, one store can listen there, a second one cannot, and nobody is given it as free."""
    import torch.distributed as dist

    with held_port() as port:
        with pytest.raises(OSError), socket.socket() as other:
            other.bind(("", port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        with pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
            dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        del store
