"""One block of the archive: compressed bytes behind a header that says how to get the original back.

Layout, little endian: magic (8 bytes), codec, width, two bytes of zeros, size of the original (4 bytes), XXH3-128 of
the header so far and of all that follows (16 bytes); then one zstd frame. The name of a block is the XXH3-128 of its
original, so that the content is checked twice: as it is stored, and as it was.
"""

from __future__ import annotations

import struct
from typing import Literal

import xxhash
import zstandard

from megasdc.common.errors import CheckpointError
from megasdc.ops.archive.moments import Moment, dequantize, quantize, quantized_bytes
from megasdc.ops.archive.planes import from_planes, to_planes

BLOCK_BYTES = 4 << 20
"""Largest original of a block."""
LARGEST_STORED = BLOCK_BYTES + (64 << 10)
"""More than a block ever has as it is stored."""
_LEVELS = {0: 3, 1: 1, 2: 1, 3: 1}
"""Level of zstd for each codec: in planes and codes there is nothing to find but frequent bytes, which 1 does best."""
_MAGIC = b"MSDCBLK1"
_HEADER = struct.Struct("<8sBBHI")
_DIGEST_BYTES = 16
_START = _HEADER.size + _DIGEST_BYTES
_MOMENTS: dict[int, Moment] = {2: "exp_avg", 3: "exp_avg_sq"}
Codec = Literal[0, 1, 2, 3]
"""0: bytes as they are; 1: byte planes; 2, 3: quantized moments, first and second."""


def block_name(raw: bytes) -> str:
    """Name of the block with this original."""
    return xxhash.xxh3_128_hexdigest(raw)


def encode_block(raw: bytes, width: int = 1, moment: Moment | None = None) -> bytes:
    """A block as it is stored.

    Args:
        width: bytes of a floating-point number; 1: of something else.
        moment: the original may be one of ``dequantize``; None: it is not. Where quantizing would not give back each
            of its bits, it is stored as any other block.
    """
    codec, content = (1, to_planes(raw, width)) if width > 1 else (0, raw)
    for number, name in _MOMENTS.items():
        if name == moment and (codes := _quantized(raw, name)) is not None:
            codec, content = number, codes
    header = _HEADER.pack(_MAGIC, codec, width, 0, len(raw))
    payload = zstandard.ZstdCompressor(level=_LEVELS[codec]).compress(content)
    return header + xxhash.xxh3_128_digest(header + payload) + payload


def decode_block(stored: bytes, digest: str, size: int) -> bytes:
    """The original of a block.

    Nothing is decompressed whose digest is wrong, and no more than ``size`` bytes are ever made.

    Args:
        digest: its name.
        size: of the original, by whoever needs it.

    Raises:
        CheckpointError: it is damaged, or another block; without its name.
    """
    if len(stored) < _START or not stored.startswith(_MAGIC):
        raise CheckpointError(f"is no block of an archive ({len(stored)} bytes)")
    _, codec, width, zeros, raw_size = _HEADER.unpack_from(stored)
    found = xxhash.xxh3_128_digest(stored[: _HEADER.size] + stored[_START:])
    if found != stored[_HEADER.size : _START]:
        raise CheckpointError("was changed or cut off: the digest of what is stored is wrong")
    if raw_size != size or codec > 3 or zeros or width not in (1, 2, 4, 8):
        raise CheckpointError(f"is of {raw_size} bytes (codec {codec}, width {width}), needed are {size} bytes")
    count = size // 4
    content = _decompress(stored[_START:], quantized_bytes(count) if codec in _MOMENTS else size)
    raw = content if codec == 0 else from_planes(content, width)
    if codec in _MOMENTS:
        raw = dequantize(content, count, _MOMENTS[codec])
    if (real := block_name(raw)) != digest:
        raise CheckpointError(f"has the content of block {real}")
    return raw


def size_of(stored: bytes) -> int:
    """Size of a block's original by its header; 0 if it has none, so that ``decode`` refuses it."""
    return int(_HEADER.unpack_from(stored)[4]) if len(stored) >= _START else 0


def _decompress(payload: bytes, size: int) -> bytes:
    """Decompress a frame of this size; the frame's own size is compared first, since the library would reserve it."""
    try:
        if zstandard.frame_content_size(payload) != size:
            raise CheckpointError(f"unpacks to {zstandard.frame_content_size(payload)} bytes, needed are {size}")
        return zstandard.ZstdDecompressor(max_window_size=2 * BLOCK_BYTES).decompress(payload, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CheckpointError(f"cannot be decompressed: {error}") from error


def _quantized(raw: bytes, moment: Moment) -> bytes | None:
    """Scales and codes that give back every bit of a block; None: there are none."""
    if len(raw) % 4:
        return None
    try:
        codes = quantize(raw, moment)
    except ValueError:
        return None
    return codes if dequantize(codes, len(raw) // 4, moment) == raw else None
