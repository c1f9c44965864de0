"""Verification of an archive without the originals: every record, every block, and that nothing is missing."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from megasdc.common.errors import CheckpointError
from megasdc.common.program import bytes_bar
from megasdc.ops.archive.block import LARGEST_STORED, decode_block, size_of
from megasdc.ops.archive.entries import ArchivedStep, list_names, read_entries
from megasdc.ops.archive.record import BLOCKS, block_file, open_archive
from megasdc.ops.archive.store import Store

WORKERS = 4
_TOLD = 50


@dataclass(frozen=True)
class DamagedBlock:
    """A damaged or missing block; ``needed_by``: steps that need it, such as ``step 20 of RUN``."""

    name: str
    problem: str
    needed_by: list[str]


@dataclass
class VerifyReport:
    """Result of a verification.

    Attributes:
        num_steps: steps of all runs.
        num_blocks: blocks that are there; ``stored_bytes``: as they are stored.
        unneeded: blocks that no step needs.
        damages: of blocks.
        problems: of steps, by ``step 20 of RUN``.
        deleted: damaged blocks that were deleted.
    """

    address: str
    num_steps: int
    num_blocks: int
    stored_bytes: int
    unneeded: int
    damages: list[DamagedBlock] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    deleted: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damages and not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return {"ok": self.ok, **asdict(self)}

    def render(self) -> str:
        """The report as text."""
        state = "every block and record is whole" if self.ok else "DAMAGED"
        spare = f" ({self.unneeded} that no step needs: prune removes them)" if self.unneeded else ""
        lines = [
            f"{self.address}: {state}; {self.num_steps} steps, {self.num_blocks} blocks{spare}, "
            f"{self.stored_bytes / 1e6:.1f} MB"
        ]
        lines += [f"  - {who}: {'; '.join(problems)}" for who, problems in self.problems.items()]
        for damage in self.damages[:_TOLD]:
            who = ", ".join(damage.needed_by) or "no step"
            lines.append(f"  - {damage.name} {damage.problem}; needed by {who}")
        if len(self.damages) > _TOLD:
            lines.append(f"  - and {len(self.damages) - _TOLD} more blocks: --json lists all")
        if self.deleted:
            lines.append(f"  {self.deleted} damaged blocks are deleted: push these steps again, where they still exist")
        elif self.damages:
            lines.append("  --delete-damaged deletes such blocks, so that pushing the step again stores them anew")
        return "\n".join(lines)


def verify_archive(
    address: str, *, delete_damaged: bool = False, workers: int = WORKERS, progress: bool = False
) -> VerifyReport:
    """Read, decompress and compare everything in an archive.

    Args:
        delete_damaged: delete damaged blocks.
        workers: threads that fetch and decompress.
        progress: draw a bar on standard error where it is a terminal.

    Raises:
        CheckpointError: there is no archive.
        StorageError: it cannot be read.
    """
    store = open_archive(address)
    strange = list_names(store).strange
    entries = read_entries(store)
    needed: dict[str, tuple[int, list[str]]] = {}
    for entry in entries:
        for digest, size in _blocks(entry):
            needed.setdefault(digest, (size, []))[1].append(_who(entry))
    there = {name.rpartition("/")[2]: (name, size) for name, size in store.sizes(BLOCKS).items()}
    report = VerifyReport(
        store.address,
        len(entries),
        len(there),
        sum(size for _, size in there.values()),
        len(there.keys() - needed.keys()),
        problems={_who(entry): entry.problems for entry in entries if entry.problems},
    )
    if strange:
        report.problems["the archive"] = [f"{name} does not belong to an archive" for name in strange]
    for digest in sorted(needed.keys() - there.keys()):
        report.damages.append(DamagedBlock(block_file(digest), "is missing", needed[digest][1]))
    with bytes_bar("blocks", report.stored_bytes, quiet=not progress) as advance, ThreadPoolExecutor(workers) as pool:

        def check(digest: str) -> str | None:
            name, stored = there[digest]
            problem = _problem(store, digest, name, needed.get(digest, (None, []))[0])
            advance(stored)
            return problem

        for digest, problem in zip(sorted(there), pool.map(check, sorted(there)), strict=True):
            if problem is not None:
                report.damages.append(DamagedBlock(there[digest][0], problem, needed.get(digest, (0, []))[1]))
    if delete_damaged:
        names = [damage.name for damage in report.damages if damage.problem != "is missing"]
        store.delete(names)
        report.deleted = len(names)
    return report


def _problem(store: Store, digest: str, name: str, size: int | None) -> str | None:
    """What is wrong with a block; None: nothing."""
    if name != block_file(digest):
        return "does not belong to an archive"
    try:
        if (stored := store.read(name, LARGEST_STORED)) is None:
            return "is missing"
        decode_block(stored, digest, min(size_of(stored), LARGEST_STORED) if size is None else size)
    except CheckpointError as error:
        return str(error)
    return None


def _blocks(entry: ArchivedStep) -> Iterator[tuple[str, int]]:
    """Name and size of each block that a step needs, once."""
    yield from {digest: size for part in entry.parts.values() for digest, size in part.blocks().items()}.items()


def _who(entry: ArchivedStep) -> str:
    return f"step {entry.step} of {entry.run}"
