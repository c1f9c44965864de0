"""View of a checkpoint of DeepSpeed's pipeline engine with ZeRO-1, at any layout.

Weights: one file per pipeline layer and tensor rank. Master weights and moments: see ``zero_shards``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.checks import find_missing
from megasdc.checkpoint.files import find_prefix, layer_file, rank_state_file, shard_file, stage_file
from megasdc.checkpoint.manifest import (
    SHARED_STATE_FILE,
    Manifest,
    counters_of,
    model_of,
    parse_type,
    read_manifest,
    read_other_nodes,
    read_shared_state,
)
from megasdc.checkpoint.pieces import Copy, Piece, WriterRank, whole_shape
from megasdc.checkpoint.tensor_files import StateFiles
from megasdc.checkpoint.views.view import GLOBAL_GENERATORS, Entry, Scalar, Slot, View, flatten
from megasdc.checkpoint.views.zero_shards import (
    locate_shards,
    read_stage,
    state_digest,
)
from megasdc.common.errors import CheckpointError
from megasdc.model.sharding import TIED_EMBEDDING, Split, parameter_splits, split_name, torch_name


def open_deepspeed(path: Path) -> View:
    """Open the view of a checkpoint, ``step_NNNNNNNN``, with every piece located.

    CheckpointError if the manifest, ``megasdc.json`` or the file of a stage cannot be read, files of other nodes are
    missing, or the layout of parameters is not supported.
    """
    return _Opening(path).view()


@dataclass(frozen=True)
class States:
    """Where the optimizer's states of a checkpoint are.

    Attributes:
        copies: of a parameter's state, by name of the pipeline with backend ``torch`` and slot.
        shapes: unsharded shape of every parameter of the model, by its name in the pipeline.
        stage: content of the file of the first stage.
        files: through which all of it is read.
    """

    copies: dict[tuple[str, Slot], list[Copy]]
    shapes: dict[str, list[int]]
    stage: dict[str, Any]
    files: StateFiles


def locate_states(path: Path, names: Collection[str]) -> States:
    """Locate master weights and moments of some parameters, whichever of the checkpoint's other files are there.

    Args:
        names: of the parameters in the pipeline.

    CheckpointError as of ``open_deepspeed``.
    """
    return _Opening(path).states(names)


def shared_scalars(path: Path) -> tuple[dict[str, Scalar], dict[str, Any]]:
    """Counters and loader position in a checkpoint's ``megasdc.json``, and its content; else CheckpointError."""
    state = read_shared_state(path)
    found = {
        name if name.startswith("loader/") else f"run/{name}": Scalar(
            repr(value), path / SHARED_STATE_FILE, WriterRank()
        )
        for name, value in flatten("", counters_of(state))
    }
    return found, state


class _Opening:
    """The work of ``open_deepspeed``."""

    def __init__(self, path: Path) -> None:
        self.path, self.files = path, StateFiles()
        manifest = read_manifest(path)
        self.layout, self.manifest = manifest.layout, manifest
        self.hosts = {rank: node for node, ranks in manifest.nodes.items() for rank in ranks}
        self.records = manifest.by_name()
        for other in read_other_nodes(path):
            _same_save(path, manifest, other)
            self.records |= other.by_name()
        if manifest.storage == "node_local" and (lacking := find_missing(path, manifest, set(self.records))):
            raise CheckpointError("; ".join(lacking))
        self.scalars, state = shared_scalars(path)
        self.real_rows = int(state["vocab_size"]) if state.get("vocab_size") else None
        model = model_of(state, path)
        self.splits = {torch_name(name): split for name, split in parameter_splits(model).items()}
        self.prefix = find_prefix(self.records)
        self.copies: dict[tuple[str, Slot], list[Copy]] = {}
        self.problems: list[str] = []

    def view(self) -> View:
        """The complete view."""
        for pp_rank in range(self.layout.pipeline):
            stages = [self._stage(pp_rank, tp_rank) for tp_rank in range(self.layout.tensor)]
            self._add_weights(stages[0]["param_shapes"], pp_rank)
            for group in range(len(stages[0]["param_shapes"])):
                self._add_states([stage["param_shapes"][group] for stage in stages], pp_rank, group)
        self._add_rng()
        self._add_empty_layers()
        return View(
            path=self.path,
            kind="DeepSpeed pipeline with ZeRO-1",
            layout=str(self.layout),
            slots=("weight", "master", "exp_avg", "exp_avg_sq", "scalar"),
            entries={
                key: Entry(tuple(copies), self.real_rows if self.splits[key[0]] is Split.VOCABULARY else None)
                for key, copies in self.copies.items()
            },
            scalars=self.scalars,
            problems=self.problems,
            records={self.path / name: record for name, record in self.records.items()},
            save_id=self.manifest.save_id,
        )

    def states(self, names: Collection[str]) -> States:
        """Where the states of some parameters are."""
        shapes: dict[str, list[int]] = {}
        first: dict[str, Any] = {}
        for pp_rank in range(self.layout.pipeline):
            stages = [self._stage(pp_rank, tp_rank) for tp_rank in range(self.layout.tensor)]
            first = first or stages[0]
            for group, of_group in enumerate(stages[0]["param_shapes"]):
                for name, local in of_group.items():
                    shapes[name] = list(whole_shape(tuple(local), self._split(name), self.layout.tensor))
                if not of_group.keys().isdisjoint(names):
                    self._add_states([stage["param_shapes"][group] for stage in stages], pp_rank, group)
        return States(self.copies, shapes, first, self.files)

    def _split(self, name: str) -> Split:
        fqn = torch_name(name)
        if fqn not in self.splits:
            raise CheckpointError(f"{self.path} has a parameter {name}, which its model has not")
        return self.splits[fqn]

    def _owner(self, pp_rank: int, dp_rank: int, tp_rank: int) -> WriterRank:
        rank = (pp_rank * self.layout.data + dp_rank) * self.layout.tensor + tp_rank  # tensor ranks vary fastest
        return WriterRank(rank, dp_rank, pp_rank, tp_rank, self.hosts.get(rank))

    def _writer(self, name: str) -> WriterRank:
        record = self.records.get(name)
        if record is None:
            return WriterRank()
        dims = self.layout.dims(record.rank)
        return WriterRank(record.rank, dims.dp_rank, dims.pp_rank, dims.tp_rank, record.node)

    def _stage(self, pp_rank: int, tp_rank: int) -> dict[str, Any]:
        file = self.path / stage_file(pp_rank * self.layout.tensor + tp_rank)
        state, scalars = read_stage(self.files, file, self._writer(file.name), pp_rank, tp_rank)
        self.scalars |= scalars
        return state

    def _add_weights(self, groups: list[dict[str, torch.Size]], pp_rank: int) -> None:
        for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
            if name == TIED_EMBEDDING and pp_rank:
                continue  # saved once, by the first stage
            index, key = split_name(name)
            pieces = [self._weight(index, key, tp_rank, tuple(shape)) for tp_rank in range(self.layout.tensor)]
            self._add(name, "weight", tuple(shape), [(piece,) for piece in pieces])

    def _weight(self, index: int, key: str, tp_rank: int, shape: tuple[int, ...]) -> Piece:
        name = layer_file(index, tp_rank)
        saved = ((self.records[name].tensors or {}) if name in self.records else {}).get(key)
        return Piece(
            self.path / name,
            self._writer(name),
            prod(shape),
            partial(self.files.tensor, self.path / name, key),
            shape=shape,
            dtype=parse_type(saved)[0] if saved else None,
        )

    def _add_states(self, shapes_of: list[dict[str, torch.Size]], pp_rank: int, group: int) -> None:
        """Add master weights and moments of one group of a stage's parameters."""
        pieces: dict[tuple[str, Slot], list[tuple[Piece, ...]]] = {}
        for tp_rank, shapes in enumerate(shapes_of):
            stage = pp_rank * self.layout.tensor + tp_rank
            replicas = [
                (self.path / shard_file(dp_rank, stage, self.prefix), self._owner(pp_rank, dp_rank, tp_rank))
                for dp_rank in range(self.layout.data)
            ]
            found, scalars = locate_shards(self.files, replicas, group, shapes)
            self.scalars |= scalars
            for key, shard in found.items():
                pieces.setdefault(key, []).append(shard)
        for (name, slot), shards in pieces.items():
            self._add(name, slot, tuple(shapes_of[0][name]), shards)

    def _add_rng(self) -> None:
        for rank in range(self.manifest.world_size):
            file = self.path / rank_state_file(rank)
            value: str | None = None
            try:
                if file.exists():
                    value = state_digest(load_checked(file))
            except CheckpointError as error:
                self.problems.append(str(error))
                continue
            self.scalars[f"rank {rank:05d}{GLOBAL_GENERATORS}"] = Scalar(value, file, self._writer(file.name))

    def _add_empty_layers(self) -> None:
        """Add files of layers without parameters, which DeepSpeed requires to exist."""
        for name, record in self.records.items():
            if record.tensors == {}:
                value = "is there" if (self.path / name).exists() else None
                self.scalars[f"rank {record.rank:05d}/{name}"] = Scalar(value, self.path / name, self._writer(name))

    def _add(self, name: str, slot: Slot, local: tuple[int, ...], shards: list[tuple[Piece, ...]]) -> None:
        split, tensor = self._split(name), self.layout.tensor
        copies = self.copies.setdefault((torch_name(name), slot), [])
        if split is Split.REPLICATED:
            copies += [Copy(local, (shard,)) for shard in shards]
        else:
            copies.append(Copy(whole_shape(local, split, tensor), tuple(shards), split))


def _same_save(path: Path, manifest: Manifest, other: Manifest) -> None:
    if other.save_id != manifest.save_id:
        raise CheckpointError(f"{path}: the manifest of node {other.node} is of another save of this step")
