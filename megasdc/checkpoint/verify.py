"""Verification of a checkpoint's files on this machine, without an engine or a process group."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.checks import (
    check_file,
    check_identity,
    deleted_while_read,
    find_incomplete,
    find_missing,
    find_unexpected,
)
from megasdc.checkpoint.files import (
    CHECKPOINT,
    UNIVERSAL,
    UNIVERSAL_STEP,
    explain_folder,
    is_universal,
    kind_of,
    list_steps,
    list_universal,
    step_folder,
)
from megasdc.checkpoint.manifest import (
    FileRecord,
    Manifest,
    UniversalManifest,
    find_unknown,
    has_marker,
    read_manifest,
    read_other_nodes,
    read_universal_manifest,
)
from megasdc.checkpoint.verification_marks import Standing, find_standing
from megasdc.common.errors import CheckpointError
from megasdc.common.program import bytes_bar

CHECKED, NOT_ASKED = "checked", "not requested"


@dataclass(frozen=True)
class CheckpointReport:
    """Result of the verification of one checkpoint; ``step`` is None if the manifest cannot be read.

    ``standing``: whether an audit has verified it, None if no audits are in use; ``contents``: whether the files'
    content was checked too: ``CHECKED``, ``NOT_ASKED``, or why not; ``non_finite``: see ``Manifest``.
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
        universal: include universal checkpoints, after the others.

    Raises:
        CheckpointError: there is none; the message says what kind of folder it is.
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
        checksums: read the files; otherwise only sizes and pickles.
        progress: draw a bar on standard error where it is a terminal.
        workers: threads that read; None: one per CPU, at most 8. Checksums are computed without the GIL.

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
    """A checkpoint of which the files of all ranks are in one folder, to convert it.

    Attributes:
        manifest: of this node, or of shared storage.
        records: all files by name, of all nodes whose manifests are in the folder.
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
