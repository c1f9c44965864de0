"""Saves on the disk: the state is captured, and written while training waits, or beside training.

``DiskSaver``: one save at a time, in stages on which all ranks agree at the ends of steps. Beside training a save
begins with a snapshot: the state is copied into shared memory, and while training goes on a process of each rank writes
the snapshot's files. Once all have, the leader of each folder gives it its final name, then (node-local storage) its
marker, then moves ``latest`` and deletes old checkpoints. A rank that has a problem ends the save of all; the
checkpoint before stays, and training goes on. ``save_checkpoint`` goes through the same stages while training waits:
each rank writes its files itself (``OwnWriter``), without a copy in between.

``Snapshot``: files of one rank in shared memory, laid out as on the disk. Parameters and moments do not change between
the optimizer's update and the next one. So a thread copies them while the next forward and backward passes run, and the
update waits for it. Before a tensor is copied its checksum is computed in place; whoever uses the snapshot later
compares it with the copy. Each file's tensors are also searched for NaN and Inf.

``capture_engine``: the files of a save before any byte is copied: pickles, and the tensors that they refer to.
``why_not``: whether the hosts' memory has room for snapshots.
"""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import pickle
import shutil
import socket
import threading
import time
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megasdc.checkpoint.files import LATEST_FILE, MANIFEST_FILE, MARKER_FILE, layer_of, rank_state_file, step_folder
from megasdc.checkpoint.manifest import SHARED_STATE_FILE, FileRecord
from megasdc.checkpoint.ranks import CheckpointGroup, FolderRanks, RankProblem, describe_error, find_place
from megasdc.checkpoint.records import record_text
from megasdc.checkpoint.save import (
    Retention,
    SavedState,
    SaveJob,
    SaveResult,
    WrittenFiles,
    describe_engine,
    describe_tensors,
    finish_save,
    list_due,
    refuse_decoupled,
    shared_state_text,
    with_plain_stage,
    wrapped_writer,
)
from megasdc.checkpoint.writer_main import act, describe_stored, explain
from megasdc.checkpoint.writer_process import (
    Act,
    FileLayout,
    StoredFile,
    StoreTask,
    TakenFile,
    Task,
    TaskResult,
    WriterProcess,
    directory,
    lay_out,
    local_header,
)
from megasdc.common.durable import sync_path, write_durably
from megasdc.common.errors import MegasdcError, StorageError
from megasdc.common.host import SNAPSHOT_SHARE, free_memory, shared_folder
from megasdc.parallel.collectives import MIN, Field, StepAgreement, gather_objects
from megasdc.parallel.dims import ParallelDims
from megasdc.tensors.bits import are_finite
from megasdc.tensors.checksum import default_algorithm, read_back

logger = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass
class _Save:
    """The save under way.

    Attributes:
        started: start of the save on the monotonic clock.
        texts: content of files besides those of the snapshot, by name, on the leader of a folder.
        stages: methods that begin the stages that follow; the first is called when all ranks have finished this one.
        stalled_s: seconds in which training stood still.
        answer: result of this rank's writer in this stage; None: the writer is not done.
        problem: this rank's problem; None: it has none.
        written: files of this rank; once all ranks have written theirs, the files of all.
        due: steps of the checkpoints that the leader deletes.
        saved: whether the checkpoint is complete, whatever follows.
    """

    job: SaveJob
    started: float
    texts: dict[str, str]
    stages: list[Callable[[_Save], None]]
    stalled_s: float = 0.0
    answer: TaskResult | None = None
    problem: RankProblem | None = None
    written: WrittenFiles = field(default_factory=WrittenFiles)
    due: list[int] = field(default_factory=list)
    saved: bool = False


class DiskSaver:
    """Saves checkpoints into a folder.

    All methods but ``wait_for_copy`` and ``close`` are collective: all ranks of the world.

    Args:
        folder: folder of the checkpoints; created if absent.
        dims: this rank's position in the layout.
        device: device of the run's tensors, which are copied and written beside training; None: training waits for a
            save, see ``save_checkpoint``.
        keep: rules by which older checkpoints are kept; None: all are kept.

    Attributes:
        fields: values that all ranks reduce in each step: whether the stage is done, and whether a rank has a problem.
        failed: number of saves that failed, without those whose checkpoint is complete.
        no_room: whether the last failed save had no room; the same on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        dims: ParallelDims,
        ranks: CheckpointGroup,
        device: torch.device | None,
        keep: Retention | None = None,
    ) -> None:
        self.folder, self._dims, self._keep = folder, dims, keep or Retention()
        self._place = find_place(ranks)
        self._snapshot = None if device is None else Snapshot(device)
        self._writer = OwnWriter() if device is None else WriterProcess(describes=True)
        self._save: _Save | None = None
        self._begun = 0
        self.failed = 0
        self.no_room = False
        self._done = Field(self._own_done, reduction=MIN)
        self._trouble = Field(self._own_trouble)
        self.fields = (self._done, self._trouble)

    @property
    def step(self) -> int | None:
        """Step of the save under way; None: there is none."""
        return None if self._save is None else self._save.job.step

    def start(self) -> None:
        """Start the writer, which loads its modules while the first steps run; the first save reports an error."""
        with contextlib.suppress(OSError):
            self._writer.start()

    # --- begin -------------------------------------------------------------------------------------------------

    def measure(self, engine: Any, state: SavedState) -> int:
        """Number of bytes that a snapshot of this rank takes; none is taken."""
        files, problem = capture_engine(engine, self._dims, self._place, state)
        return 0 if problem is not None else sum(one.layout.size_bytes for one in files)

    def reserve(self, engine: Any, state: SavedState) -> None:
        """Allocate memory for the snapshot and start the writer, so that no save has to wait for that."""
        files, problem = capture_engine(engine, self._dims, self._place, state)
        with contextlib.suppress(OSError):  # the first save reports it
            if problem is None and self._snapshot is not None:
                self._snapshot.prepare(files)
            self._writer.start()

    def begin(self, engine: Any, step: int, state: SavedState) -> None:
        """Begin a save of the state after a step; training may go on, its next update waits for ``wait_for_copy``.

        Raises:
            CheckpointError: DeepSpeed is configured to write in the background itself.
        """
        assert self._save is None, "one save at a time"
        refuse_decoupled(engine)
        started = time.monotonic()
        self._begun += 1
        job = self._job(engine, step, self._begun, state)
        texts = {SHARED_STATE_FILE: shared_state_text(state)} if job.place.leader else {}
        save = self._save = _Save(job, started, texts, self._stages(job))
        save.problem = job.prepare() if job.place.leader else None
        files, problem = capture_engine(engine, self._dims, self._place, state)
        save.problem = save.problem or problem
        if save.problem is None:
            self._write_or_copy(save, files)
        save.stalled_s = time.monotonic() - started

    def _write_or_copy(self, save: _Save, files: list[CapturedFile]) -> None:
        """Write the captured files, or begin to copy them."""
        if isinstance(self._writer, OwnWriter):
            save.written = WrittenFiles(not_finite=[one.name for one in files if not are_finite(one.tensors)])
            self._writer.send(WriteTask(files, save.job.temporary, save.texts))
        elif self._snapshot is not None:
            try:
                self._snapshot.prepare(files)
                self._snapshot.start_copy(files)
            except OSError as error:
                save.problem = describe_error(error, "allocate memory for the snapshot")

    def _job(self, engine: Any, step: int, number: int, state: SavedState) -> SaveJob:
        place = replace(self._place, save_id=uuid.uuid5(uuid.UUID(self._place.save_id), str(number)).hex)
        known = state.finite_step, state.wrong_place
        return SaveJob(self.folder, step, self._dims, place, describe_engine(engine), *known)

    def _stages(self, job: SaveJob) -> list[Callable[[_Save], None]]:
        mark = [self._mark] if job.node_local else []
        return [self._store, self._rename, *mark, self._point]

    def wait_for_copy(self) -> None:
        """Wait until the snapshot is copied, then have it written; must be called before the optimizer's update."""
        if self._save is None or self._snapshot is None or not self._snapshot.is_copying:
            return
        started = time.monotonic()
        save = self._save
        try:
            files = self._snapshot.wait()
            save.written = WrittenFiles(not_finite=[one.name for one in files if not one.finite])
            self._writer.send(StoreTask(files, save.job.temporary, texts=save.texts))
        except (OSError, RuntimeError) as error:
            save.problem = describe_error(error, "copy the snapshot")
        save.stalled_s += time.monotonic() - started

    @property
    def _is_copying(self) -> bool:
        return self._snapshot is not None and self._snapshot.is_copying

    # --- agreement of a step -----------------------------------------------------------------------------------

    def _own_done(self) -> float | None:
        save = self._save
        if save is None:
            return None
        if save.answer is None and save.problem is None and not self._is_copying:
            save.answer = self._writer.poll_result()
            if save.answer is not None and save.answer.problem:
                save.problem = RankProblem(save.answer.problem, save.answer.is_storage, save.answer.no_room)
        return float(save.answer is not None)

    def _own_trouble(self) -> float | None:
        return None if self._save is None else float(self._save.problem is not None)

    def advance(self) -> SaveResult | None:
        """Begin the next stage if all ranks have finished this one; returns the result if the save is finished."""
        save = self._save
        if save is None:
            return None
        if self._trouble.value:
            self._abort(save)
        elif self._done.value:
            started = time.monotonic()
            save.stages.pop(0)(save)
            save.stalled_s += time.monotonic() - started
            if not save.stages:
                return self._finish(save)
        return None

    def finish(self) -> SaveResult | None:
        """Wait for the save under way; returns its result, None if there is none or it failed.

        Raises:
            StorageError, CheckpointError: a save that training waits for failed, see ``save_checkpoint``.
        """
        result = None
        started = time.monotonic()
        self._writer.hurry()
        agreement = StepAgreement(self._place.among.group)
        while (save := self._save) is not None:
            self.wait_for_copy()
            agreement.start(self.fields)
            agreement.finish()
            result = self.advance()
            if self._save is not None and not self._done.value:
                time.sleep(_POLL_S)
            save.stalled_s += time.monotonic() - started
            started = time.monotonic()
        return result

    # --- stages ------------------------------------------------------------------------------------------------

    def _act(self, save: _Save, act: Act) -> None:
        """Send a task to the leaders' writers; the other ranks have finished the stage at once."""
        save.answer = None if save.job.place.leader else TaskResult()
        if save.job.place.leader:
            try:
                self._writer.send(replace(act, fence=save.job.place.among.fence))
            except OSError as error:
                save.problem = describe_error(error, "reach the writer")

    def _store(self, save: _Save) -> None:
        """All files are written: rename the folder."""
        assert save.answer is not None, "the stage is done"
        place, job = save.job.place, save.job
        own = [_record(one, place) for one in save.answer.stored]
        save.written = replace(save.written, records=own).gather(place)
        texts = {job.temporary / MANIFEST_FILE: record_text(job.manifest(save.written))} if place.leader else {}
        self._act(save, Act(texts, rename=(job.temporary, job.final)))

    def _rename(self, save: _Save) -> None:
        """All folders have their names: write markers, or move ``latest``."""
        if save.job.node_local:
            self._act(save, Act({save.job.final / MARKER_FILE: save.job.place.save_id + "\n"}))
        else:
            self._move_latest(save)

    def _mark(self, save: _Save) -> None:
        """All markers are there: move ``latest``."""
        self._move_latest(save)

    def _move_latest(self, save: _Save) -> None:
        save.saved = True
        job, verified = save.job, save.job.verified()
        save.due = list_due(job.folder, job.step, self._keep, verified) if job.place.leader else []
        folders = tuple(job.folder / step_folder(step) for step in save.due)
        self._act(save, Act({job.folder / LATEST_FILE: job.final.name + "\n"}, delete=folders))

    def _point(self, save: _Save) -> None:
        """``latest`` is moved and old checkpoints are deleted: nothing is left to do."""

    def _finish(self, save: _Save) -> SaveResult:
        self._save = None
        failed = [] if save.answer is None else save.answer.failed
        deleted = [step for step in save.due if not (self.folder / step_folder(step)).exists()]
        duration_s = time.monotonic() - save.started
        return finish_save(save.job, self._keep, save.written, deleted, failed, duration_s, save.stalled_s)

    def _abort(self, save: _Save) -> None:
        """End a save in which a rank has a problem; training goes on, unless it has waited for the save."""
        self._save = None
        self.failed += not save.saved
        if self._snapshot is not None and self._snapshot.is_copying:
            self._snapshot.close()
        self._writer.close()  # whatever it does for this save must end before its folder is removed
        try:
            save.job.agree(save.problem, saved=save.saved)
        except MegasdcError as error:
            self.no_room = isinstance(error, StorageError) and error.no_room
            self._report(save, error)

    def _report(self, save: _Save, error: MegasdcError) -> None:
        """Report an error that all ranks have; raise it where training waits."""
        place, waits = save.job.place, self._snapshot is None
        kind, name = "warning", "checkpoint_not_saved"
        if waits and not self.no_room:
            kind, name = "error", "checkpoint_save"
        elif save.saved and not waits:
            name = "checkpoint_not_finished"
        place.emit(kind, name, step=save.job.step, message=str(error))
        if waits:
            raise error
        if place.rank == 0:
            logger.warning("%s; training goes on", error)

    def close(self) -> None:
        """End the writer, and release memory; a save under way is lost."""
        self._writer.close()
        if self._snapshot is not None:
            self._snapshot.close()


def save_checkpoint(
    engine: Any,
    folder: Path | str,
    step: int,
    state: SavedState,
    dims: ParallelDims,
    ranks: CheckpointGroup,
    keep: Retention | None = None,
) -> SaveResult:
    """Save one checkpoint as ``folder/step_NNNNNNNN``, and wait until it is whole.

    Args:
        engine: the PipelineEngine.
        folder: the checkpoint folder; created if absent.
        step: optimizer step, first is 1. A checkpoint of the same step is replaced.
        keep: rules by which older checkpoints are kept; None: all are kept.

    Raises:
        StorageError: a folder is not writable or a disk is full, on all ranks; earlier checkpoints are untouched.
        CheckpointError: the states cannot be saved, or their pickles would be refused when loaded, on all ranks.

    Collective: all ranks of the world.
    Sync: waits for the device.
    """
    saver = DiskSaver(Path(folder), dims, ranks, None, keep)
    saver.begin(engine, step, state)
    result = saver.finish()
    assert result is not None, "a failed save raises"
    return result


@dataclass(frozen=True)
class WriteTask:
    """Task of a rank that writes itself: write captured files into a folder, and texts as files of these names."""

    files: list[CapturedFile]
    target: Path
    texts: dict[str, str]


class OwnWriter:
    """In the place of a ``WriterProcess``: the rank does each task itself, at once; training waits meanwhile."""

    def __init__(self) -> None:
        self._answer = TaskResult()

    def send(self, task: WriteTask | Task) -> None:
        """Write files, or act; there is no snapshot to store, and no partner."""
        tasks: dict[type, Callable[[Any], TaskResult]] = {WriteTask: _write, Act: act}
        try:
            self._answer = tasks[type(task)](task)
        except Exception as error:  # whatever it is, this rank must tell the others
            self._answer = explain(error)

    def poll_result(self) -> TaskResult:
        """Result of the last task."""
        return self._answer

    def start(self) -> None:
        """Nothing is to be started."""

    def hurry(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is to be ended."""


def _write(task: WriteTask) -> TaskResult:
    for file in task.files:
        path = task.target / file.name
        try:
            write_file(path, file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
    for name, text in task.texts.items():
        write_durably(task.target / name, text)
    files = {file.name: file.described for file in task.files} | dict.fromkeys(task.texts)
    return TaskResult(stored=[describe_stored(task.target / name, one) for name, one in files.items()])


def write_file(path: Path, file: CapturedFile) -> None:
    """Write a captured file, and wait until it is on the disk.

    Sync: waits for the device; one tensor at a time is copied from there.
    """
    tensors, checksums = iter(file.tensors), []
    with open(path, "wb") as written:
        for member in file.layout.members:
            content: Any = member.content
            if content is None:
                flat = next(tensors).detach().cpu().contiguous().view(-1)
                content = flat.view(torch.uint8).numpy().data if flat.numel() else b""
            checksums.append(zlib.crc32(content))
            written.write(local_header(member, checksums[-1]))
            written.write(content)
        written.write(directory(file.layout, checksums))
    sync_path(path)


def _record(stored: StoredFile, place: FolderRanks) -> FileRecord:
    return FileRecord(
        name=stored.name,
        size_bytes=stored.size_bytes,
        xxh3_128=stored.xxh3_128,
        rank=place.rank,
        node=place.node,
        tensors=stored.described,
        content=stored.content,
    )


_PIECE = 1 << 20
"""Bytes in steps of which memory for a file grows, so that a slightly longer pickle needs no new mapping."""


class _Image:
    """Shared memory for one file, which stays mapped and is filled again for each snapshot.

    Args:
        name: name of the file, for the system.
        path: path in shared memory; None: it has none, and ends with this process.
        on_device: whether a CUDA device copies into it.
    """

    def __init__(self, name: str, path: Path | None, on_device: bool) -> None:
        self._on_device = on_device
        if path is None:
            self._file = os.memfd_create(name)
        else:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._map: mmap.mmap | None = None
        self._registered = 0

    @property
    def path(self) -> Path:
        """Path by which other processes of this user can open the file."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def fit(self, size: int) -> None:
        """Give the file its size in bytes, and allocate memory that it does not have yet.

        Raises:
            OSError: memory is full.
        """
        if self._map is None or len(self._map) < size:
            self._unmap()
            room = -(-size // _PIECE) * _PIECE
            os.posix_fallocate(self._file, 0, room)
            # In the page tables at once: a copy that runs beside training would else stop at each page.
            self._map = mmap.mmap(self._file, room, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            if self._on_device:
                self._register()
        held = os.fstat(self._file).st_size
        if size > held:  # only what is new: the system looks at each page it is asked for, also at one that is there
            os.posix_fallocate(self._file, held, size - held)
        os.ftruncate(self._file, size)

    @property
    def memory(self) -> mmap.mmap:
        """The mapped memory: the file's bytes, and some beyond its end."""
        assert self._map is not None, "fit comes first"
        return self._map

    def _register(self) -> None:
        """Register the memory with the CUDA driver, so that the device copies into it without a buffer in between."""
        first = torch.frombuffer(self.memory, dtype=torch.uint8)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(first.data_ptr(), len(self.memory), 0))
        self._registered = first.data_ptr()

    def _unmap(self) -> None:
        if self._registered:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._registered))
            self._registered = 0
        if self._map is not None:
            self._map.close()
            self._map = None

    def close(self) -> None:
        """Release the memory; a file with a path stays."""
        self._unmap()
        os.close(self._file)


class Snapshot:
    """Shared memory for a rank's snapshot, which is reused for the next one.

    Args:
        device: device of the run's tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._images: dict[str, _Image] = {}
        self._copying: threading.Thread | None = None
        self._files: list[CapturedFile] = []
        self._failed: BaseException | None = None
        self._sums: list[list[int | Tensor]] = []
        self._finite: list[bool] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_copying(self) -> bool:
        """Whether a copy was begun and ``wait`` was not called since."""
        return self._copying is not None

    def prepare(self, files: Sequence[CapturedFile], folder: Path | None = None) -> None:
        """Allocate memory for files, and release that of earlier files that are not among them.

        Args:
            files: the files of the next snapshot.
            folder: their folder in shared memory, the same at each call; None: the files have no paths.

        Raises:
            OSError: memory is full.
        """
        names = {one.name for one in files}
        for gone in [name for name in self._images if name not in names]:
            self._images.pop(gone).close()
            if folder is not None:
                (folder / gone).unlink(missing_ok=True)
        for one in files:
            if one.name not in self._images:
                path = None if folder is None else folder / one.name
                self._images[one.name] = _Image(one.name, path, self._stream is not None)
            self._images[one.name].fit(one.layout.size_bytes)

    def start_copy(self, files: Sequence[CapturedFile]) -> None:
        """Begin to copy files for which ``prepare`` has allocated memory; returns at once.

        Their tensors must not change until ``wait`` has returned.
        """
        self._files, self._sums, self._failed = list(files), [[] for _ in files], None
        self._finite = []
        ready = None
        if self._stream is not None:
            ready = torch.cuda.Event()
            ready.record()
        self._copying = threading.Thread(target=self._copy, args=(ready,), name="snapshot", daemon=True)
        self._copying.start()

    def _copy(self, ready: Any) -> None:
        try:
            if self._stream is None:
                self._fill()
            else:
                self._stream.wait_event(ready)
                with torch.cuda.stream(self._stream):
                    self._fill()
                self._stream.synchronize()
        except BaseException as error:  # the rank raises it in ``wait``
            self._failed = error

    def _fill(self) -> None:
        algorithm = default_algorithm(self._device)
        for one, sums in zip(self._files, self._sums, strict=True):
            memory = self._images[one.name].memory
            one.layout.write_contents(memoryview(memory))
            for tensor, member in zip(one.tensors, one.layout.tensors, strict=True):
                if not member.size_bytes:
                    sums.append(0)
                    continue
                sums.append(algorithm.start(tensor))
                place = torch.frombuffer(memory, dtype=torch.uint8, count=member.size_bytes, offset=member.offset)
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            self._finite.append(are_finite(one.tensors))

    def wait(self) -> list[TakenFile]:
        """Wait until all files are copied, and return them; their tensors may change then.

        Raises:
            OSError, RuntimeError: they could not be copied.
        """
        assert self._copying is not None, "take comes first"
        self._copying.join()
        self._copying = None
        files, self._files = self._files, []
        if self._failed is not None:
            raise self._failed.with_traceback(None)  # its frames hold the memory
        name = default_algorithm(self._device).name
        return [
            TakenFile(
                one.name,
                self._images[one.name].path,
                one.layout.without_contents(),
                read_back(sums),
                name,
                [tensor.element_size() for tensor in one.tensors],
                [
                    xxhash.xxh3_64_intdigest(member.content)
                    for member in one.layout.members
                    if member.content is not None
                ],
                one.described,
                finite,
            )
            for one, sums, finite in zip(files, self._sums, self._finite, strict=True)
        ]

    def close(self) -> None:
        """Release all memory, after the end of a copy that still runs."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None
        self._failed = None  # its frames hold the memory
        while self._images:
            self._images.popitem()[1].close()


_PROTOCOL = 2
"""Protocol version of pickles, the same as in ``torch.save``."""
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""Class by which a pickle names the data type of a storage."""


@dataclass(frozen=True)
class CapturedFile:
    """A file of a checkpoint that is not written yet.

    Attributes:
        name: name in the checkpoint's folder.
        layout: offsets of its parts, with the pickle.
        tensors: the run's own tensors, not copies, in the order of the layout.
        described: for a layer's file, data type and shape of each tensor, else None.
    """

    name: str
    layout: FileLayout
    tensors: list[Tensor]
    described: dict[str, str] | None


class CapturingWriter:
    """Replaces DeepSpeed's checkpoint engine during a capture: files are kept instead of written.

    ``captured``: the files so far, whose tensors must not change before they are copied; ``problem``: the last error of
    a file that cannot be saved; None: there is none.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.problem: RankProblem | None = None
        self.captured: list[CapturedFile] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing is written, so no folder is needed."""

    def preserves_storage_sharing(self) -> bool:
        """Whether a view is saved with the whole memory that it is part of; DeepSpeed then clones views first."""
        return False

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Keep the content of one file, or store the error."""
        try:
            self.captured.append(capture(with_plain_stage(state_dict), Path(path).name))
        except Exception as error:  # whatever it is, this rank must reach the barrier and report it
            self.problem = describe_error(error, f"save {Path(path).name}")


def capture_engine(
    engine: Any, dims: ParallelDims, place: FolderRanks, state: SavedState
) -> tuple[list[CapturedFile], RankProblem | None]:
    """The files that this rank would write in a save, and the problem if one cannot be saved; None: all can.

    Collective: all ranks of the world.
    """
    writer = CapturingWriter(engine.checkpoint_engine)
    node_local = place.among.storage == "node_local"
    with wrapped_writer(engine, writer, place.writes_model(dims), every_node=node_local):
        engine.save_checkpoint("captured", tag=".", client_state=state.client_state, save_latest=False)
    writer.save(state.rank_state, rank_state_file(place.rank))
    return writer.captured, writer.problem


def capture(state: dict[str, Any], name: str) -> CapturedFile:
    """Pickle a state as ``torch.save`` does, each tensor without the memory around it.

    Args:
        name: name of the file.

    Raises:
        ValueError: a tensor has attributes that would get lost, or a type that is not supported.
        TypeError, pickle.PicklingError: something in it cannot be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(state)
    sizes = [tensor.numel() * tensor.element_size() for tensor in pickler.tensors]
    described = describe_tensors(state) if layer_of(name) is not None else None
    return CapturedFile(name, lay_out(Path(name).stem, buffer.getvalue(), sizes), pickler.tensors, described)


@dataclass(frozen=True)
class _Stored:
    """Placeholder for a tensor's memory while its state is pickled."""

    index: int
    dtype: torch.dtype
    location: str
    numel: int


class _Pickler(pickle.Pickler):
    """Pickler that writes references to tensors' memory as ``torch.save``; ``tensors``: the tensors, by number."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, _PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        """Reference to a tensor's memory; None: the object is none."""
        if isinstance(obj, _Stored):
            return "storage", _STORAGES[obj.dtype], str(obj.index), obj.location, obj.numel
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Function and arguments that rebuild a tensor; other objects are pickled as usual."""
        if not isinstance(obj, Tensor):
            return NotImplemented
        if type(obj) not in (Tensor, torch.nn.Parameter) or vars(obj):
            raise ValueError(f"a tensor of type {type(obj).__name__} with attributes {sorted(vars(obj))} is not saved")
        if isinstance(obj, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (obj.data, obj.requires_grad, OrderedDict())
        if obj.dtype not in _STORAGES:
            raise ValueError(f"a tensor of type {obj.dtype} is not saved, only of {', '.join(map(str, _STORAGES))}")
        device = obj.device
        location = device.type if device.index is None else str(device)
        stored = _Stored(len(self.tensors), obj.dtype, location, obj.numel())
        self.tensors.append(obj.detach())
        strides = torch.empty(obj.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (stored, 0, obj.size(), strides, obj.requires_grad, OrderedDict())


GIB, MIB = 1 << 30, 1 << 20
LEAST_BYTES = 64 << 20
"""Size of a rank's state in bytes below which a snapshot saves no time: writing it takes a fraction of a second."""


def why_not(size: int, group: dist.ProcessGroup | None, *, is_asked: bool, with_names: bool = False) -> str | None:
    """Reason why snapshots are not taken, the same on all ranks; None: they are taken.

    Args:
        size: bytes that this rank's snapshots still need.
        group: process group of all ranks, on the host.
        is_asked: whether small states are snapshotted too, as the configuration asks.
        with_names: whether the files have paths in the folder of shared memory, whose size is limited too.

    Collective: the group.
    """
    room = min(free_memory(), shutil.disk_usage(shared_folder()).free) if with_names else free_memory()
    told = gather_objects((socket.gethostname(), size, room), group)
    largest = max(one for _, one, _ in told)
    if largest < LEAST_BYTES and not is_asked:
        return f"the state of a rank has {largest / MIB:,.1f} MiB, which is written faster than it is worth"
    for host in dict.fromkeys(name for name, _, _ in told):
        needed = sum(one for name, one, _ in told if name == host)
        free = min(one for name, _, one in told if name == host)
        if needed > SNAPSHOT_SHARE * free:
            return (
                f"the snapshots of the ranks on {host} need {needed / MIB:,.1f} MiB of memory, and of the "
                f"{free / MIB:,.1f} MiB that are free {f'in {shared_folder()} ' if with_names else ''}there they may "
                f"take {SNAPSHOT_SHARE:.0%}: use fewer ranks a host, or more memory"
                f"{f', or a larger {shared_folder()}' if with_names else ''}"
            )
    return None
