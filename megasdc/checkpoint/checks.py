"""Checks of a checkpoint's files against its manifest, without an engine or other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from megasdc.checkpoint.allowlist import check_pickle
from megasdc.checkpoint.files import (
    MANIFEST_FILE,
    hash_file,
    layer_file,
    layer_of,
    rank_state_file,
    shard_files,
    stage_file,
    stage_number,
)
from megasdc.checkpoint.manifest import FileRecord, Manifest, read_manifest
from megasdc.checkpoint.places import FolderRanks
from megasdc.common.errors import CheckpointError, MegasdcError


class HasFiles(Protocol):
    """A manifest of any kind."""

    @property
    def files(self) -> list[FileRecord]:
        """Its files."""
        ...


def check_file(
    folder: Path,
    record: FileRecord,
    manifest: HasFiles,
    *,
    checksums: bool = True,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Compare one file with its record, and its pickle with the allow-list; the problems, each starting with its name.

    Without ``checksums`` only size and pickle are checked. ``manifest`` is searched for another file with the same
    content; ``progress`` gets the bytes of each piece read.
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
    """Check those of some files that fall to this rank when the ranks of a folder divide them by size.

    See ``check_file``.
    """
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
    """Problems: ``.pt`` files that the manifest does not name.

    DeepSpeed finds files by pattern, so an extra one changes which it opens.
    """
    known = {record.name for record in manifest.files}
    return [
        f"{path.name} is not in the manifest: it does not belong to this checkpoint"
        for path in sorted(folder.glob("*.pt"))
        if path.name not in known
    ]


def find_incomplete(manifest: Manifest) -> list[str]:
    """Problems: files that ranks of this folder (all, or a node's) need and that the manifest does not name."""
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
    """Files that a rank of the layout that saved loads: of its stage, its shard, its own state, its layers."""
    dims, names = manifest.layout.dims(rank), manifest.by_name()
    shards = shard_files(dims)
    shard = next((name for name in shards if name in names), shards[0])
    writers = {layer: record.rank for name, record in names.items() if (layer := layer_of(name)) is not None}
    layers = [layer for layer, writer in writers.items() if manifest.layout.dims(writer).pp_rank == dims.pp_rank]
    return [
        *(stage_file(stage_number(dims)), shard, rank_state_file(rank)),
        *(layer_file(layer, dims.tp_rank) for layer in layers),
    ]


def find_missing(folder: Path, manifest: Manifest, names: set[str]) -> list[str]:
    """Problems: ranks whose files are not among ``names``, those known here, with what to copy from which node."""
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
    """Problems: the manifest is that of another folder."""
    expected = f"step_{manifest.step:08d}"
    if folder.name != expected:
        return [f"manifest.json is of {expected}, the folder is {folder.name}: files of two checkpoints are mixed"]
    return []


def deleted_while_read(folder: Path) -> str:
    """The message for a checkpoint that no longer exists."""
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
