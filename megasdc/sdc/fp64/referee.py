"""Referee: which of several results is wrong, by the bound of its rounding; nobody is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megasdc.sdc.fp64.rounding_bounds import Exact


def judge_rounding(
    results: Mapping[int, Tensor], exact: Exact, inner: float = 1.0, outer: float = 1.0
) -> dict[int, bool]:
    """Whether the results of each rank are what rounding allows.

    Args:
        results: by rank, [n]; elements in which ranks differ.
        inner: times the bound: what a right result may be off by.
        outer: times the bound: what a wrong one exceeds in some element. One between the two is neither.

    Returns:
        True: all are within the bound. False: some are not, or are NaN or Inf, and another rank's all are within: the
        rank is wrong for certain. Empty: none is outside, so that any may be right; or all are, so that the elements
        are not what the referee takes them for.
    """
    found = {rank: bool(is_within(values.double(), exact, inner).all()) for rank, values in results.items()}
    wrong = {rank: not is_within(values.double(), exact, outer).all() for rank, values in results.items()}
    if any(not right and not wrong[rank] for rank, right in found.items()):
        return {}
    return found if len(set(found.values())) == 2 else {}


def is_within(values: Tensor, exact: Exact, times: float = 1.0) -> Tensor:
    """Which elements, [n], are what rounding allows; ``times``: as much."""
    inside = (values - exact.values).abs() <= times * exact.bounds  # NaN is not
    return inside | ~exact.bounds.isfinite()


def agreed(found: Sequence[Exact]) -> Exact | None:
    """What several ranks have computed of the same elements, if their bits are equal; else None: one is not right."""
    first = found[0]
    same = all(torch.equal(one.values, first.values) and torch.equal(one.bounds, first.bounds) for one in found)
    return first if same else None
