"""Files and folders of checkpoints: names, kinds, deletion, locks for writing and reading, and DeepSpeed's names.

``Fence``: a launch that was frozen or cut off so long that another launch took its folder must not change the folder
any more. The lock of a run folder ends such a launch at its next step (``megasdc.train.stop``). The fence stops its
saves, which also run outside of steps and while a host wakes up: the record in the folder must still name this launch
when a checkpoint gets its name, its marker, or the file ``latest``, and before old checkpoints are deleted.

``read_lock``: a checkpoint is locked while its files are read, so that a run that keeps only its newest does not
delete it meanwhile. The lock is a kernel's lock (flock) on the manifest, shared by readers; deletion needs it
exclusively. It ends with the process that has it. On a file system without flock nothing is locked: a reader then finds
that files are missing.

DeepSpeed's names are built and parsed here alone. Source: DeepSpeed 0.19.8, ``PipelineModule.ckpt_layer_path``,
``DeepSpeedEngine._get_ckpt_name`` and ``_get_zero_ckpt_name``, ``deepspeed/checkpoint/ds_to_universal.py``.

- ``layer_03-model_01-model_states.pt``: weights of pipeline layer 3 on tensor rank 1.
- ``mp_rank_02_model_states.pt``: counters and shapes of stage file 2; a plain engine keeps its weights there too. The
  number counts pipeline stages and tensor ranks together.
- ``bf16_zero_pp_rank_0_mp_rank_02_optim_states.pt``: the optimizer's shard of a dp rank (called pp there), with a
  prefix where weights are not fp32.
- ``zero/0.word_embeddings.weight/fp32.pt``: a state of a parameter, in a universal checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from megasdc.common.durable import REPLACED_PREFIX, TEMPORARY_PREFIX
from megasdc.common.errors import CheckpointError
from megasdc.common.origin import CONFIG_FILE
from megasdc.common.run_lock import WITHOUT_FLOCK, read_holder
from megasdc.parallel.dims import ParallelDims

VERIFIED_FILE = "verified.json"
"""Mark in a checkpoint after which an audit has agreed."""
VERIFIED_BY_GUARD_FILE = "megasdc_verified.json"
"""The same in a checkpoint of DeepSpeed's, whose training a guard audits."""

LATEST_FILE = "latest"
MANIFEST_FILE = "manifest.json"
SHARED_STATE_FILE = "megasdc.json"
MARKER_FILE = "complete"
UNIVERSAL_FILE = "universal.json"
UNIVERSAL_STEP = "universal_step_"
WEIGHTS_FILE = "weights.json"
_CHUNK_BYTES = 1 << 22
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


def step_folder(step: int) -> str:
    """Name of the folder of a step's checkpoint, such as ``step_00000123``."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """Step in the name of a checkpoint's folder; None: it is no such name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def rank_state_file(rank: int) -> str:
    """Name of the file with a rank's own state, such as ``rank_00003_state.pt``."""
    return f"rank_{rank:05d}_state.pt"


def list_steps(folder: Path | str) -> list[int]:
    """Steps with a folder under a final name, complete or not, in ascending order; empty if ``folder`` is absent."""
    path = Path(folder)
    if not path.is_dir():
        return []
    matches = (_STEP_FOLDER.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def list_replaced(folder: Path | str) -> list[int]:
    """Steps whose checkpoint a killed save had moved aside; ``remove_leftovers`` restores them."""
    names = (entry.name.removeprefix(REPLACED_PREFIX) for entry in Path(folder).glob(f"{REPLACED_PREFIX}*"))
    return sorted(int(match.group(1)) for match in map(_STEP_FOLDER.fullmatch, names) if match)


def hash_file(path: Path | str, progress: Callable[[int], None] | None = None) -> str:
    """XXH3-128 of a file's bytes, hexadecimal; ``progress`` is called with the number of bytes of each piece read."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_CHUNK_BYTES):
            state.update(piece)
            if progress is not None:
                progress(len(piece))
    return state.hexdigest()


def delete_folder(folder: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that a half-deleted one is never taken for a checkpoint."""
    shutil.rmtree(rename_to_delete(folder))


def rename_to_delete(folder: Path) -> Path:
    """Rename a checkpoint so that it no longer counts as one, before its deletion; returns its new path."""
    aside = folder.with_name(f"{TEMPORARY_PREFIX}delete_{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    return aside


def remove_leftovers(folder: Path | str) -> list[str]:
    """Remove files of killed saves from a checkpoint folder, which need not exist; returns the actions, one line each.

    A checkpoint that was moved aside for a newer one of the same step is restored if the newer one was not committed.
    """
    path = Path(folder)
    done: list[str] = []
    if not path.is_dir():
        return done
    for entry in sorted(path.glob(f"{TEMPORARY_PREFIX}*")):
        final = path / entry.name.removeprefix(REPLACED_PREFIX)
        if entry.name.startswith(REPLACED_PREFIX) and entry.is_dir() and not final.exists():
            os.rename(entry, final)
            done.append(f"{final.name} restored: the save that was to replace it did not finish")
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
        done.append(f"{entry.name} removed: left by a save that did not finish")
    return done


CHECKPOINT = "a checkpoint"
CHECKPOINTS = "a folder of checkpoints"
UNIVERSAL = "a universal checkpoint"
UNIVERSALS = "a folder of universal checkpoints"
INITIAL = "initial weights, made by import-hf"
DATA = "prepared data"
MODEL = "a Hugging Face model"
ZERO = "a checkpoint of DeepSpeed without a manifest of megasdc"
ZEROS = "a folder of checkpoints of DeepSpeed"
DCP = "a folder of torch.distributed.checkpoint"
RUN = "a run folder"
ONE_CHECKPOINT = "one checkpoint or one model"
"""Kind of folder that a comparison or a view of tensors needs; used in messages only."""


def is_universal(folder: Path | str) -> bool:
    """Whether a folder is a universal checkpoint, complete or not."""
    return (Path(folder) / UNIVERSAL_FILE).exists()


def list_universal(folder: Path | str) -> list[Path]:
    """Universal checkpoints in a folder, complete or not, in order of name; empty if the folder does not exist."""
    path = Path(folder)
    if not path.is_dir():
        return []
    entries = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return [entry for entry in entries if is_universal(entry) or entry.name.startswith(UNIVERSAL_STEP)]


def is_initial_weights(folder: Path | str) -> bool:
    """Whether a folder was made by ``megasdc import-hf``."""
    return (Path(folder) / WEIGHTS_FILE).is_file()


_READABLE = "megasdc inspect-checkpoint, manifest and compare read it; a run cannot start from it"
_REMEDIES = {
    CHECKPOINT: "give it to eval, generate, export-hf or megasdc.model.initial_weights, or convert it with megasdc "
    "convert-checkpoint {path} --to universal",
    CHECKPOINTS: "give it to eval, generate, export-hf or megasdc.model.initial_weights, or convert the newest in it "
    "with megasdc convert-checkpoint {path} --to universal",
    UNIVERSAL: "start a run from it with megasdc.checkpoint.universal={path}; eval, generate and export-hf read the "
    "checkpoint that it was made from",
    UNIVERSALS: "start a run from one of them with megasdc.checkpoint.universal; eval, generate and export-hf read the "
    "checkpoints that they were made from",
    INITIAL: "train from it with megasdc.model.initial_weights={path}, or give it to eval, generate or export-hf",
    DATA: "name it in megasdc.data.path",
    MODEL: "import it with megasdc import-hf {path} OUT",
    RUN: "its checkpoints are in {path}",
    ZERO: _READABLE,
    ZEROS: "give one of the folders in it, such as that which {path}/latest names, to megasdc inspect-checkpoint, "
    "manifest or compare",
    DCP: _READABLE,
}
_REMEDIES_FOR_UNIVERSAL = {
    CHECKPOINT: "convert it with megasdc convert-checkpoint {path} --to universal",
    CHECKPOINTS: "convert the newest in it with megasdc convert-checkpoint {path} --to universal",
    RUN: "convert the newest of its checkpoints with megasdc convert-checkpoint {path} --to universal",
}
"""Remedies by kind of folder where a universal checkpoint is needed."""
_SIGNS: dict[str, Callable[[Path], Any]] = {
    UNIVERSAL: is_universal,
    INITIAL: is_initial_weights,
    DATA: lambda path: "splits" in _read_json(path / MANIFEST_FILE),
    CHECKPOINT: lambda path: (path / MANIFEST_FILE).exists(),
    CHECKPOINTS: list_steps,
    UNIVERSALS: list_universal,
    MODEL: lambda path: "model_type" in _read_json(path / "config.json"),
    ZERO: lambda path: (path / stage_file()).exists(),
    ZEROS: lambda path: (path / "latest").is_file(),
    DCP: lambda path: any((path / name).exists() for name in (".metadata", "__0_0.distcp")),
    RUN: lambda path: (path / CONFIG_FILE).is_file() or any(one.is_dir() for one in _in_run(path)),
}
"""Test for each kind of folder; the first that holds decides."""


def kind_of(path: Path | str) -> str | None:
    """Kind of a folder, by the files that only such a folder holds; None: unknown."""
    return next((kind for kind, sign in _SIGNS.items() if sign(Path(path))), None)


def explain_folder(path: Path | str, needed: str) -> str | None:
    """A sentence that a folder is of another kind than ``needed``, with a remedy; None if its kind is unknown."""
    kind = kind_of(path)
    if kind is None:
        return None
    remedy = _REMEDIES[kind]
    if needed == UNIVERSAL:
        inside = [one for folder in (Path(path), *_in_run(Path(path))) for one in list_universal(folder)]
        remedy = f"give {inside[-1]}, which lies in it" if inside else _REMEDIES_FOR_UNIVERSAL.get(kind, remedy)
    elif needed == ONE_CHECKPOINT and (inside := _list_checkpoints(Path(path))):
        remedy = f"name one of its checkpoints, such as {inside[-1]}"
    places = _in_run(Path(path))
    home = next((one for one in places if one.is_dir()), places[0]) if kind == RUN else path
    return f"{path} is {kind}; needed is {needed}: {remedy.format(path=home)}"


def _in_run(path: Path) -> list[Path]:
    """Folders of checkpoints that a run folder may have, its own or those of replicas that train apart."""
    return [_folder_of_run(one) for one in (path, *sorted(path.glob("replica_*")))]


def _folder_of_run(path: Path) -> Path:
    """Folder of a run's checkpoints, as its configuration names it."""
    found: Any = _read_json(path / CONFIG_FILE)
    for name in ("megasdc", "checkpoint", "folder"):
        found = found.get(name) if isinstance(found, dict) else None
    return Path(found) if isinstance(found, str) else path / "checkpoints"


def _list_checkpoints(path: Path) -> list[Path]:
    """Checkpoints in a folder of several or in a run folder: universal ones by name, then the others by step."""
    folders = (path, *_in_run(path))
    found = [one for folder in folders for one in list_universal(folder)]
    return found + [folder / step_folder(step) for folder in folders for step in list_steps(folder)]


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class FencedError(OSError):
    """Another launch has taken the folder."""


@dataclass(frozen=True)
class Fence:
    """The claim of a launch on a folder.

    Args:
        folder: the locked folder, which holds the checkpoints.
        token: token of the launch, as in the record of its lock.
    """

    folder: Path
    token: str

    def check(self) -> None:
        """Check that this launch still holds the folder; a record that cannot be read counts as its own.

        Raises:
            FencedError: another launch has taken the folder.
        """
        holder = read_holder(self.folder)
        if holder is not None and holder.token != self.token:
            raise FencedError(f"{self.folder} was taken by {holder} while this launch stood still; nothing is changed")


@contextlib.contextmanager
def read_lock(folder: Path) -> Iterator[int]:
    """Context in which a checkpoint is not deleted by its run; CheckpointError if it is absent or being deleted.

    Yields the file descriptor of the lock: a process that inherits it keeps the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder / MANIFEST_FILE, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            if not _lock(descriptor, fcntl.LOCK_SH):
                raise CheckpointError(f"{folder} is being deleted: name a newer checkpoint")
        except OSError as error:
            raise CheckpointError(f"{folder / MANIFEST_FILE} cannot be read: {error.strerror}") from error
        yield descriptor


@contextlib.contextmanager
def exclusive_lock(folder: Path) -> Iterator[bool]:
    """Context with the exclusive lock of a checkpoint, if it is free; yields whether it was: nobody reads it then.

    OSError if its manifest cannot be opened for writing, which NFS needs for such a lock.
    """
    descriptor = os.open(folder / MANIFEST_FILE, os.O_RDWR)
    try:
        yield _lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def delete_unheld(folder: Path) -> str | None:
    """Delete a checkpoint unless it is being read; returns the reason why it was not deleted, None: it was."""
    try:
        with exclusive_lock(folder) as free:
            aside = rename_to_delete(folder) if free else None
        if aside is None:
            return f"{folder} is being archived: a later save deletes it"
        shutil.rmtree(aside)
    except OSError as error:
        return f"{folder} cannot be deleted: {error}"
    return None


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_FLOCK:
            raise
    return True


SHARD_FILES = "*zero_pp_rank_*_optim_states.pt"
"""Glob pattern of the files of optimizer shards."""
PARAMETERS_FOLDER = "zero"
"""Folder of a universal checkpoint with a subfolder for each parameter."""
UNIVERSAL_OPTIMIZER = f"{PARAMETERS_FOLDER}/optimizer_state.pt"
"""Parameter groups of a universal checkpoint."""
STATES = ("fp32", "exp_avg", "exp_avg_sq")
"""Tensors of a parameter there, each unsharded and in fp32: master weight, first and second moment."""
FileKind = Literal["layers", "optimizer", "stages", "parameters"]
_PREFIXES = ("", "bf16_", "fp16_")
_LAYER = re.compile(r"layer_(\d+)-model_\d+-model_states\.pt")
_STAGE = re.compile(r"mp_rank_\d+_model_states\.pt")
_SHARD = re.compile(r"(.*)zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_PARAMETER = re.compile(rf"{PARAMETERS_FOLDER}/(.+)/({'|'.join(STATES)})\.pt")


def layer_file(index: int, tp_rank: int) -> str:
    """Name of the file with the weights of a pipeline layer on a tensor rank."""
    return f"layer_{index:02d}-model_{tp_rank:02d}-model_states.pt"


def layer_of(name: str) -> int | None:
    """Pipeline layer whose weights a file holds, by its name; None: it is no layer's file."""
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def stage_number(dims: ParallelDims) -> int:
    """Number of a rank's stage file."""
    return dims.pp_rank * dims.tensor + dims.tp_rank


def stage_file(stage: int = 0) -> str:
    """Name of a stage file; number 0 is in every checkpoint of DeepSpeed but those of ZeRO-3."""
    return f"mp_rank_{stage:02d}_model_states.pt"


def shard_file(dp_rank: int, stage: int, prefix: str = "") -> str:
    """Name of the file with a dp rank's shard of a stage's optimizer; see ``stage_number`` and ``find_prefix``."""
    return f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{stage:02d}_optim_states.pt"


def shard_files(dims: ParallelDims) -> list[str]:
    """Names that the file of a rank's optimizer shard can have; the first is that of an fp32 run."""
    return [shard_file(dims.dp_rank, stage_number(dims), prefix) for prefix in _PREFIXES]


def find_prefix(names: Iterable[str]) -> str:
    """Prefix of the files of optimizer shards among ``names``, such as ``bf16_``; empty if there are none."""
    return next((match[1] for name in names if (match := _SHARD.fullmatch(name))), "")


def parameter_file(parameter: str, state: str) -> str:
    """Path of a state of a parameter in a universal checkpoint."""
    return f"{PARAMETERS_FOLDER}/{parameter}/{state}.pt"


def parameter_of(name: str) -> tuple[str, str] | None:
    """Parameter and state that a path in a universal checkpoint holds; None: it is no state's file."""
    match = _PARAMETER.fullmatch(name)
    return (match[1], match[2]) if match else None


def kind_of_file(name: str | Path) -> FileKind | None:
    """Kind of content of a file of DeepSpeed, by its name in the checkpoint; None: it is no file of DeepSpeed."""
    text = str(name)
    if text.startswith(f"{PARAMETERS_FOLDER}/"):
        return "parameters"
    kinds: dict[FileKind, re.Pattern[str]] = {"layers": _LAYER, "optimizer": _SHARD, "stages": _STAGE}
    return next((kind for kind, pattern in kinds.items() if pattern.fullmatch(text)), None)


_ALIGNMENT = 2
"""A group is padded to a multiple of it times the replicas (DeepSpeed 0.19.8, ``nccl_start_alignment_factor``)."""


def shard_elements(total: int, replicas: int) -> int:
    """Number of elements of each rank's shard of a parameter group, padding included; ``total``: those of the group."""
    return -(-total // (_ALIGNMENT * replicas)) * _ALIGNMENT


def shards_of(totals: Sequence[int], saved: int, now: int, dp_rank: int) -> set[int]:
    """Numbers of the saved shards that hold the elements of a replica's new shard; at least one.

    Args:
        totals: number of elements of each parameter group of a stage's optimizer on one tensor rank.
        saved: number of replicas that saved.
        now: number of replicas that load.
        dp_rank: the replica that loads.
    """
    found = set()
    for total in totals:
        before, after = (shard_elements(total, replicas) for replicas in (saved, now))
        first, end = dp_rank * after, min((dp_rank + 1) * after, total)
        if first < end:
            found |= set(range(first // before, -(-end // before)))
    return found or {min(dp_rank, saved - 1)}
