"""Summary of a checkpoint of any format: model, tensors, states, writers and marks; no tensor is read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

from megasdc.checkpoint import files as kinds
from megasdc.checkpoint.files import MANIFEST_FILE, PARAMETERS_FOLDER, kind_of_file
from megasdc.checkpoint.hf_shards import read_model_json, section_of
from megasdc.checkpoint.manifest import (
    FileRecord,
    Manifest,
    UniversalManifest,
    model_of,
    read_manifest,
    read_shared_state,
    read_universal_manifest,
)
from megasdc.checkpoint.verify import find_folders, find_standing, is_called_universal
from megasdc.checkpoint.views import GLOBAL_GENERATORS, TENSOR_SLOTS, Slot, View
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.config.model import ModelSection
from megasdc.lab.checkpoints.views.open import open_view
from megasdc.model.hf.fields import model_fields
from megasdc.model.kinds import submodule_kind
from megasdc.tensors.bits import dtype_name

OTHER = "other"


def find_inspectable(path: Path) -> list[Path]:
    """The checkpoints at a path: all in it, newest first, or the path itself, of any format.

    Raises:
        CheckpointError: it holds nothing to inspect; the message says what kind of folder it is.
    """
    if path.is_file() or (path.is_dir() and kinds.kind_of(path) == kinds.MODEL):
        return [path]
    return find_folders(path, universal=True)


def inspect_checkpoint(path: Path | str) -> dict[str, Any]:
    """Summary of a checkpoint, from its manifest and the metadata of its files.

    Args:
        path: folder of the checkpoint, or one file.

    Returns:
        JSON-compatible values: format, step, time, age, layout, nodes, engine, versions, files by kind and by writer,
        model, tensors by slot and kind of submodule, states, results of audits, and what could not be read.

    Raises:
        CheckpointError: it is no checkpoint, its manifest is damaged, or without one its tensors cannot be read.
    """
    folder = Path(path)
    found: dict[str, Any] = {"path": str(path)}
    manifest: Manifest | UniversalManifest | None = None
    if is_called_universal(folder):
        manifest = read_universal_manifest(folder)
    elif (folder / MANIFEST_FILE).exists():
        manifest = read_manifest(folder)
    unread: list[str] = []
    view: View | None = None
    try:
        view = open_view(folder)
    except CheckpointError as error:
        if manifest is None:
            raise
        unread.append(str(error))
    found |= _from_manifest(folder, manifest, view)
    found["model"] = _model(folder)
    found["slots"] = {} if view is None else describe_slots(view)
    found["states"] = {} if view is None else _states(view)
    found["unread"] = unread + ([] if view is None else view.problems)
    return found


def describe_slots(view: View) -> dict[Slot, dict[str, Any]]:
    """For each slot: tensors, parameters, bytes stored over all copies, and the same by type and kind of submodule.

    The vocabulary's padding is counted if the format stores it.
    """
    slots: dict[Slot, dict[str, Any]] = {}
    for slot in TENSOR_SLOTS:
        entries = {fqn: entry for (fqn, own), entry in view.entries.items() if own == slot}
        if not entries:
            continue
        empty = {"num_tensors": 0, "num_parameters": 0, "size_bytes": 0}
        total: dict[str, Any] = {**empty, "by_dtype": {}, "by_kind": {}}
        for fqn, entry in entries.items():
            dtypes = {piece.dtype for copy in entry.copies for piece in copy.pieces}
            known = [dtype for dtype in dtypes if dtype is not None]
            width = known[0].itemsize if len(known) == 1 else 0
            stored = sum(piece.numel for copy in entry.copies for piece in copy.pieces) * width
            dtype = "/".join(sorted(map(dtype_name, known))) or "unknown"
            places = [total, total["by_dtype"].setdefault(dtype, dict(empty))]
            places.append(total["by_kind"].setdefault(_kind(fqn), dict(empty)))
            for place in places:
                place["num_tensors"] += 1
                place["num_parameters"] += prod(entry.copies[0].shape)
                place["size_bytes"] += stored
        slots[slot] = total
    return slots


def _from_manifest(folder: Path, manifest: Manifest | UniversalManifest | None, view: View | None) -> dict[str, Any]:
    """Values known without opening the files of tensors; None or empty if the format has no manifest."""
    files: Iterable[FileRecord] = () if manifest is None else manifest.files
    found: dict[str, Any] = {
        "format": "unknown" if view is None else view.kind,
        "step": None,
        "time": None,
        "age_s": None,
        "layout": None,
        "world_size": None,
        "storage": None,
        "nodes": {},
        "node": None,
        "engine": {},
        "versions": {},
        "quantized_moments_bits": None,
        "num_files": 0,
        "size_bytes": _size(folder),
        "size_bytes_by_kind": _sizes_by_kind(files),
        "written_by": _writers(files),
        "tensors": {},
        "standing": None,
    }
    if manifest is None:
        return found
    found |= {
        "step": manifest.step,
        "time": datetime.fromtimestamp(manifest.time, UTC).isoformat(timespec="seconds"),
        "age_s": round(max(0.0, time.time() - manifest.time), 1),
        "engine": manifest.engine,
        "versions": manifest.versions,
        "quantized_moments_bits": manifest.quantized_moments_bits,
        "num_files": len(manifest.files),
        "size_bytes": manifest.size_bytes,
    }
    if isinstance(manifest, UniversalManifest):
        return found | {
            "layout": manifest.source_layout.model_dump(),
            "storage": f"universal, made from {manifest.source}",
            "written_by": {},
            "tensors": {PARAMETERS_FOLDER: {name: f"float32{shape}" for name, shape in manifest.parameters.items()}},
        }
    standing = find_standing(folder)
    return found | {
        "layout": manifest.layout.model_dump(),
        "world_size": manifest.world_size,
        "storage": manifest.storage,
        "nodes": manifest.nodes,
        "node": manifest.node,
        "tensors": {record.name: record.tensors for record in manifest.files if record.tensors is not None},
        "standing": None if standing is None else asdict(standing),
    }


def _model(folder: Path) -> dict[str, Any]:
    """Sizes of the model; empty if the format does not store them."""
    try:
        if (folder / "config.json").is_file():
            model: ModelSection = section_of(model_fields(read_model_json(folder / "config.json")))
        else:
            model = model_of(read_shared_state(folder), folder)
    except (CheckpointError, ConfigError, OSError, ValueError):
        return {}  # the view reports it, if the format needs it
    fields = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
    forms = ("normalization", "position_embedding", "gated_mlp", "tie_embeddings")
    return {name: value for name in (*fields, *forms) if (value := getattr(model, name)) is not None}


def _states(view: View) -> dict[str, Any]:
    """Counters, learning rates, the loader's position, and how many ranks have random generators."""
    random = [scalar for name, scalar in view.scalars.items() if name.endswith(GLOBAL_GENERATORS)]
    steps = {scalar.value for name, scalar in view.scalars.items() if name.endswith("/step") and "/group " in name}
    found: dict[str, Any] = {
        name.removeprefix("run/"): scalar.value for name, scalar in view.scalars.items() if name.startswith("run/")
    }
    if steps:
        found["optimizer_steps"] = sorted(step or "missing" for step in steps)
    rates = {scalar.value for name, scalar in view.scalars.items() if name.endswith("/lr") and "optimizer/" in name}
    if rates:
        found["learning_rates"] = sorted(rate or "missing" for rate in rates)
    if any(name.startswith("loader/") for name in view.scalars):
        found["loader"] = {
            name.removeprefix("loader/"): one.value for name, one in view.scalars.items() if name.startswith("loader/")
        }
    if random:
        found["random_generators"] = {"ranks": len(random), "missing": sum(one.value is None for one in random)}
    return found


def _sizes_by_kind(files: Iterable[FileRecord]) -> dict[str, int]:
    """Bytes by kind of file: layers, optimizer, stages, ranks, parameters of a universal checkpoint, other."""
    sizes: dict[str, int] = {}
    for record in files:
        kind = kind_of_file(record.name) or ("ranks" if record.name.startswith("rank_") else "other")
        sizes[kind] = sizes.get(kind, 0) + record.size_bytes
    return sizes


def _writers(files: Iterable[FileRecord]) -> dict[str, dict[str, Any]]:
    """Ranks, files and bytes of each node."""
    nodes: dict[str, dict[str, Any]] = {}
    for record in files:
        node = nodes.setdefault(record.node, {"ranks": [], "num_files": 0, "size_bytes": 0})
        node["ranks"] = sorted({*node["ranks"], record.rank})
        node["num_files"] += 1
        node["size_bytes"] += record.size_bytes
    return nodes


def _size(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _kind(fqn: str) -> str:
    """Kind of the submodule of a parameter; ``other`` for unknown names."""
    name = fqn.replace("tied_modules.embedding.", "0.")
    try:
        return submodule_kind(name.rpartition(".")[0])
    except ValueError:
        return OTHER
