"""Retention of checkpoints: the newest few, every k-th step, and the newest that a run can go back to are kept.

One that is being archived is deleted after a later save; see ``megasdc.checkpoint.files``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megasdc.checkpoint.files import delete_unheld, step_folder
from megasdc.checkpoint.manifest import KnownState, list_continued, list_sound, read_complete


@dataclass(frozen=True)
class Retention:
    """Rules by which checkpoints are kept.

    Attributes:
        last: the newest, and of those without NaN, Inf and wrong place in the data the newest, the newest verified one,
            and the newest from which a finite step was taken; 0: all.
        every: those whose step is a multiple too; 0: none.
    """

    last: int = 0
    every: int = 0


def plan_retention(
    steps: Iterable[int], newest: int, keep_last: int, keep_every: int, *newest_of: Collection[int]
) -> list[int]:
    """Steps of complete checkpoints to delete, ascending; ``newest``, just saved, and later ones are never deleted.

    ``keep_last`` are kept, including ``newest`` (0: all), those whose step is a multiple of ``keep_every`` (0: none),
    and the newest of each collection in ``newest_of``.
    """
    if keep_last == 0:
        return []
    past = sorted(step for step in steps if step <= newest)
    kept = {newest, *past[-keep_last:]}
    for those in newest_of:
        kept.update([step for step in past if step in those][-1:])
    return [step for step in past if step not in kept and not (keep_every and step % keep_every == 0)]


def list_due(folder: Path, newest: int, keep: Retention, verified: Collection[int] = ()) -> list[int]:
    """Steps of a folder's checkpoints that need not be kept; incomplete ones are neither counted nor listed.

    ``verified`` comes from the marks of all nodes, so that all keep the same.
    """
    if keep.last == 0:
        return []
    past = {step: manifest for step, manifest in read_complete(folder).items() if step <= newest}
    return plan_retention(past, newest, keep.last, keep.every, *worth_keeping(past, verified))


def worth_keeping(known: Mapping[int, KnownState], verified: Collection[int] = ()) -> tuple[Collection[int], ...]:
    """Steps of which the newest is never deleted: sound and verified, sound, sound and a finite step followed."""
    sound = list_sound(known)
    return [step for step in sound if step in verified], sound, list_continued(known)


def apply_retention(
    folder: Path, newest: int, keep: Retention, verified: Collection[int] = ()
) -> tuple[list[int], list[str]]:
    """Delete the checkpoints of ``list_due``.

    Returns the steps deleted, and one line for each that could not be deleted.
    """
    deleted, failed = [], []
    for step in list_due(folder, newest, keep, verified):
        if problem := delete_unheld(folder / step_folder(step)):
            failed.append(problem)
        else:
            deleted.append(step)
    return deleted, failed
