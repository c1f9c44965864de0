"""Completeness of a checkpoint in one folder, also if each node saved its own part.

With ``checkpoint.storage = "node_local"`` a node's folder lacks the files of ranks on other nodes. They can be copied
into one folder, with each node's ``manifest.json`` as ``manifest.NODE.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasdc.checkpoint.checks import check_file, deleted_while_read
from megasdc.checkpoint.formats.deepspeed_names import shard_files, stage_file, stage_number
from megasdc.checkpoint.manifest import FileRecord, Manifest, read_manifest
from megasdc.checkpoint.verify import CheckpointReport, verify_checkpoint
from megasdc.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """A checkpoint to convert.

    Attributes:
        path: its folder.
        manifest: of this node, or of shared storage.
        records: all files by name, of all nodes whose manifests are in the folder.
    """

    path: Path
    manifest: Manifest
    records: dict[str, FileRecord]


def read_source(folder: Path, *, progress: bool = False) -> tuple[Source | None, list[str]]:
    """Check every file of a checkpoint, and that the files of all ranks are present.

    Args:
        folder: folder of the checkpoint.
        progress: draw a bar.

    Returns:
        The checkpoint, None if a manifest cannot be read; and the problems, one sentence an entry.
    """
    report: CheckpointReport = verify_checkpoint(folder, progress=progress)
    try:
        manifest = read_manifest(folder)
        others = [read_manifest(folder, path.name) for path in sorted(folder.glob("manifest.*.json"))]
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
    return Source(folder, manifest, records), problems + find_missing(folder, manifest, set(records))


def find_missing(folder: Path, manifest: Manifest, names: set[str]) -> list[str]:
    """Problems: ranks whose files are in no manifest of the folder, with what to copy from which node.

    Args:
        folder: folder of the checkpoint.
        manifest: one node's, or that of shared storage.
        names: all files known.
    """
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
