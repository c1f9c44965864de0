"""Messages between the watchers of a launch, through a key-value store on rank 0, so that a dead rank blocks nobody."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megasdc.common.errors import HangError, LaunchError, MegasdcError, PeerError
from megasdc.parallel.identity import Identity
from megasdc.parallel.meeting import join_store

START_S = 300.0
"""Largest difference of the ranks' start times, in seconds."""
GRACE_S = 30.0
"""Seconds without a sign of life after which a started watcher counts as gone."""
POLL_S = 0.2


class Board:
    """Messages between the watchers of a launch, as JSON, each written once under a name.

    Raises:
        LaunchError: rank 0 cannot be reached; by every method too, once rank 0 has gone.
    """

    def __init__(self, rank: int, world: int) -> None:
        import torch.distributed as dist

        self.rank, self.world = rank, world
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._errors = (RuntimeError, dist.DistError)
        with self._store_errors(f"rank {rank} cannot reach rank 0 at {place}"):
            try:
                self._store = join_store(Identity.own(rank, world, None), START_S)
            except HangError as error:
                raise LaunchError(str(error)) from error
        self.sign()

    def sign(self, runs: int = 0) -> None:
        """Send rank 0 a sign of life, with the number of runs that this rank has done."""
        self.tell(f"alive/{self.rank}", [time.time(), runs])

    def tell(self, name: str, message: Any) -> None:
        """Write a message."""
        with self._store_errors():
            self._store.set(name, json.dumps(message))

    def read(self, name: str) -> Any:
        """A message; None if it has not been written yet."""
        with self._store_errors():
            return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def wait(self, name: str, what: str) -> Any:
        """Wait for a message of another rank, and send signs of life meanwhile; ``what``: who must do what, for people.

        Raises:
            PeerError: it was not written in time.
        """
        deadline = time.monotonic() + START_S
        while (message := self.read(name)) is None:
            if time.monotonic() > deadline:
                raise PeerError(f"{what} within {START_S:.0f} s")
            self.sign()
            time.sleep(POLL_S)
        return message

    def leave(self, readers: int) -> None:
        """Wait until all ``readers`` of the last message, this rank too, have read it, for at most ``GRACE_S`` seconds.

        The launcher ends all ranks of a host as soon as one of them ends with a non-zero exit code, and the store ends
        with rank 0.
        """
        deadline = time.monotonic() + GRACE_S
        try:
            with self._store_errors():
                read = self._store.add("read", 1)
                while read < readers and time.monotonic() < deadline:
                    time.sleep(POLL_S)
                    read = self._store.add("read", 0)
        except LaunchError:
            if self.rank == 0:
                raise  # its own store; on another rank the message was read, and the store is no longer needed

    @contextmanager
    def _store_errors(self, text: str = "rank 0, which collects the reports, has ended") -> Iterator[None]:
        try:
            yield
        except MegasdcError:
            raise
        except self._errors as error:
            raise LaunchError(f"{text}: {error}") from error
