"""Options, findings and report of a comparison of checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megasdc.checkpoint.views import Slot, View
from megasdc.lab.checkpoints.damage import MEANINGS, DamagePattern, Pattern, PieceDamage
from megasdc.lab.checkpoints.measure import Measure
from megasdc.lab.checkpoints.outcome import ComparisonOutcome


@dataclass(frozen=True)
class Options:
    """Selection of what is compared, and of what counts as a difference.

    Attributes:
        only: shell patterns of ``fqn`` or ``fqn/slot``; empty: everything.
        ignore: the same; these are not compared.
        ulp: tensors whose elements differ by at most this many representable values count as equal.
        rtol: the same for the maximum relative difference.
    """

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    weights_only: bool = False
    ulp: int = 0
    rtol: float = 0.0

    def wants(self, name: str, slot: Slot) -> bool:
        """Whether a tensor or value is compared."""
        if self.weights_only and slot != "weight":
            return False

        def hit(patterns: tuple[str, ...]) -> bool:
            return any(fnmatchcase(name, one) or fnmatchcase(f"{name}/{slot}", one) for one in patterns)

        return (not self.only or hit(self.only)) and not hit(self.ignore)

    def tolerates(self, found: Measure) -> bool:
        """Whether a difference is small enough; without ``ulp`` and ``rtol`` none is.

        Bits may differ where no distance does: +0 and -0, or integers that are one number in fp64.
        """
        near = self.ulp > 0 and found.max_ulp is not None and found.max_ulp <= self.ulp
        return near or (self.rtol > 0 and found.max_relative <= self.rtol)


@dataclass(frozen=True)
class CheckpointMismatch:
    """One tensor or value of one checkpoint that differs from the expected one.

    Attributes:
        checkpoint: the one that differs.
        against: the one that it was compared with; itself, where its own copies differ.
        basis: why ``against`` is expected to be right; empty: either may be wrong.
        measure: size of the difference; None where values cannot be compared.
        pieces: where it lies, and which rank owns it.
        unchanged: for each of their files, by name, whether it is as it was saved; None: not known.
        covers_all: every piece differs as a whole.
    """

    fqn: str
    slot: Slot
    checkpoint: str
    against: str
    basis: str
    pattern: Pattern
    detail: str
    measure: Measure | None
    pieces: list[PieceDamage]
    unchanged: dict[str, bool | None]
    covers_all: bool = False

    @property
    def files(self) -> frozenset[Path]:
        """Files that it lies in."""
        return frozenset(one.piece.file for one in self.pieces)

    @property
    def meaning(self) -> str:
        """The usual cause of such a difference."""
        return MEANINGS[self.pattern]

    def as_dict(self) -> dict[str, Any]:
        """The finding as JSON-compatible values."""
        found = None
        if self.measure is not None:
            found = dict(vars(self.measure))
            found["max_relative"] = _finite(self.measure.max_relative)
            found["norms"] = [_finite(norm) for norm in self.measure.norms]
        return {
            "fqn": self.fqn,
            "slot": self.slot,
            "checkpoint": self.checkpoint,
            "against": self.against,
            "basis": self.basis,
            "pattern": self.pattern,
            "meaning": self.meaning,
            "detail": self.detail,
            "measure": found,
            "pieces": [
                {
                    "file": str(one.piece.file),
                    "unchanged_since_saved": self.unchanged.get(one.piece.file.name),
                    **vars(one.piece.owner),
                    "num_different": one.num_different,
                    "first": one.first,
                    "last": one.last,
                }
                for one in self.pieces
            ],
        }


@dataclass
class Report(ComparisonOutcome):
    """Result of a comparison of checkpoints.

    Attributes:
        num_compared: tensors and values of which there are at least two copies.
        num_tolerated: tensors that differ within the tolerance.
        findings: in order of the checkpoints' tensors.
    """

    views: list[View]
    num_compared: int = 0
    num_tolerated: int = 0
    findings: list[CheckpointMismatch] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether there is no finding."""
        return not self.findings

    def add(
        self,
        key: tuple[str, Slot],
        view: View,
        against: View,
        damage: DamagePattern,
        basis: str = "",
        measure: Measure | None = None,
    ) -> None:
        """Add a finding in ``view``; the arguments are its attributes. Reads its files again, see ``View.changed``."""
        states = {one.piece.file: view.changed(one.piece.file) for one in damage.pieces}
        self.findings.append(
            CheckpointMismatch(
                *key,
                checkpoint=str(view.path),
                against=str(against.path),
                basis=basis,
                **vars(damage),
                measure=measure,
                unchanged={file.name: None if state is None else not state for file, state in states.items()},
            )
        )

    def merge(self, other: Report) -> None:
        """Add the results of other tensors of the same checkpoints."""
        self.num_compared += other.num_compared
        self.num_tolerated += other.num_tolerated
        self.findings += other.findings
        self.problems += other.problems

    def details(self) -> dict[str, Any]:
        """Checkpoints, counts and findings."""
        return {
            "checkpoints": [{"path": str(v.path), "kind": v.kind, "layout": v.layout} for v in self.views],
            "num_compared": self.num_compared,
            "num_tolerated": self.num_tolerated,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
