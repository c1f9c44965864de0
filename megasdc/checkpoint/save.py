"""What every save of a checkpoint has, so that it is either complete or absent: its paths, files and report.

All files go into a folder with a temporary name. When every rank has reported that its files are on the disk, the
manifest is written and one rename gives the folder its final name; only then is ``latest`` updated and are old
checkpoints deleted. With node-local storage each node renames its own folder, and after all have, each gets a marker: a
checkpoint without it does not count. Any failure is reported to all ranks and removes the temporary folder. The stages
are those of ``megasdc.checkpoint.disk_saver.DiskSaver``.

``Retention``: the newest few, every k-th step, and the newest that a run can go back to are kept. One that is being
archived is deleted after a later save; see ``read_lock``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch

from megasdc.checkpoint.files import (
    LATEST_FILE,
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
    find_wrong_place,
    has_marker,
    installed_versions,
    list_continued,
    list_sound,
    read_complete,
    read_manifest,
    sorted_records,
)
from megasdc.checkpoint.ranks import (
    FolderRanks,
    RankProblem,
    describe_error,
    raise_on_all_ranks,
)
from megasdc.checkpoint.verify import list_verified
from megasdc.common.durable import TEMPORARY_PREFIX
from megasdc.common.errors import CheckpointError, MegasdcError
from megasdc.parallel.dims import ParallelDims
from megasdc.tensors.bits import dtype_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedState:
    """State saved beside the engine's own.

    Attributes:
        shared_state: JSON-compatible values, the same on all ranks.
        rank_state: this rank's own values and tensors, in plain containers.
        client_state: further top-level keys of DeepSpeed's file of each stage, the same on all ranks.
    """

    shared_state: dict[str, Any]
    rank_state: dict[str, Any]
    client_state: dict[str, Any] = field(default_factory=dict)

    @property
    def finite_step(self) -> int | None:
        """Last optimizer step with a finite loss and gradient norm; None: not known."""
        return self.shared_state.get("finite_step")

    @property
    def wrong_place(self) -> str | None:
        """Sentence on an error in the replicas' positions in the data; None: no error is known."""
        return find_wrong_place(self.shared_state)


@dataclass(frozen=True)
class SaveResult:
    """Result of a save, the same on all ranks except for ``path``.

    Attributes:
        path: the checkpoint's folder, as this rank sees it.
        step: optimizer step of the checkpoint.
        size_bytes: bytes of the files of all ranks.
        duration_s: seconds from the start of the save until the checkpoint was complete.
        stalled_s: seconds of ``duration_s`` in which training stood still.
        deleted: steps whose checkpoints were deleted.
        non_finite: sentence that names the files whose tensors hold NaN or Inf; None: the state is finite.
    """

    path: Path
    step: int
    size_bytes: int
    duration_s: float
    stalled_s: float
    deleted: list[int]
    non_finite: str | None = None


@dataclass(frozen=True)
class WrittenFiles:
    """Files that a save has written.

    Attributes:
        records: one record a file, in order of name.
        not_finite: names of the files whose tensors hold NaN or Inf.
    """

    records: list[FileRecord] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)

    def gather(self, place: FolderRanks) -> WrittenFiles:
        """The files that all ranks have written.

        Collective: all ranks.
        """
        answers: list[WrittenFiles] = place.gather(self)
        records = sorted_records(record for one in answers for record in one.records)
        return WrittenFiles(records, sorted({name for one in answers for name in one.not_finite}))


def finish_save(
    job: SaveJob,
    keep: Retention,
    written: WrittenFiles,
    deleted: list[int],
    failed: list[str],
    duration_s: float,
    stalled_s: float,
) -> SaveResult:
    """Report a finished save in events and logs, and return its result.

    Args:
        written: the files of all ranks.
        deleted: on a leader, steps whose checkpoints it deleted.
        failed: on a leader, one message for each checkpoint that it could not delete.

    Collective: all ranks of the world.
    """
    place = job.place
    answers = place.gather((deleted, failed))
    result = SaveResult(
        path=job.final,
        step=job.step,
        size_bytes=sum(record.size_bytes for record in written.records),
        duration_s=duration_s,
        stalled_s=stalled_s,
        deleted=sorted({gone for steps, _ in answers for gone in steps}),
        non_finite=job.manifest(written).non_finite,
    )
    place.emit(
        "save",
        "checkpoint",
        step=job.step,
        path=str(result.path),
        size_bytes=result.size_bytes,
        duration_s=round(duration_s, 3),
        stalled_s=round(stalled_s, 3),
    )
    if result.non_finite is not None:
        place.emit("warning", "checkpoint_not_finite", step=job.step, files=written.not_finite)
        if place.rank == 0:
            logger.warning("%s is saved, but %s", job.final, result.non_finite)
    if job.wrong_place is not None:
        place.emit("warning", "checkpoint_wrong_place", step=job.step, reason=job.wrong_place)
        if place.rank == 0:
            logger.error("%s is saved, but no resume takes it: %s", job.final, job.wrong_place)
    for gone in result.deleted:
        place.emit("delete", "checkpoint", step=gone, reason=f"keep_last {keep.last}, keep_every {keep.every}")
    for line in (line for _, lines in answers for line in lines):
        place.emit("warning", "checkpoint_not_deleted", step=job.step, message=line)
    return result


@dataclass(frozen=True)
class SaveJob:
    """One save: its paths and ranks.

    Attributes:
        folder: the checkpoint folder.
        dims: this rank's position in the layout.
        place: the ranks of the save, with those that share this rank's folder.
        engine: properties of the engine, from ``describe_engine``.
        finite_step, wrong_place: see ``Manifest``.
    """

    folder: Path
    step: int
    dims: ParallelDims
    place: FolderRanks
    engine: dict[str, Any]
    finite_step: int | None = None
    wrong_place: str | None = None

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

    def manifest(self, written: WrittenFiles) -> Manifest:
        """The manifest of the leader's folder; ``written``: the files of all ranks."""
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
            files=[record for record in written.records if record.rank in mine],
            not_finite=written.not_finite,
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

    def agree(self, problem: RankProblem | None, *, saved: bool = False) -> None:
        """Continue if no rank has a problem, else clean up and raise on all ranks; ``saved``: the checkpoint stays.

        Collective: all ranks.
        """
        try:
            raise_on_all_ranks(problem, self.place, self.failure(saved=saved))
        except MegasdcError:
            if self.place.leader:
                self.clean_up()
            self.place.gather(None)  # no rank raises before the folders are clean
            raise

    def failure(self, *, saved: bool) -> str:
        """First words of the message of a failure; ``saved``: the checkpoint is complete."""
        if saved:
            return (
                f"checkpoint of step {self.step} was saved, {self.final} is whole and a run resumes from it, but "
                f"{self.folder / LATEST_FILE} could not be written and names an earlier one or none"
            )
        return f"checkpoint of step {self.step} in {self.folder} was not saved, those before it are untouched"


def refuse_decoupled(engine: Any) -> None:
    """Raise a CheckpointError if DeepSpeed is configured to write checkpoints in the background itself."""
    if engine.checkpoint_engine.is_decoupled():
        raise CheckpointError(
            "DeepSpeed's key checkpoint.writer asks for files written in the background, but a checkpoint is "
            "complete only when all files are on the disk: remove the key, and use megasdc.checkpoint.writing"
        )


def shared_state_text(state: SavedState) -> str:
    """Content of ``megasdc.json``."""
    return json.dumps(state.shared_state, indent=1) + "\n"


def describe_engine(engine: Any) -> dict[str, Any]:
    """Properties that the saving and the loading engine must share, and the number of steps taken."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return {
        "optimizer": type(engine.optimizer).__name__,
        "inner_optimizer": type(inner).__name__,
        "num_param_groups": len(engine.optimizer.param_groups),
        "num_layers": len(engine.module._layer_specs),
        "global_steps": int(engine.global_steps),
    }


def with_plain_stage(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same state with the ZeRO stage as a number.

    DeepSpeed saves it as an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``, which the load
    into an engine refuses.
    """
    optimizer = state_dict.get("optimizer_state_dict")
    if not isinstance(optimizer, dict) or not isinstance(stage := optimizer.get("zero_stage"), Enum):
        return state_dict
    return {**state_dict, "optimizer_state_dict": {**optimizer, "zero_stage": stage.value}}


def describe_tensors(state: dict[str, Any]) -> dict[str, str]:
    """Data type and shape of each tensor of a state dict, such as ``float32[64, 64]``."""
    return {
        name: f"{dtype_name(value.dtype)}{list(value.shape)}"
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


Writer = TypeVar("Writer")


@contextlib.contextmanager
def wrapped_writer(engine: Any, writer: Writer, writes_model: bool, *, every_node: bool) -> Iterator[Writer]:
    """Context that installs a writer in a PipelineEngine instead of DeepSpeed's and removes it again.

    DeepSpeed writes the weights on the first replica only. With node-local storage (``every_node``), the first rank of
    each stage and tensor rank on a node is made to write them too: ``save_non_zero_checkpoint`` opens the file of the
    stage, and the grid's ``data_parallel_id`` the files of its layers. Its two recovery scripts are not copied: they
    cannot read checkpoints of a pipeline engine.
    """
    grid, module = engine.grid, engine.module
    before = (engine.checkpoint_engine, engine.save_non_zero_checkpoint, grid.data_parallel_id)
    parallel_write = module.checkpoint_parallel_write_pipeline
    engine.checkpoint_engine = writer
    engine._copy_recovery_script = lambda save_path: None
    if every_node:
        engine.save_non_zero_checkpoint = writes_model
        module.checkpoint_parallel_write_pipeline = False
        grid.data_parallel_id = 0 if writes_model else 1
    try:
        yield writer
    finally:
        engine.checkpoint_engine, engine.save_non_zero_checkpoint, grid.data_parallel_id = before
        module.checkpoint_parallel_write_pipeline = parallel_write
        del engine._copy_recovery_script  # uncovers the method of the class


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
