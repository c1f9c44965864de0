"""Choice of the checkpoint to resume from: the newest that is complete on every node; all ranks agree on it.

After corruption only verified ones count; see ``megasdc.checkpoint.verify``. One whose state holds NaN or Inf is taken
only where there is no other.

Every rank reads the manifest in the folder that it sees and checks a share of the files; the answers are gathered, so
that all ranks make the same choice. DeepSpeed itself would load some damaged checkpoints silently, and others on some
ranks only.

``quarantine`` moves aside checkpoints that a resume passed over and that are no longer part of the run's history: they
are not verified after corruption, or newer than the step that the run returns to. Left in place, a later resume or
audit would use them. They are kept for an investigation until someone deletes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Literal

from megasdc.checkpoint.files import (
    LATEST_FILE,
    list_replaced,
    list_steps,
    rank_state_file,
    remove_leftovers,
    step_folder,
)
from megasdc.checkpoint.manifest import Layout, Manifest, find_wrong_place, has_marker, read_manifest, read_shared_state
from megasdc.checkpoint.ranks import (
    CheckpointGroup,
    FolderRanks,
    RankProblem,
    describe_error,
    find_place,
    raise_on_all_ranks,
)
from megasdc.checkpoint.verify import (
    check_file,
    check_identity,
    check_share,
    clear_corruption,
    find_corruption,
    find_incomplete,
    find_unexpected,
    list_verified,
    loaded_files,
    share_of,
)
from megasdc.common.durable import rename_durably, write_durably
from megasdc.common.errors import CheckpointError
from megasdc.common.program import report_bytes
from megasdc.parallel.dims import ParallelDims

logger = logging.getLogger(__name__)

RequireVerified = Literal["auto", "always", "never"]
_NOT_COMMON = "not every replica of the study has a checkpoint of this step"
_CANDIDATE = "it is a candidate: no audit has agreed after it"


@dataclass(frozen=True)
class SelectedCheckpoint:
    """The checkpoint to resume from, as this rank sees it.

    ``skipped``: reasons why each newer checkpoint was passed over, by step; ``candidates``: steps of those that no
    later resume may use either: not verified where only verified ones counted (``verified_only``), or newer than the
    limit (``newest``).
    """

    path: Path
    step: int
    manifest: Manifest
    skipped: dict[int, list[str]]
    candidates: list[int]
    verified_only: bool


class NoneUsableError(CheckpointError):
    """There are checkpoints, and none of them can be used; attributes as in ``SelectedCheckpoint``.

    ``too_new``: whether all of them are newer than the limit (``newest``).
    """

    def __init__(
        self,
        message: str,
        skipped: dict[int, list[str]],
        candidates: list[int],
        verified_only: bool,
        too_new: bool = False,
    ) -> None:
        super().__init__(message)
        self.skipped, self.candidates, self.verified_only, self.too_new = skipped, candidates, verified_only, too_new


def find_checkpoint(
    folder: Path | str,
    dims: ParallelDims | None,
    ranks: CheckpointGroup,
    *,
    verify: bool = True,
    resume: Literal["auto", "never", "must"] = "auto",
    require_verified: RequireVerified = "auto",
    at_most: int | None = None,
    newest: int | None = None,
) -> SelectedCheckpoint | None:
    """Choose the newest checkpoint that is complete and unchanged on every node, a finite one if there is one.

    Leftovers of killed saves are removed first, unless ``resume`` is ``never`` and checkpoints exist. Rank 0 emits an
    event with the reasons for each checkpoint passed over.

    Args:
        dims: position in the layout that the checkpoint must have; None: any layout, where the storage is shared.
        verify: whether checksums are compared; otherwise only the list of files, their sizes and their pickles.
        resume: without a checkpoint, auto returns None and must raises an error; with one, never raises an error.
        require_verified: whether candidates are passed over; auto: if there is a corruption mark on any node.
        at_most: last step that every replica of the study has; newer checkpoints are passed over; None: no limit.
        newest: last step that this and later resumes may use; newer checkpoints are passed over. None: no limit.

    Returns:
        The same choice on all ranks; None if there is no checkpoint at all.

    Raises:
        NoneUsableError: there are checkpoints but none can be used or none is verified; on all ranks.
        CheckpointError: the newest usable one has a layout that is not allowed, or ``resume`` forbids what was
            found; on all ranks.
        StorageError: the folder cannot be read or cleaned; on all ranks.

    Collective: all ranks of the world.
    """
    path, place = Path(folder), find_place(ranks)
    if resume == "never":
        _refuse_any(path, place)
    found = _list_on_all_nodes(path, place)
    if resume == "never":
        return None
    verified_only = require_verified == "always" or (require_verified == "auto" and found.corruption is not None)
    if place.rank == 0:
        _report_corruption(found, require_verified, place)
    skipped: dict[int, list[str]] = {}
    candidates: list[int] = []
    non_finite: SelectedCheckpoint | None = None
    for step in found.steps:
        if newest is not None and step > newest:
            manifest, problems = None, [too_new(newest)]
            candidates.append(step)
        elif at_most is not None and step > at_most:
            manifest, problems = None, [_NOT_COMMON]
        elif verified_only and step not in found.verified:
            manifest, problems = None, [_CANDIDATE]
            candidates.append(step)
        else:
            manifest, problems = _examine(path / step_folder(step), place, dims, verify)
        if not problems:
            assert manifest is not None, "a checkpoint without problems has a manifest"
            chosen = SelectedCheckpoint(
                path / step_folder(step), step, manifest, dict(skipped), list(candidates), verified_only
            )
            if manifest.non_finite is None:
                return chosen
            non_finite = non_finite or chosen
            problems = [manifest.non_finite]
        skipped[step] = problems
        _report_skipped(path / step_folder(step), step, problems, place)
    if non_finite is not None:
        _report_non_finite(non_finite, place)
        return non_finite
    if skipped and at_most != 0:
        text = _explain_none(path, skipped, candidates, found.corruption if verified_only else None)
        all_too_new = newest is not None and min(skipped) > newest
        raise NoneUsableError(text, skipped, candidates, verified_only, all_too_new)
    if resume == "must" and at_most != 0:
        raise CheckpointError(f"there is no checkpoint in {path} but megasdc.checkpoint.resume is must")
    return None


def too_new(newest: int) -> str:
    """Reason for passing over a checkpoint that is newer than the limit."""
    return f"megasdc.checkpoint.resume_at_most is {newest}"


def _refuse_any(path: Path, place: FolderRanks) -> None:
    """Raise a CheckpointError on all ranks if there are checkpoints."""
    if steps := _list_on_all_nodes(path, place, clean=False).steps:
        raise CheckpointError(
            f"{path} holds checkpoints (newest: step {steps[0]}) but megasdc.checkpoint.resume is never: "
            "use another folder, or resume auto; nothing in it was changed"
        )


def _report_skipped(path: Path, step: int, problems: list[str], place: FolderRanks) -> None:
    """Log and emit why a checkpoint is passed over."""
    if place.rank == 0:
        logger.warning("checkpoint of step %d is skipped: %s", step, "; ".join(problems))
    place.emit("skip", "checkpoint", step=step, reasons=problems, path=str(path))


def _report_non_finite(chosen: SelectedCheckpoint, place: FolderRanks) -> None:
    """Log and emit that no finite checkpoint can be used."""
    if place.rank == 0:
        logger.warning(
            "%s is taken since no finite checkpoint can be used, but %s", chosen.path, chosen.manifest.non_finite
        )
    place.emit("resume", "not_finite", step=chosen.step, path=str(chosen.path), files=chosen.manifest.not_finite)


def _report_corruption(found: _Found, require_verified: RequireVerified, place: FolderRanks) -> None:
    """Log and emit the consequence of a corruption mark, if there is one."""
    if found.corruption is None or not found.steps:
        return
    ignored = require_verified == "never"
    follows = "ignored, megasdc.checkpoint.require_verified is never" if ignored else "only verified checkpoints count"
    logger.warning("%s: %s", found.corruption, follows)
    place.emit("warning", "corruption_mark", message=found.corruption, ignored=ignored)


def _explain_none(path: Path, skipped: dict[int, list[str]], candidates: list[int], corruption: str | None) -> str:
    """Message that says why no checkpoint can be used, with the remedy."""
    reasons = "\n".join(f"  - step {step}: {'; '.join(problems)}" for step, problems in skipped.items())
    why = f"{corruption}, so that only verified ones count; " if corruption else ""
    remedy = "Restore one of them, or start in another folder."
    if candidates:
        remedy = (
            "Start in another folder, restore an earlier checkpoint that is verified, or resume from a candidate with "
            "megasdc.checkpoint.require_verified=never."
        )
    return f"{why}none of the {len(skipped)} checkpoints in {path} can be used:\n{reasons}\n{remedy}"


@dataclass(frozen=True)
class _Found:
    """Content of the checkpoint folders of all nodes.

    ``steps``: steps with a checkpoint on any node, newest first; ``verified``: steps marked as verified on any node (a
    mark is written only after all ranks agreed); ``corruption``: text of the first node's corruption mark; None: no
    mark.
    """

    steps: list[int]
    verified: set[int]
    corruption: str | None


def _list_on_all_nodes(path: Path, place: FolderRanks, *, clean: bool = True) -> _Found:
    """List the checkpoints of all nodes, cleaned first; without ``clean`` also those that cleaning would restore."""
    cleaned: list[str] = []
    mine = _Found([], set(), None)
    problem: RankProblem | None = None
    if place.leader:
        try:
            cleaned = remove_leftovers(path) if clean else []
            steps = list_steps(path) if clean else [*list_steps(path), *list_replaced(path)]
            mine = _Found(steps, set(list_verified(path)), find_corruption(path))
        except OSError as error:
            problem = describe_error(error, f"look into {path}")
    raise_on_all_ranks(problem, place, "checkpoints cannot be listed")
    answers = place.gather((place.node, cleaned, mine))
    for name, lines, _ in answers:
        for line in lines:
            place.emit("clean", "checkpoint", message=line, node=name)
    return _Found(
        steps=sorted({step for _, _, found in answers for step in found.steps}, reverse=True),
        verified={step for _, _, found in answers for step in found.verified},
        corruption=next((found.corruption for _, _, found in answers if found.corruption), None),
    )


def _examine(
    folder: Path, place: FolderRanks, dims: ParallelDims | None, verify: bool
) -> tuple[Manifest | None, list[str]]:
    """Check a checkpoint with all ranks; return this rank's manifest and the problems of all ranks.

    Raises a CheckpointError on all ranks if it is complete but of another layout than that of ``dims``; None: any.
    """
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(folder)
        problems = _check_share(folder, manifest, place, verify)
    except CheckpointError as error:
        problems = [str(error)]
    # Problems are gathered, not raised: every rank must reach this collective.
    found = (manifest.save_id, manifest.layout) if manifest else None
    answers = place.gather((place.node, found, problems))
    prefix = place.among.storage == "node_local"
    everybody = [f"{name}: {line}" if prefix else line for name, _, lines in answers for line in lines]
    problems = list(dict.fromkeys(everybody))  # ranks that read the same manifest report the same problems
    identities = {identity[0] for _, identity, _ in answers if identity}
    if len(identities) > 1:
        problems.append(f"the nodes hold files of {len(identities)} different saves of this step")
    if not problems and manifest is not None and dims is not None and manifest.layout != Layout.of(dims):
        raise CheckpointError(
            f"{folder} was saved with {manifest.layout} ({manifest.world_size} ranks), this run has {dims} "
            f"({dims.world_size} ranks): start with the saved layout; or set megasdc.checkpoint.other_layout to "
            "convert, where the storage is shared; or convert it with megasdc convert-checkpoint, and name the result "
            "in megasdc.checkpoint.universal of a run with a new folder"
        )
    return manifest, problems


def _check_share(folder: Path, manifest: Manifest, place: FolderRanks, verify: bool) -> list[str]:
    """Do the checks of every rank, check the files that this rank loads, and its share of those that no rank loads.

    What a rank has read for its checksum is in its host's cache when it is loaded.
    """
    problems = check_identity(folder, manifest)
    if manifest.storage != (storage := place.among.storage):
        problems.append(f"manifest.json is of {manifest.storage} storage, megasdc.checkpoint.storage is {storage}")
    if not has_marker(folder, manifest):
        problems.append("the marker is missing: not every node finished the save")
    same_size = manifest.world_size == sum(len(ranks) for ranks in place.nodes.values())
    if same_size and rank_state_file(place.rank) not in manifest.by_name():
        problems.append(f"{rank_state_file(place.rank)} is on another node: rank {place.rank} ran there when it saved")
    if place.leader:
        problems += find_unexpected(folder, manifest) + find_incomplete(manifest)
    if place.leader and manifest.wrong_place is not None:
        problems.append(manifest.wrong_place)
    elif place.leader and (wrong := find_wrong_place(read_shared_state(folder))):
        problems.append(wrong)
    loaded_by = {rank: set(loaded_files(manifest, rank)) for rank in place.ranks} if same_size else {}
    own, loaded = loaded_by.get(place.rank, set()), set[str]().union(*loaded_by.values())
    others = [record for record in manifest.files if record.name not in loaded]
    needed = [record for record in manifest.files if record.name in own]
    progress = None
    if place.rank == 0:  # as one of those that read at the same time
        total = sum(record.size_bytes for record in (*needed, *share_of(others, place)))
        said = f"checksums of the checkpoint of step {manifest.step}, on this rank: %s"
        progress = report_bytes(lambda text: logger.info(said, text), total)
    for record in needed:
        problems += check_file(folder, record, manifest, checksums=verify, progress=progress)
    return problems + check_share(folder, manifest, others, place, checksums=verify, progress=progress)


ASIDE_FOLDER = "unverified"


def quarantine(
    folder: Path | str, chosen: SelectedCheckpoint | NoneUsableError | None, ranks: CheckpointGroup
) -> list[int]:
    """Move the candidates that a resume passed over aside, then clear the corruption mark.

    If the process dies in between, the mark is still there and the next resume finishes.

    Args:
        chosen: result of ``find_checkpoint`` after it was loaded, or the error that it raised if the run goes on
            nevertheless; None: there was no checkpoint.

    Returns:
        Steps that were moved, on any node.

    Raises:
        StorageError: a folder cannot be renamed or the mark cannot be removed; on all ranks.

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
        _report_moved(path, where, {} if chosen is None else chosen.skipped, any(gone for _, gone in answers), place)
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


def _report_moved(
    path: Path, moved: dict[int, str], why: dict[int, list[str]], cleared: bool, place: FolderRanks
) -> None:
    """Log and emit, on rank 0, which checkpoints were moved and whether the corruption mark was removed."""
    for step, name in sorted(moved.items()):
        logger.warning("the checkpoint of step %d is now %s; delete it when you no longer need it", step, path / name)
        place.emit("move", "checkpoint", step=step, path=str(path / name), reason="; ".join(why[step]))
    if cleared:
        logger.info("the corruption mark in %s is removed: no candidate from before is left", path)
        place.emit("clear", "corruption_mark", path=str(path))
