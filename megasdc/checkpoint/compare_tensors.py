"""Does a tensor have the same bits in all checkpoints, and if not: which copy is wrong, and how?

Every copy is read once and reduced to a digest of its bits; only where digests differ are copies read again and
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from megasdc.checkpoint.compare_report import Options, Report
from megasdc.checkpoint.compare_votes import all_intact, find_expected
from megasdc.checkpoint.damage import PieceDamage, classify, measure
from megasdc.checkpoint.view import Copy, Entry, PieceError, Slot, View
from megasdc.errors import CheckpointError


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
        return all_intact([self.view.changed(piece.file) for piece in self.copy.pieces])


class TensorComparison:
    """Compares tensors one after the other, and notes in a report what differs.

    Args:
        report: of the checkpoints.
        options: what counts as a difference.
        progress: called with the bytes of each copy that was read.
    """

    def __init__(self, report: Report, options: Options, progress: Callable[[int], None]) -> None:
        self.report, self.options, self.progress = report, options, progress

    def compare(self, fqn: str, slot: Slot) -> None:
        """Compare one tensor in all checkpoints whose format has its slot."""
        able = [view for view in self.report.views if slot in view.slots]
        having = [view for view in able if (fqn, slot) in view.entries]
        entries = [(view, view.entries[fqn, slot]) for view in having]
        for view in able:
            if view not in having:
                self.report.add(fqn, slot, view, having[0], "missing", f"{view.path} has no such tensor", [])
        parts = [_Part(view, entry, copy) for view, entry in entries for copy in entry.copies]
        rows = _common_rows([entry for _, entry in entries])
        classes: dict[tuple[torch.dtype, tuple[int, ...], str], list[_Part]] = {}
        for part in parts:
            try:
                tensor = part.read(rows)
                classes.setdefault((tensor.dtype, tuple(tensor.shape), _digest(tensor)), []).append(part)
            except PieceError as error:
                damage = [PieceDamage.whole(piece) for piece in error.pieces]
                self.report.add(fqn, slot, part.view, part.view, error.kind, str(error), damage, "its own layout")
            except CheckpointError as error:
                self.report.problems.append(str(error))
            self.progress(sum(4 * piece.numel for piece in part.copy.pieces))
        self.report.num_compared += len(parts) > 1
        if len(classes) > 1:
            self._judge(fqn, slot, list(classes.values()), rows)

    def _judge(self, fqn: str, slot: Slot, classes: list[list[_Part]], rows: int | None) -> None:
        """Find out which copies are expected to be right, and what is wrong with the others."""
        votes = [len({id(part.view) for part in parts}) for parts in classes]
        place, basis = find_expected(votes, [[part.intact for part in parts] for parts in classes])
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
        every = [PieceDamage.whole(piece) for piece in part.copy.pieces]
        if expected.shape != got.shape:
            detail = f"shape {list(got.shape)}, expected {list(expected.shape)}"
            self.report.add(fqn, slot, part.view, against, "shape", detail, every, basis)
            return
        if expected.dtype != got.dtype:
            equal = torch.equal(expected.to(got.dtype), got) or torch.equal(expected, got.to(expected.dtype))
            values = "the same values but for rounding" if equal else "other values too"
            detail = f"{got.dtype}, expected {expected.dtype}: {values}".replace("torch.", "")
            self.report.add(fqn, slot, part.view, against, "dtype", detail, every, basis)
            return
        found = measure(expected, got)
        if self.options.tolerates(found):
            self.report.num_tolerated += 1
            return
        damage = classify(expected, got, part.copy)
        pattern, detail, pieces = damage.pattern, damage.detail, damage.pieces
        self.report.add(fqn, slot, part.view, against, pattern, detail, pieces, basis, found, damage.covers_all)


def _common_rows(entries: list[Entry]) -> int | None:
    """Real rows of the vocabulary, where formats differ in whether they have its padding."""
    shapes = {entry.copies[0].shape for entry in entries}
    rows = {entry.real_rows for entry in entries}
    return next(iter(rows)) if len(shapes) > 1 and len(rows) == 1 else None


def _digest(tensor: Tensor) -> str:
    """XXH3-128 of a tensor's bits."""
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
