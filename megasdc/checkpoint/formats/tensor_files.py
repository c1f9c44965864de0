"""Safetensors files: written without holding all tensors in memory, located without reading them.

The library's own writer needs all tensors of a file in memory; the header needs only names, types and shapes, and is
written first.

Source: the format, https://huggingface.co/docs/safetensors/index#format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasdc.checkpoint.formats.allowlist import check_regular
from megasdc.checkpoint.formats.extents import Extent, Stamp, changed_error
from megasdc.common.durable import parse_json, replacing
from megasdc.common.errors import CheckpointError

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_NAMED = {
    **{name: dtype for dtype, name in DTYPES.items()},
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip

MAX_HEADER_BYTES = 100_000_000
"""Source: ``MAX_HEADER_SIZE`` of the library."""


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's values; it may be on the meta device."""
    return tensor.numel() * tensor.element_size()


def write_tensors(path: Path, plan: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write one safetensors file.

    Args:
        path: the file to make; it appears whole.
        plan: its tensors, in order; only type and shape are used, so meta tensors suffice.
        tensors: the values, in the same order; each may be freed when the next is requested.

    Raises:
        ValueError: a tensor differs from the plan, or is missing.
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in plan.items():
        end = offset + num_bytes(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    expected = iter(plan.items())
    with replacing(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name, tensor in tensors:
            wanted, like = next(expected, ("nothing", tensor))
            if (name, tensor.dtype, tensor.shape) != (wanted, like.dtype, like.shape):
                raise ValueError(
                    f"{path}: {name} {tensor.dtype}{list(tensor.shape)} comes where {wanted} "
                    f"{like.dtype}{list(like.shape)} was planned"
                )
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"{path}: {missing[0]} was not written")


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Names, types and offsets of a file's tensors, and the byte at which its data begin.

    ValueError if the file ends before its header does, or the header is no JSON object or larger than allowed.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,} are read")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"its header is a {type(header).__name__}, needed is an object")
    return header, 8 + length


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file, read by ``keys()`` and ``get_tensor(name)``; CheckpointError if missing or damaged."""
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except FileNotFoundError as error:  # safetensors also raises it without read permission
        if path.exists():
            raise CheckpointError(f"{path} cannot be read: Permission denied; ask its owner") from error
        raise CheckpointError(f"{path} is missing; copy the folder again") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def locate_tensors(path: Path) -> dict[str, Extent]:
    """Extents of the tensors of a safetensors file, by name; parsed here because the library memory-maps the file.

    CheckpointError if it is missing or damaged, or has an unknown data type.
    """
    check_regular(path)
    try:
        stamp = Stamp.of(path)
        header, start = read_header(path)
        if (now := Stamp.of(path)) != stamp:
            raise changed_error(path, stamp, now)
        header.pop("__metadata__", None)
        found, end = {}, 0
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if not all(isinstance(one, int) and one >= 0 for one in (first, last, *entry["shape"])):
                raise ValueError(f"{name} has shape {entry['shape']} and lies at bytes {first} to {last} of its data")
            extent = Extent(path, stamp, start + first, _NAMED[entry["dtype"]], tuple(entry["shape"]))
            if extent.numel() * extent.dtype.itemsize != last - first:
                raise ValueError(f"{name} {entry['dtype']}{entry['shape']} has {last - first} bytes")
            found[name], end = extent, max(end, last)
        if start + end != stamp.num_bytes:
            raise ValueError(f"tensors up to byte {start + end} in a file of {stamp.num_bytes}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; copy the folder again") from error
    except KeyError as error:
        raise CheckpointError(f"{path} cannot be read: its header has no {error}, or it is not a known type") from error
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    return found
