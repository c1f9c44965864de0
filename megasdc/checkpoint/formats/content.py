"""Content of a file as digests: by tensor and by block of a tensor; small enough to copy where the file cannot be.

A block is ``block_bytes`` of a tensor, counted from the tensor's start, so that the same tensor has the same blocks
wherever it lies in a file. All other values but the configuration share one digest; a few counters are kept by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from megasdc.checkpoint.formats.deepspeed_names import layer_of, parameter_of
from megasdc.checkpoint.formats.records import Count, Record
from megasdc.tensors.bits import dtype_name

BLOCK_BYTES = 4 << 20
DIGEST_DIGITS = 32
"""Hexadecimal digits of one XXH3-128."""
_TYPE = re.compile(r"(\w+)( ?)\[((?:\d+(?:, \d+)*)?)\]( strided)?")
_MASTER = re.compile(r"optimizer_state_dict/single_partition_of_fp32_groups/(\d+)")
_MOMENT = re.compile(r"optimizer_state_dict/base_optimizer_state/state/(\d+)/(exp_avg|exp_avg_sq)")


class TensorContent(Record):
    """One tensor in a file.

    Attributes:
        name: its keys joined by slashes; empty: a whole file whose tensors are not known.
        type: data type and shape, such as ``float32[64, 64]``; followed by ``strided`` if not contiguous.
        offset: first byte in the file.
        size_bytes: from its first to its last element.
        blocks: XXH3-128 of each block (the last may be shorter), concatenated hexadecimal digits.
    """

    name: str
    type: str
    offset: Count
    size_bytes: Count
    blocks: Annotated[str, Field(pattern=r"^([0-9a-f]{32})*$")]

    @model_validator(mode="after")
    def _type_is_known(self) -> Self:
        parse_type(self.type)
        return self

    @property
    def dtype(self) -> torch.dtype | None:
        """Its data type; None if it is not contiguous, or of a type that training does not write."""
        return None if self.type.endswith(" strided") else parse_type(self.type)[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return parse_type(self.type)[1]

    def block(self, number: int) -> str:
        """Digest of one block, from 0."""
        return self.blocks[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS]


class Content(Record):
    """Content of one file.

    Attributes:
        tensors: in order of their offsets in the file.
        values: counters and rates by name, as text.
        rest: XXH3-128 of all other values but the configuration and the global random generators; None: the file's
            format is not known, and its bytes are compared.
        fragments: of an optimizer's shard, by group: offset and size of each parameter, such as ``128+64``.
    """

    block_bytes: int = Field(ge=1)
    tensors: list[TensorContent]
    values: dict[str, str]
    rest: str | None
    fragments: list[dict[str, Annotated[str, Field(pattern=r"^\d+\+\d+$")]]]

    @model_validator(mode="after")
    def _blocks_are_all_there(self) -> Self:
        for tensor in self.tensors:
            if len(tensor.blocks) != -(-tensor.size_bytes // self.block_bytes) * DIGEST_DIGITS:
                raise ValueError(f"{tensor.name} has {tensor.size_bytes} bytes and not the blocks of so many")
        return self


def parse_type(text: str) -> tuple[torch.dtype | None, tuple[int, ...]]:
    """Parse the text of ``type_text``, else ValueError; data type None for one that only the file's format names.

    For example ``I64 [2]``, with a space: a type of safetensors that training does not write.
    """
    match = _TYPE.fullmatch(text)
    dtype = getattr(torch, match[1], None) if match and not match[2] else None
    if match is None or not (match[2] or isinstance(dtype, torch.dtype)):
        raise ValueError(f"{text} is no type and shape of a tensor")
    return dtype, tuple(int(size) for size in match[3].split(",") if size)


def type_text(tensor: torch.Tensor) -> str:
    """Data type and shape, such as ``float32[64, 64]``."""
    order = "" if tensor.is_contiguous() else " strided"
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}{order}"


def type_of_bytes(count: int) -> str:
    """The type text for a file of which only bytes are known."""
    return f"uint8[{count}]"


def parts_of(file: str, tensor: TensorContent, content: Content) -> Iterator[tuple[str, str, int, int]]:
    """Yield the parameters in a tensor of a file: name, slot, first element in the tensor, number of elements.

    Where the parameter is not known, the name is that in the file, with slot ``weight``.
    """
    numel = prod(tensor.shape) if tensor.dtype is not None else 0
    if (layer := layer_of(file)) is not None:
        yield f"{layer}.{tensor.name}", "weight", 0, numel
    elif (named := parameter_of(file)) is not None:
        yield named[0], "master" if named[1] == "fp32" else named[1], 0, numel
    elif (match := _MASTER.fullmatch(tensor.name) or _MOMENT.fullmatch(tensor.name)) and int(match[1]) < len(
        content.fragments
    ):
        slot = "master" if match.re is _MASTER else match[2]
        for name, place in content.fragments[int(match[1])].items():
            first, count = map(int, place.split("+"))
            yield name, slot, first, count
    else:
        yield tensor.name, "weight", 0, numel
