"""Which checkpoints may be trusted? Marks that audits leave on them, and the mark of a run that found corruption.

A checkpoint is a candidate until an audit of a later step agrees on all ranks, then verified: the ranks that made it
computed the same afterwards. It says so in a file in its own folder, which names the save that it is of, so that a new
save of the same step is a candidate again. A run that ends because of corruption leaves a mark beside the checkpoints.
Neither mark is a file of the checkpoint: the manifest does not name them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megasdc.checkpoint.files import list_steps, step_folder
from megasdc.checkpoint.manifest import has_marker, read_manifest
from megasdc.checkpoint.places import Place
from megasdc.checkpoint.records import Record, read_record, write_record
from megasdc.errors import CheckpointError, StorageError
from megasdc.events import EventLog

VERIFIED_FILE = "verified.json"
CORRUPTION_FILE = "corruption.json"
_VERSION = 1

logger = logging.getLogger(__name__)


class VerifiedMark(Record):
    """An audit has agreed after this checkpoint.

    Attributes:
        save_id: of the save that it is about; see ``Manifest``.
        step: optimizer step of the checkpoint, first is 1.
        audit_step: step of the audit.
        time: when the mark was written, in seconds since the epoch.
    """

    format_version: int
    save_id: str
    step: int
    audit_step: int
    time: float


class CorruptionMark(Record):
    """A run has ended because of corruption, and none has gone on from a verified checkpoint since.

    Attributes:
        step: optimizer step in which it was found.
        incident: path of the incident report.
        time: when the mark was written, in seconds since the epoch.
    """

    format_version: int
    step: int
    incident: str
    time: float


@dataclass(frozen=True)
class Standing:
    """Whether a checkpoint is verified, in a folder where audits are in use.

    Attributes:
        verified: an audit after it has agreed.
        audit_step: step of that audit; None for a candidate.
        problem: why its mark does not count, though there is one; else None.
    """

    verified: bool
    audit_step: int | None = None
    problem: str | None = None

    def __str__(self) -> str:
        if self.verified:
            return f"verified by the audit of step {self.audit_step}"
        return "candidate, no audit has agreed after it" + (f" ({self.problem})" if self.problem else "")


def read_mark(folder: Path | str) -> VerifiedMark | None:
    """Read the mark of a verified checkpoint.

    Args:
        folder: of the checkpoint, such as ``checkpoints/step_00000100``.

    Returns:
        The mark; None for a candidate.

    Raises:
        CheckpointError: there is a mark, but it is damaged or of another save of this step.
    """
    path = Path(folder) / VERIFIED_FILE
    try:
        if not path.exists():
            return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; ask its owner for the right to") from error
    mark = read_record(path, VerifiedMark, _VERSION)
    if mark.save_id != (saved := read_manifest(Path(folder)).save_id):
        raise CheckpointError(f"{path} is of save {mark.save_id}, the checkpoint is of save {saved}")
    return mark


def find_standing(folder: Path | str) -> Standing | None:
    """Tell whether a checkpoint is verified.

    Args:
        folder: of the checkpoint.

    Returns:
        None where no audits are in use: neither it nor any checkpoint beside it is marked, nor is corruption.
    """
    path = Path(folder)
    try:
        mark = read_mark(path)
    except CheckpointError as error:
        return Standing(False, problem=str(error))
    if mark is not None:
        return Standing(True, mark.audit_step)
    return Standing(False) if _audits_in_use(path.resolve().parent) else None


def list_verified(folder: Path | str) -> list[int]:
    """Steps of a folder's verified checkpoints, in ascending order; a mark that does not count is a warning."""
    found = []
    for step in list_steps(folder):
        try:
            if read_mark(Path(folder) / step_folder(step)) is not None:
                found.append(step)
        except CheckpointError as error:
            logger.warning("the checkpoint of step %d is taken for a candidate: %s", step, error)
    return found


def mark_verified(
    folder: Path | str,
    up_to_step: int,
    audit_step: int,
    place: Place,
    *,
    passed_over: Collection[int] = (),
    events: EventLog | None = None,
) -> list[int]:
    """Mark a run's checkpoints as verified after an audit on which all ranks have agreed.

    A mark that cannot be written is a warning: the checkpoint stays a candidate until the next audit.

    Args:
        folder: the checkpoint folder.
        up_to_step: last step whose state the audit has used: the one before it.
        audit_step: step of the audit.
        place: of this rank; the leader of each folder writes, the others do nothing.
        passed_over: steps whose checkpoints are not of this run's past: the resume left them out.
        events: where it is reported, by the rank that writes.

    Returns:
        The steps that were marked now; empty on ranks that do not write.
    """
    if not place.leader:
        return []
    marked = []
    try:
        steps = list_steps(folder)
    except OSError as error:
        logger.warning("the checkpoints in %s stay candidates, they cannot be listed: %s", folder, error)
        return []
    for step in steps:
        if step > up_to_step or step in passed_over:
            continue
        path = Path(folder) / step_folder(step)
        try:
            if _is_marked(path) or not has_marker(path, manifest := read_manifest(path)):
                continue
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
            logger.warning("the checkpoint of step %d stays a candidate: %s", step, error)
            if events is not None:
                events.emit("warning", "checkpoint_not_marked", step=step, message=str(error))
    if events is not None:
        for step in marked:
            events.emit("verify", "checkpoint", step=step, audit_step=audit_step)
    return marked


def mark_corruption(folder: Path | str, step: int, incident: Path | str, place: Place) -> None:
    """Leave word beside the checkpoints that a run ends because of corruption.

    It calls no collective, so that it can be called while ranks are missing. An earlier mark is replaced.

    Args:
        folder: the checkpoint folder; created if absent.
        step: optimizer step in which corruption was found.
        incident: the incident report.
        place: of this rank; the leader of each folder writes, the others do nothing.

    Raises:
        StorageError: it cannot be written.
    """
    if not place.leader:
        return
    path = Path(folder) / CORRUPTION_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mark = CorruptionMark(format_version=_VERSION, step=step, incident=str(incident), time=time.time())
        write_record(path, mark)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error}; the next resume does not know of the corruption in step {step}: start "
            "it with megasdc.checkpoint.require_verified=always"
        ) from error


def find_corruption(folder: Path | str) -> str | None:
    """What the corruption mark of a checkpoint folder says, in words; None if there is none.

    A mark that cannot be read counts too.
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
    """Remove the corruption mark of a checkpoint folder.

    Returns:
        Whether there was one.

    Raises:
        OSError: it cannot be removed.
    """
    path = Path(folder) / CORRUPTION_FILE
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def _is_marked(folder: Path) -> bool:
    """Whether a checkpoint has a mark that counts; one that does not is written anew."""
    try:
        return read_mark(folder) is not None
    except CheckpointError:
        return False


def _audits_in_use(folder: Path) -> bool:
    marks = (folder / step_folder(step) / VERIFIED_FILE for step in list_steps(folder))
    # A checkpoint beside this one that may not be read tells nothing, and is no reason to fail.
    return any(map(os.path.exists, (folder / CORRUPTION_FILE, *marks)))
