"""View of a checkpoint of DeepSpeed's plain engine with ZeRO-1 or 2: a model without pipeline stages.

Weights, buffers and counters are in ``mp_rank_00_model_states.pt``, which the first replica writes, under the names of
the model, with ``client_state`` beside them. Master weights and moments: see ``zero_shards``. Without a manifest it is
not known whether files changed. DeepSpeed saves no random generators; those in ``client_state`` are compared.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.formats.deepspeed_names import SHARD_FILES, find_prefix, shard_file, stage_file
from megasdc.checkpoint.formats.pieces import Copy, Owner, Piece
from megasdc.checkpoint.formats.state_files import StateFiles
from megasdc.checkpoint.manifest import Layout
from megasdc.checkpoint.views.view import Entry, Scalar, Slot, View, flatten
from megasdc.checkpoint.views.zero_shards import (
    locate_shards,
    read_stage,
    text_of,
)
from megasdc.common.errors import CheckpointError

_OF_DEEPSPEED = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
        "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
        "global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
        "ds_config", "ds_version",
    }
)  # fmt: skip
"""Top-level keys that DeepSpeed 0.19.8 itself writes into the model's file; others are ``client_state``."""


def open_zero1(path: Path) -> View:
    """Open the view of a checkpoint, ``global_stepN``, with every piece located.

    CheckpointError if the file of the model cannot be read, the checkpoint is of a pipeline, of model-parallel ranks or
    of another stage of ZeRO, or the layout of parameters is not supported.
    """
    files, first = StateFiles(), path / stage_file()
    writer = Owner(0, 0, 0, 0)
    state, scalars = read_stage(files, first, writer, 0, 0)
    replicas = _replicas(path, state)
    entries = _weights(files, first, writer, state)
    for key in (key for key in state if key not in _OF_DEEPSPEED):
        scalars |= {
            name: Scalar(text_of(files.read(first, value)), first, writer)
            for name, value in flatten(f"client/{key}", state[key])
        }
    prefix = _prefix(files, path)
    for group, shapes in enumerate(state["param_shapes"]):
        shards = [(path / shard_file(dp_rank, 0, prefix), Owner(dp_rank, dp_rank, 0, 0)) for dp_rank in range(replicas)]
        found, values = locate_shards(files, shards, group, shapes)
        scalars |= values
        for (name, slot), pieces in found.items():
            entries[name, slot] = Entry((Copy(tuple(shapes[name]), (pieces,)),))
    return View(
        path=path,
        kind="DeepSpeed with ZeRO",
        layout=str(Layout(tensor=1, pipeline=1, data=replicas)),
        slots=("weight", "master", "exp_avg", "exp_avg_sq", "scalar"),
        entries=entries,
        scalars=scalars,
    )


def _replicas(path: Path, state: dict[str, Any]) -> int:
    """Number of ranks that saved the checkpoint; CheckpointError if the layout of its files is not supported."""
    if not isinstance(state.get("module"), dict):
        raise CheckpointError(
            f"{path} was saved by a pipeline of DeepSpeed and has no manifest.json: how its files belong together is "
            "not known; compare checkpoints that megasdc saved, with their manifests"
        )
    replicas, ranks = state.get("dp_world_size"), state.get("mp_world_size")
    if ranks != 1:
        raise CheckpointError(
            f"{path} was saved by {ranks} model-parallel ranks; how they divide tensors is not in its files. Compare "
            "a checkpoint of one, or gather the model into one file"
        )
    if not isinstance(replicas, int) or replicas < 1:
        raise CheckpointError(
            f"{path / stage_file()} says that {replicas!r} ranks saved it; needed is a number above 0"
        )
    return replicas


def _prefix(files: StateFiles, path: Path) -> str:
    """Prefix of the optimizer's files; CheckpointError if there are none, or of another ZeRO stage than 1 and 2."""
    found = sorted(path.glob(SHARD_FILES))
    if not found:
        raise CheckpointError(
            f"{path} has no files {SHARD_FILES}: it was saved without ZeRO, or they were not copied; "
            f"to compare weights alone, name {path / stage_file()}"
        )
    for file in found:
        try:
            stage = files.load(file)["optimizer_state_dict"].get("zero_stage", 1)  # BF16_Optimizer does not store it
        except (CheckpointError, KeyError, TypeError, AttributeError):
            continue  # reported when its tensors are read
        if stage not in (1, 2):
            raise CheckpointError(f"{file} is of ZeRO stage {int(stage)}; stages 1 and 2 can be compared")
    return find_prefix(file.name for file in found)


def _weights(files: StateFiles, file: Path, writer: Owner, state: dict[str, Any]) -> dict[tuple[str, Slot], Entry]:
    """Entries for parameters and buffers of the model; parameters of the optimizer even if the file lacks them."""
    shapes = {name: tuple(shape) for group in state["param_shapes"] for name, shape in group.items()}
    for name, value in state["module"].items():
        if isinstance(value, Tensor):
            shapes.setdefault(name, tuple(value.shape))
    entries: dict[tuple[str, Slot], Entry] = {}
    for name, shape in shapes.items():
        stored = partial(files.tensor, file, "module", name)
        piece = Piece(file, writer, torch.Size(shape).numel(), stored, shape=shape)
        entries[name, "weight"] = Entry.of_piece(piece, shape)
    return entries
