"""Leases: that a prune never deletes blocks which a push counts on.

A push writes a lease, and then looks for a prune; a prune writes one, and then looks for pushes; so at least one of two
that begin together sees the other. The prune gives way, and the push waits. A lease is written again every minute. One
that is older than 5 minutes, by the store's own clock, is of a process that has died, and a prune removes it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Literal

from megasdc.common.errors import CheckpointError, StorageError
from megasdc.ops.archive.record import FORMAT_VERSION, LARGEST_RECORD, LEASES, Lease, parse_record, text_of
from megasdc.ops.archive.store import Store

RENEW_S = 60.0
STALE_S = 300.0
WAIT_S = STALE_S + RENEW_S
_POLL_S = 2.0


class OwnLease:
    """A lease that this process holds."""

    def __init__(self, store: Store, kind: Literal["push", "prune"], what: str) -> None:
        self._store, self.name = store, f"{LEASES}/{kind}-{uuid.uuid4().hex}.json"
        host = f"process {os.getpid()} on {socket.gethostname()}"
        self._text = text_of(Lease(format_version=FORMAT_VERSION, kind=kind, what=f"{what} ({host})"))
        self._ended = threading.Event()
        self.renew()
        self._thread = threading.Thread(target=self._renew_periodically, name="lease of an archive", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Write it again."""
        self._store.write(self.name, self._text)

    def end(self) -> None:
        """Remove it."""
        self._ended.set()
        self._thread.join()
        with contextlib.suppress(StorageError):  # then it becomes stale
            self._store.delete([self.name])

    def others(self, kind: Literal["push", "prune"]) -> list[str]:
        """Names of the living leases of others of this kind; this one must have been written just now."""
        found = []
        now = self._store.modified(self.name)
        for name in self._store.sizes(LEASES):
            then = self._store.modified(name)
            if now is None or then is None or name == self.name:
                continue
            if name.startswith(f"{LEASES}/{kind}-") and now - then < STALE_S:
                found.append(name)
        return found

    def remove_stale(self) -> None:
        """Remove leases of processes that have died."""
        living = {*self.others("push"), *self.others("prune"), self.name}
        self._store.delete([name for name in self._store.sizes(LEASES) if name not in living])

    def describe(self, name: str) -> str:
        """What a lease is for."""
        try:
            return parse_record(self._store, name, self._store.read(name, LARGEST_RECORD), Lease).what
        except CheckpointError:
            return name

    def _renew_periodically(self) -> None:
        while not self._ended.wait(RENEW_S):
            with contextlib.suppress(StorageError):  # until it is stale, the next minute may still do it
                self.renew()


@contextlib.contextmanager
def pushing(store: Store, what: str, say: Callable[[str], None]) -> Iterator[OwnLease]:
    """Context of a push; waits while a prune goes on.

    Raises:
        StorageError: it goes on for longer than 6 minutes.
    """
    held = OwnLease(store, "push", what)
    try:
        deadline = time.monotonic() + WAIT_S
        while others := held.others("prune"):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{store.address}: {held.describe(others[0])} goes on for {WAIT_S:.0f} s; push later"
                )
            say(f"waiting for {held.describe(others[0])}")
            time.sleep(_POLL_S)
            held.renew()
        yield held
    finally:
        held.end()


@contextlib.contextmanager
def pruning(store: Store, what: str) -> Iterator[OwnLease]:
    """Context of a prune.

    Raises:
        StorageError: a push or another prune goes on.
    """
    held = OwnLease(store, "prune", what)
    try:
        refuse_others(store, held)
        held.remove_stale()
        yield held
    finally:
        held.end()


def refuse_others(store: Store, held: OwnLease) -> None:
    """StorageError if a push or another prune goes on beside this prune."""
    held.renew()
    if others := held.others("push") + held.others("prune"):
        raise StorageError(
            f"{store.address}: {held.describe(others[0])} goes on; prune when it has ended. Of a process that was "
            f"killed it counts for {STALE_S / 60:.0f} minutes"
        )
