"""Pulling a checkpoint out of an archive: bit for bit as it was pushed, or not at all.

Files are put together in a folder with a temporary name. What a killed pull left there is read again and its digests
compared, so that only what is missing is fetched. The folder gets its final name when every file has its checksum and
every pickle was checked.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megasdc.checkpoint.files import LATEST_FILE, MANIFEST_FILE, VERIFIED_FILE, hash_file, list_steps, step_folder
from megasdc.checkpoint.manifest import Manifest, read_manifest, write_marker
from megasdc.checkpoint.verify import verify_checkpoint
from megasdc.common.durable import TEMPORARY_PREFIX, rename_durably, sync_path, write_durably
from megasdc.common.errors import CheckpointError, StorageError
from megasdc.common.origin import read_identity
from megasdc.common.program import FULL, bytes_bar
from megasdc.ops.archive.block import LARGEST_STORED, block_name, decode_block
from megasdc.ops.archive.cut import BlockPiece
from megasdc.ops.archive.entries import ArchivedStep, list_names, read_entry
from megasdc.ops.archive.record import ArchivedFile, Part, block_file, open_archive, part_name
from megasdc.ops.archive.store import Store

logger = logging.getLogger(__name__)
WORKERS = 4
_SPARE_BYTES = 1 << 20
_TOLD = 10


@dataclass
class PullReport:
    """Result of a pull; ``kept_bytes``: that an earlier pull had left; ``quantized``: as text, None: every bit."""

    address: str
    run: str
    step: int
    part: str
    path: str
    size_bytes: int
    kept_bytes: int = 0
    quantized: str | None = None
    duration_s: float = 0.0

    def render(self) -> str:
        """The report as text."""
        kept = f", {self.kept_bytes / 1e6:.1f} MB of it there before" if self.kept_bytes else ""
        kind = f"{self.quantized}: it does not continue its run bit for bit" if self.quantized else "every bit as saved"
        return (
            f"{self.path}: step {self.step} of {self.run} ({self.part}), {self.size_bytes / 1e6:.1f} MB{kept}, in "
            f"{self.duration_s:.1f} s; {kind}"
        )


def pull_checkpoint(
    address: str,
    out: Path | str,
    *,
    run: str | None = None,
    step: int | None = None,
    node: str | None = None,
    accept_quantized: bool = False,
    workers: int = WORKERS,
    progress: bool = False,
) -> PullReport:
    """Pull one checkpoint into a folder of checkpoints.

    Args:
        out: the folder, created if absent; the checkpoint is ``step_NNNNNNNN`` in it.
        run: None: the only run of the archive, which must be the one whose folder this is, if it is that of a run.
        step: None: the newest that is complete and undamaged.
        node: of node-local storage, whose files are wanted; None: this host.
        accept_quantized: pull one with quantized moments.
        workers: threads that fetch and decompress.
        progress: draw a bar on standard error where it is a terminal.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged or quantized, or another one or another run lies
            there.
        StorageError: the archive cannot be read, or the folder not written. What was fetched is found by the next pull.
    """
    started = time.monotonic()
    store = open_archive(address)
    part = _choose_part(choose_entry(store, run, step), node)
    if part.quantized is not None and not accept_quantized:
        raise CheckpointError(
            f"step {part.step} of {part.run} in {store.address} has {part.quantized}: it does not continue its run bit "
            "for bit. Pull it with --accept-quantized if that is what you want"
        )
    if run is None:
        _check_run(Path(out), part.run)
    final = Path(out) / step_folder(part.step)
    report = PullReport(store.address, part.run, part.step, part.name, str(final), part.size_bytes)
    report.quantized = None if part.quantized is None else str(part.quantized)
    try:
        if final.exists():
            _compare_present(final, part)
            report.kept_bytes = part.size_bytes
        else:
            report.kept_bytes = _Pull(store, part, final, workers, progress).run()
    except OSError as error:
        remedy = "free space" if error.errno in FULL else "check the folder and the rights on it"
        raise StorageError(
            f"{error.filename or final} cannot be written: {error.strerror or error}; {remedy}, and pull again: what "
            "is there is kept"
        ) from error
    report.duration_s = time.monotonic() - started
    return report


def _check_run(folder: Path, run: str) -> None:
    """Refuse to put a checkpoint into the folder of another run, which would go on from it."""
    there = read_identity(folder.resolve().parent)
    if there is not None and there.run != run:
        raise CheckpointError(
            f"{folder.resolve().parent} is the folder of run {there.run}, and the archive has {run}: pull it into "
            f"another folder, or name it with --run {run} to put it there all the same"
        )


def choose_entry(store: Store, run: str | None, step: int | None) -> ArchivedStep:
    """The step of an archive that is asked for.

    Raises:
        CheckpointError: there is none, or it is damaged, or there are several runs and none is named.
    """
    names = list_names(store, run).parts
    runs = sorted({key[0] for key in names})
    if not runs:
        of_run = "" if run is None else f" of run {run}"
        raise CheckpointError(f"{store.address} holds no checkpoint{of_run}; see megasdc archive list {store.address}")
    if len(runs) > 1:
        raise CheckpointError(f"{store.address} holds {len(runs)} runs, {', '.join(runs)}: name one with --run")
    steps = [number for _, number in names]
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps[-_TOLD:]))
        raise CheckpointError(f"{store.address} holds no step {step} of {runs[0]}; there are (newest last) {there}")
    for number in reversed(steps) if step is None else [step]:
        entry = read_entry(store, runs[0], number, names[runs[0], number])
        if not entry.problems:
            return entry
        if step is not None:
            raise CheckpointError(f"step {step} of {runs[0]} cannot be pulled: {'; '.join(entry.problems)}")
        logger.warning("step %d is passed over: %s", number, "; ".join(entry.problems))
    raise CheckpointError(f"no step of {runs[0]} in {store.address} is complete and undamaged")


def _choose_part(entry: ArchivedStep, node: str | None) -> Part:
    nodes = next(iter(entry.parts.values())).nodes
    if not nodes and node is not None:
        raise CheckpointError(f"step {entry.step} of {entry.run} is of shared storage: pull it without --node")
    wanted = part_name((node or socket.gethostname()) if nodes else None)
    if wanted not in entry.parts:
        raise CheckpointError(
            f"step {entry.step} of {entry.run} has no part of node {wanted.removeprefix('node-')}: name one of its "
            f"nodes with --node: {', '.join(nodes)}"
        )
    return entry.parts[wanted]


def _compare_present(final: Path, part: Part) -> None:
    """CheckpointError if what lies there is not this part, whole."""
    report = verify_checkpoint(final)
    names = {file.name: file for file in part.files}
    same = report.ok and hash_file(final / MANIFEST_FILE) == names[MANIFEST_FILE].xxh3_128
    if not same:
        what = "another checkpoint" if report.ok else f"a damaged one ({report.problems[0]})"
        raise CheckpointError(f"{final} is there already, and is {what}: choose another --out, or move it away")


@dataclass
class _Pull:
    """One pull of a part."""

    store: Store
    part: Part
    final: Path
    workers: int
    progress: bool

    @property
    def scratch(self) -> Path:
        """Folder under the temporary name; the checkpoint lies in it under its own, as its checks want it."""
        return self.final.with_name(f"{TEMPORARY_PREFIX}pull_{self.part.save_id}_{self.final.name}")

    def run(self) -> int:
        """Fetch, check, and give the final name; returns the bytes that were there before."""
        folder = self.scratch / self.final.name
        folder.mkdir(parents=True, exist_ok=True)
        self._check_room(folder)
        bar = bytes_bar(self.final.name, self.part.size_bytes, quiet=not self.progress)
        with bar as advance, ThreadPoolExecutor(self.workers, thread_name_prefix="pull") as pool:
            kept = [self._fetch_file(folder, file, pool, advance) for file in self.part.files]
        manifest = self._check(folder)
        if manifest.node is not None:
            write_marker(folder, manifest)
        report = verify_checkpoint(folder)
        if not report.ok:
            shutil.rmtree(self.scratch)
            raise CheckpointError(f"what was pulled is refused and removed: {'; '.join(report.problems[:5])}")
        sync_path(folder)
        rename_durably(folder, self.final)
        self.scratch.rmdir()
        if list_steps(self.final.parent)[-1] == self.part.step:
            write_durably(self.final.parent / LATEST_FILE, self.final.name + "\n")
        return sum(kept)

    def _check_room(self, folder: Path) -> None:
        """StorageError if the files cannot fit on the disk."""
        there = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        needed, free = self.part.size_bytes - there + _SPARE_BYTES, shutil.disk_usage(folder).free
        if needed > free:
            raise StorageError(
                f"{folder.parent.parent} has {free / 1e6:.1f} MB free, step {self.part.step} needs "
                f"{needed / 1e6:.1f} MB more: free space, or choose another --out"
            )

    def _fetch_file(
        self, folder: Path, file: ArchivedFile, pool: ThreadPoolExecutor, advance: Callable[[int], None]
    ) -> int:
        """Fetch one file's blocks that are not there; returns the bytes that were."""
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        kept = 0
        try:
            size = os.fstat(descriptor).st_size
            if size != file.size_bytes:
                os.truncate(descriptor, file.size_bytes)

            def fetch(digest: str, piece: BlockPiece) -> int:
                there = _holds(descriptor, digest, piece, size)
                if not there:
                    self._fetch(descriptor, digest, piece, path)
                advance(piece.size_bytes)
                return piece.size_bytes if there else 0

            futures = [pool.submit(fetch, *one) for one in file.pieces()]
            try:
                kept = sum(future.result() for future in futures)
            except BaseException:
                for future in futures:
                    future.cancel()
                for future in futures:
                    if not future.cancelled():
                        future.exception()
                raise
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return kept

    def _fetch(self, descriptor: int, digest: str, piece: BlockPiece, path: Path) -> None:
        name = block_file(digest)
        stored = self.store.read(name, LARGEST_STORED)
        who = f"{self.store.address}/{name}, a block of {path.name} of step {self.part.step} of {self.part.run},"
        remedy = "see megasdc archive verify, and pull another step"
        if stored is None:
            raise CheckpointError(f"{who} is missing; {remedy}")
        try:
            raw = memoryview(decode_block(stored, digest, piece.size_bytes))
        except CheckpointError as error:
            raise CheckpointError(f"{who} {error}; {remedy}") from error
        for offset, size in piece.parts:
            _write(descriptor, raw[:size], offset, path)
            raw = raw[size:]

    def _check(self, folder: Path) -> Manifest:
        """The manifest that was pulled, if it is of this part; CheckpointError else."""
        manifest = read_manifest(folder)
        known = {file.name: (file.size_bytes, file.xxh3_128) for file in self.part.files}
        expected = {record.name: (record.size_bytes, record.xxh3_128) for record in manifest.files}
        bits = None if self.part.quantized is None else self.part.quantized.bits
        same = (manifest.step, manifest.save_id, manifest.node, manifest.quantized_moments_bits)
        extra = known.keys() - expected.keys() - {MANIFEST_FILE, VERIFIED_FILE}
        whole = expected.items() <= known.items() and not extra
        if same != (self.part.step, self.part.save_id, self.part.node, bits) or not whole:
            raise CheckpointError(f"{self.store.address}: the manifest of step {self.part.step} is of other files")
        for file in self.part.files:
            if file.name not in expected and hash_file(folder / file.name) != file.xxh3_128:
                raise CheckpointError(f"{self.store.address}: {file.name} of step {self.part.step} is another file")
        return manifest


def _holds(descriptor: int, digest: str, piece: BlockPiece, size: int) -> bool:
    """Whether a file of this size already has a block's bytes in their places."""
    if any(offset + count > size for offset, count in piece.parts):
        return False
    return block_name(b"".join(_read(descriptor, piece.parts))) == digest


def _read(descriptor: int, parts: Sequence[tuple[int, int]]) -> list[bytes]:
    return [os.pread(descriptor, size, offset) for offset, size in parts]


def _write(descriptor: int, data: memoryview, offset: int, path: Path) -> None:
    try:
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror, str(path)) from error
