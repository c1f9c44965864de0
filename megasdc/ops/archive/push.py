"""Pushing a checkpoint into an archive: blocks that are not there yet, then the record of its files.

A push that was killed left blocks and no record; the next one finds them by name and stores the others. Archives that
need not give every bit back receive a copy of the checkpoint with moments of 8 bits.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import struct
import tempfile
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

from megasdc.checkpoint.files import (
    MANIFEST_FILE,
    VERIFIED_FILE,
    hash_file,
    list_steps,
    read_lock,
    step_folder,
    step_of,
)
from megasdc.checkpoint.manifest import FileRecord, Manifest, describe_file, has_marker, read_manifest, write_manifest
from megasdc.checkpoint.verify import check_file, reading
from megasdc.common.errors import CheckpointError, ConfigError
from megasdc.common.origin import read_identity
from megasdc.common.program import bytes_bar, why_unreadable
from megasdc.ops.archive.block import BLOCK_BYTES, block_name, encode_block
from megasdc.ops.archive.cut import Cutter, TypedRange, find_ranges
from megasdc.ops.archive.entries import read_part
from megasdc.ops.archive.lease import pushing
from megasdc.ops.archive.moments import MomentError, dequantize, quantize
from megasdc.ops.archive.record import (
    BLOCKS,
    FORMAT_VERSION,
    ArchivedFile,
    Part,
    Quantized,
    Span,
    block_file,
    check_name,
    open_archive,
    part_file,
    part_name,
    receipt_file,
    receipt_of,
    text_of,
)
from megasdc.ops.archive.store import Store

BITS: Literal[8] = 8
_CHUNK_BYTES = 1 << 22
_LOCAL, _CENTRAL = struct.Struct("<26x2H"), struct.Struct("<4s24x3H")
_LOCAL_BYTES, _CENTRAL_BYTES = 30, 46
_CRC_PLACE = 16


def quantize_checkpoint(folder: Path, manifest: Manifest, target: Path) -> tuple[Manifest, Quantized]:
    """Write a checkpoint's files with quantized moments into a new folder; its other files become links there.

    Returns:
        The manifest of the copy, which says so, and the error.

    Raises:
        CheckpointError: there are no moments of float32, or they are not finite, or a file is damaged.
    """
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file() and path.name != MANIFEST_FILE:
            (target / path.name).symlink_to(path.resolve())
    error = MomentError()
    records = [_quantize_file(folder, record, target, error) for record in manifest.files]
    if records == manifest.files:
        raise CheckpointError(f"{folder} has no moments of float32 that could be quantized: push it without")
    made = manifest.model_copy(update={"files": records, "quantized_moments_bits": BITS})
    write_manifest(target, made)
    return made, Quantized(bits=BITS, largest_error=error.largest, mean_error=error.mean)


def _quantize_file(folder: Path, record: FileRecord, target: Path, error: MomentError) -> FileRecord:
    """Write one file with quantized moments, if it has any; returns the record of what lies in ``target``."""
    ranges = [one for one in find_ranges(record.name, record.content) if one.moment is not None]
    if not ranges:
        return record
    copy = target / record.name
    copy.unlink()
    shutil.copyfile(folder / record.name, copy)
    with open(copy, "r+b", buffering=0) as file:
        for one in ranges:
            _quantize_range(file, one, copy.name, error)
        _renew_checksums(file, ranges)
    return describe_file(target, record.name, rank=record.rank, node=record.node, tensors=record.tensors)


def _quantize_range(file: BinaryIO, one: TypedRange, name: str, error: MomentError) -> None:
    """Replace the numbers of one range by what their codes stand for, block by block as they are archived."""
    import numpy as np

    assert one.moment is not None, "only ranges of moments come here"
    for place in range(one.offset, one.offset + one.size_bytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, one.offset + one.size_bytes - place)
        file.seek(place)
        raw = file.read(size)
        try:
            found = dequantize(quantize(raw, one.moment), size // 4, one.moment)
        except ValueError as problem:
            raise CheckpointError(f"{name}: {problem}: its moments cannot be quantized, push it without") from problem
        error.add(np.frombuffer(raw, "<f4"), np.frombuffer(found, "<f4"))
        file.seek(place)
        file.write(found)


def _renew_checksums(file: BinaryIO, ranges: Sequence[TypedRange]) -> None:
    """Write the CRC-32 of changed members of a zip file anew: behind their data, and in the central directory."""
    with zipfile.ZipFile(file) as members:
        infos, central = members.infolist(), members.start_dir
    for info in infos:
        file.seek(central)
        _, name, extra, comment = _CENTRAL.unpack(file.read(_CENTRAL.size))
        file.seek(info.header_offset)
        start = info.header_offset + _LOCAL_BYTES + sum(_LOCAL.unpack(file.read(_LOCAL.size)))
        end = start + info.file_size
        if any(start <= one.offset < end for one in ranges):
            crc = 0
            for data in _read(file, start, end):
                crc = zlib.crc32(data, crc)
            file.seek(end)
            if file.read(4) == b"PK\x07\x08":
                file.write(struct.pack("<I", crc))
            file.seek(central + _CRC_PLACE)
            file.write(struct.pack("<I", crc))
        central += _CENTRAL_BYTES + name + extra + comment


def _read(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    while start < end:
        data = file.read(min(_CHUNK_BYTES, end - start))
        start += len(data)
        yield data


logger = logging.getLogger(__name__)
WORKERS = 4


@dataclass
class PushReport:
    """Result of a push.

    Attributes:
        size_bytes: of all files.
        new_blocks: blocks that were stored; ``new_bytes``: of their originals; ``stored_bytes``: as they are stored.
        known_blocks: blocks that were there; ``known_bytes``: of their originals.
        already: whether the step was there, and only what was missing of it was stored.
        quantized: as text; None: every bit is as it was saved.
    """

    address: str
    run: str
    step: int
    part: str
    size_bytes: int = 0
    new_blocks: int = 0
    new_bytes: int = 0
    stored_bytes: int = 0
    known_blocks: int = 0
    known_bytes: int = 0
    already: bool = False
    quantized: str | None = None
    duration_s: float = 0.0

    def render(self) -> str:
        """The report as text."""
        state = "is already there" if self.already else "is archived"
        kind = f"; {self.quantized}" if self.quantized else ""
        known = f"{self.known_blocks} ({self.known_bytes / 1e6:.1f} MB) there before"
        return (
            f"step {self.step} of {self.run} ({self.part}) {state} in {self.address}: {self.size_bytes / 1e6:.1f} MB; "
            f"of {self.new_blocks + self.known_blocks} blocks {known}, {self.new_blocks} stored as "
            f"{self.stored_bytes / 1e6:.1f} MB; {self.duration_s:.1f} s{kind}"
        )


@dataclass(frozen=True)
class PushedCheckpoint:
    """A checkpoint to push.

    ``folder`` has the files, by the records of ``manifest``; ``others``: names of further files; ``quantized``: None:
    it is as it was saved.
    """

    folder: Path
    manifest: Manifest
    others: list[str]
    quantized: Quantized | None = None


def push_checkpoint(
    path: Path | str,
    address: str,
    *,
    run: str | None = None,
    quantize_bits: int | None = None,
    workers: int = WORKERS,
    progress: bool = False,
) -> PushReport:
    """Push one checkpoint.

    Args:
        path: the checkpoint, or a folder of several: the newest complete one.
        address: of the archive; made if it is empty.
        run: id of the run; None: that of the run folder in which the checkpoint lies.
        quantize_bits: 8: the moments are quantized; None: nothing is.
        workers: threads that compress and write.
        progress: draw a bar on standard error where it is a terminal.

    Raises:
        CheckpointError: it is not complete, damaged, being deleted, or the archive holds this step of the run with
            other content.
        ConfigError: the address is refused, or the run is not known.
        StorageError: the archive cannot be read or written. What was stored is found by the next push.
    """
    started = time.monotonic()
    folder = find_pushed_checkpoint(Path(path))
    name = check_name(run or _run_of(folder), "the id of a run")
    with contextlib.ExitStack() as stack:
        stack.enter_context(read_lock(folder))
        manifest = read_manifest(folder)
        if not has_marker(folder, manifest):
            raise CheckpointError(f"{folder} is not complete: not every node finished the save; push another step")
        if manifest.quantized_moments_bits is not None:
            raise CheckpointError(f"{folder} has quantized moments, from an archive: push what it was made from")
        stack.enter_context(reading(folder, manifest.save_id))
        # What the content of the files is worth is known only when all are read; the rest before anything is stored.
        for record in manifest.files:
            for problem in check_file(folder, record, manifest, checksums=False):
                raise CheckpointError(f"{folder}: {problem}: {_DAMAGED}")
        store = open_archive(address, create=True)
        part = part_name(None if manifest.node is None else check_name(manifest.node, "the name of a node"))
        report = PushReport(store.address, name, manifest.step, part)
        others = [file for file in (MANIFEST_FILE, VERIFIED_FILE) if (folder / file).is_file()]
        source = PushedCheckpoint(folder, manifest, others)
        if quantize_bits is not None:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megasdc_")))
            made, error = quantize_checkpoint(folder, manifest, scratch / folder.name)
            source = PushedCheckpoint(scratch / folder.name, made, others, error)
            report.quantized = str(error)
        stack.enter_context(pushing(store, f"the push of step {manifest.step} of {name}", logger.warning))
        _Push(store, source, report, workers, progress).run()
    report.duration_s = time.monotonic() - started
    return report


def find_pushed_checkpoint(path: Path) -> Path:
    """The checkpoint at a path, or the newest complete one in it; CheckpointError if there is none."""
    if problem := why_unreadable(path, missing=True):
        raise CheckpointError(f"{path} {problem}")
    if step_of(path) is not None or (path / MANIFEST_FILE).exists():
        return path
    for step in reversed(list_steps(path)):
        folder = path / step_folder(step)
        try:
            if has_marker(folder, read_manifest(folder)):
                return folder
        except CheckpointError as error:
            logger.warning("the checkpoint of step %d is passed over: %s", step, error)
    raise CheckpointError(f"{path} is neither a checkpoint of a run (step_NNNNNNNN) nor holds a complete one")


def _run_of(folder: Path) -> str:
    """Id of the run in whose folder a checkpoint lies: two folders up, or one."""
    for place in folder.resolve().parents[:2]:
        if (found := read_identity(place)) is not None:
            return found.run
    raise ConfigError(f"{folder} lies in no run folder with a run.json: name the run with --run ID")


@dataclass
class _Push:
    """One push of a source into a store."""

    store: Store
    source: PushedCheckpoint
    report: PushReport
    workers: int
    progress: bool
    known: set[str] = field(default_factory=set)
    waiting: deque[Future[int]] = field(default_factory=deque)

    def run(self) -> None:
        """Store what is missing, and then the record; look once more whether all blocks are there."""
        before = self._before()
        self.known = _blocks_of(self.store)
        if before is not None and (blocks := before.blocks()).keys() <= self.known:
            self.report.already = True
            self.report.size_bytes = before.size_bytes
            self.report.known_blocks, self.report.known_bytes = len(blocks), sum(blocks.values())
            return
        part = self._store_files()
        if before is None:
            self._commit(part)
        # A prune that took this push for dead may have removed some; from here on none does.
        self.known = _blocks_of(self.store)
        if lost := (before or part).blocks().keys() - self.known:
            logger.warning("%d blocks were removed meanwhile, they are stored again", len(lost))
            self._store_files()

    def _commit(self, part: Part) -> None:
        """Write the record and its receipt; CheckpointError if another push of this step does so too."""
        key, stored = (part.run, part.step, part.name), text_of(part)
        self.store.write(part_file(*key), stored)
        self.store.write(receipt_file(*key), text_of(receipt_of(part, stored)))
        if (found := read_part(self.store, key)) != part:
            raise self._conflict(found)

    def _before(self) -> Part | None:
        """The same part, if it is in the archive; one whose record is damaged is written anew."""
        key = (self.report.run, self.report.step, self.report.part)
        try:
            before = read_part(self.store, key)
        except CheckpointError as error:
            if self.store.read(part_file(*key), 0) is not None:
                logger.warning("%s; it is written again", error)
            return None
        content = {record.name: record.xxh3_128 for record in self.source.manifest.files}
        if before.quantized != self.source.quantized or before.content() != content:
            raise self._conflict(before)
        return before

    def _conflict(self, before: Part) -> CheckpointError:
        kind = f" with {before.quantized}" if before.quantized else ""
        return CheckpointError(
            f"{self.store.address} holds step {before.step} of {before.run} ({before.name}) with other content (save "
            f"{before.save_id}{kind}; this is save {self.source.manifest.save_id}); nothing was replaced. Use another "
            f"archive, or remove that step first: megasdc archive prune ADDRESS --run {before.run} --step {before.step}"
        )

    def _store_files(self) -> Part:
        """Store all blocks that are not known, and return the record."""
        folder, manifest = self.source.folder, self.source.manifest
        records: list[FileRecord | str] = [*manifest.files, *self.source.others]
        sizes = {name: (folder / name).stat().st_size for name in map(_name_of, records)}
        self.report.size_bytes = sum(sizes.values())
        bar = bytes_bar(folder.name, self.report.size_bytes, quiet=not self.progress)
        with bar as advance, ThreadPoolExecutor(self.workers, thread_name_prefix="push") as pool:
            try:
                files = [self._store_file(record, sizes[_name_of(record)], pool, advance) for record in records]
                self._wait_for_blocks(0)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return Part(
            format_version=FORMAT_VERSION,
            run=self.report.run,
            step=manifest.step,
            node=manifest.node,
            nodes=sorted(manifest.nodes) if manifest.node is not None else [],
            save_id=manifest.save_id,
            time=time.time(),
            layout=str(manifest.layout),
            quantized=self.source.quantized,
            not_finite=manifest.not_finite,
            finite_step=manifest.finite_step,
            wrong_place=manifest.wrong_place,
            files=sorted(files, key=lambda file: file.name),
        )

    def _store_file(
        self, record: FileRecord | str, size: int, pool: ThreadPoolExecutor, advance: Callable[[int], None]
    ) -> ArchivedFile:
        name = _name_of(record)
        path = self.source.folder / name
        expected = hash_file(path) if isinstance(record, str) else record.xxh3_128
        ranges = [] if isinstance(record, str) else find_ranges(name, record.content)
        digests: dict[int, str] = {}
        with open(path, "rb") as file:
            cutter = Cutter(file, size, ranges)
            try:
                for number, raw, place in cutter.blocks():
                    digests[number] = digest = block_name(raw)
                    self._store_block(digest, raw, place, pool)
                    advance(len(raw))
            except EOFError as error:
                raise CheckpointError(f"{path}: {error}: {_DAMAGED}") from error
        if cutter.digest != expected:
            raise CheckpointError(f"{path} has checksum {cutter.digest}, written was {expected}: {_DAMAGED}")
        return ArchivedFile(
            name=name,
            size_bytes=size,
            xxh3_128=expected,
            spans=[Span(offset=one.offset, size_bytes=one.size_bytes) for one in ranges],
            blocks="".join(digests[number] for number in sorted(digests)),
        )

    def _store_block(self, digest: str, raw: bytes, place: TypedRange | None, pool: ThreadPoolExecutor) -> None:
        if digest in self.known:
            self.report.known_blocks += 1
            self.report.known_bytes += len(raw)
            return
        self.known.add(digest)
        self.report.new_blocks += 1
        self.report.new_bytes += len(raw)
        moment = place.moment if place is not None and self.source.quantized is not None else None
        width = 1 if place is None else place.width
        self._wait_for_blocks(2 * self.workers)

        def store() -> int:
            stored = encode_block(raw, width, moment)
            self.store.write(block_file(digest), stored)
            return len(stored)

        self.waiting.append(pool.submit(store))

    def _wait_for_blocks(self, most: int) -> None:
        """Wait until at most so many blocks are being stored; raises what one raised."""
        while len(self.waiting) > most:
            self.report.stored_bytes += self.waiting.popleft().result()


_DAMAGED = "the checkpoint is damaged, see `megasdc verify-checkpoint`; push another step"


def _name_of(record: FileRecord | str) -> str:
    return record if isinstance(record, str) else record.name


def _blocks_of(store: Store) -> set[str]:
    """Names of all blocks that are there."""
    return {name.rpartition("/")[2] for name in store.sizes(BLOCKS)}
