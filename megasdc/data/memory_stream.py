"""Random tokens in memory, for measurements and checks that need no prepared data."""

from __future__ import annotations

import torch


class MemoryStream:
    """Random tokens in memory, as a loader reads them; position k is sample k modulo their number.

    Args:
        vocab: entries of the vocabulary.
        sequence: tokens s of a sample.
        distinct: different samples.
        length: samples of the stream.
    """

    def __init__(self, vocab: int, sequence: int, distinct: int, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, vocab, (distinct, sequence + 1), generator=generator)
        self._mask = torch.ones(sequence)
        self.path = "memory"
        self.identity = "memory"
        self.vocab_size = vocab
        self._length = length

    def __len__(self) -> int:
        return self._length

    def extend(self, num_samples: int) -> None:
        """Make the stream at least so long."""
        self._length = max(self._length, num_samples)

    def __getitem__(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row = self._tokens[position % len(self._tokens)]
        return row[:-1], row[1:], self._mask

    def read_again(self, position: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same sample: there is no file."""
        return self[position]
