"""Opening a checkpoint of any format as a view, without an engine.

Here are the views of checkpoints written without a layout: universal checkpoints, Hugging Face models, and single
files, which are ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``; and that of a checkpoint of DeepSpeed's plain engine
with ZeRO-1 or 2, a model without pipeline stages. There weights, buffers and counters are in
``mp_rank_00_model_states.pt``, which the first replica writes, under the names of the model, with ``client_state``
beside them. Master weights and moments: see ``zero_shards``. Without a manifest it is not known whether files changed.
DeepSpeed saves no random generators; those in ``client_state`` are compared.
"""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.files import (
    CHECKPOINT,
    DCP,
    MANIFEST_FILE,
    MODEL,
    ONE_CHECKPOINT,
    SHARD_FILES,
    UNIVERSAL,
    UNIVERSAL_OPTIMIZER,
    ZERO,
    explain_folder,
    find_prefix,
    kind_of,
    shard_file,
    stage_file,
)
from megasdc.checkpoint.hf_shards import HfShards, read_model_json, section_of
from megasdc.checkpoint.manifest import Layout, model_of, read_universal_manifest
from megasdc.checkpoint.tensor_files import Extent, StateFiles, locate_tensors, read_whole
from megasdc.checkpoint.views import (
    UNIVERSAL_STATES,
    Copy,
    Entry,
    Piece,
    Scalar,
    Slot,
    View,
    WriterRank,
    flatten,
    locate_shards,
    open_deepspeed,
    read_stage,
    shared_scalars,
    universal_piece,
    value_text,
)
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.config.model import ModelSection
from megasdc.lab.checkpoints.views.dcp import open_dcp
from megasdc.model.hf.fields import model_fields, vocabulary
from megasdc.model.hf.tensors import Form, TensorMapping, hf_shapes, num_pipeline_layers, rules, shape_of_ours, to_ours
from megasdc.model.sharding import Split, parameter_splits, split_name, torch_name

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_universal_view(path: Path) -> View:
    """Open a universal checkpoint: master weight and moments of each parameter, unsharded.

    Weights are derived: master weights rounded to the run's precision, as its optimizer does. CheckpointError if the
    manifest or ``megasdc.json`` cannot be read.
    """
    manifest, files = read_universal_manifest(path), StateFiles()
    scalars, state = shared_scalars(path)
    model = model_of(state, path)
    splits = {torch_name(name): split for name, split in parameter_splits(model).items()}
    entries: dict[tuple[str, Slot], Entry] = {}
    derived: dict[tuple[str, Slot], Entry] = {}
    dtype = _PRECISIONS[manifest.precision]
    for name, shape in manifest.parameters.items():
        fqn = torch_name(name)
        rows = state.get("vocab_size") if splits.get(fqn) is Split.VOCABULARY else None
        for slot in UNIVERSAL_STATES:
            piece = universal_piece(files, path, name, slot, tuple(shape))
            entries[fqn, slot] = Entry.of_piece(piece, tuple(shape), rows)
        file = entries[fqn, "master"].copies[0].pieces[0].file
        derived[fqn, "weight"] = _entry(file, tuple(shape), partial(_rounded, files, file, dtype), dtype, rows)
    file = path / UNIVERSAL_OPTIMIZER
    try:
        groups = files.load(file)["param_groups"]
    except FileNotFoundError:
        groups = []
    for number, group in enumerate(groups):
        scalars[f"optimizer/group {number}/lr"] = Scalar(repr(group["lr"]), file, WriterRank())
    return View(
        path=path,
        kind="DeepSpeed universal",
        layout=None,
        slots=("master", "exp_avg", "exp_avg_sq", "scalar"),
        entries=entries,
        scalars=scalars,
        records={path / record.name: record for record in manifest.files},
        derived=derived,
    )


def open_hf_view(path: Path) -> View:
    """Open a folder of a Hugging Face model in safetensors: only weights, under megasdc's names.

    CheckpointError if a file is missing or damaged, or the model is not supported.
    """
    try:
        config = read_model_json(path / "config.json")
        model = section_of(model_fields(config))
        shards = HfShards(path)
        shards.check(model, hf_shapes(model, vocabulary(config)))
    except (OSError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} cannot be compared as a Hugging Face model: {error}") from error
    entries: dict[tuple[str, Slot], Entry] = {}
    for name, split in parameter_splits(model).items():
        index, rest = split_name(name)
        (rule,) = (rule for rule in rules(model, index) if rule.ours == rest)
        theirs = [shards.extents[shards.name_in_file(one)] for one in rule.theirs]
        shape = shape_of_ours(model, rule, [one.shape for one in theirs])
        if rule.form in (Form.SAME, Form.GATE_UP):  # their tensors concatenated
            pieces = tuple(
                Piece(one.file, WriterRank(), one.numel(), partial(_same, one), dtype=one.dtype) for one in theirs
            )
        else:
            whole = partial(_converted, model, rule, theirs)
            pieces = (Piece(theirs[0].file, WriterRank(), prod(shape), whole, dtype=theirs[0].dtype),)
        entries[name, "weight"] = Entry((Copy(shape, (pieces,)),), shape[0] if split is Split.VOCABULARY else None)
    for rule in (rule for index in range(num_pipeline_layers(model)) for rule in rules(model, index) if not rule.ours):
        _check_zero(rule, shards.extents[shards.name_in_file(rule.theirs[0])])
    return View(path, "Hugging Face", None, ("weight",), entries)


def _converted(model: ModelSection, rule: TensorMapping, theirs: list[Extent]) -> Tensor:
    """A tensor in megasdc's order of elements, converted from theirs in memory."""
    return to_ours(model, rule, [read_whole(one) for one in theirs])


def _check_zero(rule: TensorMapping, theirs: Extent) -> None:
    if read_whole(theirs).any():
        raise CheckpointError(
            f"{theirs.file}: {rule.theirs[0]} is not zero; supported are biases everywhere or on q, k, v alone"
        )


def open_file_view(path: Path) -> View:
    """Open a single file; its tensors become weights under their names in the file.

    CheckpointError if the file is of another kind, unsafe or damaged.
    """
    entries: dict[tuple[str, Slot], Entry] = {}
    scalars: dict[str, Scalar] = {}
    if path.suffix == ".safetensors":
        for name, extent in locate_tensors(path).items():
            entries[name, "weight"] = _entry(path, extent.shape, partial(_same, extent), extent.dtype, None)
        return View(path, "safetensors file", None, ("weight",), entries)
    if path.suffix not in (".pt", ".pth", ".bin"):
        raise CheckpointError(f"{path} is no checkpoint: known files end in .pt, .pth, .bin or .safetensors")
    files = StateFiles()
    for name, value in flatten("", files.load(path)):
        if isinstance(value, Tensor):
            stored = partial(files.place, path, value)
            entries[name, "weight"] = _entry(path, tuple(value.shape), stored, value.dtype, None)
        else:
            scalars[name] = Scalar(repr(value), path, WriterRank())
    return View(path, "torch.save file", None, ("weight", "scalar"), entries, scalars)


def _entry(file: Path, shape: tuple[int, ...], stored: Any, dtype: torch.dtype | None, rows: int | None) -> Entry:
    piece = Piece(file, WriterRank(), torch.Size(shape).numel(), stored, shape=shape, dtype=dtype)
    return Entry.of_piece(piece, shape, rows)


def _same(extent: Extent) -> Extent:
    return extent


def _rounded(files: StateFiles, file: Path, dtype: torch.dtype) -> Tensor:
    """Master weights rounded to ``dtype``, in memory."""
    master = files.tensor(file, "param")
    if master.dtype != torch.float32:
        raise CheckpointError(f"{file} holds {master.dtype}, needed are master weights of torch.float32")
    return (read_whole(master) if isinstance(master, Extent) else master).to(dtype)


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
    writer = WriterRank(0, 0, 0, 0)
    state, scalars = read_stage(files, first, writer, 0, 0)
    replicas = _replicas(path, state)
    entries = _weights(files, first, writer, state)
    for key in (key for key in state if key not in _OF_DEEPSPEED):
        scalars |= {
            name: Scalar(value_text(files.read(first, value)), first, writer)
            for name, value in flatten(f"client/{key}", state[key])
        }
    prefix = _prefix(files, path)
    for group, shapes in enumerate(state["param_shapes"]):
        shards = [
            (path / shard_file(dp_rank, 0, prefix), WriterRank(dp_rank, dp_rank, 0, 0)) for dp_rank in range(replicas)
        ]
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


def _weights(files: StateFiles, file: Path, writer: WriterRank, state: dict[str, Any]) -> dict[tuple[str, Slot], Entry]:
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


_OPENERS = {
    CHECKPOINT: open_deepspeed,
    UNIVERSAL: open_universal_view,
    MODEL: open_hf_view,
    ZERO: open_zero1,
    DCP: open_dcp,
}


def open_view(path: Path) -> View:
    """Detect the format at a path and locate its tensors; tensors are not read, and nothing is written.

    Links that lead out of a folder are followed, which model caches require, and reported in ``notes``.

    Args:
        path: a checkpoint of any layout, a universal checkpoint, a folder of a Hugging Face model, of DeepSpeed with
            ZeRO-1 or 2 or of ``torch.distributed.checkpoint``, or one file.

    Raises:
        CheckpointError: the path is none of these, or its metadata cannot be read.
    """
    try:
        if path.is_file():
            return open_file_view(path)
        if not path.is_dir():
            raise CheckpointError(f"{path} is {'no file or folder' if path.exists() else 'not there'}")
        kind = kind_of(path)
        if kind not in _OPENERS:
            raise CheckpointError(
                explain_folder(path, ONE_CHECKPOINT)
                or f"{path} is no checkpoint: it has no {MANIFEST_FILE}, universal.json, config.json of a model, "
                f"{stage_file()} or .metadata"
            )
        view = _OPENERS[kind](path)
        view.notes += _links_out(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    return view


def _links_out(folder: Path) -> list[str]:
    """The note on links in a folder that lead out of it; empty if there are none."""
    root = folder.resolve()
    links = [file for file in sorted(folder.rglob("*")) if file.is_symlink()]
    out = [file for file in links if not file.resolve().is_relative_to(root)]
    if not out:
        return []
    first = f"{out[0].relative_to(folder)} -> {out[0].resolve()}"
    return [f"{folder} has {len(out)} links that lead out of it, the first {first}: what they lead to was compared"]
