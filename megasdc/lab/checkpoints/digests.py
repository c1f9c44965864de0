"""Comparison of manifests with digests: which blocks of which tensors differ, and on which node.

Files with equal digests are skipped. In the others, tensors are compared by name, block by block. The expected content
is that of most manifests; on a tie, that of files unchanged since they were saved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from megasdc.checkpoint.manifest import DIGEST_DIGITS, Content, TensorContent, parts_of
from megasdc.common.errors import CheckpointError
from megasdc.lab.checkpoints.digest import CheckpointContent, Digest, FileContent
from megasdc.lab.checkpoints.digest_report import BlockRange, DigestReport, FileDifference, What
from megasdc.lab.checkpoints.votes import MOST, find_expected

NO_BLOCKS = "blocks are not known: saved by a version that did not record them"


@dataclass(frozen=True)
class _Holder:
    """A file in one manifest."""

    label: str
    file: FileContent

    @property
    def intact(self) -> bool | None:
        return None if self.file.saved is None else self.file.saved == self.file.xxh3_128


def compare_digests(digests: Sequence[Digest]) -> DigestReport:
    """Compare two or more manifests.

    Args:
        digests: each of one checkpoint, under any folder name, or of a folder of several, compared by name.

    Raises:
        CheckpointError: they have no checkpoint in common.
    """
    report = DigestReport(list(digests), _labels(digests))
    single = all(len(digest.checkpoints) == 1 for digest in digests)
    by_name: dict[str, list[tuple[str, CheckpointContent]]] = {}
    for label, digest in zip(report.labels, digests, strict=True):
        for checkpoint in digest.checkpoints:
            by_name.setdefault("" if single else checkpoint.name, []).append((label, checkpoint))
    for name in sorted(by_name):
        found = by_name[name]
        if len(found) < len(digests):
            lacking = ", ".join(label for label in report.labels if label not in dict(found))
            report.notes.append(f"{name or 'a checkpoint without a name'} is not on {lacking}")
        if len(found) > 1:
            before = len(report.differences)
            _Comparison(report, name, found).run()
            report.checkpoints[name] = len(report.differences) == before
    if not report.checkpoints:
        listed = "; ".join(f"{one.label} has {', '.join(c.name for c in one.checkpoints)}" for one in digests)
        raise CheckpointError(f"no checkpoint is in two of them: {listed}")
    return report


def _labels(digests: Sequence[Digest]) -> list[str]:
    """Host and path of each; numbered where one occurs several times."""
    counts = Counter(digest.label for digest in digests)
    return [
        digest.label if counts[digest.label] == 1 else f"{digest.label} ({number})"
        for number, digest in enumerate(digests, 1)
    ]


class _Comparison:
    """The work of ``compare_digests`` for one checkpoint."""

    def __init__(self, report: DigestReport, name: str, found: list[tuple[str, CheckpointContent]]) -> None:
        self.report, self.name, self.found = report, name, found
        first = found[0][1]
        self.one_save = all(one.save_id == first.save_id is not None for _, one in found)
        self.elsewhere = self.outside = 0

    def run(self) -> None:
        """Compare all files."""
        files: dict[str, list[_Holder]] = {}
        for label, checkpoint in self.found:
            for file in checkpoint.files:
                files.setdefault(file.name, []).append(_Holder(label, file))
        self._name_lone_files(files)
        for name, holders in files.items():
            self._note_missing(name, holders)
            if len(holders) > 1:
                self.report.num_files += 1
                if len({holder.file.xxh3_128 for holder in holders}) > 1:
                    self._compare(holders)
        where = f"{self.name}: " if self.name else ""
        if self.elsewhere:
            self.report.notes.append(
                f"{where}{self.elsewhere:,} files are those of one node's ranks, on that node alone"
            )
        if self.outside:
            self.report.notes.append(
                f"{where}{self.outside:,} files differ in headers, configuration or global random generators alone"
            )

    def _name_lone_files(self, files: dict[str, list[_Holder]]) -> None:
        """Compare single files under one name, whatever their names are."""
        if len(files) == len(self.found) and all(len(one.files) == 1 for _, one in self.found):
            holders = [holder for one in files.values() for holder in one]
            files.clear()
            files[holders[0].file.name] = holders

    def _note_missing(self, name: str, holders: list[_Holder]) -> None:
        having = {holder.label for holder in holders}
        lacking = [(label, checkpoint) for label, checkpoint in self.found if label not in having]
        if lacking and self.one_save and all(checkpoint.per_node for _, checkpoint in self.found):
            self.elsewhere += 1
            return
        basis = MOST if len(holders) > len(lacking) else ""
        for label, _ in lacking:
            self._add("missing", "", (_Holder(label, holders[0].file), holders[0]), basis, f"{name} is not there")

    def _compare(self, holders: list[_Holder]) -> None:
        """Compare one file whose bytes differ between manifests."""
        before = len(self.report.differences)
        contents = [holder.file.content for holder in holders]
        known = [content for content in contents if content is not None]
        unlike = len({content.block_bytes for content in known}) > 1
        if len(known) < len(contents) or unlike:
            detail = "blocks are of different sizes: make the manifests with one version" if unlike else NO_BLOCKS
            self._bytes(holders, "bytes", detail)
            return
        tensors = [{one.name: one for one in content.tensors} for content in known]
        for name in dict.fromkeys(name for one in tensors for name in one):
            self._compare_tensor(holders, name, [one.get(name) for one in tensors])
        for name in dict.fromkeys(name for content in known for name in content.values):
            values = [content.values.get(name) for content in known]
            for wrong, right, basis in _wrong(holders, values):
                detail = f"{values[wrong]}, expected {values[right]}"
                self._add("value", name, (holders[wrong], holders[right]), basis, detail)
        rests = [content.rest for content in known]
        for wrong, right, basis in _wrong(holders, rests):
            if holders[wrong].file.problem is None and holders[right].file.problem is None:
                self._add("values", "", (holders[wrong], holders[right]), basis, "")
        if len(self.report.differences) == before and (self.one_save or None in rests):
            self._bytes(holders, "bytes" if None in rests else "outside", "")
        elif len(self.report.differences) == before:
            self.outside += 1

    def _bytes(self, holders: list[_Holder], what: What, detail: str) -> None:
        for wrong, right, basis in _wrong(holders, [holder.file.xxh3_128 for holder in holders]):
            self._add(what, "", (holders[wrong], holders[right]), basis, detail)

    def _compare_tensor(self, holders: list[_Holder], name: str, found: list[TensorContent | None]) -> None:
        keys = [None if one is None else (one.type, one.blocks) for one in found]
        for wrong, right, basis in _wrong(holders, keys):
            got, expected, pair = found[wrong], found[right], (holders[wrong], holders[right])
            file = pair[0].file
            if got is None or expected is None:
                which = f"{file.name} {'does not hold' if got is None else 'holds'} {name or 'bytes alone'}"
                self._add("missing", name, pair, basis, which)
            elif got.type != expected.type and got.name:
                self._add("type", name, pair, basis, f"{got.type}, expected {expected.type}")
            else:
                assert file.content is not None, "files without blocks are not compared inside"
                detail = f"{got.size_bytes} bytes, expected {expected.size_bytes}" if got.type != expected.type else ""
                ranges = list(_ranges(file.name, got, expected, file.content))
                count = len(differing_blocks(got, expected))
                self._add("blocks", name, pair, basis, detail, count=count, ranges=ranges)

    def _add(
        self,
        what: What,
        name: str,
        pair: tuple[_Holder, _Holder],
        basis: str,
        detail: str,
        *,
        count: int = 0,
        ranges: list[BlockRange] | None = None,
    ) -> None:
        wrong, right = pair
        problem = wrong.file.problem or ""
        self.report.differences.append(
            FileDifference(
                checkpoint=self.name,
                file=wrong.file.name,
                name=name,
                what=what,
                digest=wrong.label,
                against=right.label,
                basis=basis,
                detail="; ".join(filter(None, (detail, problem if what != "missing" else ""))),
                rank=wrong.file.rank,
                node=wrong.file.node,
                unchanged=None if what == "missing" and not name else wrong.intact,
                num_blocks=count,
                ranges=ranges or [],
            )
        )


def _wrong(holders: list[_Holder], keys: Sequence[Hashable]) -> Iterator[tuple[int, int, str]]:
    """Yield for each holder with an unexpected key: its index, the index of an expected holder, and the basis."""
    classes: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        classes.setdefault(key, []).append(place)
    if len(classes) < 2:
        return
    groups = list(classes.values())
    states = [[holders[place].intact for place in group] for group in groups]
    best, basis = find_expected([len(group) for group in groups], states)
    for group in groups:
        for place in group if group is not groups[best] else ():
            yield place, groups[best][0], basis


def differing_blocks(got: TensorContent, expected: TensorContent) -> list[int]:
    """Numbers of the blocks in which two tensors differ, ascending."""
    count = max(len(got.blocks), len(expected.blocks)) // DIGEST_DIGITS
    return [number for number in range(count) if got.block(number) != expected.block(number)]


def _ranges(file: str, got: TensorContent, expected: TensorContent, content: Content) -> Iterator[BlockRange]:
    """Runs of adjacent differing blocks, as byte ranges of the file and element ranges of the tensor."""
    runs: list[list[int]] = []
    for number in differing_blocks(got, expected):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = list(parts_of(file, got, content))
    for first, last in runs:
        start, end = first * content.block_bytes, max(got.size_bytes, expected.size_bytes)
        end = min((last + 1) * content.block_bytes, end)
        elements = None
        if got.dtype is not None and got.name:
            elements = (start // got.dtype.itemsize, -(-end // got.dtype.itemsize) - 1)
        inside = [
            f"{fqn}/{slot}"
            for fqn, slot, begin, numel in parts
            if fqn and (elements is None or (begin <= elements[1] and begin + numel > elements[0]))
        ]
        yield BlockRange((got.offset + start, got.offset + end - 1), elements, inside)
