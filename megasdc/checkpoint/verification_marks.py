"""Marks on checkpoints: verified by an audit, and the corruption mark of a run that found corruption.

A checkpoint is a candidate until an audit of a later step agrees on all ranks, with finite loss and gradient norm; then
it is verified, if its own state was found to be finite when it was saved, and its place in the data to follow from its
steps: the ranks that saved it still computed the same. What was saved with a host that takes no part in the audit, or
with fewer ranks, stays a candidate. The mark is a file in the checkpoint's folder with its ``save_id``, so that a new
save of the same step is a candidate again. A run that ends because of corruption writes
``corruption.json`` beside the checkpoints. Neither mark is a file of the checkpoint: the manifest does not name them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.checkpoint.manifest import has_marker, list_continued, read_complete, read_manifest
from megasdc.checkpoint.places import FolderRanks
from megasdc.checkpoint.records import Record, read_record, record_text, write_record
from megasdc.common.durable import END_S, wait_for_room, write_whole
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.events import EventLog

VERIFIED_FILE = "verified.json"
CORRUPTION_FILE = "corruption.json"
_VERSION = 1

logger = logging.getLogger(__name__)


class VerifiedMark(Record):
    """Mark of a verified checkpoint: the later audit of ``audit_step`` agreed; ``time``: seconds since the epoch."""

    format_version: int
    save_id: str
    step: int
    audit_step: int
    time: float


class CorruptionMark(Record):
    """Mark of a run that ended because of corruption; kept until a resume from a verified checkpoint.

    ``step``: where corruption was found; ``incident``: path of the report; ``time``: seconds since the epoch.
    """

    format_version: int
    step: int
    incident: str
    time: float


@dataclass(frozen=True)
class Standing:
    """Whether a checkpoint is verified, in a folder where audits are in use.

    Attributes:
        verified: whether a later audit agreed.
        audit_step: step of that audit; None for a candidate.
        problem: why its mark is not valid; None: valid, or no mark.
    """

    verified: bool
    audit_step: int | None = None
    problem: str | None = None

    def __str__(self) -> str:
        if self.verified:
            return f"verified by the audit of step {self.audit_step}"
        return "candidate, no audit has agreed after it" + (f" ({self.problem})" if self.problem else "")


def read_mark(folder: Path | str) -> VerifiedMark | None:
    """Read the mark of a checkpoint; None: it is a candidate. CheckpointError if it is damaged or of another save."""
    path = Path(folder) / VERIFIED_FILE
    try:
        if not path.exists():
            return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; ask its owner for the right to") from error
    mark = read_record(path, VerifiedMark, _VERSION)
    manifest = read_manifest(Path(folder))
    if mark.save_id != manifest.save_id:
        raise CheckpointError(f"{path} is of save {mark.save_id}, the checkpoint is of save {manifest.save_id}")
    if mark.step != manifest.step:
        raise CheckpointError(f"{path} is of step {mark.step}, the checkpoint is of step {manifest.step}")
    if (problem := manifest.problem) is not None:
        raise CheckpointError(f"{path} says that the checkpoint is verified, but {problem}")
    return mark


def find_standing(folder: Path | str) -> Standing | None:
    """Whether a checkpoint is verified; None: no audits are in use, no mark here or beside it, no corruption mark."""
    path = Path(folder)
    try:
        mark = read_mark(path)
    except CheckpointError as error:
        return Standing(False, problem=str(error))
    if mark is not None:
        return Standing(True, mark.audit_step)
    return Standing(False) if _audits_in_use(path.resolve().parent) else None


def list_verified(folder: Path | str) -> list[int]:
    """Steps of a folder's verified checkpoints, in ascending order; logs a warning for an invalid mark."""
    found = []
    for step in list_steps(folder):
        try:
            if read_mark(Path(folder) / step_folder(step)) is not None:
                found.append(step)
        except CheckpointError as error:
            logger.warning("the checkpoint of step %d is treated as a candidate: %s", step, error)
    return found


def mark_verified(
    folder: Path | str,
    up_to_step: int,
    audit_step: int,
    place: FolderRanks,
    *,
    skipped_checkpoint_steps: Collection[int] = (),
    events: EventLog | None = None,
    told: dict[int, str] | None = None,
) -> list[int]:
    """Mark a run's checkpoints as verified after an audit in which all ranks agreed.

    A mark that cannot be written is logged as a warning: the checkpoint stays a candidate until the next audit.

    Args:
        up_to_step: last step whose state the audit used: the one before it.
        place: of this rank, with the hosts that took part in the audit; the leader of each folder writes, the others do
            nothing.
        skipped_checkpoint_steps: steps whose checkpoints the resume passed over; they are not part of this run's
        history.
        events: log of the rank that writes.
        told: of each step, why its checkpoint stays a candidate, as it was told before and is not told again; kept up
            to date here.

    Returns:
        The steps marked by this call; empty on ranks that do not write.
    """
    if not place.leader:
        return []
    marked: list[int] = []
    told = {} if told is None else told
    try:
        steps = list_steps(folder)
    except OSError as error:
        logger.warning("the checkpoints in %s stay candidates, they cannot be listed: %s", folder, error)
        return []
    for step in steps:
        if step > up_to_step or step in skipped_checkpoint_steps:
            continue
        path = Path(folder) / step_folder(step)
        try:
            if _is_marked(path) or not has_marker(path, manifest := read_manifest(path)):
                continue
            if manifest.not_finite is None:
                raise CheckpointError("a version saved it that did not look whether its state is finite")
            if (problem := manifest.problem) is not None:
                raise CheckpointError(problem)
            if lacking := place.lacks(manifest.nodes):
                raise CheckpointError(
                    f"it was saved with {', '.join(lacking)}, of which no rank, or fewer, are in this start: what its "
                    "audits agree on says nothing of them"
                )
            mark = VerifiedMark(
                format_version=_VERSION,
                save_id=manifest.save_id,
                step=step,
                audit_step=audit_step,
                time=time.time(),
            )
            write_record(path / VERIFIED_FILE, mark)
            marked.append(step)
        except (CheckpointError, OSError) as error:
            if told.get(step) == str(error):
                continue
            told[step] = str(error)
            logger.warning("the checkpoint of step %d stays a candidate: %s", step, error)
            if events is not None:
                events.emit("warning", "checkpoint_not_marked", step=step, message=str(error))
    if events is not None:
        for step in marked:
            events.emit("verify", "checkpoint", step=step, audit_step=audit_step)
    return marked


@dataclass(frozen=True)
class WayBack:
    """The checkpoint to go on from where the state of a run has become useless.

    Attributes:
        step: of the newest checkpoint that is finite and verified; where none is, of the newest finite one from which a
            finite step was taken.
        path: of its folder.
        verified: whether an audit has agreed after it.
    """

    step: int
    path: Path
    verified: bool

    def __str__(self) -> str:
        return f"{self.path} ({'verified' if self.verified else 'finite, and a finite step followed'})"


def find_way_back(folder: Path | str) -> WayBack | None:
    """The checkpoint to go back to after NaN and Inf, by manifests and marks alone; None: there is none."""
    manifests = read_complete(folder)
    verified = [step for step in list_verified(folder) if step in manifests]
    step = max(verified or list_continued(manifests), default=None)
    return None if step is None else WayBack(step, Path(folder) / step_folder(step), bool(verified))


def mark_corruption(folder: Path | str, step: int, incident: Path | str, place: FolderRanks) -> None:
    """Write ``corruption.json`` beside the checkpoints of a run that ends because of corruption.

    It calls no collective, so that it works while ranks are missing. An earlier mark is replaced.

    Args:
        folder: the checkpoint folder; created if absent.
        step: optimizer step in which corruption was found.
        incident: path of the incident report.
        place: of this rank; the leader of each folder writes, the others do nothing.

    Raises:
        StorageError: the mark cannot be written.
    """
    if not place.leader:
        return
    path = Path(folder) / CORRUPTION_FILE
    try:
        mark = CorruptionMark(format_version=_VERSION, step=step, incident=str(incident), time=time.time())
        # The run ends now, and the next start has to know.
        wait_for_room(lambda: write_whole(path, record_text(mark)), path, logger.warning, at_most_s=END_S)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error}; the next resume does not know of the corruption in step {step}: start "
            "it with megasdc.checkpoint.require_verified=always"
        ) from error


def find_corruption(folder: Path | str) -> str | None:
    """Text of a checkpoint folder's corruption mark; None if there is none.

    An unreadable mark counts as a mark.
    """
    path = Path(folder) / CORRUPTION_FILE
    if not path.exists():
        return None
    try:
        mark = read_record(path, CorruptionMark, _VERSION)
    except CheckpointError as error:
        return f"corruption was found: {error}"
    return f"corruption was found in step {mark.step}, see {mark.incident}"


def clear_corruption(folder: Path | str) -> bool:
    """Remove the corruption mark of a checkpoint folder; returns whether there was one."""
    path = Path(folder) / CORRUPTION_FILE
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def _is_marked(folder: Path) -> bool:
    """Whether a checkpoint has a valid mark; an invalid one is overwritten."""
    try:
        return read_mark(folder) is not None
    except CheckpointError:
        return False


def _audits_in_use(folder: Path) -> bool:
    marks = (folder / step_folder(step) / VERIFIED_FILE for step in list_steps(folder))
    # An unreadable checkpoint beside this one is ignored; os.path.exists does not raise.
    return any(map(os.path.exists, (folder / CORRUPTION_FILE, *marks)))
