"""Digests of a file, of its tensors and of their blocks; each byte is read once.

Structure of a file: offsets of its tensors and its other values, from headers and pickles; no tensor is read.

A pickle goes through the allow-list and the restricted unpickler, with storages on ``meta``: torch (2.13) records the
file offset of each, which ``torch.save`` stores uncompressed.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.checkpoint.formats.allowlist import load_checked
from megasdc.checkpoint.formats.content import BLOCK_BYTES, Content, TensorContent, type_of_bytes, type_text
from megasdc.checkpoint.formats.extents import place_in_file
from megasdc.checkpoint.formats.shared_state import SHARED_STATE_FILE, counters_of, read_shared_state
from megasdc.checkpoint.formats.tensor_files import DTYPES, read_header
from megasdc.common.errors import CheckpointError
from megasdc.tensors.bits import dtype_name

PICKLED = (".pt", ".pth", ".bin")
_NAMED = ("step", "lr", "global_steps", "global_samples", "skipped_steps", "last_batch_iteration", "tokens", "samples")
"""Values that are kept by name, because a comparison should show them."""
_OF_A_RUN = ("ds_config", "ds_version", "rng")
"""Keys that differ between runs of equal content: paths, a version, global generators that training does not use."""
_unpickling = threading.Lock()
"""torch's list of allowed classes is shared by all threads."""


@dataclass(frozen=True)
class TensorSpan:
    """Offset of a tensor in a file: see ``TensorContent``."""

    name: str
    type: str
    offset: int
    size_bytes: int


@dataclass
class Structure:
    """``Content`` without the blocks; ``problem``: why the file cannot be parsed though its bytes can be read."""

    spans: list[TensorSpan] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    rest: str | None = None
    fragments: list[dict[str, str]] = field(default_factory=list)
    problem: str | None = None


def read_structure(path: Path) -> Structure:
    """Find the tensors and values of a file of ``torch.save``, of safetensors, or ``megasdc.json``.

    Any other file is treated as bytes.
    """
    size = path.stat().st_size
    whole = [TensorSpan("", type_of_bytes(size), 0, size)] if size else []
    try:
        if path.suffix in PICKLED:
            return _read_pickled(path)
        if path.suffix == ".safetensors":
            return _read_safetensors(path, size)
        if path.name == SHARED_STATE_FILE:
            return _with_values(Structure(), counters_of(read_shared_state(path.parent)))
    except CheckpointError as error:
        return Structure(whole, problem=str(error))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Structure(whole, problem=f"{path} cannot be parsed: {error!r}")
    return Structure(whole)


def _read_pickled(path: Path) -> Structure:
    with _unpickling:
        state = load_checked(path, map_location="meta", members=True)
    found = Structure()
    if isinstance(state, dict):
        state = {key: value for key, value in state.items() if key not in _OF_A_RUN}
        optimizer = state.get("optimizer_state_dict")
        for mapping in optimizer.get("param_slice_mappings", []) if isinstance(optimizer, dict) else []:
            found.fragments.append({str(name): f"{place.start}+{place.numel}" for name, place in mapping.items()})
    return _with_values(found, state, path)


def _with_values(found: Structure, state: Any, path: Path | None = None) -> Structure:
    """Split the leaves of a state into tensors, named values, and the digest of the rest."""
    rest = xxhash.xxh3_128()
    for name, leaf in leaves("", state):
        value = leaf
        if isinstance(value, Tensor):
            span = _span(name, value)
            if value.dim() or path is None:
                found.spans.append(span)
                rest.update(f"{name}\0{span.type}\0".encode())
                continue
            value = _read_number(path, span, value.dtype)
        if name.rpartition("/")[2] in _NAMED and isinstance(value, int | float):
            found.values[name] = repr(value)
        else:
            rest.update(f"{name}\0{value!r}\0".encode())
    found.spans.sort(key=lambda span: (span.offset, span.name))
    found.rest = rest.hexdigest()
    return found


def _span(name: str, tensor: Tensor) -> TensorSpan:
    offset, reach = place_in_file(tensor)
    return TensorSpan(name, type_text(tensor), offset, reach * tensor.element_size())


def _read_number(path: Path, span: TensorSpan, dtype: torch.dtype) -> Any:
    """Read a zero-dimensional tensor, such as an optimizer's counter, as a number."""
    with open(path, "rb") as file:
        file.seek(span.offset)
        content = bytearray(file.read(span.size_bytes))
    if len(content) != span.size_bytes:
        raise ValueError(f"{span.name} ends after {len(content)} bytes of {span.size_bytes}")
    return torch.frombuffer(content, dtype=dtype)[0].item()


def _read_safetensors(path: Path, size: int) -> Structure:
    """Names and offsets from the header; a type that training does not write is kept as it is named there."""
    header, data = read_header(path)
    names = {short: dtype_name(dtype) for dtype, short in DTYPES.items()}
    found, rest = Structure(), xxhash.xxh3_128(json.dumps(header.pop("__metadata__", None), sort_keys=True).encode())
    for name, one in sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])):
        start, end = one["data_offsets"]
        if not 0 <= start <= end:
            raise ValueError(f"{name} lies from byte {start} to {end} of its data")
        if data + end > size:
            raise ValueError(f"{name} ends at byte {data + end}, the file has {size}")
        kind = f"{names[one['dtype']]}{one['shape']}" if one["dtype"] in names else f"{one['dtype']} {one['shape']}"
        found.spans.append(TensorSpan(name, kind, data + start, end - start))
    found.rest = rest.hexdigest()
    return found


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts, lists and objects of the allow-list, each with its path below ``name``.

    Their repr is equal in every process.
    """
    items: Any
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, io.BytesIO):
        yield name, value.getvalue()
        return
    elif isinstance(value, Tensor | str | bytes | int | float | None) or not hasattr(value, "__dict__"):
        yield name, value
        return
    else:
        items = vars(value).items()
    yield f"{name}/", type(value).__name__
    for key, item in items:
        yield from leaves(f"{name}/{key}" if name else str(key), item)


_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileDigest:
    """The digests of one file, its tensors and their blocks; ``problem``: why it cannot be parsed, None if it can."""

    size_bytes: int
    xxh3_128: str
    content: Content
    problem: str | None


def digest_file(
    path: Path, *, block_bytes: int = BLOCK_BYTES, progress: Callable[[int], None] | None = None
) -> FileDigest:
    """Read a file once, from its first byte to its last; CheckpointError if it became shorter meanwhile."""
    structure = read_structure(path)
    size = path.stat().st_size
    spans = sorted({(span.offset, span.offset + span.size_bytes) for span in structure.spans if span.size_bytes})
    blocks: dict[tuple[int, int], str] = dict.fromkeys(spans, "")
    states: dict[tuple[int, int], xxhash.xxh3_128] = {}
    whole = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        for place, end, inside in _segments(spans, size, block_bytes):
            wanting = [whole, *(states.setdefault(span, xxhash.xxh3_128()) for span in inside)]
            left = end - place
            while left:
                got = file.readinto(buffer[: min(left, _CHUNK_BYTES)])
                if not got:
                    raise CheckpointError(f"{path} got shorter while it was read, it had {size} bytes: read it again")
                for state in wanting:
                    state.update(buffer[:got])
                left -= got
                if progress is not None:
                    progress(got)
            for start, stop in inside:
                if (end - start) % block_bytes == 0 or end == stop:
                    blocks[start, stop] += states.pop((start, stop)).hexdigest()
    return FileDigest(size, whole.hexdigest(), _content(structure, blocks, block_bytes), structure.problem)


def _segments(
    spans: list[tuple[int, int]], size: int, block_bytes: int
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Cut a file where a tensor or block begins or ends; yields each segment's ends and the tensors that contain it."""
    cuts = {0, size}.union(*(range(start, stop, block_bytes) for start, stop in spans), (stop for _, stop in spans))
    waiting, inside = spans[::-1], list[tuple[int, int]]()
    for place, end in pairwise(sorted(cuts)):
        inside = [span for span in inside if span[1] > place]
        while waiting and waiting[-1][0] <= place:
            inside.append(waiting.pop())
        yield place, end, inside


def _content(structure: Structure, blocks: dict[tuple[int, int], str], block_bytes: int) -> Content:
    def tensor(span: TensorSpan) -> TensorContent:
        return TensorContent(**vars(span), blocks=blocks.get((span.offset, span.offset + span.size_bytes), ""))

    tensors = [tensor(span) for span in structure.spans]
    return Content(
        block_bytes=block_bytes,
        tensors=tensors,
        values=structure.values,
        rest=structure.rest,
        fragments=structure.fragments,
    )
