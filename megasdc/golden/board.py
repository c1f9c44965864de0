"""How do watchers on many hosts talk? Through a key-value store that rank 0 holds; what died cannot answer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megasdc.errors import HangError, LaunchError, MegasdcError, PeerError
from megasdc.parallel.identity import Identity
from megasdc.parallel.meeting import join_store

START_S = 300.0
"""Seconds that ranks may differ in when they start."""
GRACE_S = 30.0
"""Seconds of silence after which a watcher that had given a sign of life counts as gone."""
POLL_S = 0.2


class Board:
    """Messages between the watchers of a launch, each written once under a name, as JSON.

    Args:
        rank: of this watcher.
        world: how many there are.

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
        """Tell rank 0 that this watcher lives, and how many runs its rank has done."""
        self.tell(f"alive/{self.rank}", [time.time(), runs])

    def tell(self, name: str, message: Any) -> None:
        """Write a message."""
        with self._store_errors():
            self._store.set(name, json.dumps(message))

    def read(self, name: str) -> Any:
        """A message; None where nothing has been written yet."""
        with self._store_errors():
            return json.loads(self._store.get(name)) if self._store.check([name]) else None

    def wait(self, name: str, what: str) -> Any:
        """A message that another rank writes soon, with signs of life until then.

        Args:
            name: of the message.
            what: who must do what, for people.

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
        """Stay until all who read the last message have read it, or some seconds have passed.

        The launcher ends all ranks of a host as soon as one of them ends with an exit code, and the store ends with
        rank 0.

        Args:
            readers: how many ranks read it, this one among them.
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
                raise  # its own store; another rank that finds it gone has nothing more to wait for

    @contextmanager
    def _store_errors(self, text: str = "rank 0, which collects the reports, has gone") -> Iterator[None]:
        try:
            yield
        except MegasdcError:
            raise
        except self._errors as error:
            raise LaunchError(f"{text}: {error}") from error
