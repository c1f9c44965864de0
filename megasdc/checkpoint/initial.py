"""Initial weights: a folder of unsharded tensors from which a run of any layout can start.

``megasdc import-hf`` writes it: one safetensors file per pipeline layer under megasdc's names, the vocabulary without
padding, ``model.json`` (the ``model`` section that describes the weights) and ``weights.json`` with size and checksum
of every file. A tokenizer that came with the weights is in ``tokenizer``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from megasdc.checkpoint.files import WEIGHTS_FILE, explain_folder, hash_file
from megasdc.checkpoint.records import Record
from megasdc.checkpoint.tensor_files import open_tensors
from megasdc.common.durable import parse_json
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.config.model import ModelSection
from megasdc.data.manifest import Manifest as DataManifest
from megasdc.data.tokenizer import checksum_tokenizer

MODEL_FILE = "model.json"
GENERATION_FILE = "generation_config.json"
"""Of ``transformers``, as it came with the weights; it is passed on and not read."""
TOKENIZER_FOLDER = "tokenizer"
FORMAT_VERSION = 1


class FileRecord(Record):
    """Size and XXH3-128 of one file."""

    size_bytes: int
    xxh3_128: str


class WeightsManifest(Record):
    """Manifest of a folder of initial weights.

    Attributes:
        kind: distinguishes it from a checkpoint's manifest.
        source: what it was imported from.
        vocab_size: rows of the word embedding.
        tokenizer_vocab_size: entries of its tokenizer; None: no usable one came with it.
        end_of_document: id from the tokenizer, or from the imported configuration; None: unknown.
        token_ids: ids of special tokens in the imported configuration, by its keys; None: an older import.
        files: by name, including the tokenizer's.
    """

    format_version: int
    kind: Literal["initial weights"]
    source: str
    vocab_size: int
    tokenizer_vocab_size: int | None
    end_of_document: int | None
    token_ids: dict[str, int | list[int] | None] | None = None
    files: dict[str, FileRecord]


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
