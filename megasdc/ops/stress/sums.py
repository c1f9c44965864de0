"""Known results of collectives: contributions of integers, and their sums, which every rank can compute.

The integers are so small that every partial sum is representable: a sum is exact in any order and with any algorithm,
and one wrong bit is a fault. Data that are only moved are random bits, each of which must arrive.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasdc.model.randomness import mix

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
}
LARGEST_SUM = {"fp32": 1 << 24, "bf16": 1 << 8, "fp16": 1 << 11, "int32": (1 << 31) - 1, "int64": 1 << 62}
"""Largest magnitude of a sum, up to which all integers are representable."""
SUMMED = ("all_reduce", "reduce_scatter")
MOVED = ("all_gather", "broadcast", "all_to_all")


@dataclass(frozen=True)
class Exchange:
    """One collective of a group: an operation of ``SUMMED`` or ``MOVED``, and a name of ``DTYPES``.

    ``elements``: n, received by each rank from each rank, or of the sum; ``seed``: of the contributions.
    """

    operation: str
    dtype: str
    elements: int
    ranks: int
    seed: int

    @property
    def name(self) -> str:
        """Name in messages and addresses."""
        return f"{self.operation}.{self.dtype}.{self.elements}"

    @property
    def pieces(self) -> int:
        """Pieces of n elements that a rank contributes: one per receiver, where receivers get different pieces."""
        return self.ranks if self.operation in ("reduce_scatter", "all_to_all") else 1


def contribution(exchange: Exchange, rank: int) -> Tensor:
    """Contribution of one rank, [pieces n] on the host.

    Raises:
        ValueError: there are too many ranks for an exact sum in this dtype.
    """
    dtype, size = DTYPES[exchange.dtype], exchange.pieces * exchange.elements
    generator = torch.Generator().manual_seed(mix(exchange.seed, rank, exchange.elements))
    if exchange.operation in MOVED:
        width = 8 * dtype.itemsize
        integer = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
        limit = torch.iinfo(integer)
        return torch.randint(limit.min, limit.max, (size,), generator=generator, dtype=integer).view(dtype)
    most = LARGEST_SUM[exchange.dtype] // exchange.ranks
    if most < 1:
        raise ValueError(f"{exchange.ranks} ranks have no exact sum in {exchange.dtype}")
    return torch.randint(-most, most + 1, (size,), generator=generator).to(dtype)


def known_result(exchange: Exchange, rank: int) -> Tensor:
    """Correct result of one rank, on the host: [n]; for an all-gather and an all-to-all [ranks n].

    A broadcast is from rank ``seed`` modulo the number of ranks.
    """
    n, ranks = exchange.elements, range(exchange.ranks)
    if exchange.operation == "broadcast":
        return contribution(exchange, exchange.seed % exchange.ranks)
    given = [contribution(exchange, one) for one in ranks]
    if exchange.operation == "all_gather":
        return torch.cat(given)
    piece = slice(rank * n, (rank + 1) * n) if exchange.pieces > 1 else slice(0, n)
    if exchange.operation == "all_to_all":
        return torch.cat([one[piece] for one in given])
    return torch.stack([one[piece].to(torch.int64) for one in given]).sum(0).to(DTYPES[exchange.dtype])
