"""Order of samples in a blend of several datasets by weight, as in Megatron-core.

The order is that of Megatron-core's `build_blending_indices`: the next sample comes from the dataset that is furthest
behind its share. Deliberate differences from Megatron's `BlendedDataset`:

* Each part is an endless stream: when all its samples were used it begins its next epoch, in another order. Megatron's
  parts hold a fixed number of samples, drawn with a surplus that a user must guess.
* The order does not depend on the length of the run. Megatron's function chooses each sample from the preceding ones
  only, so that a shorter index is a prefix of a longer one. The index is built for the next multiple of
  `WINDOW_SAMPLES` and cached beside the other sample indices (see `index_cache`): an extended run reads a longer
  index with the same prefix.

After n samples a part has had at most one sample more than its share of n, and with two parts less than one sample
fewer. The sequence of parts depends only on the weights; the seed orders the samples inside each part. With weights in
the ratio of small numbers the pattern is short, and a replica may see one part more often than another does; all
samples of a step together have the right shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import xxhash
from megatron.core.datasets import helpers
from megatron.core.datasets.utils import normalize

from megasdc.data.index_cache import OnDamage, ignore_problem, kept_index

WINDOW_SAMPLES = 1 << 20
"""The index is built for a multiple of this many samples, at 10 bytes each."""


class OrderedSamples(Protocol):
    """A stream of samples in its own order; `megasdc.data.dataset.TokenDataset` is one."""

    path: Path
    identity: str

    @property
    def num_distinct(self) -> int:
        """Number of samples from the beginning until the first repeats."""
        ...

    def extend(self, num_samples: int) -> None:
        """Extend the stream to at least ``num_samples``."""

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same from the file, into fresh memory."""
        ...


class BlendedTokens(torch.utils.data.Dataset):
    """A stream that draws from several streams by weight; a position always holds the same sample.

    Args:
        parts: the streams, each at least `num_samples` long.
        weights: of each, above 0; only their ratios matter.

    Attributes:
        path: the parts' ``.bin`` files, for messages.
        identity: checksum of what determines the sample at a position: identities of the parts and weights.
        weights: with sum 1.
    """

    def __init__(
        self,
        parts: Sequence[OrderedSamples],
        weights: Sequence[float],
        num_samples: int,
        vocab_size: int,
        cache: Path,
        on_damage: OnDamage = ignore_problem,
    ) -> None:
        self.parts = list(parts)
        self.weights: list[float] = normalize(list(weights))
        self.num_samples = num_samples
        self.vocab_size = vocab_size
        self.path = " + ".join(str(part.path) for part in parts)
        self.identity = xxhash.xxh3_64_hexdigest(
            f"blend {[(part.identity, weight) for part, weight in zip(parts, self.weights, strict=True)]}".encode()
        )
        self._cache = cache
        self._on_damage = on_damage
        self._load_order()

    def _load_order(self) -> None:
        size = max(1, -(-self.num_samples // WINDOW_SAMPLES)) * WINDOW_SAMPLES
        # The sequence depends only on weights and size, so training and validation share its cached index.
        name = xxhash.xxh3_64_hexdigest(f"{self.weights} {size}".encode())
        self._part_of, self._position_in_part = kept_index(
            self._cache / f"blend-{name}",
            ("part", "position"),
            lambda: blend_order(self.weights, size),
            self._on_damage,
        )

    def extend(self, num_samples: int) -> None:
        """Extend the stream to at least ``num_samples``; existing positions keep their samples."""
        if num_samples > self.num_samples:
            for part in self.parts:
                part.extend(num_samples)
            self.num_samples = num_samples
            self._load_order()

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_distinct(self) -> int:
        """Number of samples before the first repeats: until a part begins its next epoch."""
        first = self._first_repeated()
        return self.num_samples if first is None else first

    @property
    def first_used_up(self) -> OrderedSamples | None:
        """The part that repeats first; None if none repeats within the stream."""
        first = self._first_repeated()
        return None if first is None else self.parts[int(self._part_of[first])]

    def _first_repeated(self) -> int | None:
        """Position of the first repeated sample; None if none repeats."""
        ends = np.array([part.num_distinct for part in self.parts])
        part_of, position = self._part_of[: self.num_samples], self._position_in_part[: self.num_samples]
        repeated = np.flatnonzero(position >= ends[part_of])
        return int(repeated[0]) if len(repeated) else None

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position in [0, len).

        Returns:
            tokens [s] int64, labels [s] int64 (the next token of each), loss_mask [s] float32.
        """
        part, inner = self.locate(position)
        return self.parts[part][inner]

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sample at a position in [0, len) from its part's file; see ``TokenDataset.read_again``."""
        part, inner = self.locate(position)
        return self.parts[part].read_again(inner)

    def locate(self, position: int) -> tuple[int, int]:
        """The part that a sample comes from, and its position there."""
        if not 0 <= position < self.num_samples:
            raise IndexError(f"position {position} is not in [0, {self.num_samples}) of {self.path}")
        return int(self._part_of[position]), int(self._position_in_part[position])

    def where(self, position: int) -> str:
        """Description of a sample for a message: its file, its position there and in the blend."""
        part, inner = self.locate(position)
        return f"{self.parts[part].path}, sample position {inner} (position {position} of the blend)"


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Megatron-core's order of a blend of ``size`` samples, for weights with sum 1.

    Returns the part of each sample, [size] int16, and its position in that part, [size] int64.
    """
    part_of = np.zeros(size, dtype=np.int16)
    position = np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(part_of, position, np.asarray(weights, dtype=np.float64), len(weights), size, False)
    return part_of, position
