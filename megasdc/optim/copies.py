"""Bitwise comparison of the gradients of parameters that every tensor rank holds whole.

A norm would miss copies that differ at equal norm, such as two exchanged elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megasdc.tensors.checksum import default_algorithm

_HALF = (1 << 32) - 1


def shard_checksum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """A checksum of shards that is exact when summed in fp64.

    Args:
        gradients: [n] each, of one type, in an order that is the same on all tensor ranks; may be empty.

    Returns:
        [2], fp64, on the device: the upper and the lower 32 bits of a checksum of all elements in order, 0 for none:
        whole numbers, whose sum over up to 2^21 ranks is exact.

    Sync: none.
    """
    if not gradients:
        return torch.zeros(2, dtype=torch.float64, device=device)
    value = default_algorithm(device).start(torch.cat(list(gradients)))
    if isinstance(value, Tensor):
        return torch.stack([(value >> 32) & _HALF, value & _HALF]).double()
    return torch.tensor([value >> 32, value & _HALF], dtype=torch.float64, device=device)


def differ(copies: Sequence[Sequence[float]]) -> bool:
    """Whether any tensor rank's digests, summed over its shards, differ from the first's."""
    return any(list(one) != list(copies[0]) for one in copies)
