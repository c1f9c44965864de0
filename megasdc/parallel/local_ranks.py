"""Environment, rendezvous and ports of ranks that this process starts itself, without the launcher."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import shutil
import socket
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megasdc.common.errors import MegasdcError, StorageError
from megasdc.common.host import shared_folder
from megasdc.parallel.rendezvous import (
    AGENT_STORE_VARIABLE,
    LOOPBACK,
    MEETING_VARIABLE,
    SECRET_FILE,
    check_own_folder,
    new_secret,
    serve_store,
)

EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
MEETING_PREFIX = "megasdc-meeting-"
MEETING_LOCK = "held"
"""Locked as long as the process lives that made the folder."""
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
        "THP_MEM_ALLOC_ENABLE": os.environ.get("THP_MEM_ALLOC_ENABLE", "1"),  # as megasdc.entry.pretrain_gpt sets it
    }
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def local_rank_environment(rank: int, ranks: int, threads: int, place: Mapping[str, str]) -> dict[str, str]:
    """A launcher's variables for a rank, on top of ``base_environment``.

    Args:
        ranks: size of the world.
        threads: CPU threads of the rank (OMP_NUM_THREADS); 0: unchanged.
        place: variables of the place where the ranks meet: ``environment`` of ``LocalMeeting`` or ``HostsMeeting``.
    """
    return {
        **base_environment(threads),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        **place,
        AGENT_STORE_VARIABLE: "True",  # rank 0 does not host the store either
    }


class LocalMeeting:
    """Meeting place of ranks that this process starts on this host: a folder of this user's alone, and no port.

    The folder is removed by ``close``, with this object, or when the process ends; that of a process that was killed is
    removed by the next one.

    Raises:
        StorageError: it cannot be made.
    """

    def __init__(self) -> None:
        root, name = shared_folder(), secrets.token_hex(16)
        _remove_forgotten(root)
        self.folder, new = root / f"{MEETING_PREFIX}{name}", root / f"new-{MEETING_PREFIX}{name}"
        try:
            new.mkdir(0o700)
            self._lock = os.open(new / MEETING_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            with open(os.open(new / SECRET_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(new_secret())
            new.rename(self.folder)  # from now on others look whether it is locked
        except OSError as error:
            raise StorageError(f"{new}, where ranks meet, cannot be made: {error.strerror}") from error
        self.close = weakref.finalize(self, _remove_meeting, self.folder, self._lock, os.getpid())

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks; gloo listens on loopback alone, unless the user has named an interface."""
        return {
            MEETING_VARIABLE: str(self.folder),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": "0",
            INTERFACE_VARIABLE: os.environ.get(INTERFACE_VARIABLE) or "lo",
        }


class HostsMeeting:
    """Meeting place of ranks of several hosts, hosted by none of them: torch's store, on one address of this host.

    They have the secret of the launch in whose environment they are, if it gave one.

    Args:
        address: address by which the other hosts reach this one.

    Raises:
        OSError: it is none of this host's.
    """

    def __init__(self, address: str) -> None:
        self._address, self.store = address, serve_store(address, 0)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the ranks."""
        return {MEETING_VARIABLE: "", "MASTER_ADDR": self._address, "MASTER_PORT": str(self.store.port)}


def _remove_meeting(folder: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a copy of the process
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_forgotten(root: Path) -> None:
    """Remove meetings of this user whose process has ended without."""
    for folder in root.glob(f"{MEETING_PREFIX}*"):
        with contextlib.suppress(OSError):
            check_own_folder(folder)
            lock = os.open(folder / MEETING_LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def free_port() -> int:
    """A free port outside the ephemeral range, for a launcher that needs a port number; not reserved.

    Raises:
        MegasdcError: all are taken.
    """
    with reserved_port() as port:
        return port


@contextmanager
def reserved_port() -> Iterator[int]:
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
