"""Rendezvous of a launch's ranks at a key-value store; ranks of another launch are refused. Imports no torch.

On one host ``megasdc launch`` and programs that start ranks themselves name a folder of the user's alone: the store is
a file there, and nothing listens. Else rank 0 hosts torch's store at the launcher's port, on one address. That one asks
nobody who he is. So where ``megasdc launch`` has given ranks a secret, every value in it is signed (HMAC-SHA256, RFC
2104, over its key and itself), gloo's addresses too: who does not know the secret can block a rendezvous, but not take
part. Objects that ranks send each other are signed likewise (``parallel.collectives``), since gloo's own sockets
ask nobody either. Without a secret whoever reaches the store can take part, which rank 0 says.

Two launches may be given the same port. The second cannot listen there, and its other ranks would join the first one's
store. So rank 0 writes its identity to the store, the properties that distinguish launches, and every other rank checks
it before it writes its own: a rank of another launch ends with an error, and the launch that owns the store is not
disturbed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import hashlib
import hmac
import ipaddress
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megasdc.common.errors import HangError, LaunchError
from megasdc.common.host import open_own, shared_folder
from megasdc.common.origin import LAUNCH_ID_VARIABLE
from megasdc.common.program import printable
from megasdc.common.run_lock import process_space, start_ticks
from megasdc.common.wire import SECRET_BYTES, listen_on, own_address_towards

if TYPE_CHECKING:
    import torch.distributed as dist


LOOPBACK = "127.0.0.1"
MEETING_VARIABLE = "MEGASDC_MEETING"
"""Folder in which the ranks of a launch on one host meet; empty or absent: they meet at MASTER_ADDR and MASTER_PORT."""
STORE_FILE, SECRET_FILE = "store", "secret"
PRIVATE_VARIABLE = "MEGASDC_PRIVATE_NAME"
"""Random part of the name of a folder in each host's memory, where ``megasdc launch`` keeps secrets of a launch on
several hosts for this user alone (``megasdc.ops.launch.on_host.private``); empty or absent: there is none."""
REMEDY = (
    "another launch uses the same port, or somebody who does not belong to this run reaches its hosts: choose another "
    "port with --master_port, and let nobody else reach that network (docs/guides/security.md)"
)
REMEDY_OF_LOGOUT = (
    "; systemd may have removed it when this user's last session on this host ended: have `loginctl enable-linger` "
    "run for the user there, or set RemoveIPC=no in its logind.conf (docs/guides/security.md)"
)
ROUNDS_VARIABLE = "MEGASDC_ROUNDS"
"""Environment variable with the address and port at which replicas of Local-SGD agree on their rounds."""
TOGETHER_VARIABLE = "MEGASDC_TOGETHER"
"""Environment variable of a launch that is one of several, such as the replicas of Local-SGD: the folder on this host,
this user's alone, that holds the secret of them all."""
LARGEST_OBJECT = 1 << 32
"""Largest size in bytes of an object that ranks send each other, with its signature."""
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
        timeout: timeout of the store.

    Raises:
        OSError: the address is none of this host's, or the port is in use.
    """
    import torch.distributed as dist

    server = listen_on(address, port)
    port = int(server.getsockname()[1])
    return dist.TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=server.detach()
    )


def own_address_for_ranks(*other_hosts: str) -> str:
    """This host's address at which ranks on others reach it: towards the launch's first host; nothing is sent.

    Args:
        other_hosts: names of hosts other than this one, which may be the first; see ``own_address_towards``.

    Raises:
        OSError: the first host's name is not known, or there is no route.
    """
    return own_address_towards(os.environ.get("MASTER_ADDR", LOOPBACK), *other_hosts)


def address_of_store(host: str) -> str | None:
    """The address of this host on which a store should listen that others look for at a name.

    None: the name leads this host to its loopback, others probably not, or to an address that it does not have.
    """
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        listen_on(address).close()
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
                    options["master_listen_fd"] = listen_on(address, options["port"]).detach()
        return make(*args, **options)

    return make_store


def new_secret() -> str:
    """A secret of a launch, as text: that of the launches it belongs to, where there are such, else a new one.

    Raises:
        LaunchError: the environment names a folder of theirs, in which there is none for this user alone.
    """
    if folder := os.environ.get(TOGETHER_VARIABLE):
        return _read_secret(Path(folder), TOGETHER_VARIABLE).hex()
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
        name: name of the value, which the signature covers too.
    """
    return _signature(secret, name, value) + value


def verified_value(secret: bytes, name: str, signed: bytes) -> bytes:
    """The value of ``sign``.

    Args:
        name: as for ``sign``.

    Raises:
        LaunchError: the value is not signed with this secret for this name.
    """
    signature, value = signed[:_SIGNATURE], signed[_SIGNATURE:]
    if not hmac.compare_digest(signature, _signature(secret, name, value)):
        raise LaunchError(f"{name}: not signed with the secret of this launch; {REMEDY}")
    return value


def check_size(name: str, size: int) -> None:
    """Refuse a size that no signed object has, before there is memory for it: it is not signed itself.

    Args:
        name: name of the object, as for ``sign``.
        size: size in bytes.

    Raises:
        LaunchError: no signed object has this size.
    """
    if not _SIGNATURE <= size <= LARGEST_OBJECT:
        raise LaunchError(f"{name}: of {size} bytes, a signed one has {_SIGNATURE} to {LARGEST_OBJECT}; {REMEDY}")


def without_signature(signed: bytes) -> bytes:
    """Value without a check of its signature, which may be of another secret; to be shown, not to be believed."""
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


AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""``True`` where the process that starts the ranks hosts their store itself."""
NODE_RANK_VARIABLE = "CROSS_RANK"
"""Set by DeepSpeed's launcher (0.19.8) for the ranks that it starts: the index of its host in the launch."""
MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class Identity:
    """Identity of a rank, which it publishes at the rendezvous.

    Attributes:
        rank: rank in the launch.
        world_size: number of ranks of the launch.
        launch: id set by ``megasdc launch`` or by the user; None: none.
        job: id of the scheduler's step that started the rank; None: none is known.
        run_dir: run folder as configured; None where there is none.
        processes: boot id and PID namespace in which ``parent`` is valid.
        node: index of the host in the launch; None: not started by DeepSpeed's launcher.
        parent: id and start time (clock ticks after boot; 0: not visible) of the process that started the rank.
    """

    rank: int
    world_size: int
    launch: str | None
    job: str | None
    run_dir: str | None
    host: str
    processes: str
    node: str | None
    parent: tuple[int, int]

    @classmethod
    def own(cls, rank: int, world_size: int, run_dir: str | None, environ: Mapping[str, str] = os.environ) -> Identity:
        """The identity of this process; rank and world size are the launch's, ``run_dir`` is as configured."""
        host, boot, namespace = process_space()
        return cls(
            rank=rank,
            world_size=world_size,
            launch=environ.get(LAUNCH_ID_VARIABLE) or None,
            job=_scheduler_step(environ),
            run_dir=run_dir,
            host=host,
            processes=f"{boot} {namespace}",
            node=None if environ.get(AGENT_STORE_VARIABLE) == "True" else environ.get(NODE_RANK_VARIABLE),
            parent=(os.getppid(), start_ticks(os.getppid()) or 0),
        )

    def encode(self) -> str:
        """Return the identity as text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Identity:
        """Return the identity that ``encode`` wrote.

        Raises:
            LaunchError: the text is no identity.
        """
        try:
            if len(text) > MOST_BYTES:
                raise ValueError(f"it has {len(text):,} bytes")
            raw = json.loads(text)
            found = cls(**{**raw, "parent": tuple(raw["parent"])})
            numbers, texts = (found.rank, found.world_size, *found.parent), (found.host, found.processes)
            named = [one for one in (found.launch, found.job, found.run_dir, found.node) if one is not None]
            if len(found.parent) != 2 or not all(type(one) is int for one in numbers):
                raise ValueError("a number is none")
            if not all(isinstance(one, str) for one in (*texts, *named)):
                raise ValueError("a text is none")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LaunchError(f"the ranks' store holds no identity for a rank ({error}); {REMEDY}") from error
        return found

    def __str__(self) -> str:
        name = f"launch {self.launch}" if self.launch else f"a launch without {LAUNCH_ID_VARIABLE}"
        place = f"rank {self.rank} of {self.world_size} on {self.host}, started by process {self.parent[0]}"
        return printable(f"{name} ({place}{f', run folder {self.run_dir}' if self.run_dir else ''})")


def differing_properties(one: Identity, other: Identity) -> list[str]:
    """Properties by which two ranks belong to different launches, in words; empty: none differs.

    Without a launch id or a scheduler's step, launches on different hosts differ by run folder and world size alone.
    """
    found = []
    if one.launch != other.launch:
        found.append("launch id")
    if one.job and other.job and one.job != other.job:
        found.append("scheduler's job step")
    if one.world_size != other.world_size:
        found.append("number of ranks")
    if one.run_dir and other.run_dir and one.run_dir != other.run_dir:
        found.append("run folder")
    # Ranks started by hand may have several parents (their node is None); those of one launcher have one.
    same_node = one.processes == other.processes and one.node is not None and one.node == other.node
    if same_node and one.parent != other.parent:
        found.append("launcher process")
    return found


def _scheduler_step(environ: Mapping[str, str]) -> str | None:
    """The SLURM step or MPI job (PMIx namespace) of this process."""
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" in environ:
        return f"slurm {environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    return environ.get("PMIX_NAMESPACE")


T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_RANKS_SHOWN = 8
MEETING_NAME_VARIABLE = "MEGASDC_MEETING_NAME"
"""Name of a later meeting of ranks that go on without others; absent: it is the first meeting."""
NOT_AUTHENTICATED = (
    "ranks are not authenticated: whoever reaches {place} can take part in this run, and run code as you; start it "
    "with megasdc launch or megasdc run, which give ranks a secret (not under SLURM), or let nobody else reach its "
    "hosts (docs/guides/security.md)"
)
LOOK_S = 3.0
"""Seconds to query the listener of a port in use; also the grace beyond a timeout for a late reply."""


def meet(own: Identity, timeout_s: float) -> dist.Store:
    """Wait until all ranks of this launch have joined, and return their store.

    Args:
        timeout_s: seconds to wait for the other ranks; also the store's own timeout.

    Raises:
        LaunchError: the port is in use, or by another launch.
        HangError: a rank did not join in time.

    Collective: all ranks of the launch.
    """
    return _within(timeout_s, own, lambda end: _gather(own, _join(own, end), end))


def join_store(own: Identity, timeout_s: float) -> dist.Store:
    """Host or join the store of this launch, without waiting for ranks other than rank 0.

    Args:
        timeout_s: seconds to wait for rank 0; also the store's own timeout.

    Raises:
        LaunchError: the port is in use, or by another launch.
        HangError: rank 0 did not join in time.
    """
    return _within(timeout_s, own, lambda end: _join(own, end))


def _within(timeout_s: float, own: Identity, meeting: Callable[[float], dist.Store]) -> dist.Store:
    """Call ``meeting`` with its deadline; a timeout becomes a HangError."""
    end = time.monotonic() + timeout_s
    try:
        store = _in_thread(lambda: meeting(end), timeout_s + LOOK_S)
    except (TimeoutError, RuntimeError) as error:  # a file's store has no error of its own
        reason = str(error).splitlines()[0] if str(error) else "what listens there does not answer"
        if not isinstance(error, TimeoutError) and "timed out" not in reason and "timeout" not in reason.lower():
            raise
        raise HangError(
            f"rank {own.rank} found no rank 0 of a megasdc run at {_address()} within {timeout_s:g} s "
            f"(megasdc.parallel.timeout_s): check whether it runs{_or_another_port()} ({reason})"
        ) from error
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def _in_thread(call: Callable[[], T], limit_s: float) -> T:
    """Call with a time limit; on TimeoutError the daemon thread keeps running."""
    # torch 2.13 waits for ever for a peer that accepts a connection and does not reply.
    result: Future[T] = Future()
    threading.Thread(target=_run, args=(call, result), daemon=True).start()
    try:
        return result.result(limit_s)
    finally:
        del result  # as below


def _run(call: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(call())
    except Exception as error:  # raised again in the caller's thread
        result.set_exception(error)
    finally:
        del result  # an error has this frame, and would keep itself with the store that it is of


def _join(own: Identity, end: float) -> dist.Store:
    store = _open(own.rank == 0, end)
    store.set_timeout(_until(end))
    if own.rank == 0:
        if own.world_size > 1 and not os.environ.get(MEETING_VARIABLE) and launch_secret() is None:
            logger.warning("%s", NOT_AUTHENTICATED.format(place=_address()))
        store.set(_key(0), own.encode())
        return store
    first = _identity_of_first(own, store)
    if found := differing_properties(own, first):
        raise LaunchError(
            f"another launch uses {_address()}: {first}; {own} does not join it (different: {', '.join(found)}); "
            "end the other run, choose another port with --master_port, or give all ranks of a launch the same "
            f"{LAUNCH_ID_VARIABLE}"
        )
    holder = Identity.decode(store.compare_set(_key(own.rank), "", own.encode()))
    if holder != own:
        raise LaunchError(f"rank {own.rank} has connected to {_address()} twice: {own} is refused after {holder}")
    return store


def _identity_of_first(own: Identity, store: dist.Store) -> Identity:
    try:
        return Identity.decode(store.get(_key(0)))
    except LaunchError as error:
        if os.environ.get(MEETING_VARIABLE):
            raise
        which = "another secret than this one" if launch_secret() else "a secret, this one none"
        claimed = _listener(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        raise LaunchError(
            f"{_address()} is in use by what says it is {claimed}; {own} does not join it, that launch has {which}, or "
            f"somebody forges it: {error}"
        ) from error


def _gather(own: Identity, store: dist.Store, end: float) -> dist.Store:
    """Wait until every rank has joined: rank 0 waits for all keys and reads them, the others for its key ``met``."""
    everyone = [_key(rank) for rank in range(own.world_size)]
    try:
        store.wait(everyone if own.rank == 0 else ["met"], _until(end))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(everyone) if not store.check([key])]
        raise HangError(
            f"{_name(missing)} did not connect to {_address()} in time (megasdc.parallel.timeout_s), where rank "
            f"{own.rank} waited; check whether all processes run and reach it"
        ) from error
    if own.rank == 0:
        for rank, key in enumerate(everyone):
            if (found := Identity.decode(store.get(key))).rank != rank:
                raise LaunchError(f"{found} has connected to {_address()} as rank {rank}; {REMEDY}")
        store.set("met", "yes")
    return store


def _open(first: bool, end: float) -> dist.Store:
    """Replaces torch's ``env://``, which counts every connection as a rank before its identity is known."""
    import torch.distributed as dist

    if folder := os.environ.get(MEETING_VARIABLE):
        try:
            return _ours(folder_store(Path(folder)))
        except OSError as error:
            raise LaunchError(
                f"ranks cannot meet in {folder} (environment variable {MEETING_VARIABLE}): {error}; start all anew by "
                "one megasdc command, or unset that variable for what is no rank of a launch"
            ) from error
    host, port, secret = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), launch_secret()
    hosts_it = first and os.environ.get(AGENT_STORE_VARIABLE) != "True"
    try:
        store: dist.Store | None = _serve(host, port, end) if hosts_it else None
        if store is None:
            store = dist.TCPStore(host, port, is_master=hosts_it, wait_for_workers=False, timeout=_until(end))
    except (dist.DistNetworkError, OSError) as error:
        if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
            raise
        raise LaunchError(
            f"port {port} on {host} is in use by {_listener(host, port)}, so the ranks cannot connect there; end it, "
            f"or choose another with --master_port: {str(error).splitlines()[0]}"
        ) from error
    return _ours(store if secret is None else signed_store(store, secret))


def _serve(host: str, port: int, end: float) -> dist.TCPStore | None:
    """The store of rank 0 on the one address at which the others look for it; None: it has to be torch's own, on all.

    That is where there is no such address, which is said where the launch has a secret, and where it has none.
    """
    address, has_secret = address_of_store(host), launch_secret() is not None
    if address is not None and (has_secret or ipaddress.ip_address(address.partition("%")[0]).is_loopback):
        return serve_store(address, port, _until(end))
    if has_secret:
        logger.warning(
            "MASTER_ADDR %s leads its own host to no address by which others reach it, so that rank 0 listens on all; "
            "give one of that host by --master_addr",
            host,
        )
    return None


def _ours(store: dist.Store) -> dist.Store:
    """A prefix for each restart and each meeting of remaining ranks, since a store may outlive those before."""
    again = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}{os.environ.get(MEETING_NAME_VARIABLE, '')}"
    return prefix_store(f"meeting/{again}", store)


class AskedRanks:
    """Agreement of the ranks of a launch that are asked to stop while they start: all leave, or the run goes on.

    Over a connection of its own, since the main thread may wait at the store meanwhile, which lets nobody else ask it.
    Each rank has a key of its own, and the first to decide decides for all, so that repeating any of it is harmless.
    Every method raises LaunchError where a decision is not signed with the secret of the launch.

    Args:
        rank: rank of this process in the launch.
        world_size: number of ranks of the launch.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store: dist.Store | None = None

    def record_request(self) -> bool:
        """Note that this rank is asked; returns whether all are, and leave; false if the store does not answer."""
        if self._world_size == 1:
            return True

        def note(store: dist.Store) -> bool:
            store.set(f"{_ASKED}/{self._rank}", "yes")
            return store.check(self._keys(_ASKED)) and _decide(store, _LEAVE) == _LEAVE

        return bool(self._call(note))

    def go_on(self) -> bool:
        """Whether this rank may go on; then no rank leaves any more. False: all were asked before, and leave.

        True where the store does not answer at all: the rank that holds it has gone.
        """
        end = time.monotonic() + 2 * LOOK_S
        while (found := self._call(lambda store: _decide(store, _GO_ON))) is None and time.monotonic() < end:
            time.sleep(_RETRY_S)
        return found != _LEAVE

    def settle(self, limit_s: float) -> None:
        """Wait until all ranks know that they leave, for some seconds at most, or until the store has gone."""
        end = time.monotonic() + limit_s

        def note(store: dist.Store) -> bool:
            store.set(f"{_KNOWN}/{self._rank}", "yes")
            return not store.check(self._keys(_KNOWN))

        while self._world_size > 1 and self._call(note) and time.monotonic() < end:
            time.sleep(_RETRY_S)

    def _keys(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self._world_size)]

    def _call(self, action: Callable[[dist.Store], T]) -> T | None:
        """Result of an action with the store; None: the store does not answer in ``LOOK_S``.

        Raises:
            LaunchError: a value in the store is not signed with the secret of the launch.
        """

        def call() -> T:
            try:
                store = self._store or _open(False, time.monotonic() + LOOK_S)
            except LaunchError as error:
                raise TimeoutError("nothing of this launch is there any more") from error
            self._store = store
            return action(store)

        try:
            return _in_thread(call, LOOK_S)  # torch 2.13 has no limit for most of it
        except (RuntimeError, TimeoutError):  # the rank that holds it has gone, or is stuck
            self._store = None  # a late answer would be taken for that of the next question
            return None


_ASKED, _KNOWN, _DECISION, _LEAVE, _GO_ON = "asked", "known", "start", "leave", "go on"
_RETRY_S = 0.1


def _decide(store: dist.Store, wanted: str) -> str:
    """Decision on the start: ``wanted``, unless another rank has decided before."""
    return str(store.compare_set(_DECISION, "", wanted).decode())


def _listener(host: str, port: int) -> str:
    """Description of who listens on a port: a launch of megasdc, or another program."""
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=LOOK_S)

    def ask() -> str | None:
        found = _ours(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))
        if not found.check([_key(0)]):
            return None
        said = found.get(_key(0))
        return str(Identity.decode(said if said.startswith(b"{") else without_signature(said)))

    with contextlib.suppress(RuntimeError, TimeoutError, LaunchError):
        return _in_thread(ask, LOOK_S) or "another program"
    return "another program"


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _or_another_port() -> str:
    if os.environ.get(MEETING_VARIABLE):
        return ""
    return ", or choose another port with --master_port if another program listens there"


def _address() -> str:
    if folder := os.environ.get(MEETING_VARIABLE):
        return folder
    return f"port {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']}"


def _name(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MAX_RANKS_SHOWN]))
    more = f" and {len(ranks) - MAX_RANKS_SHOWN} more" if len(ranks) > MAX_RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}{more}"


def _until(end: float) -> datetime.timedelta:
    """Time left, always above 0: torch takes 0 or less for no limit."""
    return datetime.timedelta(seconds=max(end - time.monotonic(), 0.001))
