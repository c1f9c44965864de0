"""Environment, rendezvous and ports of ranks that this process starts itself, without the launcher."""

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
"""Ports below Linux's default ephemeral range (``net.ipv4.ip_local_port_range`` starts above them)."""


def default_extensions_dir() -> str:
    """Folder of DeepSpeed's compiled operators, one for each Python environment.

    PyTorch's default is shared by all environments of a user; their different ninja versions rebuild it in turn.
    """
    return os.path.join(sys.prefix, "torch_extensions")


def base_environment(threads: int) -> dict[str, str]:
    """This process's environment as a run has it, with this Python environment's own tools first on PATH.

    An operator of DeepSpeed is compiled again whenever PATH yields another ``ninja`` than last time.

    Args:
        threads: CPU threads of a rank (OMP_NUM_THREADS); 0: unchanged.
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
    """A launcher's variables for a rank, on top of ``base_environment``; the rendezvous is the store of ``hold_store``.

    Args:
        ranks: size of the world.
        threads: CPU threads of the rank (OMP_NUM_THREADS); 0: unchanged.
        host: of the store.
        port: of the store.
    """
    return {
        **base_environment(threads),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 does not host the store either
    }


def hold_store() -> Any:
    """A ``torch.distributed.TCPStore`` for ranks that this process starts; keep it until they have ended.

    It listens at once, on a free port. A port chosen for rank 0 could be taken by any connection in the seconds until
    rank 0 has imported everything and listens there.
    """
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def free_port() -> int:
    """A free port outside the ephemeral range, for a launcher that needs a port number; not reserved.

    Raises:
        MegasdcError: all are taken.
    """
    with held_port() as port:
        return port


@contextmanager
def held_port() -> Iterator[int]:
    """A free port, reserved inside; one other process that sets SO_REUSEADDR can listen there.

    Raises:
        MegasdcError: all are taken.
    """
    for port in random.sample(UNASSIGNED_PORTS, len(UNASSIGNED_PORTS)):
        with socket.socket() as holder:
            try:
                holder.bind(("", port))
            except OSError:
                continue
            # Set after the bind, which had to be exclusive. From now on Linux lets a second socket with SO_REUSEADDR,
            # such as that of torch's store, bind and listen; a third is refused while that one listens.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            yield port
            return
    raise MegasdcError(f"no port from {UNASSIGNED_PORTS.start} to {UNASSIGNED_PORTS.stop - 1} is free on this host")


def count_accelerators() -> int:
    """Visible GPUs of this host; 0 where ranks compute on the CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
