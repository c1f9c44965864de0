"""What the referee found of results that ranks disagree on: plain values, for events and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megasdc.common.addresses import Address


@dataclass(frozen=True)
class Outside:
    """The element farthest outside of its bound.

    Args:
        element: row and column in the result.
        exact: its value in fp64.
        bound: largest difference that rounding explains.
        values: of each rank, as text: it may be NaN or Inf.
    """

    element: tuple[int, int]
    exact: float
    bound: float
    values: Mapping[int, str]


@dataclass(frozen=True)
class Opinion:
    """What the referee found at one result; the same on all ranks.

    Args:
        address: of the result.
        within: by rank, whether it is what rounding allows; empty: undecided.
        reason: why nothing was decided; empty: something was.
        elements: that were computed.
        worst: None: none is outside.
        basis: of rulings that follow from it.
        alone: ranks that have computed it from what all of these had alike, without another rank.
    """

    address: Address
    within: Mapping[int, bool]
    reason: str = ""
    elements: int = 0
    worst: Outside | None = None
    basis: str = "referee"
    alone: tuple[int, ...] = ()
