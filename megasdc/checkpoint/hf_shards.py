"""A Hugging Face model's folder: its safetensors files and its configuration. No pickle is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megasdc.checkpoint.allowlist import check_regular
from megasdc.checkpoint.files import explain_folder
from megasdc.checkpoint.tensor_files import DTYPES, Extent, locate_tensors, open_tensors, read_whole
from megasdc.common.durable import parse_json
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.config.model import ModelSection

_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Tensors in older files that are not parameters."""

HEAD = "lm_head.weight"
_WORD_EMBEDDINGS = ("wte.weight", "embed_tokens.weight")
_ELEMENTS = 1 << 22
"""Maximum number of elements of a matrix that are compared at once."""
MAX_JSON_BYTES = 256 << 20
"""Largest size of a model's JSON file; the index of a trillion parameters has some 20 MB."""


class HfShards:
    """The safetensors files of a model, with an index by tensor name.

    Raises:
        CheckpointError: there are none, or one in the index is missing; a tensor is in two files and differs, or it
            is not known which files count.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            named = read_model_json(index).get("weight_map", {})
            if not named or not isinstance(named, dict) or not all(map(_is_text, named.values())):
                raise CheckpointError(f"{index} does not name the file of each tensor in weight_map")
            files = sorted(set(named.values()))
            if single.is_file() and single.name not in files:
                raise CheckpointError(
                    f"{folder} holds {single.name}, which transformers reads, and {index.name}, which names other "
                    "files: remove the one that is not of this model"
                )
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
            for twice in sorted(located.keys() & self.file_of.keys()):
                if not twice.endswith(_BUFFERS) and not _same_bytes(self.extents[twice], located[twice]):
                    raise CheckpointError(
                        f"{twice} is in {folder / self.file_of[twice]} and in {folder / name}, and they differ: "
                        "remove the one that is not of this model"
                    )
            self.extents |= located
            self.file_of |= dict.fromkeys(located, name)
            self.shape_of |= {key: list(extent.shape) for key, extent in located.items()}
        self.prefix = ""

    def check(self, model: ModelSection, wanted: dict[str, list[int]]) -> None:
        """Detect whether names lack their prefix, as in files of the bare model; compare all names and shapes.

        Args:
            wanted: shape of each tensor that such a model has.

        Raises:
            ConfigError: unknown tensors, such as norms of queries; missing tensors; other shapes; an output that is
                another matrix than the word embedding, though config.json ties both.
        """
        first = "transformer." if model.position_embedding == "learned" else "model."
        if not any(name.startswith(first) for name in self.file_of):
            self.prefix = first
        missing = sorted(name for name in wanted if self.name_in_file(name) not in self.file_of)
        tied = {HEAD} if model.tie_embeddings else set()
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
        if model.tie_embeddings and HEAD in self.file_of:
            self._check_tied(next(name for name in wanted if name.endswith(_WORD_EMBEDDINGS)))

    def _check_tied(self, embedding: str) -> None:
        """Compare the output with the word embedding, some elements at a time; both may have a gigabyte.

        Where one of the two is saved with less precision, the other is rounded to it.
        """
        ours, head = self.extents[self.name_in_file(embedding)], self.extents[HEAD]
        known = [dtype for dtype in (ours.dtype, head.dtype) if dtype in DTYPES]
        narrow = min(known, key=lambda dtype: dtype.itemsize) if len(known) == 2 else torch.float32

        def read(extent: Extent, start: int) -> Tensor:
            return _piece(extent, start).to(narrow).float()

        starts = range(0, head.numel(), _ELEMENTS)
        if head.shape == ours.shape and all(torch.equal(read(ours, start), read(head, start)) for start in starts):
            return
        raise ConfigError(
            f"tie_word_embeddings: is true in {self.folder / 'config.json'}, where {HEAD} is another matrix than "
            f"{embedding}. Set it to false if the output has weights of its own, or remove {HEAD}.",
            f"the tensors of {self.folder}",
        )

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


def section_of(fields: dict[str, Any]) -> ModelSection:
    """The model section for the fields of a ``config.json``.

    Raises:
        ConfigError: fields are invalid; each is listed.
    """
    try:
        return ModelSection.model_validate(fields)
    except ValidationError as error:
        problems = [f"{item['loc'][0]}: got {item['input']!r}; {item['msg']}." for item in error.errors()]
        raise ConfigError(problems, "config.json of the model") from error


def read_model_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of the model's folder.

    Raises:
        CheckpointError: it is missing, or is none.
    """
    check_regular(path)
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ValueError(f"it has {size:,} bytes, at most {MAX_JSON_BYTES:,} are read")
        content = parse_json(path.read_text(encoding="utf-8"))
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


def _piece(extent: Extent, start: int) -> Tensor:
    """Elements [n] of a tensor, at most ``_ELEMENTS``."""
    return read_whole(extent.run(start, min(_ELEMENTS, extent.numel() - start)))


def _same_bytes(one: Extent, other: Extent) -> bool:
    """Whether two tensors are equal, NaN and signs of zero included."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        torch.equal(_piece(one, start).view(torch.uint8), _piece(other, start).view(torch.uint8))
        for start in range(0, one.numel(), _ELEMENTS)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)
