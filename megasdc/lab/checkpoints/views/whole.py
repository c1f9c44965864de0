"""Views of checkpoints written without a layout: universal checkpoints, Hugging Face models, single files.

Single files are ``.pt``, ``.pth``, ``.bin`` or ``.safetensors``.
"""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.formats.deepspeed_names import UNIVERSAL_OPTIMIZER, parameter_file
from megasdc.checkpoint.formats.extents import Extent, read_whole
from megasdc.checkpoint.formats.pieces import Copy, Owner, Piece
from megasdc.checkpoint.formats.shared_state import model_of
from megasdc.checkpoint.formats.state_files import StateFiles
from megasdc.checkpoint.formats.tensor_files import locate_tensors
from megasdc.checkpoint.universal import read_universal_manifest
from megasdc.checkpoint.views.deepspeed import shared_scalars
from megasdc.checkpoint.views.hf_shards import HfShards, read_json, section_of
from megasdc.checkpoint.views.view import Entry, Scalar, Slot, View, flatten
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.config import ModelSection
from megasdc.model.hf import (
    Form,
    Rule,
    hf_shapes,
    model_fields,
    num_pipeline_layers,
    rules,
    shape_of_ours,
    to_ours,
    vocabulary,
)
from megasdc.model.sharding import Split, parameter_splits, split_name, torch_name

_UNIVERSAL_FILES: dict[Slot, str] = {"master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
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
        for slot, stem in _UNIVERSAL_FILES.items():
            file = path / parameter_file(name, stem)
            stored = partial(files.tensor, file, "param")
            entries[fqn, slot] = _entry(file, tuple(shape), stored, torch.float32, rows)
        file = path / parameter_file(name, _UNIVERSAL_FILES["master"])
        derived[fqn, "weight"] = _entry(file, tuple(shape), partial(_rounded, files, file, dtype), dtype, rows)
    file = path / UNIVERSAL_OPTIMIZER
    try:
        groups = files.load(file)["param_groups"]
    except FileNotFoundError:
        groups = []
    for number, group in enumerate(groups):
        scalars[f"optimizer/group {number}/lr"] = Scalar(repr(group["lr"]), file, Owner())
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
        config = read_json(path / "config.json")
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
                Piece(one.file, Owner(), one.numel(), partial(_same, one), dtype=one.dtype) for one in theirs
            )
        else:
            whole = partial(_converted, model, rule, theirs)
            pieces = (Piece(theirs[0].file, Owner(), prod(shape), whole, dtype=theirs[0].dtype),)
        entries[name, "weight"] = Entry((Copy(shape, (pieces,)),), shape[0] if split is Split.VOCABULARY else None)
    for rule in (rule for index in range(num_pipeline_layers(model)) for rule in rules(model, index) if not rule.ours):
        _check_zero(rule, shards.extents[shards.name_in_file(rule.theirs[0])])
    return View(path, "Hugging Face", None, ("weight",), entries)


def _converted(model: ModelSection, rule: Rule, theirs: list[Extent]) -> Tensor:
    """A tensor in megasdc's order of elements, converted from theirs in memory."""
    return to_ours(model, rule, [read_whole(one) for one in theirs])


def _check_zero(rule: Rule, theirs: Extent) -> None:
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
            scalars[name] = Scalar(repr(value), path, Owner())
    return View(path, "torch.save file", None, ("weight", "scalar"), entries, scalars)


def _entry(file: Path, shape: tuple[int, ...], stored: Any, dtype: torch.dtype | None, rows: int | None) -> Entry:
    piece = Piece(file, Owner(), torch.Size(shape).numel(), stored, shape=shape, dtype=dtype)
    return Entry.of_piece(piece, shape, rows)


def _same(extent: Extent) -> Extent:
    return extent


def _rounded(files: StateFiles, file: Path, dtype: torch.dtype) -> Tensor:
    """Master weights rounded to ``dtype``, in memory."""
    master = files.tensor(file, "param")
    if master.dtype != torch.float32:
        raise CheckpointError(f"{file} holds {master.dtype}, needed are master weights of torch.float32")
    return (read_whole(master) if isinstance(master, Extent) else master).to(dtype)
