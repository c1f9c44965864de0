"""Bitwise comparison of tensors over all checkpoints: which copy is wrong, and how.

Every copy is read once, range by range, and each range is reduced to a digest of its bits; only where digests differ
are copies read again and measured. Threads share the ranges of all tensors, and each holds one or two buffers for part
of a range: memory does not grow with tensors or checkpoints. Slots are read one after the other, so that files are read
nearly sequentially.

Reading, XXH3 and torch release the GIL, so that threads suffice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from megasdc.checkpoint.formats.extents import Reader
from megasdc.checkpoint.formats.open_copy import OpenCopy
from megasdc.checkpoint.formats.pieces import Copy, PieceError
from megasdc.checkpoint.views.view import TENSOR_SLOTS, Entry, Slot, View
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.damage import Classifying, Damage, PieceDamage
from megasdc.lab.checkpoints.measure import Measuring
from megasdc.lab.checkpoints.ranges import BATCH_BYTES, PendingDigest, Range, RangeDigester
from megasdc.lab.checkpoints.report import Options, Report
from megasdc.lab.checkpoints.votes import all_intact, find_expected

_MEASURED_BYTES = 1 << 18
"""Bytes measured at once; intermediate results, partly in float64, take many times as much."""
_WAITING = 4
"""Queued tasks per thread."""


def compare_tensors(
    report: Report, options: Options, keys: Sequence[tuple[str, Slot]], jobs: int, progress: Callable[[int], None]
) -> None:
    """Compare tensors, by name and slot, in ``jobs`` threads, and add differences to the report.

    ``progress`` gets the bytes of each copy that was read.
    """
    found: dict[tuple[str, Slot], Report] = {}
    reading: deque[_Tensor] = deque()
    judged: deque[Future[None]] = deque()
    in_flight_bytes = 0
    with ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        digester = RangeDigester(pool)

        def finish(limit_bytes: int) -> None:
            """Wait until reads in flight cost less than ``limit_bytes``; 0 waits for all."""
            nonlocal in_flight_bytes
            while reading and in_flight_bytes >= limit_bytes:
                tensor = reading.popleft()
                in_flight_bytes -= tensor.cost_bytes
                if len(classes := tensor.classes(progress)) > 1:
                    judged.append(pool.submit(tensor.judge, classes))
                while len(judged) > _WAITING * jobs:
                    judged.popleft().result()

        for key in sorted(keys, key=lambda key: TENSOR_SLOTS.index(key[1])):
            tensor = _Tensor(report.views, options, key)
            found[key] = tensor.report
            tensor.start(digester)
            reading.append(tensor)
            in_flight_bytes += tensor.cost_bytes
            finish(_WAITING * jobs * BATCH_BYTES)
        finish(0)
        for future in judged:
            future.result()
    for key in keys:
        report.merge(found[key])


@dataclass
class _Part:
    """One copy of a tensor in one checkpoint, and the digests of its ranges."""

    view: View
    copy: Copy
    opened: OpenCopy
    shape: tuple[int, ...]
    digests: list[PendingDigest] = field(default_factory=list)

    @property
    def intact(self) -> bool | None:
        """Whether all its files are as they were saved; None: not known of all."""
        return all_intact([self.view.changed(piece.file) for piece in self.copy.pieces])


class _Tensor:
    """One tensor in all checkpoints whose format has its slot.

    ``report`` covers this tensor only; ``cost_bytes`` is what reading it costs, 0 before ``start``.
    """

    def __init__(self, views: list[View], options: Options, key: tuple[str, Slot]) -> None:
        self.options, self.key = options, key
        self.report, self.parts = Report(views), list[_Part]()
        self.cost_bytes = 0
        having = [view for view in views if key in view.entries]
        for view in (view for view in views if key[1] in view.slots and view not in having):
            self.report.add(key, view, having[0], Damage("missing", f"{view.path} has no such tensor", []))
        entries = [view.entries[key] for view in having]
        rows = _common_rows(entries)
        for view, entry in zip(having, entries, strict=True):
            for copy in entry.copies:
                self._open(view, copy, rows)
        self.report.num_compared = int(sum(len(entry.copies) for entry in entries) > 1)

    def _open(self, view: View, copy: Copy, rows: int | None) -> None:
        shape = copy.shape if rows is None else (min(rows, copy.shape[0]), *copy.shape[1:])
        try:
            self.parts.append(_Part(view, copy, copy.open(), shape))
        except PieceError as error:
            damage = Damage(error.kind, str(error), [PieceDamage.whole(piece) for piece in error.pieces])
            self.report.add(self.key, view, view, damage, "its own layout")
        except CheckpointError as error:
            self.report.problems.append(str(error))

    def start(self, digester: RangeDigester) -> None:
        """Submit the reads of all copies."""
        for part in self.parts:
            for start, stop in part.opened.ranges(BATCH_BYTES, 0, prod(part.shape)):
                one = Range(part.opened, start, stop)
                self.cost_bytes += one.cost_bytes
                part.digests.append(digester.digest(id(part.view), one))

    def classes(self, progress: Callable[[int], None]) -> list[list[_Part]]:
        """Wait until all copies are read; group those of equal content."""
        found: dict[tuple[torch.dtype, tuple[int, ...], bytes], list[_Part]] = {}
        for part in self.parts:
            try:
                digest = b"".join(future.result() for future in part.digests)
                found.setdefault((part.opened.dtype, part.shape, digest), []).append(part)
            except CheckpointError as error:
                self.report.problems.append(str(error))
            progress(part.copy.num_bytes)
        return list(found.values())

    def judge(self, classes: list[list[_Part]]) -> None:
        """Find the copies expected to be right, and describe how the others differ."""
        try:
            votes = [len({id(part.view) for part in parts}) for parts in classes]
            place, basis = find_expected(votes, [[part.intact for part in parts] for parts in classes])
            right = classes[place]
            for part in (part for parts in classes if parts is not right for part in parts):
                own = any(one.view is part.view for one in right)
                self._describe(part, right[0], part.view if own else right[0].view, basis)
        except CheckpointError as error:
            self.report.problems.append(str(error))

    def _describe(self, part: _Part, right: _Part, against: View, basis: str) -> None:
        every = [PieceDamage.whole(piece) for piece in part.copy.pieces]
        about = (self.key, part.view, against)
        if right.shape != part.shape:
            detail = f"shape {list(part.shape)}, expected {list(right.shape)}"
            self.report.add(*about, Damage("shape", detail, every), basis)
        elif right.opened.dtype != part.opened.dtype:
            values = "the same values but for rounding" if _equal_but_for_rounding(right, part) else "other values too"
            detail = f"{part.opened.dtype}, expected {right.opened.dtype}: {values}".replace("torch.", "")
            self.report.add(*about, Damage("dtype", detail, every), basis)
        else:
            measuring, classifying = Measuring(part.shape), Classifying(part.copy)
            for start, expected, got in _pairs(right, part):
                measuring.add(expected, got)
                classifying.add(start, expected, got)
            measure = measuring.result()
            if self.options.tolerates(measure):
                self.report.num_tolerated += 1
                return
            self.report.add(*about, classifying.result(), basis, measure)


def _pairs(right: _Part, other: _Part) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield offset and elements of both, [n] each, range by range."""
    with Reader() as reader:
        for start, stop in right.opened.ranges(_MEASURED_BYTES, 0, prod(right.shape)):
            pair = [torch.empty(stop - start, dtype=part.opened.dtype) for part in (right, other)]
            for part, out in zip((right, other), pair, strict=True):
                part.opened.fill(start, out, reader)
            yield start, pair[0], pair[1]


def _equal_but_for_rounding(right: _Part, other: _Part) -> bool:
    """Whether values of two data types are equal after rounding to one of them."""
    as_other, as_right = True, True
    for _, expected, got in _pairs(right, other):
        as_other = as_other and torch.equal(expected.to(got.dtype), got)
        as_right = as_right and torch.equal(expected, got.to(expected.dtype))
    return as_other or as_right


def _common_rows(entries: list[Entry]) -> int | None:
    """Vocabulary rows without padding, if formats differ in whether they store the padding."""
    shapes = {entry.copies[0].shape for entry in entries}
    rows = {entry.real_rows for entry in entries}
    return next(iter(rows)) if len(shapes) > 1 and len(rows) == 1 else None
