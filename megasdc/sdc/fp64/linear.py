"""Check of the gradient reduction: linear functions of the reduced gradient against those of the replicas' gradients.

Two linear functions of a gradient are taken in float64 on every rank before the reduction, and on every owner's shard
after it: the sum of all elements, and their sum with random signs, which shows errors that cancel in the first.
The reduction's own rounding is about that of one addition times the norm, so the norm is the unit.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

PERIOD = 8191
"""Number of elements after which signs repeat; a prime, so that they do not align with rows."""

HOST_ROWS = 16
"""Periods converted to fp64 at a time on a CPU: a megabyte."""


def draw_signs(seed: int, device: torch.device) -> Tensor:
    """Random signs, the same on all ranks that use the same seed.

    Returns:
        [PERIOD], fp64, each +1 or -1.
    """
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (PERIOD,), generator=generator) * 2 - 1).to(device, torch.float64)


def linear_sums(values: Tensor, signs: Tensor, offset: int = 0) -> Tensor:
    """Sum and signed sum of some elements of a tensor.

    Args:
        values: any shape; consecutive elements of a tensor, row-major.
        signs: from ``draw_signs``.
        offset: index of the first of them in that tensor; it decides the sign of each element.

    Returns:
        [2], fp64: the sum, and the sum with signs.

    Sync: none.
    """
    flat = values.detach().flatten()
    turned = signs.roll(-(offset % PERIOD))
    whole = flat.numel() // PERIOD * PERIOD
    columns = _column_sums(flat[:whole].view(-1, PERIOD))
    rest = flat[whole:].double()
    columns[: rest.numel()] += rest
    return torch.stack([columns.sum(), columns @ turned])


def _column_sums(rows: Tensor) -> Tensor:
    """Sum of each column in float64; [rows, PERIOD] to [PERIOD].

    On a CPU a few rows at a time are converted within the cache: seven times as fast as a sum with conversion.
    """
    if rows.device.type != "cpu":
        return rows.sum(0, dtype=torch.float64)
    total = torch.zeros(PERIOD, dtype=torch.float64)
    widened = torch.empty(min(len(rows), HOST_ROWS), PERIOD, dtype=torch.float64)
    for part in rows.split(HOST_ROWS):
        total += widened[: len(part)].copy_(part).sum(0)
    return total


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of all elements, 0-d, fp64.

    Sync: none.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for one in tensors:
        total += torch.linalg.vector_norm(one.detach(), dtype=torch.float32).double() ** 2
    return total


def residuals(before: Tensor, squares: Tensor, after: Tensor, replicas: int, factor: Tensor) -> Tensor:
    """Difference of the sums before and after the reduction, over the norm of what was reduced.

    Args:
        before: [g, 2], sums of each group's local gradients, summed over replicas.
        squares: [g], squared norms of the local gradients, summed over replicas.
        after: [g, 2], sums of the reduced gradient, summed over the owners of its shards.
        replicas: number of replicas, of which the reduction takes the mean.
        factor: 0-d, factor that the mean was multiplied with.

    Returns:
        [g, 2]; 0 for a group whose gradient is 0 before and after.
    """
    difference = (after * (replicas / factor.to(after)) - before).abs()
    unit = squares.sqrt().unsqueeze(-1)
    return torch.where(difference == 0, 0.0, difference / unit)
