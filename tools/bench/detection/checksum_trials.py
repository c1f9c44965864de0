"""Random faults of the kinds that defective hardware makes, and how many a checksum misses.

Beside our algorithms the same trials run over two that are known to be blind to some kinds. Their misses show that the
trials can find a blind spot: without them, no misses would prove little.

Source of the kinds: gate-level fault simulation, https://arxiv.org/abs/2605.04213 (few faults are single flips, their
addresses are periodic); AEGIS, OSDI 2026 (adjacent elements wrong in tensor cores).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasdc.tensors.bits import as_bits
from megasdc.tensors.checksum import ALGORITHMS, checksum
from tools.bench.rank import Progress, ignore_progress

NUM_ELEMENTS = 1000
"""Elements of a tensor: whole 64-bit words in both types."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_UNSIGNED = {torch.float32: np.uint32, torch.bfloat16: np.uint16}

Words = np.ndarray[Any, Any]


def _flip(words: Words, places: Sequence[int], bit: int) -> None:
    words[list(places)] ^= words.dtype.type(1 << bit)


def _any_bit(words: Words, rng: random.Random) -> int:
    return rng.randrange(8 * words.itemsize)


def _single_flip(words: Words, rng: random.Random) -> None:
    _flip(words, [rng.randrange(len(words))], _any_bit(words, rng))


def _equal_flip_pair(words: Words, rng: random.Random) -> None:
    _flip(words, rng.sample(range(len(words)), 2), _any_bit(words, rng))


def _sign_flip_pair(words: Words, rng: random.Random) -> None:
    _flip(words, rng.sample(range(len(words)), 2), 8 * words.itemsize - 1)


def _adjacent_flips(words: Words, rng: random.Random) -> None:
    count = rng.randint(2, 4)
    begin = rng.randrange(len(words) - count + 1)
    _flip(words, range(begin, begin + count), _any_bit(words, rng))


def _periodic_flips(words: Words, rng: random.Random) -> None:
    period = rng.choice([2, 4, 8, 16, 32, 64])
    count = rng.randint(2, 8)
    begin = rng.randrange(len(words) - period * (count - 1))
    _flip(words, range(begin, begin + period * count, period), _any_bit(words, rng))


def _swap(words: Words, rng: random.Random) -> None:
    first = rng.randrange(len(words))
    second = rng.choice(np.flatnonzero(words != words[first]).tolist())
    words[[first, second]] = words[[second, first]]


FAULTS: dict[str, Callable[[Words, random.Random], None]] = {
    "single flip": _single_flip,
    "equal flips in 2 elements": _equal_flip_pair,
    "sign flips in 2 elements": _sign_flip_pair,
    "equal flips in 2 to 4 adjacent elements": _adjacent_flips,
    "equal flips at a period": _periodic_flips,
    "swap of 2 elements": _swap,
}
"""Effect of each kind of fault on the bit patterns of a tensor."""

XOR = "torch.hash_tensor"
PACKED = "weighted sum of packed words"
BLIND_TO = {
    XOR: tuple(fault for fault in FAULTS if fault != "single flip"),
    PACKED: ("sign flips in 2 elements",),
}
"""Kinds that the algorithms for comparison must miss at least once, or the trials are no good."""


def xor_checksum(tensor: Tensor) -> int:
    """XOR of all elements, as PyTorch offers it; does not know where an element is."""
    return int(torch.hash_tensor(tensor).item())  # int(tensor) refuses the upper half of uint64


_WEIGHTS = torch.randint(-(2**62), 2**62, (NUM_ELEMENTS,), generator=torch.Generator().manual_seed(1)) * 2 + 1


def packed_checksum(tensor: Tensor) -> int:
    """Sum modulo 2^64 of 64-bit words that hold several elements, each times an odd random weight.

    The highest bit of a word adds 2^63 whatever the weight, so two flips of it cancel.
    """
    words = tensor.view(torch.int64)
    return int((words * _WEIGHTS[: len(words)]).sum())


@dataclass(frozen=True)
class Trials:
    """Faults of one kind with one algorithm; a miss is a fault that left the checksum as it was."""

    also = ("passed",)

    algorithm: str
    dtype: str
    fault: str
    count: int
    misses: int

    @property
    def passed(self) -> bool:
        """Whether nothing was missed; of an algorithm known to be blind to this kind, whether something was."""
        if self.algorithm in BLIND_TO:
            return self.misses > 0 or self.fault not in BLIND_TO[self.algorithm]
        return self.misses == 0


def run_trials(count: int, seed: int = 0, on_progress: Progress = ignore_progress) -> list[Trials]:
    """Inject faults of every kind into tensors of every type, and compare every algorithm's value before and after.

    Each of the ``count`` faults is in a new tensor of normal numbers; one entry an algorithm, type and kind.
    """
    functions: dict[str, Callable[[Tensor], int]] = {
        **{name: partial(checksum, name=name) for name in sorted(ALGORITHMS)},
        XOR: xor_checksum,
        PACKED: packed_checksum,
    }
    found = []
    for dtype_name, dtype in DTYPES.items():
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        misses = {(algorithm, fault): 0 for algorithm in functions for fault in FAULTS}
        for trial in range(count):
            tensor = torch.randn(NUM_ELEMENTS, generator=generator).to(dtype)
            before = {algorithm: function(tensor) for algorithm, function in functions.items()}
            for fault, damage in FAULTS.items():
                damaged = tensor.clone()
                damage(as_bits(damaged).numpy().view(_UNSIGNED[dtype]), rng)
                for algorithm, function in functions.items():
                    misses[algorithm, fault] += function(damaged) == before[algorithm]
            if trial % 100 == 99 or trial + 1 == count:
                on_progress(f"blind spots, {dtype_name}", trial + 1, count)
        found += [Trials(algorithm, dtype_name, fault, count, n) for (algorithm, fault), n in misses.items()]
    return found
