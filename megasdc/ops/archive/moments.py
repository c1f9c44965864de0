"""Adam's moments in 8 bits a number: one scale for each group of numbers, codes in the domain of a square root.

What Adam uses is m / sqrt(v), so v is quantized as s = sqrt(v), in the unit of m. A code c stands for
scale * (c / largest code)^2, which is finer the smaller a number is. m has codes -127 to 127. s has 0 to 255; no s
other than 0 becomes 0, which would make the step m / eps, but at least code 1, which makes the step shorter.

Source: blockwise quantization of Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021,
https://arxiv.org/abs/2110.02861. They quantize while training, in groups of 2048 and with a table of codes; here it is
done once, to a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Moment = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: dict[str, Moment] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""By the name of the tensor in an optimizer's state."""
GROUP = 256
"""Numbers that share a scale."""
_LARGEST = {"exp_avg": 127, "exp_avg_sq": 255}
_CODES = {"exp_avg": np.int8, "exp_avg_sq": np.uint8}


@dataclass
class MomentError:
    """The error of quantized moments so far.

    ``largest``: largest error of a number over the largest number of its group; ``absolute`` and ``magnitude``: sums of
    errors and of numbers, without signs.
    """

    largest: float = 0.0
    absolute: float = 0.0
    magnitude: float = 0.0

    @property
    def mean(self) -> float:
        """The mean error over the mean number."""
        return self.absolute / self.magnitude if self.magnitude else 0.0

    def add(self, exact: NDArray[np.float32], found: NDArray[np.float32]) -> None:
        """Count the errors of a block, [n] each."""
        error = np.abs(exact.astype(np.float64) - found)
        size = np.abs(exact.astype(np.float64))
        self.absolute += float(error.sum())
        self.magnitude += float(size.sum())
        tops = _in_groups(size).max(axis=1, keepdims=True)
        self.largest = max(self.largest, float((_in_groups(error) / np.where(tops == 0, 1, tops)).max(initial=0)))


def quantize(raw: bytes, moment: Moment) -> bytes:
    """Scales and codes of a block of finite float32 numbers, in that order; ValueError if one is not finite."""
    numbers = np.frombuffer(raw, dtype="<f4")
    if not np.isfinite(numbers).all() or (moment == "exp_avg_sq" and (numbers < 0).any()):
        raise ValueError(f"{moment} holds NaN, infinity or a negative square")
    values = _in_groups(numbers if moment == "exp_avg" else np.sqrt(numbers))
    scales = np.abs(values).max(axis=1, keepdims=True, initial=0).astype("<f4")
    shares = np.abs(values) / np.where(scales == 0, np.float32(1), scales)
    codes = np.rint(np.sqrt(shares) * _LARGEST[moment])
    if moment == "exp_avg_sq":
        codes = np.where((codes == 0) & (values != 0), 1, codes)
    signed = np.copysign(codes, values).astype(_CODES[moment])
    return scales.tobytes() + signed.reshape(-1)[: numbers.size].tobytes()


def dequantize(content: bytes, count: int, moment: Moment) -> bytes:
    """The block of ``count`` float32 numbers that the scales and codes of ``quantize`` stand for."""
    groups = -(-count // GROUP)
    scales = np.frombuffer(content, dtype="<f4", count=groups).reshape(-1, 1)
    codes = np.frombuffer(content, dtype=_CODES[moment], offset=4 * groups, count=count).astype("<f4")
    shares = codes / np.float32(_LARGEST[moment])
    values = _in_groups(shares * np.abs(shares)) * scales
    found = values if moment == "exp_avg" else values * values
    return found.reshape(-1)[:count].astype("<f4").tobytes()


def quantized_bytes(count: int) -> int:
    """Bytes of the scales and codes of so many numbers."""
    return 4 * -(-count // GROUP) + count


def _in_groups(numbers: NDArray[np.floating]) -> NDArray[np.floating]:
    """The numbers as [groups, GROUP], filled up with zeros."""
    return np.pad(numbers, (0, -numbers.size % GROUP)).reshape(-1, GROUP)
