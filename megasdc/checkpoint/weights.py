"""Unsharded weights, one pipeline layer at a time: a folder of initial weights, or a checkpoint of any layout.

``megasdc import-hf`` writes a folder of initial weights, from which a run of any layout can start: one safetensors file
per pipeline layer under megasdc's names, the vocabulary without padding, ``model.json`` (the ``model`` section that
describes the weights) and ``weights.json`` with size and checksum of every file. A tokenizer that came with the weights
is in ``tokenizer``.

The weights of a checkpoint (``CheckpointWeights``) need no engine, process group or GPU. Only their files are opened,
memory-mapped: at most one layer is held. A ``View`` would open more: it locates the optimizer's states too, and for
that unpickles the files of all ranks.

``open_start``: weights from which a new run starts, and checks that they fit its model and its data. Only weights are
read, in the type in which they were saved: for a bf16 run not the optimizer's fp32 copies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from megasdc.checkpoint.allowlist import load_checked
from megasdc.checkpoint.files import (
    CHECKPOINT,
    CHECKPOINTS,
    SHARED_STATE_FILE,
    WEIGHTS_FILE,
    explain_folder,
    hash_file,
    is_initial_weights,
    kind_of,
    layer_file,
)
from megasdc.checkpoint.manifest import model_of, read_manifest, read_shared_state
from megasdc.checkpoint.records import Record
from megasdc.checkpoint.tensor_files import open_tensors
from megasdc.checkpoint.verify import find_folders, reading, verify_checkpoint
from megasdc.common.durable import parse_json
from megasdc.common.errors import CheckpointError, ConfigError, DataError, StorageError
from megasdc.config.model import ModelSection, ffn_width, head_width, query_groups
from megasdc.data.manifest import DataManifest
from megasdc.data.tokenizer import checksum_tokenizer
from megasdc.model.sharding import Split, join_shards, parameter_splits, shard_of, split_name, torch_name
from megasdc.model.sizes import padded_vocab_size

MODEL_FILE = "model.json"
GENERATION_FILE = "generation_config.json"
"""Name of a file of ``transformers`` that came with the weights; it is passed on and not read."""
TOKENIZER_FOLDER = "tokenizer"
FORMAT_VERSION = 1


class WeightsFileRecord(Record):
    """Size and XXH3-128 of one file."""

    size_bytes: int
    xxh3_128: str


class WeightsManifest(Record):
    """Manifest of a folder of initial weights.

    Attributes:
        kind: distinguishes it from a checkpoint's manifest.
        source: folder or name of the model that was imported.
        vocab_size: number of rows of the word embedding.
        tokenizer_vocab_size: number of entries of its tokenizer; None: no usable one came with it.
        end_of_document: id from the tokenizer, or from the imported configuration; None: unknown.
        token_ids: ids of special tokens in the imported configuration, by its keys; None: an older import.
        files: size and checksum of each file by name, including the tokenizer's.
    """

    format_version: int
    kind: Literal["initial weights"]
    source: str
    vocab_size: int
    tokenizer_vocab_size: int | None
    end_of_document: int | None
    token_ids: dict[str, int | list[int] | None] | None = None
    files: dict[str, WeightsFileRecord]


def weights_file(index: int) -> str:
    """Name of the file with the weights of one pipeline layer."""
    return f"layer_{index:02d}.safetensors"


class InitialWeights:
    """A folder of initial weights, read layer by layer; each file's checksum is verified before use.

    Attributes:
        vocab_size: rows of the word embedding.
        model_file: where the model section is written.

    Raises:
        CheckpointError: the folder is missing, not of this kind, or damaged.
    """

    step: int | None = None
    config: dict[str, Any] | None = None

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.model_file = self.path / MODEL_FILE
        try:
            self.manifest = WeightsManifest.model_validate_json((self.path / WEIGHTS_FILE).read_text(encoding="utf-8"))
            self.model = ModelSection.model_validate_json(self.model_file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                explain_folder(self.path, "a checkpoint, a folder of several, or a folder made by `megasdc import-hf`")
                or f"{error.filename} is missing: {self.path} is not a folder made by `megasdc import-hf`, nor does it "
                "hold a checkpoint"
            ) from error
        except (OSError, ValueError, ValidationError) as error:
            raise CheckpointError(f"{self.path} is damaged: {error}; import it again") from error
        if self.manifest.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"{self.path / WEIGHTS_FILE} has format version {self.manifest.format_version}, this megasdc reads "
                f"{FORMAT_VERSION}"
            )
        self.vocab_size = self.manifest.vocab_size
        self.tokenizer_checksum: str | None = None  # its tokenizer's files are in the manifest; ids are compared
        self._verified: set[str] = set()

    def layer(self, index: int, device: str = "cpu") -> dict[str, Tensor]:
        """Unsharded parameters of one pipeline layer, by names without the layer's number; vocabulary without padding.

        Args:
            index: index of the layer in the pipeline.
            device: ``cpu``, or ``meta`` for types and shapes only, without verification.

        Raises:
            CheckpointError: the file is missing or changed.
        """
        name = weights_file(index)
        if name not in self.manifest.files:
            return {}
        if device != "meta":
            self.verify_file(name)
        with open_tensors(self.path / name) as file:
            if device == "meta":
                return {key: _meta(file, key) for key in file.keys()}  # noqa: SIM118 - not a dict
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def verify(self) -> None:
        """Compare every file with its record.

        Raises:
            CheckpointError: a file is missing or changed; names it.
        """
        for name in self.manifest.files:
            self.verify_file(name)

    def verify_file(self, name: str) -> None:
        """Compare one file with its record, once.

        Raises:
            CheckpointError: it is missing or changed.
        """
        if name in self._verified:
            return
        path, record = self.path / name, self.manifest.files[name]
        remedy = "import the model again, or copy the folder again"
        try:
            size = path.stat().st_size
            if size != record.size_bytes:
                raise CheckpointError(f"{path} has {size} bytes, written were {record.size_bytes}; {remedy}")
            found = hash_file(path)
        except OSError as error:
            state = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
            raise CheckpointError(f"{path} {state}; {remedy}") from error
        if found != record.xxh3_128:
            raise CheckpointError(f"{path} was changed: checksum {found}, written was {record.xxh3_128}; {remedy}")
        self._verified.add(name)


def _meta(file: Any, key: str) -> Tensor:
    return file.get_tensor(key).to("meta")


def check_vocabulary(weights: InitialWeights, data: DataManifest, where: str) -> None:
    """Compare the tokenizer of prepared data with that of the weights.

    Embedding rows beyond the tokenizer's vocabulary, which some models have, are allowed.

    Raises:
        ConfigError: the number of entries or the tokenizer differs.
    """
    rows, own, wanted = weights.vocab_size, weights.manifest.tokenizer_vocab_size, data.tokenizer.vocab_size
    remedy = (
        f'prepare the data with data.tokenizer {{"kind": "huggingface", "path": "{weights.path / TOKENIZER_FOLDER}"}}'
    )
    if wanted != rows and not (own == wanted < rows):
        of_own = "" if own is None else f", their tokenizer {own}"
        raise ConfigError(
            f"megasdc.model.initial_weights: the weights in {weights.path} have {rows} vocabulary entries{of_own}, the "
            f"tokenizer of {where} has {wanted}; {remedy}"
        )
    if not same_tokenizer(data.tokenizer.kind, weights.path / TOKENIZER_FOLDER, Path(where) / "tokenizer"):
        raise ConfigError(
            f"megasdc.model.initial_weights: the tokenizer of {where} has as many entries as that of {weights.path}, "
            f"but it is another; {remedy}"
        )


def same_tokenizer(kind: str, one: Path, other: Path) -> bool:
    """Whether two tokenizers are the same, as far as their files can be compared; true if they cannot."""
    if kind == "sentencepiece":
        if not (one / "tokenizer.model").is_file() or not (other / "tokenizer.model").is_file():
            return True
        return checksum_tokenizer(kind, one) == checksum_tokenizer(kind, other)
    try:
        contents = [parse_json((folder / "tokenizer.json").read_text(encoding="utf-8")) for folder in (one, other)]
    except (OSError, ValueError):
        return True
    models = [content.get("model") if isinstance(content, dict) else None for content in contents]
    vocabularies = [model.get("vocab") if isinstance(model, dict) else None for model in models]
    return bool(vocabularies[0] == vocabularies[1])


def pad_vocabulary(rows: Tensor, padded: int) -> Tensor:
    """Truncate or zero-pad a vocabulary's rows [v, h] to a padded size; no real token uses the added rows."""
    if rows.shape[0] >= padded:
        return rows[:padded]
    return torch.cat((rows, torch.zeros(padded - rows.shape[0], *rows.shape[1:], dtype=rows.dtype)))


logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Unsharded weights of a model: a checkpoint of any layout, or a folder of initial weights.

    Attributes:
        vocab_size: number of real rows of the vocabulary, without padding.
        tokenizer_checksum: checksum of the tokenizer that it was trained with; None: not known.
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
        progress: whether a bar is drawn on standard error where it is a terminal.
        accept: function called with the model before the files are read, to refuse it early.

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
        vocab_size: number of real entries of the vocabulary.
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
            value = shard_of(value, split, tensor, tp_rank)
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


FIELD = "megasdc.model.initial_weights"


def open_start(path: Path | str) -> InitialWeights | CheckpointWeights:
    """Open the weights that ``model.initial_weights`` names.

    Files of initial weights are verified as they are read; a checkpoint is verified as a whole before it is used.

    Raises:
        CheckpointError: the folder is of another kind or damaged, or no checkpoint in it is whole.
        StorageError: the folder cannot be read.
    """
    try:
        kind = kind_of(path)
    except OSError as error:
        raise StorageError(f"{FIELD}: {path} cannot be read ({error.strerror}); name another folder") from error
    if kind in (CHECKPOINT, CHECKPOINTS):
        weights: CheckpointWeights = open_weights(path)
        return weights
    return InitialWeights(path)


def check_fits(weights: InitialWeights | CheckpointWeights, model: ModelSection) -> None:
    """Compare a run's model with the model of the weights.

    Raises:
        ConfigError: fields differ; each is listed with both values.
    """
    have, want = _identity(weights.model), _identity(model)
    problems = [
        f"megasdc.model.{field}: got {want[field]!r}; the weights in {weights.path} need {have[field]!r}."
        for field in have
        if field in want and have[field] != want[field]
    ]
    if problems:
        raise ConfigError([*problems, f"The section to use is in {weights.model_file}."], FIELD)


def check_tokenizer(weights: InitialWeights | CheckpointWeights, data: DataManifest, where: str) -> None:
    """Compare the tokenizer of prepared data, in the folder ``where``, with that of the weights.

    Raises:
        ConfigError: the number of entries or the tokenizer differs.
    """
    if isinstance(weights, InitialWeights):
        check_vocabulary(weights, data, where)
        return
    own, found = (weights.vocab_size, weights.tokenizer_checksum), (data.tokenizer.vocab_size, data.tokenizer.checksum)
    if own[0] == found[0] and own[1] in (None, found[1]):
        return
    assert weights.config is not None, "a checkpoint holds its run's configuration"
    tokenizer = Path(weights.config["megasdc"]["data"]["path"]) / "tokenizer"
    raise ConfigError(
        f"{FIELD}: the weights in {weights.path} were trained with a tokenizer of {own[0]} entries and checksum "
        f"{own[1]}, that of {where} has {found[0]} and {found[1]}; prepare the data with data.tokenizer.path of its "
        f"tokenizer, which is in {tokenizer}"
    )


def _identity(model: ModelSection) -> dict[str, Any]:
    """The fields that define the meaning of the weights, with derived defaults filled in."""
    found: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": query_groups(model),
        "kv_channels": head_width(model),
        "ffn_hidden_size": ffn_width(model),
        "position_embedding": model.position_embedding,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "activation": model.activation,
        "gated_mlp": model.gated_mlp,
        "bias": model.bias,
        "qkv_bias": model.bias or model.qkv_bias,
        "tie_embeddings": model.tie_embeddings,
    }
    if model.position_embedding == "learned":
        found["max_positions"] = model.max_positions
    else:
        found["rotary_base"] = model.rotary_base
    ignored = {"deterministic_mode"}
    found["megatron"] = {key: value for key, value in model.megatron.items() if key not in ignored}
    return found
