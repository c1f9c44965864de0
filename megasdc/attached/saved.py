"""Who has saved a checkpoint of a guarded training, and whether its files are those that were saved then.

DeepSpeed's folder does not say so: a record beside its files does. What replaces those files without a guard leaves the
record, which is not theirs then: so it has their sizes and times of change.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megasdc.attached.training import Training
from megasdc.checkpoint.formats.records import Record, read_record, write_record
from megasdc.checkpoint.places import Place, Ranks, Storage, find_place
from megasdc.common.errors import CheckpointError

SAVED = "megasdc_saved.json"
MARK = "megasdc_verified.json"
_VERSION = 1


class Saved(Record):
    """A save with a guard.

    Args:
        save_id: unique to each save, the same in the folders of all hosts.
        step: optimizer steps that were taken.
        layout: of the training.
        zero: whether DeepSpeed had divided the optimizer's state.
        nodes: ranks of each host, of each of its devices where they have an identity.
        files: size in bytes, and time of the last change in nanoseconds since the epoch, of each of DeepSpeed's files.
    """

    format_version: int = _VERSION
    save_id: str
    step: int
    layout: str
    zero: bool
    nodes: dict[str, list[int]]
    files: dict[str, list[int]]


def find_makers(training: Training) -> Place:
    """The place of this rank, whose ``nodes`` are the devices that compute, by host.

    Collective: all ranks of the world.
    """
    storage: Storage = "node_local" if training.engine.use_node_local_storage() else "shared"
    place, device = find_place(Ranks(storage, training.world)), training.origin.device
    nodes = dict[str, list[int]]()
    for rank, name in enumerate(place.gather(place.node if device is None else f"{place.node} ({device})")):
        nodes.setdefault(name, []).append(rank)
    return replace(place, nodes=nodes)


def forget_save(folder: Path) -> None:
    """Remove what is said of the checkpoint that a save replaces; OSError: it cannot be."""
    for name in (MARK, SAVED):  # a mark alone would be taken for one of an older version
        (folder / name).unlink(missing_ok=True)


def note_save(folder: Path, training: Training, place: Place, number: int) -> None:
    """Write who has saved a checkpoint; OSError: it cannot be.

    Args:
        number: of saves before it.
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
    """Who has saved a checkpoint.

    Raises:
        CheckpointError: it is not known, with the reason.
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


def check_makers(saved: Saved, training: Training, place: Place) -> None:
    """Check that all who have saved a checkpoint take part in audits now, and that all of it was loaded.

    Raises:
        CheckpointError: they do not, or it was not.
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
        marked_at = (folder / MARK).stat().st_mtime_ns
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
