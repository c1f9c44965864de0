"""Do two or more checkpoints hold the same bits, and if not: what differs, where, whose was it, what kind of damage?

Every logical tensor is read once from each checkpoint and reduced to a digest of its bits; only where digests differ
are tensors read again and measured. No checkpoint is trusted for being named first: what most checkpoints hold is
expected, and where they are split, what lies in files that are unchanged since they were saved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from megasdc.checkpoint.damage import MEANINGS, Damage, Measure, Pattern, PieceDamage, classify, measure
from megasdc.checkpoint.view import (
    TENSOR_SLOTS,
    Copy,
    Entry,
    Piece,
    PieceError,
    Scalar,
    Slot,
    View,
    with_derived_weights,
)
from megasdc.errors import CheckpointError

_RANKLESS = ("engine/", "optimizer/")
"""Scalars that stand for those of all ranks; compared only where layouts differ."""
_OF_ELEMENTS: tuple[Pattern, ...] = ("bit", "element", "run", "period", "scattered", "tail")
_OF_A_LAYOUT = ("rank", "loader/")
"""Scalars whose meaning depends on the layout; compared only where all have one layout."""


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
        measure: how far; null where values cannot be compared.
        pieces: where it lies, and whose it was.
        unchanged: files among them by name: whether they are as they were saved; null: not known.
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


@dataclass(frozen=True)
class _Part:
    """One copy of a tensor in one checkpoint."""

    view: View
    entry: Entry
    copy: Copy

    def read(self, rows: int | None) -> Tensor:
        whole = self.copy.read()
        return whole if rows is None else whole[:rows]

    @property
    def intact(self) -> bool | None:
        """Whether its files are as they were saved; null: not known of all."""
        return _state([self.view.changed(piece.file) for piece in self.copy.pieces])


def compare_checkpoints(
    views: Sequence[View], options: Options | None = None, progress: Callable[[int], None] | None = None
) -> Report:
    """Compare two or more checkpoints of any formats and layouts.

    Args:
        views: the checkpoints.
        options: what is compared; null: everything, exactly.
        progress: called with the bytes of each tensor that was read.

    Returns:
        The report; a file that cannot be read is a problem in it, what it holds is not compared.

    Raises:
        CheckpointError: they have nothing in common that is to be compared.
    """
    comparison = _Comparison(with_derived_weights(views), options or Options(), progress or (lambda _: None))
    return comparison.run()


def tensors_to_compare(views: Sequence[View], options: Options) -> list[tuple[str, Slot]]:
    """Tensors that at least two checkpoints can have."""
    keys = dict.fromkeys(key for view in views for key in view.entries)
    shared = [slot for slot in TENSOR_SLOTS if sum(slot in view.slots for view in views) > 1]
    return [key for key in keys if key[1] in shared and options.wants(*key)]


class _Comparison:
    """The work of ``compare_checkpoints``."""

    def __init__(self, views: list[View], options: Options, progress: Callable[[int], None]) -> None:
        self.views, self.options, self.progress = views, options, progress
        self.report = Report(views)

    def run(self) -> Report:
        """Compare everything."""
        keys = tensors_to_compare(self.views, self.options)
        in_two = [key for key in keys if sum(key in view.entries for view in self.views) > 1]
        if not in_two:
            listed = "; ".join(f"{view.path} ({view.kind}) has {', '.join(view.slots)}" for view in self.views)
            raise CheckpointError(f"no tensor is in two of them that --only and --ignore leave: {listed}")
        for key in keys:
            self._compare(*key)
        self._compare_scalars()
        lacking = {slot for view in self.views for slot in self._slots() if slot not in view.slots}
        for slot in (one for one in self._slots() if one in lacking):
            without = ", ".join(str(view.path) for view in self.views if slot not in view.slots)
            self.report.notes.append(f"{slot} is not in the format of {without}")
        self.report.notes += [note for view in self.views for note in view.notes]
        self._settle()
        self.report.problems = list(dict.fromkeys(self.report.problems))
        return self.report

    def _slots(self) -> list[Slot]:
        return [
            slot for slot in TENSOR_SLOTS if any(slot in v.slots for v in self.views) and self.options.wants("", slot)
        ]

    def _compare(self, fqn: str, slot: Slot) -> None:
        """One tensor in all checkpoints whose format has its slot."""
        able = [view for view in self.views if slot in view.slots]
        having = [view for view in able if (fqn, slot) in view.entries]
        entries = [(view, view.entries[fqn, slot]) for view in having]
        for view in able:
            if view not in having:
                self._add(fqn, slot, view, having[0], "missing", f"{view.path} has no such tensor", [])
        parts = [_Part(view, entry, copy) for view, entry in entries for copy in entry.copies]
        rows = _common_rows([entry for _, entry in entries])
        classes: dict[tuple[torch.dtype, tuple[int, ...], str], list[_Part]] = {}
        for part in parts:
            try:
                tensor = part.read(rows)
                classes.setdefault((tensor.dtype, tuple(tensor.shape), _digest(tensor)), []).append(part)
            except PieceError as error:
                damage = [_whole_piece(piece) for piece in error.pieces]
                self._add(fqn, slot, part.view, part.view, error.kind, str(error), damage, basis="its own layout")
            except CheckpointError as error:
                self.report.problems.append(str(error))
            self.progress(sum(4 * piece.numel for piece in part.copy.pieces))
        self.report.num_compared += len(parts) > 1
        if len(classes) > 1:
            self._judge(fqn, slot, list(classes.values()), rows)

    def _judge(self, fqn: str, slot: Slot, classes: list[list[_Part]], rows: int | None) -> None:
        """Find out which copies are expected to be right, and what is wrong with the others."""
        votes = [len({id(part.view) for part in parts}) for parts in classes]
        place, basis = _expected(votes, [[part.intact for part in parts] for parts in classes])
        right = classes[place]
        expected = right[0].read(rows)
        for wrong in classes:
            if wrong is right:
                continue
            for part in wrong:
                against = right[0].view
                if any(one.view is part.view for one in right):
                    against = part.view
                got = part.read(rows)
                self._describe(fqn, slot, part, against, basis, expected, got)

    def _describe(
        self, fqn: str, slot: Slot, part: _Part, against: View, basis: str, expected: Tensor, got: Tensor
    ) -> None:
        every = [_whole_piece(piece) for piece in part.copy.pieces]
        if expected.shape != got.shape:
            detail = f"shape {list(got.shape)}, expected {list(expected.shape)}"
            self._add(fqn, slot, part.view, against, "shape", detail, every, basis)
            return
        if expected.dtype != got.dtype:
            equal = torch.equal(expected.to(got.dtype), got) or torch.equal(expected, got.to(expected.dtype))
            values = "the same values but for rounding" if equal else "other values too"
            detail = f"{got.dtype}, expected {expected.dtype}: {values}".replace("torch.", "")
            self._add(fqn, slot, part.view, against, "dtype", detail, every, basis)
            return
        found = measure(expected, got)
        if self.options.tolerates(found):
            self.report.num_tolerated += 1
            return
        damage: Damage = classify(expected, got, part.copy)
        self._add(
            fqn, slot, part.view, against, damage.pattern, damage.detail, damage.pieces, basis, found, damage.covers_all
        )

    def _add(
        self,
        fqn: str,
        slot: Slot,
        view: View,
        against: View,
        pattern: Pattern,
        detail: str,
        pieces: list[PieceDamage],
        basis: str = "",
        found: Measure | None = None,
        covers_all: bool = False,
    ) -> None:
        states = {one.piece.file: view.changed(one.piece.file) for one in pieces}
        unchanged = {file.name: None if state is None else not state for file, state in states.items()}
        self.report.findings.append(
            Finding(
                fqn,
                slot,
                str(view.path),
                str(against.path),
                basis,
                pattern,
                detail,
                found,
                pieces,
                unchanged,
                covers_all,
            )
        )

    def _settle(self) -> None:
        """Let findings that belong together say the same.

        What looks like damage of single elements is not, in a file of which most tensors hold another state: of bf16
        weights one step changes few. And another state of most tensors of a slot is drift, not that of a shard.
        """
        findings = self.report.findings
        shards = Counter(file for one in findings if one.pattern == "shard" for file in one.files)
        all_of = Counter(file for one in findings if one.slot != "scalar" for file in one.files)
        other_state = {file for file, count in shards.items() if 2 * count > all_of[file] > 1}
        findings = [
            replace(one, pattern="shard") if one.pattern in _OF_ELEMENTS and one.files <= other_state else one
            for one in findings
        ]
        drifted: dict[tuple[str, Slot], set[str]] = {}
        for one in findings:
            if one.covers_all and one.pattern == "shard":
                drifted.setdefault((one.checkpoint, one.slot), set()).add(one.fqn)
        total = Counter(slot for _, slot in tensors_to_compare(self.views, self.options))
        self.report.findings = [
            replace(one, pattern="drift")
            if one.pattern == "shard" and 2 * len(drifted.get((one.checkpoint, one.slot), ())) > total[one.slot]
            else one
            for one in findings
        ]

    def _compare_scalars(self) -> None:
        views = [view for view in self.views if "scalar" in view.slots]
        if len(views) < 2:
            return
        if self.options.wants("", "scalar"):
            self.report.problems += [problem for view in views for problem in view.problems]
        layouts = {(view.kind, view.layout) for view in views}
        for name in dict.fromkeys(name for view in views for name in view.scalars):
            if not self.options.wants(name, "scalar"):
                continue
            if name.startswith(_RANKLESS if len(layouts) == 1 else _OF_A_LAYOUT):
                continue
            holders = [(view, view.scalars[name]) for view in views if name in view.scalars]
            if len(holders) > 1:
                self.report.num_compared += 1
                self._compare_scalar(name, holders)

    def _compare_scalar(self, name: str, holders: list[tuple[View, Scalar]]) -> None:
        classes: dict[str, list[tuple[View, Scalar]]] = {}
        for view, scalar in holders:
            if scalar.value is None:
                piece = _whole_piece(Piece(scalar.file, scalar.owner, 1, _nothing))
                against = next((other for other, one in holders if one.value is not None), view)
                self._add(name, "scalar", view, against, "missing", f"{scalar.file.name} does not hold it", [piece])
            else:
                classes.setdefault(scalar.value, []).append((view, scalar))
        if len(classes) < 2:
            return
        states = [[_state([view.changed(one.file)]) for view, one in members] for members in classes.values()]
        right, basis = _expected([len(members) for members in classes.values()], states)
        value, members = list(classes.items())[right]
        for found, wrong in classes.items():
            for view, scalar in wrong if found != value else ():
                piece = _whole_piece(Piece(scalar.file, scalar.owner, 1, _nothing))
                detail = f"{found}, expected {value}"
                self._add(name, "scalar", view, members[0][0], "scalar", detail, [piece], basis)


def _expected(votes: list[int], states: Sequence[Sequence[bool | None]]) -> tuple[int, str]:
    """Which of several classes of equal content is expected to be right, and why; the first where nothing tells.

    Args:
        votes: checkpoints in each.
        states: of each member of each, whether its files are as they were saved.
    """
    most = [place for place, count in enumerate(votes) if count == max(votes)]
    if len(most) == 1:
        return most[0], "what most checkpoints hold"
    intact = [place for place in most if True in states[place]]
    if len(intact) == 1 and all(state is False for place in most if place != intact[0] for state in states[place]):
        return intact[0], "its files are as they were saved, the others are not"
    return 0, ""


def _state(changed: Sequence[bool | None]) -> bool | None:
    """Whether files are as they were saved; null: not known of all."""
    if any(changed):
        return False
    return True if all(one is False for one in changed) else None


def _common_rows(entries: list[Entry]) -> int | None:
    """Real rows of the vocabulary, where formats differ in whether they have its padding."""
    shapes = {entry.copies[0].shape for entry in entries}
    rows = {entry.real_rows for entry in entries}
    return next(iter(rows)) if len(shapes) > 1 and len(rows) == 1 else None


def _whole_piece(piece: Piece) -> PieceDamage:
    return PieceDamage(piece, piece.numel, [], [], (0, piece.numel - 1))


def _nothing() -> Tensor:
    raise FileNotFoundError


def _digest(tensor: Tensor) -> str:
    """XXH3-128 of a tensor's bits."""
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
