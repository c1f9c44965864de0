"""Tensors in files: located without reading them, and read range by range into buffers; nothing is memory-mapped.

Access to a mapped file that was truncated kills the process (SIGBUS). With reads it is an error that names the file; so
is a file that is replaced or written to during a comparison.

- ``StateFiles``: files of ``torch.save``, each checked against the allow-list.
- Safetensors files are written without holding all tensors in memory: the library's own writer needs all of a file; the
  header needs only names, types and shapes, and is written first. Source: the format,
  https://huggingface.co/docs/safetensors/index#format.
- ``OpenCopy``: a copy of a tensor, read from the pieces in which it is stored. Places are flat row-major indices of the
  whole tensor, so that copies of any layouts are compared range by range and no tensor has to be assembled.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from megasdc.checkpoint.allowlist import check_regular, load_checked
from megasdc.common.durable import parse_json, replacing
from megasdc.common.errors import CheckpointError

_OPEN_FILES = 8
"""Files that a reader keeps open; times the number of threads, it stays under the usual limit of 1024."""


@dataclass(frozen=True)
class Stamp:
    """Identity of one state of a file: device and inode, size, and the time of the last change."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, file: Path | int) -> Stamp:
        """The stamp of a file, by its path or descriptor."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class Extent:
    """A run of elements in a file, in row-major order.

    ``stamp``: stamp of the file when its offsets were determined; ``offset``: byte of the first element.
    """

    file: Path
    stamp: Stamp
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def run(self, start: int, numel: int) -> Extent:
        """The range of ``numel`` elements from ``start`` on, flat."""
        return replace(self, offset=self.offset + start * self.dtype.itemsize, shape=(numel,))


class ExtentReader:
    """Reads extents; for use by one thread. As a context manager it raises at the end if a file has changed."""

    def __init__(self) -> None:
        self._open: dict[Path, tuple[int, Stamp]] = {}
        self._changed: dict[Path, CheckpointError] = {}

    def __enter__(self) -> ExtentReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changed = self.close()
        if kind is None and changed:
            raise next(iter(changed.values()))

    def close(self) -> dict[Path, CheckpointError]:
        """Close all files; returns the error for each file that has changed."""
        for file in list(self._open):
            self._close(file)
        return self._changed

    def read(self, extent: Extent, start: int, out: Tensor) -> None:
        """Read elements into ``out``, [n], contiguous and of the extent's type; ``start`` is the first.

        CheckpointError if the file cannot be read, or has changed.
        """
        target = memoryview(out.view(torch.uint8).numpy().data)
        place, done = extent.offset + start * extent.dtype.itemsize, 0
        try:
            descriptor = self._descriptor(extent)
            while done < len(target):
                got = os.preadv(descriptor, [target[done:]], place + done)
                if not got:
                    self._check(extent.file)
                    raise CheckpointError(f"{extent.file} ends at byte {place + done}, before a tensor that it holds")
                done += got
        except OSError as error:
            raise CheckpointError(f"{extent.file} cannot be read at byte {place + done}: {error}") from error

    def _descriptor(self, extent: Extent) -> int:
        """The open file's descriptor; if too many are open, the oldest is closed."""
        if extent.file not in self._open:
            if len(self._open) == _OPEN_FILES:
                self._close(next(iter(self._open)))
            self._open[extent.file] = (os.open(extent.file, os.O_RDONLY), extent.stamp)
            self._check(extent.file)
        return self._open[extent.file][0]

    def _close(self, file: Path) -> None:
        try:
            self._check(file)
        except CheckpointError as error:
            self._changed[file] = error
        finally:
            os.close(self._open.pop(file)[0])

    def _check(self, file: Path) -> None:
        descriptor, stamp = self._open[file]
        if (now := Stamp.of(descriptor)) != stamp:
            raise changed_error(file, stamp, now)


def changed_error(file: Path, before: Stamp, now: Stamp) -> CheckpointError:
    """The error for a file that has changed."""
    sizes = f"{before.num_bytes} bytes before, {now.num_bytes} bytes now"
    what = "replaced by another" if now.inode != before.inode else "written to"
    return CheckpointError(
        f"{file} was {what} while it was being compared ({sizes}); compare again when nothing writes to it"
    )


def place_in_file(value: Tensor) -> tuple[int, int]:
    """Location in its file of a tensor that was loaded onto ``meta``.

    Returns the byte of its first element, and the number of stored elements from its first to its last, gaps included.
    """
    stored: Any = value.untyped_storage()  # torch.load notes the place in the file on it (2.13)
    offset = int(stored._checkpoint_offset) + int(value.storage_offset()) * value.element_size()
    reach = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return offset, reach if value.numel() else 0


def read_whole(extent: Extent) -> Tensor:
    """Read all elements, in the extent's shape; errors as in ``ExtentReader.read``."""
    flat = torch.empty(extent.numel(), dtype=extent.dtype)
    with ExtentReader() as reader:
        reader.read(extent, 0, flat)
    return flat.view(extent.shape)


_SMALL_BYTES = 1 << 12
"""Tensors up to this size, such as counters, are read when the file is loaded."""


class StateFiles:
    """Files of ``torch.save``, each checked against the allow-list and opened once; large tensors are not read."""

    def __init__(self) -> None:
        self._states: dict[Path, Any] = {}
        self._stamps: dict[Path, Stamp] = {}

    def load(self, path: Path) -> Any:
        """The content of a file, with tensors of more than 4 KiB on ``meta``.

        FileNotFoundError if it does not exist, CheckpointError if it is unsafe or damaged.
        """
        if path not in self._states:
            self._stamps[path] = Stamp.of(path)
            try:
                state = load_checked(path, map_location="meta", members=True)
                if (now := Stamp.of(path)) != self._stamps[path]:
                    raise changed_error(path, self._stamps[path], now)
                self._states[path] = self._with_small(path, state)
            except CheckpointError as error:
                self._states[path] = error
        state = self._states[path]
        if isinstance(state, CheckpointError):
            raise state
        return state

    def tensor(self, path: Path, *keys: Any) -> Extent | Tensor:
        """Extent of a tensor in a file; the tensor itself if it is small.

        KeyError if there is none under these keys; other errors as in ``load``.
        """
        value = self.load(path)
        for key in keys:
            if isinstance(value, list) and isinstance(key, int) and key >= len(value):
                raise KeyError(key)
            value = value[key]
        if not isinstance(value, Tensor):
            raise KeyError(keys[-1] if keys else path.name)
        return self.place(path, value)

    def place(self, path: Path, value: Tensor) -> Extent | Tensor:
        """Extent of a tensor of ``load`` in its file; the tensor itself if it is small or not contiguous."""
        if value.device.type != "meta":
            return value.detach()
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(f"{path} holds a tensor of layout {value.layout}, which cannot be compared")
        offset, reach = place_in_file(value)
        if value.is_contiguous():
            return Extent(path, self._stamps[path], offset, value.dtype, tuple(value.shape))
        run = read_whole(Extent(path, self._stamps[path], offset, value.dtype, (reach,)))
        return run.as_strided(value.shape, value.stride())

    def read(self, path: Path, value: Any) -> Any:
        """A value of ``load``, with its elements if it is a tensor; CheckpointError if they cannot be read."""
        if not isinstance(value, Tensor):
            return value
        found = self.place(path, value)
        return read_whole(found) if isinstance(found, Extent) else found

    def _with_small(self, path: Path, value: Any) -> Any:
        """The same value with its small tensors read."""
        if isinstance(value, Tensor) and value.layout is torch.strided and value.nbytes <= _SMALL_BYTES:
            return self.read(path, value)
        if isinstance(value, dict):
            value.update({key: self._with_small(path, item) for key, item in value.items()})
        elif isinstance(value, list):
            value[:] = [self._with_small(path, item) for item in value]
        elif type(value) is tuple:
            return tuple(self._with_small(path, item) for item in value)
        return value


DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_NAMED = {
    **{name: dtype for dtype, name in DTYPES.items()},
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip

MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file; source: ``MAX_HEADER_SIZE`` of the library."""


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


Part = tuple[int, int, Tensor]
"""Number of a piece, its first element, and the elements from there on as a view of a range of the whole tensor."""


class Places(Protocol):
    """Map of a tensor's elements to pieces; see ``Arrangement``."""

    def cut(self, start: int, flat: Tensor) -> Iterator[Part]:
        """Cut a range of the whole tensor at piece boundaries; parts of a piece come in order."""

    def place(self, piece: int, element: int) -> int:
        """Flat index in the whole tensor of an element of a piece; ascends with ``element``."""


@dataclass(frozen=True)
class Arrangement:
    """Map of a tensor's elements to pieces of interleaved shards.

    The whole tensor is [periods, shards, width], and shard s has [:, s] of it. This covers tensors split by columns,
    and gated ones whose halves are split. ``pieces``: number of elements of each piece, by shard.
    """

    numel: int
    width: int
    pieces: tuple[tuple[int, ...], ...]

    @property
    def period(self) -> int:
        """Number of elements of one period, over all shards."""
        return self.width * len(self.pieces)

    @cached_property
    def _starts(self) -> list[list[int]]:
        """Offset of each piece in its shard, and the end of the last."""
        return [[0, *accumulate(shard)] for shard in self.pieces]

    @cached_property
    def _numbers(self) -> list[int]:
        """Number of each shard's first piece."""
        return [0, *accumulate(map(len, self.pieces))]

    def cut(self, start: int, flat: Tensor) -> Iterator[Part]:
        """Cut a range of the whole tensor, [n] from place ``start`` on, at piece ends; parts of a piece in order."""
        place, end = start, start + flat.numel()
        while place < end:
            turn, rest = divmod(place, self.period)
            left = flat[place - start :]
            if not rest and left.numel() >= self.period:
                block = left[: left.numel() // self.period * self.period].view(-1, len(self.pieces), self.width)
                for shard in range(len(self.pieces)):
                    yield from self._of_shard(shard, turn * self.width, block[:, shard])
                place += block.numel()
            else:
                shard, inside = divmod(rest, self.width)
                run = left[: self.width - inside].view(1, -1)
                yield from self._of_shard(shard, turn * self.width + inside, run)
                place += run.numel()

    def _of_shard(self, shard: int, first: int, rows: Tensor) -> Iterator[Part]:
        """Cut consecutive elements of a shard, [rows, columns], at the ends of pieces."""
        starts, place, end = self._starts[shard], first, first + rows.numel()
        number = bisect_right(starts, first) - 1
        while place < end:
            stop = min(end, starts[number + 1])
            for part in _runs(rows, place - first, stop - first):
                yield self._numbers[shard] + number, place - starts[number], part
                place += part.numel()
            number += 1

    def place(self, piece: int, element: int) -> int:
        """Flat index in the whole tensor of an element of a piece; ascends with ``element``."""
        shard = bisect_right(self._numbers, piece) - 1
        turn, inside = divmod(self._starts[shard][piece - self._numbers[shard]] + element, self.width)
        return turn * self.period + shard * self.width + inside


def _runs(rows: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Yield elements ``start`` to ``stop`` of [rows, columns] in row-major order, as views."""
    columns = rows.shape[1]
    while start < stop:
        row, column = divmod(start, columns)
        if not column and stop - start >= columns:
            found = rows[row : row + (stop - start) // columns]
        else:
            found = rows[row, column : min(columns, column + stop - start)]
        yield found
        start += found.numel()


@dataclass(frozen=True)
class OpenCopy:
    """A copy whose pieces were located and have the expected shapes and types; ``sources`` are flat."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    arrangement: Places
    sources: Sequence[Extent | Tensor]

    def ranges(self, num_bytes: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Cut elements ``start`` up to ``stop`` into ranges of at most ``num_bytes``, at row ends if a row fits.

        ``num_bytes`` must be at least the size of an element; ``stop`` is one past the last.
        """
        row = max(1, prod(self.shape[1:]))
        size = num_bytes // self.dtype.itemsize
        size -= size % row if row <= size else 0
        for place in range(start, stop, size):
            yield place, min(place + size, stop)

    def fill(self, start: int, out: Tensor, reader: ExtentReader) -> None:
        """Read a range of the whole tensor, from place ``start`` on, into ``out``, [n] and contiguous.

        ``reader`` must be this thread's; errors as in ``ExtentReader.read``.
        """
        for number, first, part in self.arrangement.cut(start, out):
            source = self.sources[number]
            if isinstance(source, Tensor):
                part.copy_(source[first : first + part.numel()].view(part.shape))
            elif part.is_contiguous():
                reader.read(source, first, part.view(-1))
            else:
                run = part.new_empty(part.numel())
                reader.read(source, first, run)
                part.copy_(run.view(part.shape))


@dataclass(frozen=True)
class TensorBlock:
    """A rectangular block of a tensor; its elements are stored row-major within the block.

    ``offsets``: index of its first element, by dimension; ``sizes``: its shape; ``shape``: the whole tensor's.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @cached_property
    def run(self) -> int:
        """Length of a run: elements that are contiguous in the whole tensor too."""
        numel = 1
        for size, whole in zip(reversed(self.sizes), reversed(self.shape), strict=True):
            numel *= size
            if size != whole:
                break
        return numel

    @property
    def num_runs(self) -> int:
        """Number of such runs in the block."""
        return prod(self.sizes) // self.run if self.run else 0

    def run_place(self, run: int) -> int:
        """Flat index in the whole tensor of a run's first element."""
        return self.place(run * self.run)

    def place(self, element: int) -> int:
        """Flat index in the whole tensor of one of the block's elements; ascends with ``element``."""
        found, stride = 0, 1
        for offset, size, whole in zip(*(reversed(one) for one in (self.offsets, self.sizes, self.shape)), strict=True):
            element, rest = divmod(element, size)
            found += (offset + rest) * stride
            stride *= whole
        return found


@dataclass(frozen=True)
class BlockArrangement:
    """A tensor that is divided into blocks, one for each piece."""

    blocks: tuple[TensorBlock, ...]

    def cut(self, start: int, flat: Tensor) -> Iterator[Part]:
        """Cut a range of the whole tensor at the boundaries of pieces; see ``Arrangement.cut``."""
        end = start + flat.numel()
        for number, block in enumerate(self.blocks):
            runs = range(block.num_runs)
            first = bisect_right(runs, start, key=block.run_place) - 1
            for run in runs[max(0, first) :]:
                place = block.run_place(run)
                if place >= end:
                    break
                low, high = max(start, place), min(end, place + block.run)
                if low < high:
                    yield number, run * block.run + low - place, flat[low - start : high - start]

    def place(self, piece: int, element: int) -> int:
        """Flat index in the whole tensor of an element of a piece; ascends with ``element``."""
        return self.blocks[piece].place(element)
