"""Checkpoints of a guarded training: which of them an audit has agreed on since, to go on from.

Weights, masters and moments are checked to be finite where they are saved, and after the step that was audited.

DeepSpeed's folder does not say who saved it: a record beside its files does. It has their sizes and times of change, by
which files that replaced them without a guard are noticed.
"""

from __future__ import annotations

import datetime
import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megasdc.attached.training import Protection, Training
from megasdc.checkpoint.files import VERIFIED_BY_GUARD_FILE
from megasdc.checkpoint.ranks import CheckpointGroup, FolderRanks, Storage, find_place
from megasdc.checkpoint.records import Record, read_record, write_record
from megasdc.common.durable import END_S, wait_for_room, write_durably
from megasdc.common.errors import CheckpointError
from megasdc.parallel.collectives import gather_objects
from megasdc.tensors.bits import are_finite

SAVED = "megasdc_saved.json"
_VERSION = 1


class Saved(Record):
    """A save with a guard.

    Args:
        save_id: id unique to each save, the same in the folders of all hosts.
        step: number of optimizer steps that were taken.
        layout: layout of the training.
        zero: whether DeepSpeed had divided the optimizer's state.
        nodes: ranks of each host, or of each of its devices where these have an identity.
        files: size in bytes, and time of the last change in nanoseconds since the epoch, of each of DeepSpeed's files.
    """

    format_version: int = _VERSION
    save_id: str
    step: int
    layout: str
    zero: bool
    nodes: dict[str, list[int]]
    files: dict[str, list[int]]


def find_makers(training: Training) -> FolderRanks:
    """Place of this rank in the checkpoint's folders; its ``nodes`` are the devices that compute, by host.

    Collective: all ranks of the world.
    """
    storage: Storage = "node_local" if training.engine.use_node_local_storage() else "shared"
    place, device = find_place(CheckpointGroup(storage, training.host_group)), training.events.origin.device
    nodes = dict[str, list[int]]()
    for rank, name in enumerate(place.gather(place.node if device is None else f"{place.node} ({device})")):
        nodes.setdefault(name, []).append(rank)
    return replace(place, nodes=nodes)


def forget_save(folder: Path) -> None:
    """Remove the records of the checkpoint that a save replaces; OSError: they cannot be removed."""
    for name in (VERIFIED_BY_GUARD_FILE, SAVED):  # a mark alone would be taken for one of an older version
        (folder / name).unlink(missing_ok=True)


def note_save(folder: Path, training: Training, place: FolderRanks, number: int) -> None:
    """Write the record of who has saved a checkpoint; OSError: it cannot be written.

    Args:
        number: number of saves before this one.
    """
    engine = training.engine
    saved = Saved(
        save_id=f"{place.save_id}-{number}",
        step=int(engine.global_steps),
        layout=str(training.dims),
        zero=bool(engine.zero_optimization()),
        nodes=place.nodes,
        files=_files(folder),
    )
    write_record(folder / SAVED, saved)


def read_saved(folder: Path) -> Saved:
    """Read the record of who has saved a checkpoint.

    Raises:
        CheckpointError: the record is missing or not of these files, with the reason.
    """
    try:
        if not (folder / SAVED).exists():
            raise CheckpointError("it is not known who has saved it: it was without a guard, or with an older megasdc")
        saved, files = read_record(folder / SAVED, Saved, _VERSION), _files(folder)
    except OSError as error:
        raise CheckpointError(f"it is not known who has saved it: {error}") from error
    if not files:
        raise CheckpointError("it is not known who has saved it: it has no files of DeepSpeed")
    if changed := sorted(name for name in {*saved.files, *files} if saved.files.get(name) != files.get(name)):
        raise CheckpointError(
            f"it is not known who has saved it: {changed[0]} was replaced since, removed or "
            "added, or copied without its time of change"
        )
    return saved


def check_makers(saved: Saved, training: Training, place: FolderRanks) -> None:
    """Check that all who have saved a checkpoint take part in audits now, and that all of it was loaded.

    Raises:
        CheckpointError: some do not take part, or not all was loaded.
    """
    if lacking := place.lacks(saved.nodes):
        raise CheckpointError(
            f"it was saved with {', '.join(lacking)}, of which no rank, or fewer, are in this training: what its "
            "audits agree on says nothing of them"
        )
    then, now = (saved.layout, saved.zero), (str(training.dims), bool(training.engine.zero_optimization()))
    if then != now:
        texts = (f"{layout} {'with' if zero else 'without'} ZeRO" for layout, zero in (then, now))
        raise CheckpointError("it was saved with {}, this training has {}: not all of it is used".format(*texts))


def is_marked(folder: Path) -> bool:
    """Whether a checkpoint is verified: the mark is of the files that lie there now."""
    try:
        marked_at = (folder / VERIFIED_BY_GUARD_FILE).stat().st_mtime_ns
        if (folder / SAVED).exists():
            read_saved(folder)
            return True
        return all(time <= marked_at for _, time in _files(folder).values())
    except (OSError, CheckpointError):
        return False


def _files(folder: Path) -> dict[str, list[int]]:
    found = ((path.name, path.stat()) for path in sorted(folder.glob("*.pt")))
    return {name: [seen.st_size, seen.st_mtime_ns] for name, seen in found}


def same_folder(one: Path, other: Any) -> bool:
    """Whether two paths are those of one folder."""
    return other is not None and one.resolve() == Path(other).resolve()


logger = logging.getLogger(__name__)

FORMAT = "megasdc.guard_verified.v1"
_ATTACHED_LATER = (
    "a checkpoint was loaded before the guard was attached, so that its folder is not known: attach first, or give it "
    "to guard.loaded"
)


@dataclass(frozen=True)
class _Loaded:
    """Checkpoint from which this training goes on, as this rank knows it.

    Args:
        folder: folder of the checkpoint; None: not known.
        problem: reason why an audit must not mark it; None: no reason is known.
        save_id: id of its save; None: not known.
        told: whether it was reported why it is not marked.
    """

    step: int
    folder: Path | None
    problem: str | None = None
    save_id: str | None = None
    told: bool = False


class SaveMarks(Protection):
    """Part of a guard that notes the engine's saves and loads, and marks them once an audit of a later step has agreed.

    What was saved before a checkpoint was loaded is not marked any more: the steps that follow do not depend on it. The
    step that was audited must have been taken and have left a finite state: replicas that agree on NaN have not
    computed anything that can be relied on. A state that is not finite is never marked. An audit says something of the
    devices that take part in it: what others have saved, or nobody knows who, is not marked when it is gone on from.

    Args:
        saves: whether the engine saves at all; false in a trial.

    Attributes:
        verified: folder of the newest marked checkpoint; None: there is none.
        agreed_step: step of the last audit in which all replicas agreed; None: there was none.
        candidate: folder of the newest checkpoint that is not marked; None: there is none.

    Collective: all ranks of the world, where it is made.
    """

    def __init__(self, training: Training, *, saves: bool) -> None:
        self._training, self._engine = training, training.engine
        self._emit, self._world, self._saves = training.events.emit_on_rank_0, training.host_group, saves
        self._place = find_makers(training)
        self._count = 0
        """Number of saves so far."""
        self._agreed: tuple[int, int] | None = None
        """Step of the last audit, if that step is not taken yet, and the number of steps skipped before it."""
        self._save, self._load = self._engine.save_checkpoint, self._engine.load_checkpoint
        self._waiting: list[tuple[int, Path]] = []
        self._loaded: _Loaded | None = None
        if getattr(self._engine, "loaded_checkpoint_dp_world_size", None) is not None:
            self._loaded = _Loaded(int(self._engine.global_steps), None, _ATTACHED_LATER)
        self.verified: Path | None = None
        self.agreed_step: int | None = None
        self.after_load: Callable[[], None] = lambda: None
        self.tell: Callable[[Path | None], None] = lambda candidate: None
        """Told the newest checkpoint that is not marked, when there is another."""
        self._engine.save_checkpoint, self._engine.load_checkpoint = self._noting, self._loading

    def close(self) -> None:
        """Give the engine back its own methods."""
        vars(self._engine).pop("save_checkpoint", None)
        vars(self._engine).pop("load_checkpoint", None)

    @property
    def candidate(self) -> Path | None:
        """Folder of the newest checkpoint that is not marked; None: there is none."""
        if self._waiting:
            return self._waiting[-1][1]
        return None if self._loaded is None else self._loaded.folder

    def _noting(self, save_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        step = int(self._engine.global_steps)
        if not self._saves:
            self._emit("guard", "not_saved", step=step)
            return True
        folder = Path(save_dir) / (f"global_step{step}" if tag is None else str(tag))
        self._replace(folder)
        result = self._save(save_dir, tag, *args, **options)
        if self._place.leader:
            try:
                note_save(folder, self._training, self._place, self._count)
            except OSError as error:
                logger.warning("guard: once it is gone on from, %s cannot be marked as verified: %s", folder, error)
        self._count += 1
        if self._on_all(are_finite(self._state()))[0]:
            self._waiting.append((step, folder))
            self.tell(folder)
            self._emit("guard", "saved", step=step, path=str(folder.absolute()))
        else:
            self._emit("warning", "checkpoint_not_finite", step=step, path=str(folder))
            if self._place.leader:
                logger.warning("guard: %s is saved, but its state is not finite: go back to an earlier one", folder)
        return result

    def _replace(self, folder: Path) -> None:
        """Forget the checkpoint in a folder that is being saved over."""
        self._waiting = [one for one in self._waiting if not same_folder(folder, one[1])]
        if self._loaded is not None and same_folder(folder, self._loaded.folder):
            self._loaded = None
        if same_folder(folder, self.verified):
            self.verified = None
        if self._place.leader:
            try:
                forget_save(folder)
            except OSError as error:  # what it says is of other files, and is not believed
                logger.warning("guard: the mark of what %s held before cannot be removed: %s", folder, error)

    def _loading(self, load_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        before, self._waiting, self._loaded = (self._waiting, self._loaded), [], None  # also where it ends half-way
        path, state = self._load(load_dir, tag, *args, **options)
        if path is None:  # nothing was found, and the training is what it was
            self._waiting, self._loaded = before
            return path, state
        self._agreed = None
        self.after_load()
        given = inspect.signature(self._load).bind(load_dir, tag, *args, **options).arguments
        whole = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
        if whole and given.get("load_module_strict", True) and given.get("custom_load_fn") is None:
            self.loaded(Path(path).parent)
        return path, state

    def loaded(self, folder: Path) -> None:
        """Note that all ranks have loaded a checkpoint, from which the training goes on."""
        step, problem, save_id = int(self._engine.global_steps), None, None
        self._agreed, self._waiting = None, []
        if is_marked(folder):
            self.verified, self._loaded = folder, None
            return
        try:
            saved = read_saved(folder)
            check_makers(saved, self._training, self._place)
            save_id = saved.save_id
        except CheckpointError as error:
            problem = str(error)
        if not are_finite(self._state()):
            problem = "its state is not finite"
        self._loaded = _Loaded(step, folder, problem, save_id)

    def _state(self) -> list[torch.Tensor]:
        """Weights, masters and moments of this rank."""
        inner = getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)
        own = [*self._engine.module.parameters()]
        if inner is not None:
            own += [one for group in inner.param_groups for one in group["params"]]
            states = (value for state in inner.state.values() for value in state.values())
            own += [value for value in states if isinstance(value, torch.Tensor)]
        return own

    def _on_all(self, *flags: bool) -> list[bool]:
        """Whether each flag is true on all ranks.

        Collective: all ranks of the world; one reduction of a few numbers.
        Sync: waits for the device.
        """
        found = torch.tensor([float(one) for one in flags])
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self._world)
        return [bool(one) for one in found]

    def agreed(self, audit_step: int) -> None:
        """Note that all replicas have agreed in an audit before an optimizer step."""
        self._agreed, self.agreed_step = (audit_step, int(self._engine.skipped_steps)), audit_step

    def after_step(self, step: int) -> None:
        """After the optimizer step, mark checkpoints that hold only steps before one that was audited.

        Collective: all ranks of the world, where the step was audited.
        """
        if self._agreed is None:
            return
        (audit_step, skipped), self._agreed = self._agreed, None
        if audit_step != step:  # that one ended with an error
            return
        finite, settled = self._on_all(are_finite(self._state()), self._loaded is None or self._loaded.told)
        if int(self._engine.skipped_steps) > skipped or not finite:
            self._emit(
                "audit", "not_finite", step=audit_step, reason="the step was skipped, or its state is not finite"
            )
            return
        found = [] if settled else self._settle(audit_step)
        ready = [one for one in self._waiting if one[0] < audit_step]
        self._waiting = self._waiting[len(ready) :]
        self.tell(self.candidate)
        for saved, folder in found + ready:
            self.verified = folder
            if self._place.leader:
                self._mark(folder, saved, audit_step)

    def _settle(self, audit_step: int) -> list[tuple[int, Path]]:
        """Step and folder of the loaded checkpoint, if it may be marked, else none; it is reported once why not.

        Collective: all ranks of the world.
        """
        own = self._loaded
        known = None if own is None else (own.step, own.problem, own.save_id)
        answers = gather_objects(known, self._world)
        problems = [one[1] for one in answers if one is not None and one[1] is not None]
        if not problems and any(one != answers[0] for one in answers):
            problems, self._waiting = ["not all ranks have loaded the same save"], []
        self._loaded = own and replace(own, told=True) if problems else None
        if not problems:
            return [] if own is None or own.folder is None else [(own.step, own.folder)]
        where = None if own is None or own.folder is None else str(own.folder)
        self._emit("guard", "not_marked", step=audit_step, path=where, reason=problems[0])
        if self._place.leader:
            logger.warning("guard: %s is not marked as verified: %s", where or "a checkpoint", problems[0])
        return []

    def _mark(self, folder: Path, step: int, audit_step: int) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        content = {"format": FORMAT, "step": step, "audit_step": audit_step, "time": now}
        try:
            text, path = json.dumps(content) + "\n", folder / VERIFIED_BY_GUARD_FILE
            wait_for_room(lambda: write_durably(path, text), path, logger.warning, at_most_s=END_S)
        except OSError as error:  # it was removed, or the disk stays full: training goes on
            logger.warning("%s is not marked as verified: %s", folder, error)
            self._emit("warning", "checkpoint_not_marked", step=step, message=str(error))
            return
        self._emit("verify", "checkpoint", step=step, path=str(folder), audit_step=audit_step)
