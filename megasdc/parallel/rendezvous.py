"""Rendezvous of a launch's ranks at a key-value store; ranks of another launch are refused.

On one host ``megasdc launch`` and programs that start ranks themselves name a folder of the user's alone, and nothing
listens (``megasdc.parallel.stores``). Else rank 0 hosts the store at the launcher's port. Where ``megasdc launch`` has
given ranks a secret, all values in it are signed; else whoever reaches it can take part, which rank 0 says.

Two launches may be given the same port. The second cannot listen there, and its other ranks would join the first one's
store. So rank 0 writes its identity to the store, and every other rank checks it before it writes its own: a rank of
another launch ends with an error, and the launch that owns the store is not disturbed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from megasdc.common.errors import HangError, LaunchError
from megasdc.common.origin import LAUNCH_ID_VARIABLE
from megasdc.parallel.identity import AGENT_STORE_VARIABLE, Identity, differences
from megasdc.parallel.stores import (
    MEETING_VARIABLE,
    REMEDY,
    address_of_store,
    folder_store,
    launch_secret,
    prefix_store,
    serve_store,
    signed_store,
    without_signature,
)

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_RANKS_SHOWN = 8
MEETING_NAME_VARIABLE = "MEGASDC_MEETING_NAME"
"""What tells a later meeting of ranks that go on without others from the first one; absent: it is the first."""
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
    if found := differences(own, first):
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
        rank: of this process in the launch.
        world_size: ranks of the launch.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store: dist.Store | None = None

    def ask(self) -> bool:
        """Note that this rank is asked; returns whether all are, and leave. False where the store does not answer."""
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
        """Result of an action with the store; None: that does not answer in ``LOOK_S``.

        Raises:
            LaunchError: what the store holds is not signed with the secret of the launch.
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
    """What was decided of the start: that, unless another rank was first."""
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
