"""Saves beside training: one at a time, in stages on which all ranks agree at the ends of steps.

A save begins with a snapshot. While training goes on a process of each rank writes the snapshot's files. Once all have,
the leader of each folder gives it its final name, then (node-local storage) its marker, then moves ``latest`` and
deletes old checkpoints: the stages of a save for which training stands still, in the same order. A rank that has a
problem ends the save of all; the checkpoint before stays, and training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megasdc.checkpoint.files import LATEST_FILE, MANIFEST_FILE, MARKER_FILE, step_folder
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
    finish_save,
    list_due,
    refuse_decoupled,
    shared_state_text,
)
from megasdc.checkpoint.snapshots.capture import capture_engine
from megasdc.checkpoint.snapshots.messages import Act, StoredFile, StoreTask, TaskResult
from megasdc.checkpoint.snapshots.snapshot import Snapshot
from megasdc.checkpoint.snapshots.writer_process import WriterProcess
from megasdc.parallel.collectives import MIN, Field, StepAgreement
from megasdc.parallel.dims import ParallelDims

logger = logging.getLogger(__name__)

_POLL_S = 0.02


@dataclass
class _Save:
    """The save under way.

    Attributes:
        texts: files besides those of the snapshot, on the leader of a folder.
        stages: that are left, the first is under way.
        answer: of this rank's writer in this stage; None: not there yet.
        problem: of this rank.
        written: files of this rank, then of all.
        saved: whether the checkpoint is whole whatever follows.
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
    """Saves checkpoints into a folder beside training.

    All methods but ``wait_for_copy`` and ``close`` are collective: all ranks of the world.

    Args:
        folder: of the checkpoints; created if absent.
        device: of the run's tensors.
        keep: which checkpoints are kept.

    Attributes:
        fields: what all ranks agree on in each step.
        failed: number of saves that failed, without those whose checkpoint is whole.
        no_room: whether the last one failed since there was no room; the same on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        dims: ParallelDims,
        ranks: CheckpointGroup,
        device: torch.device,
        keep: Retention | None = None,
    ) -> None:
        self.folder, self._dims, self._keep = folder, dims, keep or Retention()
        self._place = find_place(ranks)
        self._snapshot = Snapshot(device)
        self._writer = WriterProcess(describes=True)
        self._save: _Save | None = None
        self._begun = 0
        self.failed = 0
        self.no_room = False
        self._done = Field(self._own_done, reduction=MIN)
        self._trouble = Field(self._own_trouble)
        self.fields = (self._done, self._trouble)

    @property
    def step(self) -> int | None:
        """Of the save under way; None: there is none."""
        return None if self._save is None else self._save.job.step

    def start(self) -> None:
        """Start the writer, which loads what it needs while the first steps run; one that cannot be is seen later."""
        with contextlib.suppress(OSError):
            self._writer.start()

    # --- begin -------------------------------------------------------------------------------------------------

    def measure(self, engine: Any, state: SavedState) -> int:
        """Bytes that a snapshot of this rank takes; nothing is kept."""
        files, problem = capture_engine(engine, self._dims, self._place, state)
        return 0 if problem is not None else sum(one.layout.size_bytes for one in files)

    def reserve(self, engine: Any, state: SavedState) -> None:
        """Allocate memory and start the writer, so that no save has to wait for that."""
        files, problem = capture_engine(engine, self._dims, self._place, state)
        with contextlib.suppress(OSError):  # the first save reports it
            if problem is None:
                self._snapshot.prepare(files)
            self._writer.start()

    def begin(self, engine: Any, step: int, state: SavedState) -> None:
        """Begin a save of the state after a step; training may go on, its next update waits for ``wait_for_copy``.

        Raises:
            CheckpointError: DeepSpeed is to write in the background itself.
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
            try:
                self._snapshot.prepare(files)
                self._snapshot.take(files)
            except OSError as error:
                save.problem = describe_error(error, "allocate memory for the snapshot")
        save.stalled_s = time.monotonic() - started

    def _job(self, engine: Any, step: int, number: int, state: SavedState) -> SaveJob:
        place = replace(self._place, save_id=uuid.uuid5(uuid.UUID(self._place.save_id), str(number)).hex)
        known = state.finite_step, state.wrong_place
        return SaveJob(self.folder, step, self._dims, place, describe_engine(engine), *known)

    def _stages(self, job: SaveJob) -> list[Callable[[_Save], None]]:
        mark = [self._mark] if job.node_local else []
        return [self._store, self._rename, *mark, self._point]

    def wait_for_copy(self) -> None:
        """Wait until the snapshot is copied, and let it be written; before the optimizer changes anything."""
        if self._save is None or not self._snapshot.is_copying:
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

    # --- agreement of a step -----------------------------------------------------------------------------------

    def _own_done(self) -> float | None:
        save = self._save
        if save is None:
            return None
        if save.answer is None and save.problem is None and not self._snapshot.is_copying:
            save.answer = self._writer.answer()
            if save.answer is not None and save.answer.problem:
                save.problem = RankProblem(save.answer.problem, save.answer.is_storage, save.answer.no_room)
        return float(save.answer is not None)

    def _own_trouble(self) -> float | None:
        return None if self._save is None else float(self._save.problem is not None)

    def advance(self) -> SaveResult | None:
        """Begin the next stage where all ranks have finished theirs; returns the result of a save that is done."""
        save = self._save
        if save is None:
            return None
        if self._trouble.value:
            self._give_up(save)
        elif self._done.value:
            started = time.monotonic()
            save.stages.pop(0)(save)
            save.stalled_s += time.monotonic() - started
            if not save.stages:
                return self._finish(save)
        return None

    def finish(self) -> SaveResult | None:
        """Wait for the save under way; returns its result, None where there is none or it failed."""
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
        """Let the leaders' writers do something; others have nothing to do."""
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
        """``latest`` is moved, old checkpoints are deleted: that was all."""

    def _finish(self, save: _Save) -> SaveResult:
        self._save = None
        failed = [] if save.answer is None else save.answer.failed
        deleted = [step for step in save.due if not (self.folder / step_folder(step)).exists()]
        duration_s = time.monotonic() - save.started
        return finish_save(save.job, self._keep, save.written, deleted, failed, duration_s, save.stalled_s)

    def _give_up(self, save: _Save) -> None:
        """End a save in which a rank has a problem; training goes on."""
        self._save = None
        self.failed += not save.saved
        place = save.job.place
        if self._snapshot.is_copying:
            self._snapshot.close()
        self._writer.close()  # whatever it does for this save must end before its folder is removed
        found = [(rank, one) for rank, one in enumerate(place.gather((place.node, save.problem))) if one[1] is not None]
        if place.leader and not save.saved:
            save.job.clean_up()
        place.gather(None)  # no rank begins another save before the folders are clean
        self.no_room = any(one.no_room for _, (_, one) in found if one is not None)
        rank, (node, problem) = found[0]
        more = f"; {len(found) - 1} other ranks failed too" if len(found) > 1 else ""
        message = f"{save.job.failure(saved=save.saved)}: rank {rank} on {node}: {problem.text}{more}"
        name = "checkpoint_not_finished" if save.saved else "checkpoint_not_saved"
        place.emit("warning", name, step=save.job.step, message=message)
        if place.rank == 0:
            logger.warning("%s; training goes on", message)

    def close(self) -> None:
        """End the writer, and release memory; a save under way is lost."""
        self._writer.close()
        self._snapshot.close()


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
