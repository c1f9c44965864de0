"""Cost of a run's checks: bytes read, results recorded and reductions, at the measured rates of a rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megasdc.sdc.cost import Reads


@dataclass(frozen=True)
class Rates:
    """Speed of a rank at the operations of checks.

    Args:
        checksum_bytes_per_s: of a large checksum.
        extremes_bytes_per_s: of a check for NaN and Inf in a large tensor.
        checksum_s: of recording and comparing one checksum of a tiny tensor, between arithmetic.
        extremes_s: the same of a check for NaN and Inf.
        exchange_s: of one reduction of constant size over all ranks.
        sent_bytes_per_s: of what each rank sends to the next, while it receives as much.
    """

    checksum_bytes_per_s: float
    extremes_bytes_per_s: float
    checksum_s: float
    extremes_s: float
    exchange_s: float
    sent_bytes_per_s: float


def median_rates(measured: Sequence[Rates]) -> Rates:
    """The median of each rate, so that one slow measurement has no effect; of at least one measurement."""
    return Rates(*(statistics.median(values) for values in zip(*map(astuple, measured), strict=True)))


@dataclass(frozen=True)
class Asked:
    """Operations of one step's checks.

    Args:
        extremes: results checked for NaN and Inf.
        exchanges: reductions over all ranks, and messages to the next.
        sent_bytes: of these messages.
    """

    checksums: Reads
    extremes: Reads
    exchanges: float
    sent_bytes: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """Time of these operations."""
        return (
            self.checksums.bytes / rates.checksum_bytes_per_s
            + self.checksums.count * rates.checksum_s
            + self.extremes.bytes / rates.extremes_bytes_per_s
            + self.extremes.count * rates.extremes_s
            + self.exchanges * rates.exchange_s
            + self.sent_bytes / rates.sent_bytes_per_s
        )
