"""Which steps of a drill's run are whole, on the disk and in the memory of its hosts, looked at from outside."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasdc.checkpoint.files import hash_file, list_replaced, list_steps, step_folder
from megasdc.checkpoint.host_memory import MemorySlot, find_slots
from megasdc.checkpoint.verify import verify_checkpoint
from megasdc.common.durable import REPLACED_PREFIX
from megasdc.common.host import own_prefix, shared_folder
from megasdc.common.origin import read_identity


@dataclass(frozen=True)
class Holdings:
    """Newest whole steps; 0: there is none."""

    memory: int
    disk: int

    @property
    def newest(self) -> int:
        """Of both."""
        return max(self.memory, self.disk)


def run_id(run: Path) -> str:
    """Id of a run."""
    identity = read_identity(run)
    assert identity is not None, f"{run} was begun"
    return identity.run


def host_memory(run: Path, host: str) -> Path:
    """Folder of a run in a host's memory; ``host``: an empty one is this machine."""
    return shared_folder() / f"{own_prefix()}memory-{run_id(run)}-{host or socket.gethostname()}"


def left_in_memory(run: Path) -> list[Path]:
    """Folders of a run in shared memory, also those of its agents."""
    return sorted(shared_folder().glob(f"{own_prefix()}*{run_id(run)}*"))


def clear_memory(run: Path) -> None:
    """Remove what a run has left in shared memory, also of its agents."""
    for path in left_in_memory(run):
        shutil.rmtree(path, ignore_errors=True)


def lose_memory(run: Path, host: str) -> None:
    """Remove what a host held."""
    shutil.rmtree(host_memory(run, host), ignore_errors=True)


def slots(run: Path, hosts: Sequence[str], rank: int, *, guests: bool) -> list[MemorySlot]:
    """What hosts hold of a rank; ``guests``: at its partner, not where it ran."""
    found = [one for host in hosts for one in find_slots(host_memory(run, host), run_id(run))[0]]
    return [one for one in found if one.is_guest == guests and one.record.rank == rank]


def find_holdings(run: Path, checkpoints: Path, hosts: Sequence[str], ranks: int) -> Holdings:
    """What a start on these hosts can go on from."""
    folders = [checkpoints / step_folder(step) for step in list_steps(checkpoints)]
    if checkpoints.is_dir():
        aside = [step_folder(step) for step in list_replaced(checkpoints)]
        folders += [checkpoints / f"{REPLACED_PREFIX}{name}" for name in aside if not (checkpoints / name).exists()]
    disk = [int(one.name.rpartition("_")[2]) for one in folders if not verify_checkpoint(one).problems]
    return Holdings(max(_whole_in_memory(run, hosts, ranks), default=0), max(disk, default=0))


def _whole_in_memory(run: Path, hosts: Sequence[str], ranks: int) -> Iterator[int]:
    found: dict[tuple[int, int], set[int]] = {}
    for host in hosts:
        for held in find_slots(host_memory(run, host), run_id(run))[0]:
            if _is_whole(held):
                found.setdefault((held.record.step, held.record.start), set()).add(held.record.rank)
    return (step for (step, _), holders in found.items() if len(holders) == ranks)


def _is_whole(held: MemorySlot) -> bool:
    paths = [(held.folder / one.name, one) for one in held.record.files]
    return all(path.is_file() and hash_file(path) == one.xxh3_128 for path, one in paths)
