"""Outcome of one fault in a running training, against what it has to be."""

from __future__ import annotations

from dataclasses import dataclass

from megasdc.sdc.verdict import MAJORITY as RELATIVE
from tools.bench.detection.live_cases import (
    ALONE,
    CLEAN,
    MAJORITY,
    MAJORITY_GOLDEN,
    OTHER,
    PAIR,
    PAIR_GOLDEN,
    ROWED,
    SHARD,
    SLICED,
    SUM,
    TWO_WRONG,
    VALUES,
)

UNSEEN = {
    VALUES: "not detectable, because the fault comes again wherever these values are computed",
    OTHER: "not detectable, because only the audited micro-batch is the same on all replicas, and without "
    "recompute, or in a backward pass, nothing is computed twice",
}
"""Rows in which no check can see the fault, with the reason."""
NOT_FINITE = {"NaN", "Inf"}
"""Kinds of faults that show in a sum whatever else is in it."""
EXPLAINED = 1e-3
"""Change of a sum in fp32, as a share of it, above which rounding is no explanation but by cancellation of 1e4."""
REPLAYED = (PAIR, PAIR_GOLDEN, TWO_WRONG, MAJORITY, MAJORITY_GOLDEN)
"""Rows in which a fault is inconclusive where every repeat gives the same wrong value, which rounding may explain, and
no golden trace shows it."""


@dataclass(frozen=True)
class Named:
    """One verdict of a trial, with its basis, as in ``megasdc.sdc.verdict``, and the address of the first wrong result.

    ``rank`` is None where none could be named.
    """

    tier: str
    rank: int | None
    verdict: str
    basis: str
    address: str


@dataclass(frozen=True, kw_only=True)
class LiveTrial:
    """One short run with faults, or one clean step, which has the defaults.

    ``largest_change``: of the fault, as a share of the value before. ``harmed``: ranks that read a bit changed in the
    first computation; ``shows``: where it has to show first, empty:
    elsewhere or nowhere. ``reproduced``: every repeat got exactly the same fault; ``golden_harmed``: the golden
    workload got a fault on all these ranks; ``replayed``: some rank's gradients of the first micro-batch differ from
    its first repeat.
    """

    layout: str
    precision: str
    recompute: bool
    dropout: bool
    uneven: bool
    row: str
    persistence: str = ""
    kinds: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    harmed: tuple[int, ...] = ()
    shows: tuple[str, ...] = ()
    largest_change: float = 0.0
    reproduced: bool = False
    golden_harmed: bool = False
    detected: bool
    named: tuple[Named, ...]
    loss: float
    grad_norm: float
    replayed: bool = False

    @property
    def clean(self) -> bool:
        """Whether no fault was injected into the step."""
        return self.row == CLEAN

    @property
    def accused(self) -> set[int]:
        """Ranks that were named."""
        return {one.rank for one in self.named if one.rank is not None}

    @property
    def wrongly(self) -> set[int]:
        """Healthy ranks that were named."""
        return self.accused - set(self.harmed)

    @property
    def rank_right(self) -> bool:
        """Whether exactly the ranks with a fault were named."""
        return self.accused == set(self.harmed) and self.detected

    @property
    def place_right(self) -> bool:
        """Whether every fault that shows at a known address was named there."""
        return self.rank_right and set(self.shows) <= {one.address for one in self.named if one.rank is not None}

    @property
    def inconclusive(self) -> bool:
        """Whether no rank could be named somewhere."""
        return any(one.rank is None for one in self.named)

    @property
    def met(self) -> bool:
        """Whether the checks reported what they have to."""
        if not self.harmed:
            return not self.detected
        if self.row == MAJORITY and self.wrongly:  # without proof verdicts are relative to the majority
            return self.detected and all(one.basis == RELATIVE for one in self.named if one.rank in self.wrongly)
        if self.wrongly:
            return False
        if self.row in UNSEEN or (self.place_right and self.row not in SLICED):
            return True
        if self.row == ROWED and not self.detected:  # what rounding makes likely in a sum cannot be seen in it
            return not NOT_FINITE & set(self.kinds)
        if self.row in (SUM, SHARD):  # nobody of several can be named, and rounding explains what is small
            return self.detected or self.precision != "fp32" or self.largest_change < EXPLAINED
        if self.row in SLICED:
            return self.rank_right
        if self.row not in REPLAYED or not (self.reproduced and self.detected and self.inconclusive):
            return False
        if self.row == TWO_WRONG:  # the one that is wrong first has a majority against it
            return bool(self.accused)
        return not self.golden_harmed or self.row not in (PAIR_GOLDEN, MAJORITY_GOLDEN)


def row_of(trial: LiveTrial) -> str:
    """The row of a trial in the table."""
    return f"{trial.row}, {trial.persistence}" if trial.row in (ALONE, PAIR, TWO_WRONG) else trial.row


def kind_of(trial: LiveTrial) -> str:
    """The kind of a trial's fault in the table."""
    return trial.kinds[0] if len(trial.kinds) == 1 else "several"
