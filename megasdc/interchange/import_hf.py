"""Import of a Hugging Face model as initial weights for training at any layout.

Only safetensors are read, so that no pickle is opened; one pipeline layer is in memory at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.files import WEIGHTS_FILE, hash_file
from megasdc.checkpoint.hf_shards import HfShards, read_model_json, section_of
from megasdc.checkpoint.tensor_files import write_tensors
from megasdc.checkpoint.weights import (
    FORMAT_VERSION,
    GENERATION_FILE,
    MODEL_FILE,
    TOKENIZER_FOLDER,
    InitialWeights,
    WeightsFileRecord,
    WeightsManifest,
    weights_file,
)
from megasdc.common.durable import write_durably
from megasdc.common.errors import CheckpointError, ConfigError, DataError
from megasdc.common.program import parts_bar, why_unreadable
from megasdc.data.tokenizer import (
    HuggingFaceTokenizer,
    complete_tokenizer,
    copy_tokenizer_files,
    kind_of_files,
    load_tokenizer,
)
from megasdc.interchange.compare_logits import LogitsComparison, compare_logits
from megasdc.interchange.export_hf import check_out, writing_folder
from megasdc.model.hf.fields import architecture, model_fields, special_token_ids, vocabulary
from megasdc.model.hf.tensors import from_hf, hf_shapes, num_pipeline_layers, rules
from megasdc.tensors.bits import are_finite

_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_NOT_OF_THE_WEIGHTS = {"backend", "megatron", "vocab_multiple"}


@dataclass(frozen=True)
class ImportResult:
    """Result of an import; ``num_parameters`` counts tied ones once, ``vocab_size`` the rows of the word embedding.

    ``tokenizer_vocab_size``: None: it has no usable tokenizer, about which ``note`` tells more, as of ids that its
    vocabulary has not; ``model``: the ``model`` section to put into a configuration; ``logits``: comparison with
    ``transformers``.
    """

    source: str
    path: str
    architecture: str
    num_parameters: int
    vocab_size: int
    tokenizer_vocab_size: int | None
    model: dict[str, Any]
    note: str | None
    logits: LogitsComparison


def import_hf(source: Path | str, out: Path | str, *, force: bool = False, progress: bool = False) -> ImportResult:
    """Import a Hugging Face model into a folder of initial weights.

    Args:
        source: a local folder, or a name on the hub.
        force: whether an earlier import is replaced.
        progress: whether a bar is drawn on standard error where it is a terminal.

    Raises:
        ConfigError: the architecture is not supported, ``out`` exists, or ``transformers`` computes other logits.
        CheckpointError: files are missing or damaged, or weights are not finite.
        StorageError: ``out`` cannot be written.
    """
    target = Path(out).absolute()
    check_out(target, force, WEIGHTS_FILE, "format_version", source)
    folder = _local(source)
    _refuse_links_out(folder)
    config = read_model_json(folder / "config.json")
    model = section_of({**model_fields(config), "initial_weights": str(out)})
    shards = HfShards(folder)
    count = num_pipeline_layers(model)
    todo = {index: found for index in range(count) if (found := rules(model, index))}
    shards.check(model, hf_shapes(model, vocabulary(config)))
    token_ids = special_token_ids(config)
    section = model.model_dump(mode="json", exclude_none=True, exclude=_NOT_OF_THE_WEIGHTS)
    files: dict[str, WeightsFileRecord] = {}
    parameters = 0
    with writing_folder(target) as work:
        with parts_bar("importing", len(todo), quiet=not progress) as advance:
            for index, found in todo.items():
                theirs = shards.read([name for rule in found for name in rule.theirs])
                _refuse_not_finite(folder, theirs)
                layer = from_hf(model, index, theirs)
                name = weights_file(index)
                write_tensors(work / name, layer, layer.items())
                if index == 0:
                    rows = layer["word_embeddings.weight"].shape[0]
                parameters += sum(tensor.numel() for tensor in layer.values())
                files[name] = _record(work / name)
                advance()
        tokens, end, note = _copy_tokenizer(folder, work / TOKENIZER_FOLDER)
        for path in sorted((work / TOKENIZER_FOLDER).glob("*")):
            files[f"{TOKENIZER_FOLDER}/{path.name}"] = _record(path)
        if (folder / GENERATION_FILE).exists():
            read_model_json(folder / GENERATION_FILE)
            shutil.copyfile(folder / GENERATION_FILE, work / GENERATION_FILE)
            files[GENERATION_FILE] = _record(work / GENERATION_FILE)
        notes = [*([note] if note is not None else []), *_unknown_ids(token_ids, rows)]
        manifest = WeightsManifest(
            format_version=FORMAT_VERSION,
            kind="initial weights",
            source=str(source),
            vocab_size=rows,
            tokenizer_vocab_size=tokens,
            end_of_document=end if end is not None else _single(token_ids.get("eos_token_id"), rows),
            token_ids=token_ids,
            files=files,
        )
        write_durably(work / MODEL_FILE, json.dumps(section, indent=2) + "\n")
        write_durably(work / WEIGHTS_FILE, manifest.model_dump_json(indent=1) + "\n")
        logits = compare_logits(InitialWeights(work), shards, progress=progress)
    return ImportResult(
        source=str(source),
        path=str(out),
        architecture=architecture(config),
        num_parameters=parameters,
        vocab_size=rows,
        tokenizer_vocab_size=tokens,
        model=section,
        note="; ".join(notes) or None,
        logits=logits,
    )


def _unknown_ids(token_ids: dict[str, int | list[int] | None], rows: int) -> list[str]:
    """Note on ids of special tokens that the vocabulary lacks, as the pad_token_id of many models."""
    return [
        f"{key} {value} in config.json is outside the vocabulary of {rows}: it is kept as it is, in exports too"
        for key, value in token_ids.items()
        if not all(0 <= one < rows for one in _ids(value))
    ]


def _refuse_not_finite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """CheckpointError for weights with NaN or Inf, or with numbers that are infinite in fp32: no run can train."""
    computed = {name: tensor.float() if tensor.dtype is torch.float64 else tensor for name, tensor in tensors.items()}
    if not are_finite(computed.values()):
        name = next(name for name, tensor in computed.items() if not are_finite([tensor]))
        count = int((~torch.isfinite(computed[name])).sum())
        raise CheckpointError(
            f"{name} of {folder} has {count} of {tensors[name].numel()} elements that are not finite"
            f"{' in fp32' if tensors[name].dtype is torch.float64 else ''}: the model is damaged, or diverged when it "
            "was trained; nothing was imported"
        )


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


def _refuse_links_out(folder: Path) -> None:
    """CheckpointError for a link that leads out of a model's folder: what it leads to would stand in the output.

    Whatever its name: an index may name any file, and a tokenizer's are known by how they begin. In the hub's cache
    links lead to the blobs beside, which belong to the model.
    """
    root = folder.resolve()
    own = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    for path in sorted(folder.iterdir()):
        target = Path(os.path.realpath(path))  # of a link to itself it is the link, where resolve raises
        if path.is_symlink() and not any(target.is_relative_to(one) for one in own):
            raise CheckpointError(
                f"{path} is a link that leads out of the model's folder, to {target}: put the file itself there, or "
                "remove the link"
            )


def _copy_tokenizer(folder: Path, target: Path) -> tuple[int | None, int | None, str | None]:
    """Copy the files of a tokenizer, if there are any; returns number of entries, end-of-document id, and what to know.

    The first two are None if unknown, the last if there is nothing.
    """
    remedy = "prepare the data with the tokenizer that the model was trained with; only its size can be compared"
    if not copy_tokenizer_files(folder, target):
        target.rmdir()
        return None, None, f"no tokenizer came with the model: {remedy}"
    try:
        if kind_of_files(target) == "huggingface":
            complete_tokenizer(folder, target)
        tokenizer = load_tokenizer(kind_of_files(target), target)
    except DataError as error:  # training needs the tokenizer of its data only
        return None, None, f"the tokenizer that came with the model cannot be used ({error}): {remedy}"
    note = None
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.begins_texts():
        note = (
            f"the model's tokenizer puts its beginning-of-sequence token, id {tokenizer.beginning_of_document}, before "
            "a text: prepare data and train with data.bos true to go on so; without it nothing stands before a document"
        )
    return tokenizer.vocab_size, tokenizer.end_of_document, note


def _record(path: Path) -> WeightsFileRecord:
    return WeightsFileRecord(size_bytes=path.stat().st_size, xxh3_128=hash_file(path))


def _ids(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _single(value: int | list[int] | None, rows: int) -> int | None:
    """The first id that the vocabulary has; None: there is none."""
    return next((one for one in _ids(value) if 0 <= one < rows), None)
