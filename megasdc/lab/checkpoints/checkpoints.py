"""Comparison of two or more checkpoints bit by bit: what differs, where, which rank wrote it, and the kind of damage.

Every logical tensor is compared over all checkpoints. The expected content is that of most checkpoints; on a tie, that
of files unchanged since they were saved. Being named first gives no preference.

Every copy is read once, range by range, and each range is reduced to a digest of its bits; only where digests differ
are copies read again and measured. Threads share the ranges of all tensors, and each holds one or two buffers for part
of a range: memory does not grow with tensors or checkpoints. Slots are read one after the other, so that files are read
nearly sequentially. Reading, XXH3 and torch release the GIL, so that threads suffice.

A task of a thread is one large range, or many small ones of one checkpoint: opening a file, checking that it is
unchanged and submitting a task cost as much as reading a million bytes.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from string import ascii_uppercase

import torch
import xxhash
from torch import Tensor

from megasdc.checkpoint.files import step_of
from megasdc.checkpoint.tensor_files import Extent, ExtentReader, OpenCopy
from megasdc.checkpoint.views import (
    GLOBAL_GENERATORS,
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
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.damage import Classifying, DamagePattern, Pattern, PieceDamage
from megasdc.lab.checkpoints.measure import Measuring
from megasdc.lab.checkpoints.report import CheckpointMismatch, Options, Report
from megasdc.lab.checkpoints.votes import all_intact, find_expected

BATCH_BYTES = 1 << 24
"""Cost at which a task is submitted."""
_RANGE_COST_BYTES = 1 << 20
"""Fixed cost of a range, in bytes that could be read in that time."""
_READ_BYTES = 1 << 21
"""Bytes of one read: large against Python's overhead, small enough to stay in the CPU caches for the digest."""


@dataclass(frozen=True)
class ElementRange:
    """Elements ``start`` to ``stop`` (one past the last) of a copy of a tensor."""

    opened: OpenCopy
    start: int
    stop: int

    @property
    def cost_bytes(self) -> int:
        """Cost of reading it, in bytes."""
        return (self.stop - self.start) * self.opened.dtype.itemsize + _RANGE_COST_BYTES

    @property
    def files(self) -> set[Path]:
        """Files that hold its copy."""
        return {source.file for source in self.opened.sources if isinstance(source, Extent)}


Digest = bytes | CheckpointError
"""XXH3-128 of the bits of a range, or why it could not be read."""


@dataclass
class _Batch:
    """Ranges read by one task, which is submitted once it is full or a result is requested."""

    pool: ThreadPoolExecutor
    ranges: list[ElementRange] = field(default_factory=list)
    cost_bytes: int = 0
    future: Future[list[Digest]] | None = None

    def add(self, one: ElementRange) -> None:
        self.ranges.append(one)
        self.cost_bytes += one.cost_bytes
        if self.cost_bytes >= BATCH_BYTES:
            self.start()

    def start(self) -> Future[list[Digest]]:
        if self.future is None:
            self.future = self.pool.submit(_digest_ranges, self.ranges)
        return self.future


@dataclass(frozen=True)
class PendingDigest:
    """A digest that is being computed."""

    batch: _Batch
    place: int

    def result(self) -> bytes:
        """Wait for it; CheckpointError if a file cannot be read, or has changed."""
        found = self.batch.start().result()[self.place]
        if isinstance(found, CheckpointError):
            raise found
        return found


class RangeDigester:
    """Digests ranges in threads."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._filling: dict[Hashable, _Batch] = {}

    def digest(self, group: Hashable, one: ElementRange) -> PendingDigest:
        """Queue a range to be digested; ranges of one group, such as a checkpoint, are read by one task."""
        batch = self._filling.get(group)
        if batch is None or batch.future is not None:
            batch = self._filling[group] = _Batch(self._pool)
        batch.add(one)
        return PendingDigest(batch, len(batch.ranges) - 1)


def _digest_ranges(ranges: list[ElementRange]) -> list[Digest]:
    """Digest ranges one after the other; those of files that changed meanwhile become errors."""
    buffer = torch.empty(_READ_BYTES, dtype=torch.uint8)
    reader = ExtentReader()
    try:
        found = [_digest(one, buffer, reader) for one in ranges]
    finally:
        changed = reader.close()
    if not changed:
        return found
    errors = [next((changed[file] for file in one.files if file in changed), None) for one in ranges]
    return [digest if error is None else error for digest, error in zip(found, errors, strict=True)]


def _digest(one: ElementRange, buffer: torch.Tensor, reader: ExtentReader) -> Digest:
    state, size = xxhash.xxh3_128(), one.opened.dtype.itemsize
    try:
        for first, last in one.opened.ranges(_READ_BYTES, one.start, one.stop):
            read = buffer[: (last - first) * size]
            one.opened.fill(first, read.view(one.opened.dtype), reader)
            state.update(read.numpy().data)
    except CheckpointError as error:
        return error
    return state.digest()


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
            self.report.add(key, view, having[0], DamagePattern("missing", f"{view.path} has no such tensor", []))
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
            damage = DamagePattern(error.kind, str(error), [PieceDamage.whole(piece) for piece in error.pieces])
            self.report.add(self.key, view, view, damage, "its own layout")
        except CheckpointError as error:
            self.report.problems.append(str(error))

    def start(self, digester: RangeDigester) -> None:
        """Submit the reads of all copies."""
        for part in self.parts:
            for start, stop in part.opened.ranges(BATCH_BYTES, 0, prod(part.shape)):
                one = ElementRange(part.opened, start, stop)
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
            self.report.add(*about, DamagePattern("shape", detail, every), basis)
        elif right.opened.dtype != part.opened.dtype:
            values = "the same values but for rounding" if _equal_but_for_rounding(right, part) else "other values too"
            detail = f"{part.opened.dtype}, expected {right.opened.dtype}: {values}".replace("torch.", "")
            self.report.add(*about, DamagePattern("dtype", detail, every), basis)
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
    with ExtentReader() as reader:
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


__all__ = ["CheckpointMismatch", "Options", "Report", "compare_checkpoints", "tensors_to_compare"]

_RANKLESS = ("engine/", "optimizer/")
"""Scalars that represent those of all ranks; compared only where layouts differ."""
_OF_A_LAYOUT = ("rank", "loader/")
"""Scalars whose meaning depends on the layout; compared only where all have one layout."""
_OF_ELEMENTS: tuple[Pattern, ...] = ("bit", "element", "run", "period", "scattered", "tail")


def compare_checkpoints(
    views: Sequence[View],
    options: Options | None = None,
    progress: Callable[[int], None] | None = None,
    jobs: int | None = None,
) -> Report:
    """Compare two or more checkpoints of any formats and layouts.

    Args:
        options: what is compared; None: everything, exactly.
        progress: called with the bytes of each tensor that was read.
        jobs: threads; None: as many as there are cores for this process.

    Returns:
        The report; a file that cannot be read is a problem in it, and its content is not compared.

    Raises:
        CheckpointError: they have no tensor in common that the options select.
    """
    views = with_derived_weights(views)
    report, options = Report(views), options or Options()
    keys = tensors_to_compare(views, options)
    if not any(sum(key in view.entries for view in views) > 1 for key in keys):
        listed = "; ".join(f"{view.path} ({view.kind}) has {', '.join(view.slots)}" for view in views)
        raise CheckpointError(f"no tensor is in two of them that --only and --ignore leave: {listed}")
    compare_tensors(report, options, keys, jobs or len(os.sched_getaffinity(0)), progress or (lambda _: None))
    _compare_scalars(report, options)
    report.notes += steps_of_a_run(views) + _left_out(views, options) + [note for view in views for note in view.notes]
    report.findings = _settle(report.findings, Counter(slot for _, slot in keys))
    report.problems = list(dict.fromkeys(report.problems))
    return report


def steps_of_a_run(views: Sequence[View]) -> list[str]:
    """A note where different steps of one folder are compared; empty if not."""
    steps = {view.path.resolve(): step_of(view.path) for view in views}
    if len({path.parent for path in steps}) != 1 or None in steps.values() or len(set(steps.values())) < 2:
        return []
    named = zip(ascii_uppercase, steps.values(), strict=False)
    told = ", ".join(f"{letter} is step {step}" for letter, step in named)
    return [f"{told} of one run: differences are expected"]


def tensors_to_compare(views: Sequence[View], options: Options) -> list[tuple[str, Slot]]:
    """Tensors that at least two checkpoints can have."""
    keys = dict.fromkeys(key for view in views for key in view.entries)
    shared = [slot for slot in TENSOR_SLOTS if sum(slot in view.slots for view in views) > 1]
    return [key for key in keys if key[1] in shared and options.wants(*key)]


def _left_out(views: Sequence[View], options: Options) -> list[str]:
    """Notes: slots that some formats have and others do not, with the checkpoints that lack them."""
    notes = []
    for slot in TENSOR_SLOTS:
        without = [str(view.path) for view in views if slot not in view.slots]
        if options.wants("", slot) and 0 < len(without) < len(views):
            notes.append(f"{slot} is not in the format of {', '.join(without)}")
    return notes


def _compare_scalars(report: Report, options: Options) -> None:
    """Compare the scalars of all checkpoints that have some, and add differences to the report."""
    views = [view for view in report.views if "scalar" in view.slots]
    if len(views) < 2:
        return
    if options.wants("", "scalar"):
        report.problems += [problem for view in views for problem in view.problems]
    others = 0
    layouts = {(view.kind, view.layout) for view in views}
    for name in dict.fromkeys(name for view in views for name in view.scalars):
        if not options.wants(name, "scalar"):
            continue
        if name.startswith(_RANKLESS if len(layouts) == 1 else _OF_A_LAYOUT):
            continue
        holders = [(view, view.scalars[name]) for view in views if name in view.scalars]
        if len(holders) < 2:
            continue
        if name.endswith(GLOBAL_GENERATORS) and len({view.save_id for view, _ in holders}) > 1:
            others += len({scalar.value for _, scalar in holders}) > 1
            continue
        report.num_compared += 1
        _compare_scalar(report, name, holders)
    if others:
        report.notes.append(
            f"global random generators of {others} ranks differ; training does not draw from them, so between two "
            "saves that is no difference"
        )


def _compare_scalar(report: Report, name: str, holders: list[tuple[View, Scalar]]) -> None:
    classes: dict[str, list[tuple[View, Scalar]]] = {}
    for view, scalar in holders:
        if scalar.value is None:
            against = next((other for other, one in holders if one.value is not None), view)
            detail = f"{scalar.file.name} does not hold it"
            report.add((name, "scalar"), view, against, DamagePattern("missing", detail, _place(scalar)))
        else:
            classes.setdefault(scalar.value, []).append((view, scalar))
    if len(classes) < 2:
        return
    states = [[all_intact([view.changed(one.file)]) for view, one in members] for members in classes.values()]
    right, basis = find_expected([len(members) for members in classes.values()], states)
    value, members = list(classes.items())[right]
    for found, wrong in classes.items():
        for view, scalar in wrong if found != value else ():
            detail = f"{found}, expected {value}"
            report.add((name, "scalar"), view, members[0][0], DamagePattern("scalar", detail, _place(scalar)), basis)


def _place(scalar: Scalar) -> list[PieceDamage]:
    return [PieceDamage.whole(Piece(scalar.file, scalar.owner, 1, _nothing))]


def _nothing() -> Tensor:
    raise FileNotFoundError


def _settle(findings: list[CheckpointMismatch], num_tensors: Mapping[Slot, int]) -> list[CheckpointMismatch]:
    """Give findings with one cause the same pattern.

    In a file of which most tensors hold another state, few differing elements are not damage: one step changes few bf16
    weights. If most tensors of a slot hold another state, the pattern is drift, not a shard's.
    ``num_tensors``: number of tensors compared in each slot.
    """
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
    return [
        replace(one, pattern="drift")
        if one.pattern == "shard"
        and 2 * len(drifted.get((one.checkpoint, one.slot), ())) > num_tensors.get(one.slot, 0)
        else one
        for one in findings
    ]
