"""Removing steps from an archive by rules, and then the blocks that no step needs any more.

The record of a step goes before its blocks, so that a prune that is killed leaves blocks that nobody needs, which the
next one removes. ``megasdc.ops.archive.lease`` keeps pushes and prunes apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megasdc.checkpoint.files import step_folder
from megasdc.checkpoint.manifest import KnownState
from megasdc.checkpoint.save import plan_retention, worth_keeping
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.ops.archive.entries import ArchivedStep, read_entries
from megasdc.ops.archive.lease import pruning, refuse_others
from megasdc.ops.archive.record import BLOCKS, RECEIPTS, RUNS, open_archive, part_file

_AT_ONCE = 1000


@dataclass
class PruneReport:
    """Result of a prune; ``removed``: steps by run; ``freed_bytes``: of ``num_blocks`` blocks as they were stored."""

    address: str
    dry_run: bool
    removed: dict[str, list[int]] = field(default_factory=dict)
    num_blocks: int = 0
    freed_bytes: int = 0

    def render(self) -> str:
        """The report as text."""
        doing = "would be removed" if self.dry_run else "removed"
        lines = [f"{run}: steps {', '.join(map(str, steps))} {doing}" for run, steps in self.removed.items()]
        lines.append(f"{self.address}: {self.num_blocks} blocks {doing}, {self.freed_bytes / 1e6:.1f} MB")
        return "\n".join(lines)


def prune_archive(
    address: str,
    *,
    run: str | None = None,
    keep_last: int = 0,
    keep_every: int = 0,
    steps: tuple[int, ...] = (),
    dry_run: bool = False,
) -> PruneReport:
    """Remove steps of each run, or of one, and all blocks that no step needs.

    Args:
        keep_last: newest complete steps of a run that are kept; 0: all.
        keep_every: steps that are a multiple are kept too; 0: none.
        steps: removed by name, whatever the rules say; need ``run``.
        dry_run: remove nothing.

    Raises:
        CheckpointError: there is no archive, no such run or no such step, or blocks cannot be removed since a record is
            damaged.
        StorageError: a push goes on, or the archive cannot be read or written.
    """
    if steps and run is None:
        raise ConfigError("--step names steps of one run: name it with --run")
    store = open_archive(address)
    report = PruneReport(store.address, dry_run)
    with pruning(store, f"a prune of {run or 'all runs'}") as held:
        entries = read_entries(store)
        if run is not None and not any(store.sizes(f"{folder}/{run}") for folder in (RUNS, RECEIPTS)):
            runs = ", ".join(sorted({entry.run for entry in entries})) or "none"
            raise CheckpointError(f"{store.address} has no run {run}; it holds {runs}: see megasdc archive list")
        gone = _steps_to_remove([entry for entry in entries if run in (None, entry.run)], keep_last, keep_every, steps)
        for entry in gone:
            report.removed.setdefault(entry.run, []).append(entry.step)
        kept = [entry for entry in entries if not any(entry is other for other in gone)]
        needed = {digest for entry in kept for part in entry.parts.values() for digest in part.blocks()}
        # Of a record that cannot be read nobody knows the blocks; a part that is merely not there needs none.
        unknown = [entry for entry in kept if _has_unread(store.sizes(RUNS + _below(entry)), entry)]
        blocks = store.sizes(BLOCKS)
        spare = [] if unknown else [name for name in blocks if name.rpartition("/")[2] not in needed]
        report.num_blocks, report.freed_bytes = len(spare), sum(blocks[name] for name in spare)
        if not dry_run:
            for entry in gone:
                for folder in (RUNS, RECEIPTS):  # a receipt that is left tells the next prune to go on
                    store.delete(list(store.sizes(folder + _below(entry))))
            for first in range(0, len(spare), _AT_ONCE):
                refuse_others(store, held)
                store.delete(spare[first : first + _AT_ONCE])
            if not unknown:
                store.delete([name for folder in (BLOCKS, RUNS, RECEIPTS) for name in store.list_unfinished(folder)])
    if unknown:
        who = ", ".join(f"step {entry.step} of {entry.run}" for entry in unknown)
        raise CheckpointError(
            f"{store.address}: no block was removed, since the records of {who} cannot be read: push them again, or "
            "remove them with --run and --step"
        )
    return report


def _steps_to_remove(entries: list[ArchivedStep], last: int, every: int, steps: tuple[int, ...]) -> list[ArchivedStep]:
    """The entries to remove, of which the rules count those that are complete, and keep what a run can go back to.

    One that is not - damaged, or half removed by a prune that was killed - goes if it would go as a complete one.
    """
    if missing := sorted(set(steps) - {entry.step for entry in entries}):
        raise CheckpointError(f"there is no step {', '.join(map(str, missing))} of this run: see megasdc archive list")
    gone = []
    for entry in entries:
        complete = {
            other.step: next(iter(other.parts.values()), KnownState())
            for other in entries
            if other.run == entry.run and other.step not in steps and (other is entry or not other.problems)
        }
        kept = worth_keeping({step: one for step, one in complete.items() if step != entry.step or not entry.problems})
        if entry.step in steps or entry.step in plan_retention(complete, max(complete), last, every, *kept):
            gone.append(entry)
    return gone


def _has_unread(names: dict[str, int], entry: ArchivedStep) -> bool:
    """Whether a step has a record that could not be read or is not sure."""
    read = {part_file(entry.run, entry.step, part) for part in entry.parts}
    return any(name not in read for name in names)


def _below(entry: ArchivedStep) -> str:
    return f"/{entry.run}/{step_folder(entry.step)}"
