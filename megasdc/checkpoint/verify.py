"""Verification of checkpoints: their files compared with the manifest, and the marks of audits and of corruption.

Files are checked without an engine, by the ranks that share a folder (``check_share``) or on this machine alone
(``verify_checkpoint``).

A checkpoint is a candidate until an audit of a later step agrees on all ranks, with finite loss and gradient norm; the
ranks that saved it still computed the same then. It becomes verified if its own state was finite when it was saved, and
its positions in the data follow from its steps. One that was saved with a host, or with ranks of a host, that take no
part in the audit stays a candidate. The mark is a file in the checkpoint's folder with its ``save_id``, so that a new
save of the same step is a candidate again. A run that ends because of corruption writes ``corruption.json`` beside the
checkpoints. Neither mark is a file of the checkpoint: the manifest does not name them.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megasdc.checkpoint.allowlist import check_pickle
from megasdc.checkpoint.files import (
    CHECKPOINT,
    MANIFEST_FILE,
    UNIVERSAL,
    UNIVERSAL_STEP,
    VERIFIED_FILE,
    explain_folder,
    hash_file,
    is_universal,
    kind_of,
    layer_file,
    layer_of,
    list_steps,
    list_universal,
    rank_state_file,
    shard_files,
    stage_file,
    stage_number,
    step_folder,
)
from megasdc.checkpoint.manifest import (
    FileRecord,
    Manifest,
    UniversalManifest,
    find_unknown,
    has_marker,
    list_continued,
    read_complete,
    read_manifest,
    read_other_nodes,
    read_universal_manifest,
)
from megasdc.checkpoint.ranks import FolderRanks
from megasdc.checkpoint.records import Record, read_record, record_text, write_record
from megasdc.common.durable import END_S, wait_for_room, write_whole
from megasdc.common.errors import CheckpointError, MegasdcError, StorageError
from megasdc.common.program import bytes_bar
from megasdc.events import EventLog


class HasFiles(Protocol):
    """A manifest of any kind."""

    @property
    def files(self) -> list[FileRecord]:
        """One record for each file of the checkpoint."""
        ...


def check_file(
    folder: Path,
    record: FileRecord,
    manifest: HasFiles,
    *,
    checksums: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Compare one file with its record, and its pickle with the allow-list.

    Args:
        manifest: manifest in which a file with the content that was read is searched, for the message.
        checksums: whether the content is read; otherwise only size and pickle are checked.
        progress: function called with the number of bytes of each piece read.

    Returns:
        The problems, each starting with the file's name; empty if there are none.
    """
    path = folder / record.name
    try:
        size = path.stat().st_size
        if size != record.size_bytes:
            state = "truncated" if size < record.size_bytes else "too long"
            return [f"{record.name} is {state}: {size} bytes, written were {record.size_bytes}"]
        if checksums and (found := hash_file(path, progress)) != record.xxh3_128:
            same = [other.name for other in manifest.files if other.xxh3_128 == found]
            detail = f"it has the content of {same[0]}" if same else f"checksum {found}, written was {record.xxh3_128}"
            return [f"{record.name} was changed: {detail}"]
        if path.suffix == ".pt":
            check_pickle(path)
    except FileNotFoundError:
        return [f"{record.name} is missing"]
    except OSError as error:
        return [f"{record.name} cannot be read: {error}"]
    except CheckpointError as error:
        return [f"{record.name} is refused: {error}"]
    return []


def check_share(
    folder: Path,
    manifest: HasFiles,
    files: Sequence[FileRecord],
    place: FolderRanks,
    *,
    checksums: bool,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Check this rank's share of some files, see ``share_of``; returns the problems as ``check_file``."""
    return [
        problem
        for record in share_of(files, place)
        for problem in check_file(folder, record, manifest, checksums=checksums, progress=progress)
    ]


def share_of(files: Sequence[FileRecord], place: FolderRanks) -> list[FileRecord]:
    """Files that fall to this rank when the ranks of a folder divide them by size."""
    by_size = sorted(files, key=lambda record: (-record.size_bytes, record.name))
    return [by_size[index] for index in place.share(len(by_size))]


def find_unexpected(folder: Path, manifest: Manifest) -> list[str]:
    """Problems, one for each ``.pt`` file that the manifest does not name.

    DeepSpeed finds files by pattern, so an extra file changes which ones it opens.
    """
    known = {record.name for record in manifest.files}
    return [
        f"{path.name} is not in the manifest: it does not belong to this checkpoint"
        for path in sorted(folder.glob("*.pt"))
        if path.name not in known
    ]


def find_incomplete(manifest: Manifest) -> list[str]:
    """Problems, one for each file that a rank of this folder (all, or a node's) needs and the manifest lacks."""
    ranks = manifest.nodes.get(manifest.node, []) if manifest.node is not None else range(manifest.world_size)
    needed: dict[str, int] = {}
    for rank in ranks:
        for name in needed_files(manifest, rank):
            needed.setdefault(name, rank)
    names = manifest.by_name()
    return [
        f"{name}, which rank {rank} needs, is not in manifest.json: the checkpoint is not complete"
        for name, rank in needed.items()
        if name not in names
    ]


def needed_files(manifest: Manifest, rank: int) -> list[str]:
    """Files that belong to a rank of the saved layout: those that it loads, and the weights of its layers."""
    dims, names = manifest.layout.dims(rank), manifest.by_name()
    writers = {layer: record.rank for name, record in names.items() if (layer := layer_of(name)) is not None}
    layers = [layer for layer, writer in writers.items() if manifest.layout.dims(writer).pp_rank == dims.pp_rank]
    return [*loaded_files(manifest, rank), *(layer_file(layer, dims.tp_rank) for layer in layers)]


def loaded_files(manifest: Manifest, rank: int) -> list[str]:
    """Files that a rank of the saved layout loads: stage file, optimizer shard, own state."""
    dims, names = manifest.layout.dims(rank), manifest.by_name()
    shards = shard_files(dims)
    shard = next((name for name in shards if name in names), shards[0])
    return [stage_file(stage_number(dims)), shard, rank_state_file(rank)]


def find_missing(folder: Path, manifest: Manifest, names: set[str]) -> list[str]:
    """Problems, one for each node whose files are not among ``names``, with the files to copy from it."""
    node_of = {rank: node for node, ranks in manifest.nodes.items() for rank in ranks}
    lacking: dict[str, list[str]] = {}
    for rank in range(manifest.world_size):
        dims = manifest.layout.dims(rank)
        shards = shard_files(dims)
        if stage_file(stage_number(dims)) not in names or names.isdisjoint(shards):
            lacking.setdefault(node_of[rank], []).append(shards[0])
    return [
        f"{folder} lacks the files of node {node} ({', '.join(shards[:2])}{', ...' if len(shards) > 2 else ''}): copy "
        f"the .pt files of its folder {folder.name} here, and its manifest.json as manifest.{node}.json"
        for node, shards in sorted(lacking.items())
    ]


def check_identity(folder: Path, manifest: Manifest) -> list[str]:
    """Problem if the manifest is of another step than the folder; empty if there is none."""
    expected = f"step_{manifest.step:08d}"
    if folder.name != expected:
        return [f"manifest.json is of {expected}, the folder is {folder.name}: files of two checkpoints are mixed"]
    return []


def deleted_while_read(folder: Path) -> str:
    """Message about a checkpoint that was deleted while it was read."""
    return (
        f"{folder} was deleted or replaced while it was read, as a run does that keeps only its newest checkpoints; "
        "name a newer one, or let the run keep more with megasdc.checkpoint.keep_last or keep_every"
    )


@contextmanager
def reading(folder: Path, save_id: str) -> Iterator[None]:
    """Context that turns an error in the block into a CheckpointError if the checkpoint was deleted meanwhile."""
    try:
        yield
    except (OSError, MegasdcError) as error:
        if _is_there(folder, save_id):
            raise
        raise CheckpointError(deleted_while_read(folder)) from error


def _is_there(folder: Path, save_id: str) -> bool:
    try:
        return (folder / MANIFEST_FILE).exists() and read_manifest(folder).save_id == save_id
    except CheckpointError:
        return True  # damaged, not deleted


CHECKED, NOT_ASKED = "checked", "not requested"


@dataclass(frozen=True)
class CheckpointReport:
    """Result of the verification of one checkpoint.

    Attributes:
        path: the checkpoint's folder.
        step: optimizer step; None if the manifest cannot be read.
        problems: one sentence each.
        num_files: number of files in the manifest.
        size_bytes: bytes of these files.
        standing: whether an audit has verified the checkpoint; None if no audits are in use.
        contents: ``CHECKED`` if the tensors' values were checked too, ``NOT_ASKED``, or the reason why they were not.
        non_finite: see ``Manifest``.
    """

    path: str
    step: int | None
    problems: list[str]
    num_files: int
    size_bytes: int
    standing: Standing | None = None
    contents: str = NOT_ASKED
    non_finite: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no problems, and the state was finite when it was saved."""
        return not self.problems and self.non_finite is None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return {"ok": self.ok, **asdict(self)}

    def render(self) -> str:
        """The report as text: one line, and one for each problem."""
        count = len(self.problems)
        state = f"DAMAGED, {count} problem{'s' if count != 1 else ''}" if count else "whole"
        state += "" if self.non_finite is None else f", but {self.non_finite}"
        head = f"{self.path}: {state}, {self.num_files} files, {self.size_bytes / 1e6:.1f} MB"
        head += f"; {self.standing}" if self.standing is not None else ""
        lines = [head, *(f"  - {problem}" for problem in self.problems)]
        if self.contents not in (CHECKED, NOT_ASKED):
            lines.append(f"  what the files hold was not checked: {self.contents}")
        return "\n".join(lines)


def find_folders(path: Path | str, *, universal: bool = False) -> list[Path]:
    """Checkpoints at a path: the path itself, or all in it, newest first.

    Args:
        universal: whether universal checkpoints are included, after the others.

    Raises:
        CheckpointError: there is no checkpoint; the message names the kind of the folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if kind_of(folder) == CHECKPOINT:  # whatever else lies in it
        return [folder]
    found = [folder / step_folder(step) for step in reversed(list_steps(folder))]
    if universal:
        found += reversed(list_universal(folder))
    if found:
        return found
    if not any(folder.iterdir()):
        raise CheckpointError(f"{folder} is empty: there is no checkpoint in it")
    kind = kind_of(folder)
    if kind in (None, CHECKPOINT) or (universal and kind == UNIVERSAL):
        return [folder]
    raise CheckpointError(explain_folder(folder, "a checkpoint (step_NNNNNNNN) or a folder of several"))


def verify_checkpoint(
    path: Path | str, *, checksums: bool = True, progress: bool = False, workers: int | None = None
) -> CheckpointReport:
    """Check every file of one checkpoint, universal or not: presence, size, checksum, pickle, completeness.

    Args:
        checksums: whether the files are read; otherwise only sizes and pickles are checked.
        progress: whether a bar is drawn on standard error where it is a terminal.
        workers: number of threads that read; None: one per CPU, at most 8. Checksums are computed without the GIL.

    Returns:
        The report; a damaged checkpoint is not an exception.
    """
    folder = Path(path)
    manifest: Manifest | UniversalManifest
    standing, non_finite = None, None
    try:
        if is_called_universal(folder):
            manifest = read_universal_manifest(folder)
            problems = find_unknown(folder, manifest)
        else:
            manifest = read_manifest(folder)
            standing, non_finite = find_standing(folder), manifest.non_finite
            problems = check_identity(folder, manifest) + find_unexpected(folder, manifest)
            problems += find_incomplete(manifest)
            problems += [] if manifest.wrong_place is None else [manifest.wrong_place]
            if not has_marker(folder, manifest):
                problems.append("the marker is missing: not every node finished the save")
    except CheckpointError as error:
        problem = str(error) if folder.exists() else deleted_while_read(folder)
        return CheckpointReport(str(folder), None, [problem], 0, 0)
    bar = bytes_bar(folder.name, manifest.size_bytes, quiet=not progress)
    with bar as advance, ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1)) as pool:
        answers = pool.map(
            lambda record: check_file(folder, record, manifest, checksums=checksums, progress=advance), manifest.files
        )
        problems += [line for lines in answers for line in lines]
    if not folder.exists():
        problems = [deleted_while_read(folder)]
    found = (str(folder), manifest.step, problems, len(manifest.files), manifest.size_bytes, standing)
    return CheckpointReport(*found, non_finite=non_finite)


def is_called_universal(folder: Path) -> bool:
    """Whether a folder should be a universal checkpoint, by its content or name."""
    return is_universal(folder) or folder.name.startswith(UNIVERSAL_STEP)


@dataclass(frozen=True)
class ConvertibleCheckpoint:
    """A checkpoint with the files of all ranks in one folder, the source of a conversion.

    Attributes:
        path: the checkpoint's folder.
        manifest: ``manifest.json``: with node-local storage that of one node.
        records: records of all files by name, from all nodes' manifests in the folder.
    """

    path: Path
    manifest: Manifest
    records: dict[str, FileRecord]


def read_source(folder: Path, *, progress: bool = False) -> tuple[ConvertibleCheckpoint | None, list[str]]:
    """Check every file of a checkpoint, and that the files of all ranks are present.

    With ``checkpoint.storage = "node_local"`` a node's folder lacks those of other nodes, see ``read_other_nodes``.

    Returns:
        The checkpoint, None if a manifest cannot be read; and the problems, one sentence an entry.
    """
    report: CheckpointReport = verify_checkpoint(folder, progress=progress)
    try:
        manifest = read_manifest(folder)
        others = read_other_nodes(folder)
    except CheckpointError as error:
        return None, [str(error) if folder.exists() else deleted_while_read(folder)]
    records = {record.name: record for record in manifest.files}
    problems = list(report.problems)
    for other in others:
        if other.save_id != manifest.save_id:
            problems.append(f"the manifest of node {other.node} is of another save of this step")
            continue
        for record in other.files:
            if record.name not in records:
                records[record.name] = record
                problems += check_file(folder, record, other)
    expected = {f"{name} is not in the manifest: it does not belong to this checkpoint" for name in records}
    problems = [problem for problem in problems if problem not in expected]
    return ConvertibleCheckpoint(folder, manifest, records), problems + find_missing(folder, manifest, set(records))


CORRUPTION_FILE = "corruption.json"
_VERSION = 1

logger = logging.getLogger(__name__)


class VerifiedMark(Record):
    """Mark of a verified checkpoint.

    ``step``: step of the checkpoint; ``audit_step``: step of the later audit that agreed; ``time``: seconds since the
    epoch.
    """

    format_version: int
    save_id: str
    step: int
    audit_step: int
    time: float


class CorruptionMark(Record):
    """Mark of a run that ended because of corruption; kept until a resume from a verified checkpoint.

    ``step``: step in which corruption was found; ``incident``: path of the incident report; ``time``: seconds since the
    epoch.
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
        problem: reason why its mark is not valid; None: it is valid, or there is no mark.
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
    """Standing of a checkpoint; None: no audits are in use: no checkpoint in its folder has a mark, nor the folder."""
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
        audit_step: step of the audit.
        place: this rank's folder and the hosts that took part in the audit; the leader of each folder writes, the
            others do nothing.
        skipped_checkpoint_steps: steps whose checkpoints the resume passed over; they are not part of this run's
            history.
        events: event log of the rank that writes.
        told: messages logged so far about checkpoints that stay candidates, by step, which are not logged again;
            updated here.

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
    """The checkpoint to resume from after the state of a run has become useless.

    Attributes:
        step: step of the newest checkpoint that is finite and verified; if there is none, of the newest finite one from
            which a finite step was taken.
        path: the checkpoint's folder.
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
        place: this rank's folder; the leader of each folder writes, the others do nothing.

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
