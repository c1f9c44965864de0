"""Saves of a run's state: stages on which all ranks agree, so that a checkpoint is either complete or absent.

``StateSaver``: what saves into all targets have in common. Beside training a save begins with a snapshot: the state is
copied into shared memory, and while training goes on a process of each rank stores the copy. A rank that has a problem
ends the save of all; what was saved before stays, and training goes on.

``DiskSaver``: one save at a time, in stages on which all ranks agree at the ends of steps. All files go into a folder
with a temporary name. When every rank has reported that its files are on the disk, the manifest is written and one
rename gives the folder its final name; only then is ``latest`` updated and are old checkpoints deleted. With node-local
storage each node renames its own folder, and after all have, each gets a marker: a checkpoint without it does not
count. Any failure is reported to all ranks and removes the temporary folder. ``save_checkpoint`` goes through the same
stages while training waits.

``Retention``: the newest few, every k-th step, and the newest that a run can go back to are kept. One that is being
archived is deleted after a later save; see ``read_lock``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megasdc.checkpoint.files import (
    LATEST_FILE,
    MANIFEST_FILE,
    MARKER_FILE,
    SHARED_STATE_FILE,
    FencedError,
    delete_folder,
    step_folder,
)
from megasdc.checkpoint.manifest import (
    FORMAT_VERSION,
    FileRecord,
    KnownState,
    Layout,
    Manifest,
    describe_engine,
    has_marker,
    installed_versions,
    list_continued,
    list_sound,
    read_complete,
    read_manifest,
    sorted_records,
)
from megasdc.checkpoint.ranks import (
    CheckpointGroup,
    FolderRanks,
    RankProblem,
    describe_error,
    find_place,
    raise_on_all_ranks,
)
from megasdc.checkpoint.snapshot import NoCopy, OwnWriter, SavedState, Snapshot, capture_engine, why_not
from megasdc.checkpoint.verify import list_verified
from megasdc.checkpoint.writer_process import (
    Act,
    StoredFile,
    StoreTask,
    TaskResult,
    WriterProcess,
)
from megasdc.common.durable import TEMPORARY_PREFIX
from megasdc.common.errors import CheckpointError, MegasdcError, StorageError
from megasdc.parallel.collectives import MIN, Field, StepAgreement
from megasdc.parallel.dims import ParallelDims

logger = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass(frozen=True)
class SaveResult:
    """Result of a save, the same on all ranks except for ``path`` and ``deleted``.

    Attributes:
        path: the checkpoint's folder, as this rank sees it.
        step: optimizer step of the checkpoint.
        size_bytes: bytes of the files of all ranks.
        duration_s: seconds from the start of the save until the checkpoint was complete.
        stalled_s: seconds of ``duration_s`` in which training stood still.
        deleted: steps whose checkpoints were deleted; with shared storage known on rank 0 alone.
        non_finite: sentence that names the files whose tensors hold NaN or Inf; None: the state is finite.
    """

    path: Path
    step: int
    size_bytes: int
    duration_s: float
    stalled_s: float
    deleted: list[int]
    non_finite: str | None = None


@dataclass
class SaveJob:
    """One save: its paths and ranks, and how far it is.

    Attributes:
        folder: the checkpoint folder.
        dims: this rank's position in the layout.
        place: the ranks of the save, with those that share this rank's folder.
        engine: properties of the engine, from ``describe_engine``.
        finite_step, wrong_place: see ``Manifest``.
        started: start of the save on the monotonic clock.
        files: one record a file of all ranks, in order of name, once all have written theirs.
        not_finite: names of this rank's files whose tensors hold NaN or Inf; then those of all ranks.
        saved: whether the checkpoint is complete, whatever follows.
    """

    folder: Path
    step: int
    dims: ParallelDims
    place: FolderRanks
    engine: dict[str, Any]
    finite_step: int | None = None
    wrong_place: str | None = None
    started: float = field(default_factory=time.monotonic)
    files: list[FileRecord] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    saved: bool = False

    @property
    def node_local(self) -> bool:
        """Whether every node has a folder of its own."""
        return self.place.among.storage == "node_local"

    @property
    def temporary(self) -> Path:
        """Path of the checkpoint's folder while it is written."""
        return self.folder / f"{TEMPORARY_PREFIX}{step_folder(self.step)}"

    @property
    def final(self) -> Path:
        """Path of the checkpoint's folder once it is complete."""
        return self.folder / step_folder(self.step)

    def check_fence(self) -> None:
        """Raise a FencedError if another launch has taken the folder."""
        if self.place.among.fence is not None:
            self.place.among.fence.check()

    def prepare(self) -> RankProblem | None:
        """Create the folder under its temporary name, on a leader; returns the problem, if any."""
        try:
            self.check_fence()
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(parents=True)
        except OSError as error:
            return describe_error(error, f"create {self.temporary}")
        return None

    def manifest(self) -> Manifest:
        """The manifest of the leader's folder, once ``files`` are there."""
        mine = set(self.place.ranks)
        return Manifest(
            format_version=FORMAT_VERSION,
            state="complete",
            step=self.step,
            save_id=self.place.save_id,
            time=time.time(),
            layout=Layout(tensor=self.dims.tensor, pipeline=self.dims.pipeline, data=self.dims.data),
            world_size=self.dims.world_size,
            storage=self.place.among.storage,
            nodes=self.place.nodes,
            node=self.place.node if self.node_local else None,
            engine=self.engine,
            versions=installed_versions(),
            files=[record for record in self.files if record.rank in mine],
            not_finite=self.not_finite,
            finite_step=self.finite_step,
            wrong_place=self.wrong_place,
        )

    def verified(self) -> set[int]:
        """Steps whose checkpoints are marked as verified on any node.

        Collective: all ranks.
        """
        marks = self.place.gather(list_verified(self.folder) if self.place.leader else [])
        return {marked for steps in marks for marked in steps}

    def clean_up(self) -> None:
        """Remove the files of a failed save from the leader's folder, unless another launch has taken it."""
        try:
            self.check_fence()
        except FencedError:
            return
        shutil.rmtree(self.temporary, ignore_errors=True)
        if not self.node_local:
            return
        with contextlib.suppress(CheckpointError, OSError):  # this node has renamed, but another failed
            manifest = read_manifest(self.final)
            if manifest.save_id == self.place.save_id and not has_marker(self.final, manifest):
                delete_folder(self.final)

    def agree(self, problem: RankProblem | None) -> None:
        """Continue if no rank has a problem, else clean up and raise on all ranks.

        Collective: all ranks.
        """
        try:
            raise_on_all_ranks(problem, self.place, self.failure)
        except MegasdcError:
            if self.place.leader:
                self.clean_up()
            self.place.gather(None)  # no rank raises before the folders are clean
            raise

    @property
    def failure(self) -> str:
        """First words of the message of a failure."""
        if self.saved:
            return (
                f"checkpoint of step {self.step} was saved, {self.final} is whole and a run resumes from it, but "
                f"{self.folder / LATEST_FILE} could not be written and names an earlier one or none"
            )
        return f"checkpoint of step {self.step} in {self.folder} was not saved, those before it are untouched"


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


def refuse_decoupled(engine: Any) -> None:
    """Raise a CheckpointError if DeepSpeed is configured to write checkpoints in the background itself."""
    if engine.checkpoint_engine.is_decoupled():
        raise CheckpointError(
            "DeepSpeed's key checkpoint.writer asks for files written in the background, but a checkpoint is "
            "complete only when all files are on the disk: remove the key, and use megasdc.checkpoint.writing"
        )


class StateSaver:
    """Saves of a run's state into one target: captured, copied beside training, and stored by this rank's writer.

    A target is a subclass: ``DiskSaver``, and ``megasdc.checkpoint.in_memory.MemorySaver``. It has the memory of its
    snapshots, and says when a save counts and what stays. A rank that has a problem ends the saves of all. All methods
    but ``wait_for_copy`` and ``close`` are collective: all ranks of the world.

    Args:
        dims: this rank's position in the layout.
        place: all ranks, and those that share this rank's folder.
        writer: what stores this rank's files.
        snapshots: memory for copies of this rank's state.

    Attributes:
        fields: values that all ranks reduce in each step.
        failed: number of saves that failed, without those that count.
        stalled_s: seconds in which training stood still for the newest save.
    """

    fields: tuple[Field, ...]

    def __init__(
        self,
        dims: ParallelDims,
        place: FolderRanks,
        writer: WriterProcess | OwnWriter,
        snapshots: Sequence[Snapshot | NoCopy],
    ) -> None:
        self._dims, self._place, self._writer, self._snapshots = dims, place, writer, snapshots
        self._copy: tuple[Any, StoreTask] | None = None
        self._problem: RankProblem | None = None
        self._trouble = Field(lambda: float(self._problem is not None))
        self.failed = 0
        self.stalled_s = 0.0

    def reserve(self, engine: Any, state: SavedState, *, is_asked: bool) -> tuple[int, str | None]:
        """Allocate memory for snapshots and start the writer, so that no save has to wait for that.

        Args:
            is_asked: see ``why_not``.

        Returns:
            Number of bytes that this rank needs; the reason why memory has no room, the same on all ranks, None: it is
            allocated.
        """
        files, problem = capture_engine(engine, self._dims, self._place, state)
        size, there = self._needs(0 if problem is not None else sum(one.layout.size_bytes for one in files))
        group, with_names = self._place.among.group, any(one.folder is not None for one in self._snapshots)
        refused = why_not(size - there, group, is_asked=is_asked, with_names=with_names)
        if refused is None:
            with contextlib.suppress(OSError):  # the first save reports it
                for snapshot in self._unused() if problem is None else ():
                    snapshot.prepare(files)
                self._writer.start()
        return size, refused

    def _needs(self, size: int) -> tuple[int, int]:
        """Bytes of all snapshots where one takes ``size``, and how many of them are allocated already."""
        return size * len(self._snapshots), 0

    def _unused(self) -> Sequence[Snapshot | NoCopy]:
        """Snapshots that hold no save."""
        return self._snapshots

    def _texts(self, state: SavedState) -> dict[str, str]:
        """Files of this rank besides those of its tensors; without an indent, which would take ten times as long."""
        return {SHARED_STATE_FILE: json.dumps(state.shared_state)} if self._place.leader else {}

    def _capture(self, engine: Any, state: SavedState, snapshot: Snapshot | NoCopy, task: StoreTask) -> None:
        """Capture the state and begin to copy it; ``task`` gets the files, once they are copied."""
        files, problem = capture_engine(engine, self._dims, self._place, state)
        self._problem = self._problem or problem
        if self._problem is None:
            try:
                snapshot.prepare(files)
                snapshot.start_copy(files)
                self._copy = snapshot, task
            except OSError as error:
                self._problem = describe_error(error, "allocate memory for the snapshot")

    def wait_for_copy(self) -> None:
        """Wait until the snapshot is copied, then have it stored; must be called before the optimizer's update."""
        if self._copy is None:
            return
        started = time.monotonic()
        (snapshot, task), self._copy = self._copy, None
        try:
            self._store(snapshot, replace(task, files=snapshot.wait()))
        except (OSError, RuntimeError) as error:
            self._problem = describe_error(error, "keep the snapshot")
        self.stalled_s += time.monotonic() - started

    def _store(self, snapshot: Any, task: StoreTask) -> None:
        """Have a copied snapshot stored; OSError if the writer cannot be reached."""
        raise NotImplementedError

    def _poll_result(self) -> TaskResult | None:
        """Result of the writer's oldest task, whose problem is noted; None: it is not done."""
        answer = self._writer.poll_result()
        if answer is not None and answer.problem:
            self._problem = RankProblem(answer.problem, answer.is_storage, answer.no_room)
        return answer

    @property
    def is_under_way(self) -> bool:
        """Whether a save is not done, the same on all ranks."""
        raise NotImplementedError

    def advance(self) -> Any:
        """Go on with saves under way by what all ranks agree on; called once ``fields`` are reduced."""
        raise NotImplementedError

    def finish(self) -> Any:
        """Wait for all saves under way; returns the last result of ``advance``, None: nothing is under way."""
        result = None
        started, before = time.monotonic(), self.stalled_s
        self._writer.hurry()
        agreement = StepAgreement(self._place.among.group)
        while self.is_under_way:
            self.wait_for_copy()
            agreement.start(self.fields)
            agreement.finish()
            self.stalled_s = before + time.monotonic() - started
            result = self.advance()
            if self.is_under_way and not self._has_moved:
                time.sleep(_POLL_S)
        return result

    @property
    def _has_moved(self) -> bool:
        """Whether ``advance`` has begun something that may be done at once."""
        return False

    def _stop(self) -> RankProblem | None:
        """End whatever this rank does for the saves under way; returns its problem."""
        problem, copy = self._problem, self._copy
        self._problem = self._copy = None
        self._writer.close()
        if copy is not None:
            copy[0].close()
        return problem

    def close(self) -> None:
        """End the writer, and release memory; a save under way is lost."""
        self._writer.close()
        for snapshot in self._snapshots:
            snapshot.close()


class DiskSaver(StateSaver):
    """Saves checkpoints into a folder, one at a time.

    Args:
        folder: folder of the checkpoints; created if absent.
        dims: this rank's position in the layout.
        device: device of the run's tensors, which are copied and written beside training; None: training waits for a
            save, see ``save_checkpoint``.
        keep: rules by which older checkpoints are kept; None: all are kept.

    Attributes:
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
        writer = OwnWriter() if device is None else WriterProcess(describes=True)
        super().__init__(dims, find_place(ranks), writer, [NoCopy() if device is None else Snapshot(device)])
        self.folder, self._waits, self._keep = folder, device is None, keep or Retention()
        self._job: SaveJob | None = None
        self._stages: list[Callable[[SaveJob], None]] = []  # those that follow, once all ranks have finished this one
        self._result: TaskResult | None = None  # of this rank in this stage; None: it is not done
        self._begun = 0
        self.no_room = False
        self._done = Field(self._own_done, reduction=MIN)
        self.fields = (self._done, self._trouble)

    @property
    def step(self) -> int | None:
        """Step of the save under way; None: there is none."""
        return None if self._job is None else self._job.step

    @property
    def is_under_way(self) -> bool:
        """Whether a save is not done."""
        return self._job is not None

    @property
    def _has_moved(self) -> bool:
        return bool(self._done.value)

    def begin(self, engine: Any, step: int, state: SavedState) -> None:
        """Begin a save of the state after a step; training may go on, its next update waits for ``wait_for_copy``.

        Raises:
            CheckpointError: DeepSpeed is configured to write in the background itself.
        """
        assert self._job is None, "one save at a time"
        refuse_decoupled(engine)
        self._begun += 1
        place = replace(self._place, save_id=uuid.uuid5(uuid.UUID(self._place.save_id), str(self._begun)).hex)
        known = describe_engine(engine), state.finite_step, state.wrong_place
        job = self._job = SaveJob(self.folder, step, self._dims, place, *known)
        self._stages = [self._rename, *([self._mark] if job.node_local else []), self._move_latest]
        self._result = None
        self._problem = job.prepare() if place.leader else None
        self._capture(engine, state, self._snapshots[0], StoreTask([], job.temporary, texts=self._texts(state)))
        self.stalled_s = time.monotonic() - job.started

    def _store(self, snapshot: Any, task: StoreTask) -> None:
        assert self._job is not None, "it was begun"
        self._job.not_finite = [one.name for one in task.files if not one.finite]
        self._writer.send(task)

    # --- agreement of a step -----------------------------------------------------------------------------------

    def _own_done(self) -> float | None:
        if self._job is None:
            return None
        if self._result is None and self._problem is None and self._copy is None:
            self._result = self._poll_result()
        return float(self._result is not None)

    def advance(self) -> SaveResult | None:
        """Begin the next stage if all ranks have finished this one; returns the result if the save is finished.

        Raises:
            StorageError, CheckpointError: a save that training waits for failed, see ``save_checkpoint``.
        """
        job = self._job
        if job is None:
            return None
        if self._trouble.value:
            self._abort(job)
        elif self._done.value:
            if not self._stages:
                return self._finish(job)
            started = time.monotonic()
            self._stages.pop(0)(job)
            self.stalled_s += time.monotonic() - started
        return None

    # --- stages ------------------------------------------------------------------------------------------------

    def _act(self, job: SaveJob, act: Act) -> None:
        """Send a task to the leaders' writers; the other ranks have finished the stage at once."""
        self._result = None if job.place.leader else TaskResult()
        if job.place.leader:
            try:
                self._writer.send(replace(act, fence=job.place.among.fence))
            except OSError as error:
                self._problem = describe_error(error, "reach the writer")

    def _rename(self, job: SaveJob) -> None:
        """All files are written: write manifests, and give folders their names."""
        assert self._result is not None, "the stage is done"
        answers = job.place.gather(([_record(one, job.place) for one in self._result.stored], job.not_finite))
        job.files = sorted_records(record for records, _ in answers for record in records)
        job.not_finite = sorted({name for _, names in answers for name in names})
        manifest = {job.temporary / MANIFEST_FILE: job.manifest()} if job.place.leader else {}
        self._act(job, Act(manifest, rename=(job.temporary, job.final)))

    def _mark(self, job: SaveJob) -> None:
        """All folders have their names: write markers."""
        self._act(job, Act({job.final / MARKER_FILE: job.place.save_id + "\n"}))

    def _move_latest(self, job: SaveJob) -> None:
        """The checkpoint is complete: move ``latest``, and delete old ones."""
        job.saved = True
        latest = Act({job.folder / LATEST_FILE: job.final.name + "\n"})
        if self._keep.last:
            verified = job.verified() if job.node_local else None
            latest = replace(latest, due=partial(find_due, job.folder, job.step, self._keep, verified))
        self._act(job, latest)

    def _finish(self, job: SaveJob) -> SaveResult:
        """Report a finished save in events and logs, and return its result."""
        self._job = None
        place, own = job.place, self._result or TaskResult()
        duration_s = time.monotonic() - job.started
        # Rank 0 leads a shared folder, and alone reports.
        answers = place.gather((own.deleted, own.failed)) if job.node_local else [(own.deleted, own.failed)]
        result = SaveResult(
            path=job.final,
            step=job.step,
            size_bytes=sum(record.size_bytes for record in job.files),
            duration_s=duration_s,
            stalled_s=duration_s if self._waits else self.stalled_s,
            deleted=sorted({gone for steps, _ in answers for gone in steps}),
            non_finite=KnownState(not_finite=job.not_finite).non_finite,
        )
        sizes = {"size_bytes": result.size_bytes, "duration_s": round(duration_s, 3)}
        stalled_s = round(result.stalled_s, 3)
        place.emit("save", "checkpoint", step=job.step, path=str(result.path), **sizes, stalled_s=stalled_s)
        if result.non_finite is not None:
            place.emit("warning", "checkpoint_not_finite", step=job.step, files=job.not_finite)
            if place.rank == 0:
                logger.warning("%s is saved, but %s", job.final, result.non_finite)
        if job.wrong_place is not None:
            place.emit("warning", "checkpoint_wrong_place", step=job.step, reason=job.wrong_place)
            if place.rank == 0:
                logger.error("%s is saved, but no resume takes it: %s", job.final, job.wrong_place)
        rules = f"keep_last {self._keep.last}, keep_every {self._keep.every}"
        for gone in result.deleted:
            place.emit("delete", "checkpoint", step=gone, reason=rules)
        for line in (line for _, lines in answers for line in lines):
            place.emit("warning", "checkpoint_not_deleted", step=job.step, message=line)
        return result

    def _abort(self, job: SaveJob) -> None:
        """End a save in which a rank has a problem; training goes on, unless it has waited for the save."""
        self._job = None
        self.failed += not job.saved
        problem = self._stop()  # whatever the writer does for this save must end before its folder is removed
        try:
            job.agree(problem)
        except MegasdcError as error:
            self.no_room = isinstance(error, StorageError) and error.no_room
            self._report(job, error)

    def _report(self, job: SaveJob, error: MegasdcError) -> None:
        """Report an error that all ranks have; raise it where training waits."""
        kind, name = "warning", "checkpoint_not_saved"
        if self._waits and not self.no_room:
            kind, name = "error", "checkpoint_save"
        elif job.saved and not self._waits:
            name = "checkpoint_not_finished"
        job.place.emit(kind, name, step=job.step, message=str(error))
        if self._waits:
            raise error
        if job.place.rank == 0:
            logger.warning("%s; training goes on", error)


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
class Retention:
    """Rules by which checkpoints are kept.

    Attributes:
        last: number of newest checkpoints to keep; 0: all. Besides them are kept: of the sound ones (no NaN, Inf or
            wrong place in the data) the newest, the newest verified one, and the newest from which a finite step was
            taken.
        every: checkpoints whose step is a multiple of this number are kept too; 0: none.
    """

    last: int = 0
    every: int = 0


def plan_retention(
    steps: Iterable[int], newest: int, keep_last: int, keep_every: int, *newest_of: Collection[int]
) -> list[int]:
    """Steps of complete checkpoints to delete, ascending; ``newest``, just saved, and later ones are never deleted.

    ``keep_last`` are kept, including ``newest`` (0: all), those whose step is a multiple of ``keep_every`` (0: none),
    and the newest of each collection in ``newest_of``.
    """
    if keep_last == 0:
        return []
    past = sorted(step for step in steps if step <= newest)
    kept = {newest, *past[-keep_last:]}
    for those in newest_of:
        kept.update([step for step in past if step in those][-1:])
    return [step for step in past if step not in kept and not (keep_every and step % keep_every == 0)]


def list_due(folder: Path, newest: int, keep: Retention, verified: Collection[int] = ()) -> list[int]:
    """Steps of a folder's checkpoints that need not be kept; incomplete ones are neither counted nor listed.

    ``verified`` comes from the marks of all nodes, so that all keep the same.
    """
    if keep.last == 0:
        return []
    past = {step: manifest for step, manifest in read_complete(folder).items() if step <= newest}
    return plan_retention(past, newest, keep.last, keep.every, *worth_keeping(past, verified))


def worth_keeping(known: Mapping[int, KnownState], verified: Collection[int] = ()) -> tuple[Collection[int], ...]:
    """Steps in three lists, of each of which the newest is kept: sound and verified; sound; sound and continued."""
    sound = list_sound(known)
    return [step for step in sound if step in verified], sound, list_continued(known)


def find_due(folder: Path, newest: int, keep: Retention, verified: Collection[int] | None = None) -> dict[int, Path]:
    """Folders of the checkpoints of ``list_due``, by step; ``verified`` None: those that are marked in the folder."""
    steps = list_due(folder, newest, keep, list_verified(folder) if verified is None else verified)
    return {step: folder / step_folder(step) for step in steps}
