"""Key-value stores of ranks, and the secret of their launch.

On one host the store is a file in a folder of the user's alone. On several it is torch's, on one address; that one asks
nobody who he is, so every value in it is signed with the secret (HMAC-SHA256, RFC 2104, over its key and itself),
gloo's addresses too: who does not know the secret can block a meeting, but not take part. Objects that ranks send each
other are signed likewise (``megasdc.parallel.collectives``), since gloo's own sockets ask nobody either.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megasdc.common.errors import LaunchError
from megasdc.common.host import open_own, shared_folder
from megasdc.common.wire import SECRET_BYTES

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
MEETING_VARIABLE = "MEGASDC_MEETING"
"""Folder in which the ranks of a launch on one host meet; empty or absent: they meet at MASTER_ADDR and MASTER_PORT."""
STORE_FILE, SECRET_FILE = "store", "secret"
PRIVATE_VARIABLE = "MEGASDC_PRIVATE_NAME"
"""Random part of the name of a folder in each host's memory, where ``megasdc launch`` leaves for this user alone what
is secret of a launch on several hosts (``megasdc.ops.launch.on_host.private``); empty or absent: there is none."""
REMEDY = (
    "another launch uses the same port, or somebody who does not belong to this run reaches its hosts: choose another "
    "port with --master_port, and let nobody else reach that network (docs/guides/security.md)"
)
REMEDY_OF_LOGOUT = (
    "; systemd may have removed it when this user's last session on this host ended: have `loginctl enable-linger` "
    "run for the user there, or set RemoveIPC=no in its logind.conf (docs/guides/security.md)"
)
LARGEST_OBJECT = 1 << 32
"""Bytes of an object that ranks send each other, with its signature."""
_MAX_SECRET = 1 << 10
_SIGNATURE = hashlib.sha256().digest_size
_UNSIGNED = "unsigned"


def check_own_folder(folder: Path) -> None:
    """Refuse a folder that others may write to, or that is a link.

    Raises:
        PermissionError: it is another user's, open to others, or no folder.
        OSError: there is none.
    """
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user's alone (mode 0700)")


def folder_store(folder: Path) -> dist.Store:
    """The store of the ranks that meet in a folder.

    Raises:
        PermissionError: see ``check_own_folder``.
        OSError: there is none.
    """
    import torch.distributed as dist

    check_own_folder(folder)
    return dist.FileStore(str(folder / STORE_FILE))


def serve_store(address: str, port: int, timeout: datetime.timedelta = datetime.timedelta(minutes=5)) -> dist.TCPStore:
    """A store that listens on one address, where torch's own listens on all.

    Args:
        port: 0: a free one.
        timeout: of the store.

    Raises:
        OSError: the address is none of this host's, or the port is in use.
    """
    import torch.distributed as dist

    descriptor, port = _listen(address, port)
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor
    )


def _listen(address: str, port: int) -> tuple[int, int]:
    """A descriptor of a socket that listens, which is the store's from now on, and its port."""
    server = socket.create_server((address, port), family=_family(address), backlog=1024)
    port = int(server.getsockname()[1])
    return server.detach(), port


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def address_of_store(host: str) -> str | None:
    """The address of this host on which a store should listen that others look for at a name.

    None: the name leads this host to its loopback, others probably not, or to an address that it does not have.
    """
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return None
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    return None if is_loopback and host not in (address, "localhost") else address


def on_one_address(make: Callable[..., T]) -> Callable[..., T]:
    """Torch's store as a program makes it itself: a first rank listens on the address at which others look for it.

    Where they look for a name, which other hosts may resolve otherwise, or the address is in use, maybe by an earlier
    store of this process, all is as torch does it.

    Args:
        make: ``torch.distributed.TCPStore``, called with names of arguments.
    """

    def make_store(*args: Any, **options: Any) -> T:
        if options.get("is_master") and options.get("master_listen_fd") is None:
            host = options["host_name"]
            address = address_of_store(host)
            with contextlib.suppress(OSError):
                if address is not None and host in (address, "localhost"):
                    options["master_listen_fd"] = _listen(address, options["port"])[0]
        return make(*args, **options)

    return make_store


def new_secret() -> str:
    """A secret of a launch, as text."""
    return secrets.token_hex(SECRET_BYTES)


def launch_secret() -> bytes | None:
    """The secret that all ranks of this launch know; None: what has started them gave them none.

    Raises:
        LaunchError: the environment names a folder, in which there is none for this user alone.
    """
    if folder := os.environ.get(MEETING_VARIABLE):
        return _read_secret(Path(folder), MEETING_VARIABLE)
    if name := os.environ.get(PRIVATE_VARIABLE):
        return _read_secret(private_folder(name), PRIVATE_VARIABLE)
    return None


def private_folder(name: str) -> Path:
    """The folder on this host that ``PRIVATE_VARIABLE`` names; hosts may share their memory."""
    return shared_folder() / f"megasdc-launch-{name}-{socket.gethostname()}"


@functools.cache  # once the ranks have met, the folder may be removed
def _read_secret(folder: Path, variable: str) -> bytes:
    try:
        check_own_folder(folder)
        with open(open_own(folder / SECRET_FILE, os.O_RDONLY), "rb") as file:
            secret = bytes.fromhex(file.read(_MAX_SECRET).decode("ascii"))
    except (OSError, ValueError) as error:
        is_private = variable == PRIVATE_VARIABLE
        raise LaunchError(
            f"there is no secret of this launch in {folder} (environment variable {variable}): {error}; start all "
            "ranks anew by one megasdc command, or unset that variable for what is no rank of a launch"
            f"{REMEDY_OF_LOGOUT if is_private else ''}"
        ) from error
    if len(secret) != SECRET_BYTES:
        raise LaunchError(f"{folder / SECRET_FILE} holds {len(secret)} bytes, a secret has {SECRET_BYTES}")
    return secret


def sign(secret: bytes, name: str, value: bytes) -> bytes:
    """A value with its signature before it.

    Args:
        name: what the value is, which the signature covers too.
    """
    return _signature(secret, name, value) + value


def verified_value(secret: bytes, name: str, signed: bytes) -> bytes:
    """The value of ``sign``.

    Args:
        name: as for ``sign``.

    Raises:
        LaunchError: it is not signed with this secret for this name.
    """
    signature, value = signed[:_SIGNATURE], signed[_SIGNATURE:]
    if not hmac.compare_digest(signature, _signature(secret, name, value)):
        raise LaunchError(f"{name}: not signed with the secret of this launch; {REMEDY}")
    return value


def check_size(name: str, size: int) -> None:
    """Refuse a size that no signed object has, before there is memory for it: it is not signed itself.

    Args:
        name: what has it, as for ``sign``.
        size: in bytes.

    Raises:
        LaunchError: it has not.
    """
    if not _SIGNATURE <= size <= LARGEST_OBJECT:
        raise LaunchError(f"{name}: of {size} bytes, a signed one has {_SIGNATURE} to {LARGEST_OBJECT}; {REMEDY}")


def without_signature(signed: bytes) -> bytes:
    """What somebody claims who may have signed it with another secret; to be shown, not to be believed."""
    return signed[_SIGNATURE:]


def _signature(secret: bytes, name: str, value: bytes) -> bytes:
    return hmac.new(secret, name.encode() + b"\0" + value, hashlib.sha256).digest()


def signed_store(store: dist.Store, secret: bytes) -> dist.Store:
    """A store whose values are signed; numbers of ``add`` are not, and who changes them or removes keys blocks ranks.

    ``get`` and ``compare_set`` raise LaunchError, with the key, where a value is not. The caller keeps the store, or
    one of ``prefix_store``, as long as torch uses it, which itself keeps only its C++ part: that does nothing without
    the Python one.
    """
    return _signed_store()(store, secret)  # type: ignore[no-any-return]


def prefix_store(prefix: str, store: dist.Store) -> dist.Store:
    """A part of a store, as torch's own makes it, which keeps all of that, and sets its timeout."""
    return _prefix_store()(prefix, store)  # type: ignore[no-any-return]


@functools.cache
def _prefix_store() -> Any:
    """Class of such parts; made here, since importing this file brings no torch."""
    import torch.distributed as dist

    class PrefixStore(dist.PrefixStore):
        def __init__(self, prefix: str, store: Any) -> None:
            super().__init__(prefix, store)
            self._store = store

        def set_timeout(self, timeout: datetime.timedelta) -> None:
            self._store.set_timeout(timeout)  # torch's calls only the C++ part of that

    return PrefixStore


def unsigned_store(store: dist.Store, first: bool) -> dist.Store:
    """A part of torch's own store below a signed one, under a name that the ranks agree on in that.

    For NCCL, whose threads ask the store at any time: they should wait for no Python code.

    Args:
        store: of ``signed_store``, maybe with prefixes; any other is returned as it is.
        first: whether this rank chooses the name; one does.
    """
    import torch.distributed as dist

    below = store
    while isinstance(below, dist.PrefixStore):
        below = below.underlying_store
    if not isinstance(below, _signed_store()):
        return store
    if first:
        store.set(_UNSIGNED, secrets.token_hex(16))
    return dist.PrefixStore(store.get(_UNSIGNED).decode(), below.plain)


@functools.cache
def _signed_store() -> Any:
    """Class of signed stores; made here, since importing this file brings no torch."""
    import torch.distributed as dist

    class SignedStore(dist.Store):
        def __init__(self, store: Any, secret: bytes) -> None:
            super().__init__()
            self.plain, self._secret = store, secret
            self._clones: list[dist.Store] = []  # as for this one, torch does not keep them

        def set(self, key: str, value: str | bytes) -> None:
            self.plain.set(key, sign(self._secret, key, _bytes(value)))  # type: ignore[arg-type]

        def get(self, key: str) -> bytes:
            return verified_value(self._secret, key, self.plain.get(key))

        def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            before = sign(self._secret, key, _bytes(expected)) if expected else b""
            found = self.plain.compare_set(key, before, sign(self._secret, key, _bytes(desired)))  # type: ignore[arg-type]
            return verified_value(self._secret, key, found) if found else b""

        def add(self, key: str, amount: int) -> int:
            return self.plain.add(key, amount)

        def check(self, keys: list[str]) -> bool:
            return self.plain.check(keys)

        def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
            self.plain.wait(keys, *timeout)

        def delete_key(self, key: str) -> bool:
            return self.plain.delete_key(key)

        def num_keys(self) -> int:
            return self.plain.num_keys()

        deleteKey, getNumKeys = delete_key, num_keys  # the names by which C++ calls them (torch 2.13)

        def clone(self) -> dist.Store:
            self._clones.append(signed_store(self.plain.clone(), self._secret))
            return self._clones[-1]

        def set_timeout(self, timeout: datetime.timedelta) -> None:
            super().set_timeout(timeout)
            self.plain.set_timeout(timeout)

    return SignedStore


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
