"""Byte planes: the bytes of a block of floating-point numbers, ordered by their place in the number.

The bits of each number are first rotated left by one, so that its whole exponent lies in one byte, or as much of it as
fits, and its sign among the bits of the mantissa. Exponents of neighbouring numbers are alike, and a general compressor
finds that only where they stand side by side.

Source: Hershcovitch et al., "ZipNN: Lossless Compression for AI Models", 2024, https://arxiv.org/abs/2411.05239. Here
all planes of a block go into one zstd frame, and fp32 is treated as they treat bf16.
"""

from __future__ import annotations

import numpy as np

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number, by the data types that have planes."""


def to_planes(raw: bytes, width: int) -> bytes:
    """The planes of a block, the most significant byte first, and then what is left of an incomplete number."""
    whole = len(raw) // width * width
    numbers = np.frombuffer(raw, dtype=f"<u{width}", count=whole // width)
    turned = (numbers << np.array(1, numbers.dtype)) | (numbers >> np.array(8 * width - 1, numbers.dtype))
    planes = turned.view(np.uint8).reshape(-1, width).T[::-1]
    return np.ascontiguousarray(planes).tobytes() + raw[whole:]


def from_planes(planes: bytes, width: int) -> bytes:
    """The block of ``to_planes``."""
    whole = len(planes) // width * width
    ordered = np.frombuffer(planes, dtype=np.uint8, count=whole).reshape(width, -1)[::-1]
    turned = np.ascontiguousarray(ordered.T).view(f"<u{width}").reshape(-1)
    numbers = (turned >> np.array(1, turned.dtype)) | (turned << np.array(8 * width - 1, turned.dtype))
    return numbers.tobytes() + planes[whole:]
