"""What do the checks of a run cost? Bytes read, results recorded and reductions, at the rates of a rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from megasdc.sdc.cost import Reads


@dataclass(frozen=True)
class Rates:
    """How fast a rank is at what checks consist of.

    Args:
        checksum_bytes_per_s: of a large checksum.
        extremes_bytes_per_s: of a look for NaN and Inf in a large tensor.
        checksum_s: of recording and comparing one checksum that reads next to nothing, between arithmetic.
        extremes_s: the same of a look for NaN and Inf.
        exchange_s: of one reduction of constant size over all ranks.
    """

    checksum_bytes_per_s: float
    extremes_bytes_per_s: float
    checksum_s: float
    extremes_s: float
    exchange_s: float


def median_rates(measured: Sequence[Rates]) -> Rates:
    """The median of each rate, so that a slow moment of the machine does not stand for all.

    Args:
        measured: at least one.
    """
    return Rates(*(statistics.median(values) for values in zip(*map(astuple, measured), strict=True)))


@dataclass(frozen=True)
class Asked:
    """What the checks of one step ask for.

    Args:
        checksums: that are taken.
        extremes: results that are looked at for NaN and Inf.
        exchanges: reductions over all ranks.
    """

    checksums: Reads
    extremes: Reads
    exchanges: int

    def seconds(self, rates: Rates) -> float:
        """The time that takes."""
        return (
            self.checksums.bytes / rates.checksum_bytes_per_s
            + self.checksums.count * rates.checksum_s
            + self.extremes.bytes / rates.extremes_bytes_per_s
            + self.extremes.count * rates.extremes_s
            + self.exchanges * rates.exchange_s
        )
