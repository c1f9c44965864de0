"""What is compared of checkpoints, and what does a comparison say?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megasdc.checkpoint.damage import MEANINGS, Pattern, PieceDamage
from megasdc.checkpoint.measure import Measure
from megasdc.checkpoint.view import Slot, View


@dataclass(frozen=True)
class Options:
    """What is compared, and what counts as a difference.

    Attributes:
        only: shell patterns of ``fqn`` or ``fqn/slot``; empty: everything.
        ignore: the same; these are left out.
        weights_only: compare weights alone.
        ulp: tensors whose elements are at most so many representable values apart count as the same.
        rtol: the same for the relative difference.
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
        """Whether a difference is small enough."""
        return (found.max_ulp is not None and found.max_ulp <= self.ulp) or (found.max_relative <= self.rtol)


@dataclass(frozen=True)
class Finding:
    """One tensor or value of one checkpoint that is not what it should be.

    Attributes:
        fqn: its name.
        slot: see ``Slot``.
        checkpoint: the one that differs.
        against: the one that it was compared with; itself, where its own copies differ.
        basis: why ``against`` is expected to be right; empty: either may be wrong.
        pattern: what kind of difference.
        detail: what is special about it.
        measure: how far; None where values cannot be compared.
        pieces: where it lies, and whose it was.
        unchanged: files among them by name: whether they are as they were saved; None: not known.
        covers_all: all that it lies in differs as a whole.
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
        """What usually makes such a difference."""
        return MEANINGS[self.pattern]

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON has."""
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
class Report:
    """What a comparison found.

    Attributes:
        views: the checkpoints.
        num_compared: tensors and values that at least two copies hold.
        num_tolerated: tensors that differ within what is allowed.
        findings: in order of the checkpoints' tensors.
        problems: what could not be read, so that it was not compared.
        notes: what was left out because not all have it.
    """

    views: list[View]
    num_compared: int = 0
    num_tolerated: int = 0
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether everything that was compared is equal, or within what is allowed."""
        return not self.findings

    def add(
        self,
        fqn: str,
        slot: Slot,
        view: View,
        against: View,
        pattern: Pattern,
        detail: str,
        pieces: list[PieceDamage],
        basis: str = "",
        measure: Measure | None = None,
        covers_all: bool = False,
    ) -> None:
        """Note a finding in ``view``; the arguments are its attributes. Reads its files once more, see ``changed``."""
        states = {one.piece.file: view.changed(one.piece.file) for one in pieces}
        unchanged = {file.name: None if state is None else not state for file, state in states.items()}
        names = (str(view.path), str(against.path))
        self.findings.append(Finding(fqn, slot, *names, basis, pattern, detail, measure, pieces, unchanged, covers_all))

    def merge(self, other: Report) -> None:
        """Take over what was found of other tensors of the same checkpoints."""
        self.num_compared += other.num_compared
        self.num_tolerated += other.num_tolerated
        self.findings += other.findings
        self.problems += other.problems

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON has."""
        return {
            "checkpoints": [{"path": str(v.path), "kind": v.kind, "layout": v.layout} for v in self.views],
            "same": self.same and not self.problems,
            "num_compared": self.num_compared,
            "num_tolerated": self.num_tolerated,
            "findings": [finding.as_dict() for finding in self.findings],
            "not_compared": self.problems,
            "notes": self.notes,
        }


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
