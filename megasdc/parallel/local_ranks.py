"""Which environment does a rank need that this process starts itself, without the launcher?"""

from __future__ import annotations

import os
import random
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megasdc.errors import MegasdcError

EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
UNASSIGNED_PORTS = range(20_000, 32_768)
"""Ports that Linux gives to no connection by itself (``net.ipv4.ip_local_port_range`` starts above them)."""


def default_extensions_dir() -> str:
    """The folder of DeepSpeed's compiled operators that belongs to this Python environment alone.

    PyTorch's own default is shared by all environments of a user, whose different ninja versions rebuild it in turn.
    """
    return os.path.join(sys.prefix, "torch_extensions")


def base_environment(threads: int) -> dict[str, str]:
    """This process's environment as a run has it, and with this Python environment's own tools first on PATH.

    An operator of DeepSpeed is compiled again whenever another ``ninja`` than the last one is found first.

    Args:
        threads: CPU threads of a rank; 0 leaves the choice.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
        EXTENSIONS_VARIABLE: os.environ.get(EXTENSIONS_VARIABLE, default_extensions_dir()),
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),  # as launch/pretrain_gpt.py sets it
    }
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def rank_environment(rank: int, ranks: int, threads: int, host: str, port: int) -> dict[str, str]:
    """What a launcher would set for a rank, on top of ``base_environment``; the ranks meet at a ``hold_store``.

    Args:
        rank: in the world.
        ranks: size of the world.
        threads: CPU threads of the rank; 0 leaves the choice.
        host: of whoever holds the store.
        port: of the store.
    """
    return {
        **base_environment(threads),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 too only connects to the store
    }


def hold_store() -> Any:
    """The rendezvous of ranks that this process starts, a ``torch.distributed.TCPStore``; kept until they have ended.

    It takes a port that is free at this moment. A port looked up for rank 0 could be taken by any connection in the
    seconds until rank 0 has imported everything and listens there.
    """
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def free_port() -> int:
    """A port for a launcher that must be told one: nobody listens there, and no connection is given it by itself.

    Raises:
        MegasdcError: all are taken.
    """
    with held_port() as port:
        return port


@contextmanager
def held_port() -> Iterator[int]:
    """A free port that nobody else is given meanwhile, and where one process that is told of it can listen.

    Raises:
        MegasdcError: all are taken.
    """
    for port in random.sample(UNASSIGNED_PORTS, len(UNASSIGNED_PORTS)):
        with socket.socket() as holder:
            try:
                holder.bind(("", port))
            except OSError:
                continue
            # Only after it was bound alone: then Linux lets who asks for it too, as torch's store does, bind beside it
            # and listen, but nobody beside that one.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            yield port
            return
    raise MegasdcError(f"no port from {UNASSIGNED_PORTS.start} to {UNASSIGNED_PORTS.stop - 1} is free on this host")


def count_accelerators() -> int:
    """Accelerators of this host that this process may use; 0 where ranks compute on its processor."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
