"""Locks on the folders of a launch, taken on every host before anything there is read or changed."""

from __future__ import annotations

import datetime
import json
import logging
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megasdc.common.durable import wait_for_room
from megasdc.common.errors import LaunchError, MegasdcError, StorageError, error_of_rank
from megasdc.common.origin import LAUNCH_ID_VARIABLE
from megasdc.common.run_lock import (
    ENDED_LAUNCHES_VARIABLE,
    STALE_S,
    Holder,
    LockedFolders,
    RunLock,
    join_lock,
    take_lock,
)
from megasdc.engine.engine import StepResult
from megasdc.engine.hooks import Hook, Run

logger = logging.getLogger(__name__)


def hold_folders(
    folders: Sequence[Path], store: dist.Store, rank: int, world_size: int, timeout_s: float, held: LockedFolders
) -> list[RunLock]:
    """Lock the folders of a launch and return this rank's locks, or end all ranks with one error that names the holder.

    Rank 0 takes the locks. A rank that sees them held by its own launch shares them; else, with folders local to each
    node, the first rank of a host locks that host's.

    Folders are created if absent. ``timeout_s``: seconds to wait for another rank, besides the time that it may watch a
    lock of another host. ``held`` gets this rank's locks and the launch's token.

    Raises:
        LaunchError: another launch holds a folder; on all ranks.
        StorageError: a folder cannot be written; on all ranks.

    Collective: all ranks of the launch.
    """
    call = store.add(f"run_lock/calls of {rank}", 1)  # in one process there may be several with one store
    store = dist.PrefixStore(f"run_lock/{call}", store)
    wait = datetime.timedelta(seconds=timeout_s + 2 * STALE_S * len(folders))
    if rank == 0:
        held.token = token = secrets.token_hex(8)
        locks, refusal = _try_all(folders, _holder(token), take_lock, held)
        store.set("first", json.dumps({"token": token, "refusal": refusal}))
        refusals = [refusal, *(_get(store, f"rank_{other}", wait) for other in range(1, world_size) if not refusal)]
        verdict = next((text for text in refusals if text), "")
        store.set("verdict", verdict)
    else:
        first = json.loads(_get(store, "first", wait))
        held.token = token = first["token"]
        locks, refusal = [], first["refusal"]
        if not refusal:
            locks, refusal = _try_all(folders, _holder(token), join_lock, held)
            store.set(f"rank_{rank}", refusal)
        verdict = refusal or _get(store, "verdict", wait)
    if verdict:
        found = json.loads(verdict)
        raise error_of_rank(found["exit_code"])(found["message"])
    for lock in locks:
        if lock.replaced is not None:
            logger.warning("%s: took over the lock that %s did not release", lock.folder, lock.replaced)
    return locks


class FolderWatch(Hook):
    """Ends a run whose folder another launch has taken over, as one may after its host was frozen for ``STALE_S``.

    It is the first hook, so that nothing more is written.
    """

    def __init__(self, locks: Sequence[RunLock]) -> None:
        self.locks = locks

    def on_start(self, run: Run) -> None:
        """Emit an event for each stale lock that was replaced, once the folders are this launch's alone."""
        for lock in self.locks:
            lock.wait_until_alone()
            if lock.replaced is not None:
                run.events.emit("start", "lock_taken_over", folder=str(lock.folder), left_by=lock.replaced)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Check that this launch still holds the locks."""
        for lock in self.locks:
            if lock.taken_by is not None:
                raise LaunchError(
                    f"{lock.folder} was taken by {lock.taken_by}: this run did not update it for {STALE_S:g} s, or "
                    "its supervisor took it for ended; this run ends, so that only one of them writes there"
                )


def _holder(token: str) -> Holder:
    return Holder.this_process(token, os.environ.get(LAUNCH_ID_VARIABLE))


def _try_all(
    folders: Sequence[Path],
    holder: Holder,
    hold: Callable[[Path, Holder, Callable[[str], None], Collection[str]], RunLock | None],
    held: LockedFolders,
) -> tuple[list[RunLock], str]:
    """Lock every folder; also the reason why not, as a text for all ranks, empty on success."""
    locks = []
    ended = os.environ.get(ENDED_LAUNCHES_VARIABLE, "").split(",")
    try:
        for folder in folders:
            wait_for_room(partial(folder.mkdir, parents=True, exist_ok=True), folder, logger.warning)
            lock = wait_for_room(partial(hold, folder, holder, logger.warning, ended), folder, logger.warning)
            if lock is not None:
                held.add(lock)
                locks.append(lock)
    except MegasdcError as error:
        return locks, json.dumps({"exit_code": error.exit_code, "message": str(error)})
    except OSError as error:
        problem = StorageError(f"{error.filename or folders[0]} cannot be written: {error.strerror}")
        return locks, json.dumps({"exit_code": problem.exit_code, "message": str(problem)})
    return locks, ""


def _get(store: dist.Store, key: str, wait: datetime.timedelta) -> str:
    store.wait([key], wait)
    return store.get(key).decode()
