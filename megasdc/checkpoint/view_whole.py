"""Where do the tensors of a checkpoint lie that was written without a layout?

DeepSpeed's universal form, an exported or imported Hugging Face model, and single ``.pt`` or ``.safetensors`` files.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.import_hf import HfShards, section_of
from megasdc.checkpoint.tensor_files import open_tensors
from megasdc.checkpoint.universal import PARAMETERS_FOLDER, read_universal_manifest
from megasdc.checkpoint.view import Copy, Entry, Owner, Piece, Scalar, Slot, StateFiles, View, flatten
from megasdc.checkpoint.view_deepspeed import model_of, shared_scalars
from megasdc.config import ModelSection
from megasdc.errors import CheckpointError, ConfigError
from megasdc.model.hf import from_hf, hf_shapes, model_fields, rules, vocabulary
from megasdc.model.sharding import Split, parameter_splits, split_name, torch_name

_UNIVERSAL_FILES: dict[Slot, str] = {"master": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_universal_view(path: Path) -> View:
    """A universal checkpoint: each parameter whole, master weight and moments.

    Weights are derived: master weights rounded to the type that the run computed in, which is how its optimizer made
    them.

    Raises:
        CheckpointError: its manifest or ``megasdc.json`` cannot be read.
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
            file = path / PARAMETERS_FOLDER / name / f"{stem}.pt"
            stored = partial(files.tensor, file, "param")
            entries[fqn, slot] = _entry(file, tuple(shape), stored, torch.float32, rows)
        file = path / PARAMETERS_FOLDER / name / f"{_UNIVERSAL_FILES['master']}.pt"
        derived[fqn, "weight"] = _entry(file, tuple(shape), partial(_rounded, files, file, dtype), dtype, rows)
    file = path / PARAMETERS_FOLDER / "optimizer_state.pt"
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
    """A folder of a Hugging Face model in safetensors: weights alone, under our names.

    Raises:
        CheckpointError: a file is missing or damaged, or it is no model whose tensors we know.
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        model = section_of(model_fields(config))
        shards = HfShards(path)
        shards.check(model, hf_shapes(model, vocabulary(config)))
    except (OSError, ValueError, ConfigError) as error:
        raise CheckpointError(f"{path} cannot be compared as a Hugging Face model: {error}") from error
    layers = _HfLayers(model, shards)
    names = {split_name(name): (name, split) for name, split in parameter_splits(model).items()}
    entries: dict[tuple[str, Slot], Entry] = {}
    for (index, rest), (name, split) in names.items():
        file = path / shards.file_of[shards.name_in_file(layers.rule(index, rest).theirs[0])]
        shape = layers.shape(index, rest)
        rows = shape[0] if split is Split.VOCABULARY else None
        entries[name, "weight"] = _entry(file, shape, partial(layers.read, index, rest), None, rows)
    return View(path, "Hugging Face", None, ("weight",), entries)


class _HfLayers:
    """Our tensors from theirs; the layer that was asked for last is kept."""

    def __init__(self, model: ModelSection, shards: HfShards) -> None:
        self.model, self.shards = model, shards
        self._last: tuple[int, dict[str, Tensor]] = (-1, {})

    def rule(self, index: int, rest: str) -> Any:
        return next(rule for rule in rules(self.model, index) if rule.ours == rest)

    def shape(self, index: int, rest: str) -> tuple[int, ...]:
        wanted = [name for rule in rules(self.model, index) for name in rule.theirs]
        like = {
            name: torch.empty(self.shards.shape_of[self.shards.name_in_file(name)], device="meta") for name in wanted
        }
        kept = {rule.theirs[0] for rule in rules(self.model, index) if not rule.ours}
        like |= {name: torch.zeros(like[name].shape) for name in kept}  # looked at for zeros; nothing can be on meta
        return tuple(from_hf(self.model, index, like)[rest].shape)

    def read(self, index: int, rest: str) -> Tensor:
        if self._last[0] != index:
            wanted = [name for rule in rules(self.model, index) for name in rule.theirs]
            try:
                self._last = (index, from_hf(self.model, index, self.shards.read(wanted)))
            except ConfigError as error:
                raise CheckpointError(str(error)) from error
        return self._last[1][rest]


def open_file_view(path: Path) -> View:
    """A single file, its tensors as weights under the names that they have in it.

    Raises:
        CheckpointError: it is of another kind, unsafe or damaged.
    """
    entries: dict[tuple[str, Slot], Entry] = {}
    scalars: dict[str, Scalar] = {}
    if path.suffix == ".safetensors":
        with open_tensors(path) as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
        for name, shape in shapes.items():
            entries[name, "weight"] = _entry(path, tuple(shape), partial(_read_tensor, path, name), None, None)
        return View(path, "safetensors file", None, ("weight",), entries)
    if path.suffix not in (".pt", ".pth", ".bin"):
        raise CheckpointError(f"{path} is no checkpoint: known files end in .pt, .pth, .bin or .safetensors")
    for name, value in flatten("", StateFiles().load(path)):
        if isinstance(value, Tensor):
            entries[name, "weight"] = _entry(path, tuple(value.shape), partial(_same, value), None, None)
        else:
            scalars[name] = Scalar(repr(value), path, Owner())
    return View(path, "torch.save file", None, ("weight", "scalar"), entries, scalars)


def _entry(file: Path, shape: tuple[int, ...], stored: Any, dtype: torch.dtype | None, rows: int | None) -> Entry:
    piece = Piece(file, Owner(), torch.Size(shape).numel(), stored, shape=shape, dtype=dtype)
    return Entry((Copy(shape, ((piece,),)),), rows)


def _read_tensor(path: Path, name: str) -> Tensor:
    with open_tensors(path) as file:
        found: Tensor = file.get_tensor(name)
    return found


def _rounded(files: StateFiles, file: Path, dtype: torch.dtype) -> Tensor:
    master = files.tensor(file, "param")
    if master.dtype != torch.float32:
        raise CheckpointError(f"{file} holds {master.dtype}, needed are master weights of torch.float32")
    return master.to(dtype)


def _same(value: Tensor) -> Tensor:
    return value
