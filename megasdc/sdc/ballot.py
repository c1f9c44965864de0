"""What can come out of a vote? Flags, a dispute, evidence that was missing; made by ``megasdc.sdc.vote``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megasdc.addresses import Address

Position = tuple[int, int]
"""(pipeline, tensor) place, the same in every replica."""


@dataclass(frozen=True)
class Flag:
    """A rank that computed something else than a strict majority.

    Args:
        rank: global rank.
        replica: that it belongs to.
        address: of its first result that differs.
        place: how many results the rank recorded before it.
        expected: checksum of the majority.
        got: its own checksum.
        against: ranks that computed ``expected``.
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
        """How many agreed against it."""
        return len(self.against)


@dataclass(frozen=True)
class Dispute:
    """Results that differ where no rank can be named.

    Args:
        address: where replicas part.
        place: how many results each of the ranks recorded before it.
        replicas: those not set aside that have a result here.
        values: checksum of each by global rank; one mapping for each tensor rank at which replicas part here.
        origin: whether all that these replicas computed before was compared and equal, so that whoever is wrong here
            began it. If not, the difference may follow from something that was not compared.
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
        dispute: where the vote stopped, if it did; flags before it stand.
        compared: results that were compared with those of another replica, over all ranks.
        missing: ranks whose results are missing, or are not those that the others recorded: inconclusive.
        left_out: positions that cannot be compared.
    """

    flagged: tuple[Flag, ...]
    dispute: Dispute | None
    compared: int
    missing: tuple[int, ...]
    left_out: tuple[Position, ...]

    @property
    def agreed(self) -> bool:
        """Whether everything was compared that can be, and was equal."""
        return self.compared > 0 and not self.flagged and self.dispute is None and not self.missing
