"""Import of a Hugging Face model as initial weights for training at any layout.

Only safetensors are read, so that no pickle is opened; one pipeline layer is in memory at a time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from megasdc.checkpoint.export_hf import check_out, writing_folder
from megasdc.checkpoint.extents import Extent
from megasdc.checkpoint.files import WEIGHTS_FILE, hash_file
from megasdc.checkpoint.initial import (
    FORMAT_VERSION,
    MODEL_FILE,
    TOKENIZER_FOLDER,
    FileRecord,
    WeightsManifest,
    layer_file,
)
from megasdc.checkpoint.kinds import explain_folder
from megasdc.checkpoint.tensor_files import DTYPES, locate_tensors, open_tensors, write_tensors
from megasdc.config import ModelSection
from megasdc.data.tokenizer import kind_of_files, load_tokenizer
from megasdc.durable import write_durably
from megasdc.errors import CheckpointError, ConfigError, DataError
from megasdc.model.hf import architecture, from_hf, hf_shapes, model_fields, num_pipeline_layers, rules, vocabulary
from megasdc.program import why_unreadable
from megasdc.progress import parts_bar

_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_NOT_OF_THE_WEIGHTS = {"backend", "megatron", "vocab_multiple"}
_TOKENIZER_FILES = ("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""Besides files whose name begins with ``tokenizer``."""
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Tensors in older files that are not parameters."""


@dataclass(frozen=True)
class ImportResult:
    """Result of an import.

    Attributes:
        source: folder or name that was read.
        path: the folder that was written.
        architecture: its class in ``transformers``.
        num_parameters: tied ones counted once.
        vocab_size: rows of the word embedding.
        tokenizer_vocab_size: entries of its tokenizer; None: it has none that can be used.
        model: the ``model`` section to put into a configuration.
        note: what to know about the tokenizer; None: nothing.
    """

    source: str
    path: str
    architecture: str
    num_parameters: int
    vocab_size: int
    tokenizer_vocab_size: int | None
    model: dict[str, Any]
    note: str | None


def import_hf(source: Path | str, out: Path | str, *, force: bool = False, progress: bool = False) -> ImportResult:
    """Import a Hugging Face model into a folder of initial weights.

    Args:
        source: a local folder, or a name on the hub.
        out: the folder to write.
        force: replace an earlier import.
        progress: draw a bar on standard error where it is a terminal.

    Raises:
        ConfigError: the architecture is not supported, or ``out`` exists.
        CheckpointError: files are missing or damaged.
        StorageError: ``out`` cannot be written.
    """
    target = Path(out).absolute()
    check_out(target, force, WEIGHTS_FILE, "format_version", source)
    folder = _local(source)
    config = _read_json(folder / "config.json")
    model = section_of({**model_fields(config), "initial_weights": str(out)})
    shards = HfShards(folder)
    todo = {index: found for index in range(num_pipeline_layers(model)) if (found := rules(model, index))}
    shards.check(model, hf_shapes(model, vocabulary(config)))
    section = model.model_dump(mode="json", exclude_none=True, exclude=_NOT_OF_THE_WEIGHTS)
    files: dict[str, FileRecord] = {}
    parameters = 0
    with writing_folder(target) as work:
        with parts_bar("importing", len(todo), quiet=not progress) as advance:
            for index, found in todo.items():
                layer = from_hf(model, index, shards.read([name for rule in found for name in rule.theirs]))
                name = layer_file(index)
                write_tensors(work / name, layer, layer.items())
                if index == 0:
                    rows = layer["word_embeddings.weight"].shape[0]
                parameters += sum(tensor.numel() for tensor in layer.values())
                files[name] = _record(work / name)
                advance()
        tokens, end, note = _copy_tokenizer(folder, work / TOKENIZER_FOLDER)
        for path in sorted((work / TOKENIZER_FOLDER).glob("*")):
            files[f"{TOKENIZER_FOLDER}/{path.name}"] = _record(path)
        manifest = WeightsManifest(
            format_version=FORMAT_VERSION,
            kind="initial weights",
            source=str(source),
            vocab_size=rows,
            tokenizer_vocab_size=tokens,
            end_of_document=end if end is not None else _single(config.get("eos_token_id")),
            files=files,
        )
        write_durably(work / MODEL_FILE, json.dumps(section, indent=2) + "\n")
        write_durably(work / WEIGHTS_FILE, manifest.model_dump_json(indent=1) + "\n")
    return ImportResult(str(source), str(out), architecture(config), parameters, rows, tokens, section, note)


class HfShards:
    """The safetensors files of a model, with an index by tensor name.

    Args:
        folder: of the model.

    Raises:
        CheckpointError: there are none, or one in the index is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            files = sorted(set(_read_json(index).get("weight_map", {}).values()))
        elif single.is_file():
            files = [single.name]
        else:
            others = sorted(path.name for path in folder.glob("*.bin"))
            hint = f" ({', '.join(others[:3])} are pickles, which are not opened)" if others else ""
            raise CheckpointError(
                f"{folder} holds no model.safetensors and no index of several{hint}; save the model with "
                "save_pretrained(..., safe_serialization=True)"
            )
        self.extents: dict[str, Extent] = {}
        self.file_of: dict[str, str] = {}
        self.shape_of: dict[str, list[int]] = {}
        for name in files:
            if Path(name).name != name:
                raise CheckpointError(f"{index} names {name!r}, which is not a file in its folder")
            located = locate_tensors(folder / name)
            self.extents |= located
            self.file_of |= dict.fromkeys(located, name)
            self.shape_of |= {key: list(extent.shape) for key, extent in located.items()}
        self.prefix = ""

    def check(self, model: ModelSection, wanted: dict[str, list[int]]) -> None:
        """Detect whether names lack their prefix, as in files of the bare model; compare all names and shapes.

        Args:
            model: the section made from ``config.json``.
            wanted: shape of each tensor that such a model has.

        Raises:
            ConfigError: unknown tensors, such as norms of queries; missing tensors; other shapes.
        """
        first = "transformer." if model.position_embedding == "learned" else "model."
        if not any(name.startswith(first) for name in self.file_of):
            self.prefix = first
        missing = sorted(name for name in wanted if self.name_in_file(name) not in self.file_of)
        tied = {"lm_head.weight"} if model.tie_embeddings else set()
        known = {self.name_in_file(name) for name in wanted} | tied
        extra = sorted(name for name in self.file_of if name not in known and not name.endswith(_BUFFERS))
        problems = [f"{name}: is missing in {self.folder}" for name in missing[:5]]
        problems += [f"{name}: is not a tensor of a supported architecture" for name in extra[:5]]
        shapes = {name: self.shape_of[self.name_in_file(name)] for name in wanted if name not in missing}
        problems += [
            f"{name}: has shape {shapes[name]}; config.json needs {wanted[name]}"
            for name in sorted(name for name in shapes if shapes[name] != wanted[name])[:5]
        ]
        if problems:
            raise ConfigError([f"{problem}." for problem in problems], f"the tensors of {self.folder}")

    def name_in_file(self, name: str) -> str:
        """The name of a tensor in the files, from its full name."""
        return name.removeprefix(self.prefix)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read tensors by their full names.

        Raises:
            ConfigError: a tensor's type is not supported.
        """
        found: dict[str, Tensor] = {}
        for file in sorted({self.file_of[self.name_in_file(name)] for name in names}):
            with open_tensors(self.folder / file) as opened:
                for name in names:
                    if self.file_of[self.name_in_file(name)] == file:
                        found[name] = opened.get_tensor(self.name_in_file(name))
        for name, tensor in found.items():
            if tensor.dtype not in DTYPES:
                raise ConfigError(f"{name}: has type {tensor.dtype}; supported are {', '.join(map(str, DTYPES))}")
        return found


def _local(source: Path | str) -> Path:
    """The local folder of a model; one on the hub is downloaded, without pickles."""
    folder = Path(source)
    if problem := why_unreadable(folder):
        raise CheckpointError(f"MODEL: {source} {problem}")
    if folder.is_dir():
        return folder
    if folder.exists() or folder.is_absolute() or len(folder.parts) > 2 or folder.parts[0] in (".", "..", "~"):
        what = "is a file" if folder.exists() else "is not there"
        raise CheckpointError(
            f"MODEL: {source} {what}; needed is the folder of a model, or a name of the hub: OWNER/NAME"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(source), allow_patterns=_WANTED))
    except Exception as error:  # the hub's client raises many kinds
        lines = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"MODEL: {source} is not a folder here, and cannot be had from the hub: {type(error).__name__}: {lines[0]}"
        ) from error


def section_of(fields: dict[str, Any]) -> ModelSection:
    """The model section for the fields of a ``config.json``.

    Args:
        fields: as ``megasdc.model.hf.model_fields`` returns them.

    Raises:
        ConfigError: fields are invalid; each is listed.
    """
    try:
        return ModelSection.model_validate(fields)
    except ValidationError as error:
        problems = [f"{item['loc'][0]}: got {item['input']!r}; {item['msg']}." for item in error.errors()]
        raise ConfigError(problems, "config.json of the model") from error


def _copy_tokenizer(folder: Path, target: Path) -> tuple[int | None, int | None, str | None]:
    """Copy the files of a tokenizer, if there are any.

    Returns:
        Number of entries, end-of-document id (both None if unknown), and the problem (None if there is none).
    """
    names = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and (path.name.startswith("tokenizer") or path.name in _TOKENIZER_FILES)
    ]
    remedy = "prepare the data with the tokenizer that the model was trained with; only its size can be compared"
    if not names:
        return None, None, f"no tokenizer came with the model: {remedy}"
    target.mkdir()
    for path in names:
        (target / path.name).write_bytes(path.read_bytes())
    try:
        tokenizer = load_tokenizer(kind_of_files(target), target)
    except DataError as error:  # training needs the tokenizer of its data only
        return None, None, f"the tokenizer that came with the model cannot be used ({error}): {remedy}"
    return tokenizer.vocab_size, tokenizer.end_of_document, None


def _record(path: Path) -> FileRecord:
    return FileRecord(size_bytes=path.stat().st_size, xxh3_128=hash_file(path))


def _single(value: Any) -> int | None:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            explain_folder(path.parent, "a Hugging Face model with safetensors")
            or f"{path} is missing: {path.parent} is not a Hugging Face model"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content
