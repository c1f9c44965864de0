"""Unsharded weights of a checkpoint of any layout, one pipeline layer at a time.

Needs no engine, process group or GPU. Only the weights' files are opened, memory-mapped: at most one layer is held. A
``View`` would open more: it locates the optimizer's states too, and for that unpickles the files of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.checks import reading
from megasdc.checkpoint.files import is_initial_weights, layer_file
from megasdc.checkpoint.initial import InitialWeights, pad_vocabulary
from megasdc.checkpoint.manifest import SHARED_STATE_FILE, model_of, read_manifest, read_shared_state
from megasdc.checkpoint.verify import find_folders, verify_checkpoint
from megasdc.common.errors import CheckpointError, DataError
from megasdc.config.model import ModelSection
from megasdc.data.manifest import Manifest as DataManifest
from megasdc.model.sharding import Split, join_shards, parameter_splits, split_name, take_shard, torch_name
from megasdc.model.sizes import padded_vocab_size

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Unsharded weights of a model: a checkpoint of any layout, or a folder of initial weights.

    Attributes:
        vocab_size: real rows of the vocabulary.
        tokenizer_checksum: of the tokenizer that it was trained with; None: not known.
        step: optimizer step of a checkpoint; None: initial weights.
        config: the resolved configuration of the run; None: initial weights.
    """

    path: Path
    model: ModelSection
    vocab_size: int
    tokenizer_checksum: str | None
    step: int | None
    config: dict[str, Any] | None

    def layer(self, index: int, device: str = "cpu") -> dict[str, Tensor]:
        """Unsharded parameters of one pipeline layer, by names without its number; the vocabulary without padding."""
        ...


class CheckpointWeights:
    """The weights of one checkpoint, ``step_NNNNNNNN``; its files are not verified here.

    CheckpointError if manifest or shared state cannot be read, or a layer's file is not in the manifest; DataError if
    an older checkpoint does not store its vocabulary size, and its prepared data cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model_file = path / SHARED_STATE_FILE
        self.manifest = read_manifest(path)
        self.step: int | None = self.manifest.step
        state = read_shared_state(path)
        self.model = model_of(state, path)
        self.config: dict[str, Any] | None = state["config"]
        self.vocab_size: int = state.get("vocab_size") or _vocabulary_of_data(state["config"], path)
        self.tokenizer_checksum: str | None = state.get("tokenizer_checksum")
        self._splits: dict[int, dict[str, Split]] = {}
        for name, split in parameter_splits(self.model).items():
            index, rest = split_name(name)
            self._splits.setdefault(index, {})[rest] = split
        self._check_files()

    def _check_files(self) -> None:
        known = self.manifest.by_name()
        missing = [
            name
            for index in self._splits
            for tp_rank in range(self.manifest.layout.tensor)
            if (name := layer_file(index, tp_rank)) not in known
        ]
        if missing:
            where = ""
            if self.manifest.storage == "node_local":
                where = (
                    "; each node holds the layers of its own ranks: give a checkpoint that was saved to shared storage"
                )
            raise CheckpointError(f"{self.path} does not hold {', '.join(missing[:4])}{where}")

    def layer(self, index: int, device: str = "cpu") -> dict[str, Tensor]:
        """Unsharded parameters of one pipeline layer, by the names of backend ``torch`` without the layer's number.

        In their saved types, the vocabulary without its padding; empty for a layer without parameters. Device ``meta``
        gives types and shapes only. CheckpointError if a file cannot be loaded or does not hold this model's
        parameters, or copies that must be equal differ.
        """
        splits = self._splits.get(index)
        if splits is None:
            return {}
        files = [self.path / layer_file(index, tp_rank) for tp_rank in range(self.manifest.layout.tensor)]
        with reading(self.path, self.manifest.save_id):
            states = [load_checked(file, mmap=True) for file in files]
        for file, state in zip(files, states, strict=True):
            found = {name for name, value in state.items() if isinstance(value, Tensor) and "_extra_state" not in name}
            if found != set(splits):
                raise CheckpointError(
                    f"{file} holds other parameters than its model has: missing {sorted(set(splits) - found)}, "
                    f"too many {sorted(found - set(splits))}"
                )
        whole = {}
        for name, split in splits.items():
            shards = [state[name].detach() for state in states]
            if device == "meta":  # the file is memory-mapped, so nothing is read
                shards = [shard.to("meta") for shard in shards]
            if device == "meta" and split is Split.REPLICATED:
                shards = shards[:1]
            try:
                tensor = join_shards(shards, split)
            except ValueError as error:
                raise CheckpointError(f"{files[0].name} and its peers, {name}: {error}") from error
            whole[torch_name(name)] = tensor[: self.vocab_size] if split is Split.VOCABULARY else tensor
        return whole


def open_weights(
    path: Path | str, *, progress: bool = False, accept: Callable[[ModelSection], Any] | None = None
) -> Any:
    """Open and verify the weights at a path.

    Args:
        path: a checkpoint, a folder of checkpoints (the newest valid one is used; those passed over are logged), or a
            folder made by ``megasdc import-hf``.
        progress: draw a bar on standard error where it is a terminal.
        accept: called with the model before the files are read, to refuse it early.

    Returns:
        A ``WeightSource``.

    Raises:
        CheckpointError: there are no usable weights; names every damaged file.
    """
    if is_initial_weights(path):
        weights = InitialWeights(path)
        if accept is not None:
            accept(weights.model)
        weights.verify()
        return weights
    folders = find_folders(path)
    reasons: list[str] = []
    for folder in folders:
        if accept is not None and len(folders) == 1:
            accept(CheckpointWeights(folder).model)
        report = verify_checkpoint(folder, progress=progress)
        if report.ok:
            for line in reasons:
                logger.warning("skipped: %s", line)
            found = CheckpointWeights(folder)
            if accept is not None:
                accept(found.model)
            return found
        reasons.append(report.render())
    raise CheckpointError("no usable weights:\n" + "\n".join(reasons))


def load_weights(
    weights: WeightSource,
    parameters: Iterable[tuple[str, nn.Parameter]],
    model: ModelSection,
    *,
    vocab_size: int,
    tensor: int = 1,
    tp_rank: int = 0,
) -> None:
    """Copy unsharded weights into the parameters of one rank; each layer is read once.

    Args:
        parameters: (name in the pipeline, parameter) of this rank.
        model: the section that the parameters were built from.
        vocab_size: real entries of the vocabulary.
        tensor: number of tensor ranks.

    Raises:
        CheckpointError: a parameter is missing, or has another shape.

    Collective: none; each rank reads what it holds.
    """
    splits = parameter_splits(model)
    padded = padded_vocab_size(vocab_size, model.vocab_multiple)
    by_layer: dict[int, list[tuple[str, str, nn.Parameter]]] = {}
    for name, parameter in parameters:
        index, rest = split_name(name)
        by_layer.setdefault(index, []).append((name, torch_name(rest), parameter))
    for index, wanted in sorted(by_layer.items()):
        whole = weights.layer(index)
        for name, rest, parameter in wanted:
            if rest not in whole:
                raise CheckpointError(f"{weights.path} does not hold {name}")
            value, split = whole[rest], splits[name]
            if split is Split.VOCABULARY:
                value = pad_vocabulary(value[:vocab_size], padded)
            value = take_shard(value, split, tensor, tp_rank)
            if value.shape != parameter.shape:
                raise CheckpointError(
                    f"{weights.path}, {name}: has shape {list(value.shape)}, the model needs {list(parameter.shape)}"
                )
            with torch.no_grad():
                parameter.copy_(value)


def _vocabulary_of_data(config: dict[str, Any], path: Path) -> int:
    """Vocabulary size of the prepared data, for checkpoints that do not store it."""
    folder = config["megasdc"]["data"]["path"]
    try:
        return DataManifest.load(folder).tokenizer.vocab_size
    except DataError as error:
        raise DataError(
            f"{path} does not say which vocabulary entries are real, nor can its prepared data: {error}; "
            "start in the folder that the run was started in"
        ) from error
