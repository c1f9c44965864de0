"""A copy of a checkpoint with moments of 8 bits, for archives that need not give every bit back."""

from __future__ import annotations

import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from megasdc.checkpoint.files import MANIFEST_FILE
from megasdc.checkpoint.manifest import FileRecord, Manifest, describe_file, write_manifest
from megasdc.common.errors import CheckpointError
from megasdc.ops.archive.block import BLOCK_BYTES
from megasdc.ops.archive.cut import TypedRange, find_ranges
from megasdc.ops.archive.moments import MomentError, dequantize, quantize
from megasdc.ops.archive.record import Quantized

BITS: Literal[8] = 8
_CHUNK_BYTES = 1 << 22
_LOCAL, _CENTRAL = struct.Struct("<26x2H"), struct.Struct("<4s24x3H")
_LOCAL_BYTES, _CENTRAL_BYTES = 30, 46
_CRC_PLACE = 16


def quantize_checkpoint(folder: Path, manifest: Manifest, target: Path) -> tuple[Manifest, Quantized]:
    """Write a checkpoint's files with quantized moments into a new folder; its other files become links there.

    Returns:
        The manifest of the copy, which says so, and the error.

    Raises:
        CheckpointError: there are no moments of float32, or they are not finite, or a file is damaged.
    """
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file() and path.name != MANIFEST_FILE:
            (target / path.name).symlink_to(path.resolve())
    error = MomentError()
    records = [_quantize_file(folder, record, target, error) for record in manifest.files]
    if records == manifest.files:
        raise CheckpointError(f"{folder} has no moments of float32 that could be quantized: push it without")
    made = manifest.model_copy(update={"files": records, "quantized_moments_bits": BITS})
    write_manifest(target, made)
    return made, Quantized(bits=BITS, largest_error=error.largest, mean_error=error.mean)


def _quantize_file(folder: Path, record: FileRecord, target: Path, error: MomentError) -> FileRecord:
    """Write one file with quantized moments, if it has any; returns the record of what lies in ``target``."""
    ranges = [one for one in find_ranges(record.name, record.content) if one.moment is not None]
    if not ranges:
        return record
    copy = target / record.name
    copy.unlink()
    shutil.copyfile(folder / record.name, copy)
    with open(copy, "r+b", buffering=0) as file:
        for one in ranges:
            _quantize_range(file, one, copy.name, error)
        _renew_checksums(file, ranges)
    return describe_file(target, record.name, rank=record.rank, node=record.node, tensors=record.tensors)


def _quantize_range(file: BinaryIO, one: TypedRange, name: str, error: MomentError) -> None:
    """Replace the numbers of one range by what their codes stand for, block by block as they are archived."""
    import numpy as np

    assert one.moment is not None, "only ranges of moments come here"
    for place in range(one.offset, one.offset + one.size_bytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, one.offset + one.size_bytes - place)
        file.seek(place)
        raw = file.read(size)
        try:
            found = dequantize(quantize(raw, one.moment), size // 4, one.moment)
        except ValueError as problem:
            raise CheckpointError(f"{name}: {problem}: its moments cannot be quantized, push it without") from problem
        error.add(np.frombuffer(raw, "<f4"), np.frombuffer(found, "<f4"))
        file.seek(place)
        file.write(found)


def _renew_checksums(file: BinaryIO, ranges: Sequence[TypedRange]) -> None:
    """Write the CRC-32 of changed members of a zip file anew: behind their data, and in the central directory."""
    with zipfile.ZipFile(file) as members:
        infos, central = members.infolist(), members.start_dir
    for info in infos:
        file.seek(central)
        _, name, extra, comment = _CENTRAL.unpack(file.read(_CENTRAL.size))
        file.seek(info.header_offset)
        start = info.header_offset + _LOCAL_BYTES + sum(_LOCAL.unpack(file.read(_LOCAL.size)))
        end = start + info.file_size
        if any(start <= one.offset < end for one in ranges):
            crc = 0
            for data in _read(file, start, end):
                crc = zlib.crc32(data, crc)
            file.seek(end)
            if file.read(4) == b"PK\x07\x08":
                file.write(struct.pack("<I", crc))
            file.seek(central + _CRC_PLACE)
            file.write(struct.pack("<I", crc))
        central += _CENTRAL_BYTES + name + extra + comment


def _read(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    while start < end:
        data = file.read(min(_CHUNK_BYTES, end - start))
        start += len(data)
        yield data
