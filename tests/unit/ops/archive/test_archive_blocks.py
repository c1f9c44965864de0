"""Is a block only ever given back as it was, and a file cut so that each byte is in one block?"""

from __future__ import annotations

import io

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megasdc.common.errors import CheckpointError
from megasdc.ops.archive import block, cut
from megasdc.ops.archive.block import BLOCK_BYTES, block_name, decode_block, encode_block
from megasdc.ops.archive.cut import Cutter, TypedRange, count_blocks
from megasdc.ops.archive.moments import dequantize, quantize

NORMAL = np.random.default_rng(1).standard_normal(1 << 18).astype("<f4")


def test_blocks_come_back_and_floats_become_small() -> None:
    """Bytes, planes, quantized moments; planes beat zstd alone, 8 bits beat planes."""
    raw = NORMAL.tobytes()
    sizes = {}
    for width in (1, 2, 4, 8):
        stored = encode_block(raw, width)
        assert decode_block(stored, block_name(raw), len(raw)) == raw
        sizes[width] = len(stored)
    assert sizes[4] < 0.92 * sizes[1]
    quantized = dequantize(quantize(raw, "exp_avg"), NORMAL.size, "exp_avg")
    stored = encode_block(quantized, 4, "exp_avg")
    assert decode_block(stored, block_name(quantized), len(quantized)) == quantized
    assert len(stored) < 0.26 * len(raw)


def test_what_quantizing_would_change_is_stored_as_it_is() -> None:
    """A block that is not made of codes keeps every bit, though it is said to be a moment."""
    raw = NORMAL.tobytes()
    assert decode_block(encode_block(raw, 4, "exp_avg"), block_name(raw), len(raw)) == raw


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    """Of a small block: each bit, each length."""
    raw = NORMAL[:40].tobytes()
    stored, digest = encode_block(raw, 4), block_name(raw)
    for place in range(len(stored) * 8):
        changed = bytearray(stored)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(CheckpointError):
            decode_block(bytes(changed), digest, len(raw))
    for length in range(len(stored)):
        with pytest.raises(CheckpointError):
            decode_block(stored[:length], digest, len(raw))
    with pytest.raises(CheckpointError, match="has the content of block"):
        decode_block(stored, "0" * 32, len(raw))
    with pytest.raises(CheckpointError, match="needed are 1 bytes"):
        decode_block(stored, digest, 1)


@pytest.mark.parametrize("declared", [True, False])
def test_a_bomb_is_refused_before_it_is_unpacked(declared: bool) -> None:
    """A gigabyte of zeros in a block whose digests are right, with and without its size in the frame."""
    compressor = zstandard.ZstdCompressor(write_content_size=declared).compressobj(size=1 << 30 if declared else -1)
    zeros = bytes(1 << 24)
    payload = b"".join(compressor.compress(zeros) for _ in range(64)) + compressor.flush()
    header = block._HEADER.pack(block._MAGIC, 0, 1, 0, BLOCK_BYTES)
    stored = header + xxhash.xxh3_128_digest(header + payload) + payload
    with pytest.raises(CheckpointError, match=r"unpacks to|cannot be decompressed"):
        decode_block(stored, block_name(bytes(BLOCK_BYTES)), BLOCK_BYTES)


@given(data=st.data(), size=st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_each_byte_is_in_one_block(data: st.DataObject, size: int) -> None:
    """Both ways to cut give the same blocks, they cover the file once, and its digest is that of xxhash."""
    places = sorted(data.draw(st.sets(st.integers(0, size), max_size=8)))
    ranges = [TypedRange(a, b - a, 4, None) for a, b in zip(places[::2], places[1::2], strict=False)]
    content = np.random.default_rng(size).bytes(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "BLOCK_BYTES", 32)
        pieces = list(cut.cut(size, ranges))
        cutter = Cutter(io.BytesIO(content), size, ranges)
        blocks = {number: raw for number, raw, _ in cutter.blocks()}
        assert len(pieces) == len(blocks) == count_blocks(size, ranges)
    assert cutter.digest == xxhash.xxh3_128_hexdigest(content)
    covered = sorted(byte for piece in pieces for start, length in piece.parts for byte in range(start, start + length))
    assert covered == list(range(size))
    for number, piece in enumerate(pieces):
        assert blocks[number] == b"".join(content[start : start + length] for start, length in piece.parts)
