"""Moving aside checkpoints that a resume passed over and that are not of the run's past any more.

They are not verified after corruption, or newer than the run goes back to. Left in place, a later resume or audit would
take them for the run's own. They are kept for an investigation until someone deletes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from megasdc.checkpoint.files import LATEST_FILE, step_folder
from megasdc.checkpoint.places import (
    CheckpointGroup,
    FolderRanks,
    RankProblem,
    describe_error,
    find_place,
    raise_on_all_ranks,
)
from megasdc.checkpoint.resume import NoneUsableError, SelectedCheckpoint
from megasdc.checkpoint.verification_marks import clear_corruption
from megasdc.common.durable import rename_durably, write_durably

ASIDE_FOLDER = "unverified"

logger = logging.getLogger(__name__)


def quarantine(
    folder: Path | str, chosen: SelectedCheckpoint | NoneUsableError | None, ranks: CheckpointGroup
) -> list[int]:
    """Move the candidates that a resume passed over aside, then clear the corruption mark.

    If the process dies in between, the mark is still there and the next resume finishes.

    Args:
        chosen: what ``find_checkpoint`` returned and was loaded, or raised where the run goes on all the same; None:
            there was no checkpoint.

    Returns:
        Steps that were moved, on any node.

    Raises:
        StorageError: a folder cannot be renamed or the mark not removed; on all ranks.

    Collective: all ranks of the world.
    """
    path, place = Path(folder), find_place(ranks)
    moved: list[tuple[int, str]] = []
    problem: RankProblem | None = None
    if place.leader and chosen is not None and chosen.candidates:
        try:
            moved = move_aside(path, chosen.candidates)
            if isinstance(chosen, SelectedCheckpoint):
                write_durably(path / LATEST_FILE, chosen.path.name + "\n")
            else:
                (path / LATEST_FILE).unlink(missing_ok=True)
        except OSError as error:
            problem = describe_error(error, f"move candidates in {path} aside")
    raise_on_all_ranks(problem, place, "skipped candidates stay in the folder")
    cleared = False
    if place.leader and (chosen is None or chosen.verified_only):
        try:
            cleared = clear_corruption(path)
        except OSError as error:
            problem = describe_error(error, f"remove the corruption mark in {path}")
    raise_on_all_ranks(problem, place, "the corruption mark stays")
    answers = place.gather((moved, cleared))
    where = dict(chain.from_iterable(names for names, _ in answers))
    if place.rank == 0:
        _tell(path, where, {} if chosen is None else chosen.skipped, any(gone for _, gone in answers), place)
    return sorted(where)


def move_aside(folder: Path, steps: Sequence[int]) -> list[tuple[int, str]]:
    """Move checkpoints into ``folder/unverified``, or ``unverified_2`` and so on if it already has one of these steps.

    Steps that have no checkpoint are ignored. Returns each step moved, with its new path relative to the folder.
    """
    there = [step for step in steps if (folder / step_folder(step)).exists()]
    if not there:
        return []
    names = chain([ASIDE_FOLDER], (f"{ASIDE_FOLDER}_{number}" for number in count(2)))
    target = next(
        folder / name for name in names if not any((folder / name / step_folder(step)).exists() for step in there)
    )
    target.mkdir(exist_ok=True)
    for step in there:
        rename_durably(folder / step_folder(step), target / step_folder(step))
    return [(step, f"{target.name}/{step_folder(step)}") for step in there]


def _tell(path: Path, moved: dict[int, str], why: dict[int, list[str]], cleared: bool, place: FolderRanks) -> None:
    """Log and events of rank 0."""
    for step, name in sorted(moved.items()):
        logger.warning("the checkpoint of step %d is now %s; delete it when you no longer need it", step, path / name)
        place.emit("move", "checkpoint", step=step, path=str(path / name), reason="; ".join(why[step]))
    if cleared:
        logger.info("the corruption mark in %s is removed: no candidate from before is left", path)
        place.emit("clear", "corruption_mark", path=str(path))
