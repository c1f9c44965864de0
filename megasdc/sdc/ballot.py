"""Outcome of a vote: flags, a dispute, missing evidence. ``megasdc.sdc.vote`` produces it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megasdc.common.addresses import Address

Position = tuple[int, int]
"""(pp_rank, tp_rank), the same in every replica."""


@dataclass(frozen=True)
class Flag:
    """A rank whose result differs from that of a strict majority.

    ``address`` is that of its first such result, before which it recorded ``place`` results; ``expected`` and ``got``
    are checksums, and the ranks ``against`` computed the expected one.
    """

    rank: int
    replica: int
    address: Address
    place: int
    expected: int
    got: int
    against: tuple[int, ...]

    @property
    def majority(self) -> int:
        """Number of ranks in the majority."""
        return len(self.against)


@dataclass(frozen=True)
class Dispute:
    """Differing results of which no rank can be named as the cause.

    ``values`` holds checksums by global rank, one mapping for each tensor rank that differs; ``replicas`` are those not
    set aside. ``origin``: everything computed before was compared and equal, so that the error began here.
    """

    address: Address
    place: int
    replicas: tuple[int, ...]
    values: tuple[Mapping[int, int], ...]
    origin: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose results are disputed."""
        return tuple(rank for values in self.values for rank in values)


@dataclass(frozen=True)
class Ballot:
    """Outcome of a vote.

    Args:
        flagged: ranks that are wrong relative to the majority, in execution order.
        dispute: where the vote stopped, if it did; flags before it remain valid.
        compared: results that were compared with those of another replica, over all ranks.
        missing: ranks whose results are missing, or are not those that the others recorded: inconclusive.
        left_out: positions that are not comparable.
    """

    flagged: tuple[Flag, ...]
    dispute: Dispute | None
    compared: int
    missing: tuple[int, ...]
    left_out: tuple[Position, ...]

    @property
    def agreed(self) -> bool:
        """Whether everything comparable was compared and equal."""
        return self.compared > 0 and not self.flagged and self.dispute is None and not self.missing
