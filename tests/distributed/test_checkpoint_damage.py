"""Is every damaged checkpoint refused by all ranks together, and does a broken save lose nothing?"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_model import Run
from harness import run_distributed
from small_disk import small_disk

from megasdc.checkpoint import files, save, snapshot, writer_process
from megasdc.checkpoint.manifest import Manifest, describe_file, read_manifest, write_manifest
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.resume import find_checkpoint
from megasdc.checkpoint.snapshot import SavedState
from megasdc.common.errors import CheckpointError, MegasdcError, StorageError
from megasdc.events import EventLog, read_events

pytestmark = pytest.mark.distributed

KINDS = (
    "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "mp_rank_00_model_states.pt",
    "layer_02-model_00-model_states.pt",
    "rank_00001_state.pt",
    "megasdc.json",
    "manifest.json",
)
"""One file of each kind in a checkpoint of TP1 x PP1 x DP2."""


class Payload:
    """Creates a file when it is unpickled without care."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.path}",))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _swap(first: Path, second: Path) -> None:
    first.rename(first.with_suffix(".aside"))
    second.rename(first)
    first.with_suffix(".aside").rename(second)


def _plant(folder: Path) -> None:
    """Replace a rank's state by a pickle that runs a command, with a manifest that fits it."""
    name = "rank_00000_state.pt"
    torch.save(Payload(str(folder.parent.parent / "executed")), folder / name)
    manifest = read_manifest(folder)
    record = describe_file(folder, name, rank=0, node="n")
    records = [record if old.name == name else old for old in manifest.files]
    write_manifest(
        folder, Manifest.model_validate({**manifest.model_dump(), "files": [r.model_dump() for r in records]})
    )


def _damages() -> dict[str, tuple[str, Callable[[Path], None]]]:
    """Every damage by name: what the reason must name, and what is done to the folder."""
    damages: dict[str, tuple[str, Callable[[Path], None]]] = {}
    for kind in KINDS:
        damages[f"flip {kind}"] = (kind, lambda folder, kind=kind: _flip(folder / kind))  # type: ignore[misc]
        damages[f"truncate {kind}"] = (kind, lambda folder, kind=kind: _truncate(folder / kind))  # type: ignore[misc]
        damages[f"remove {kind}"] = (kind, lambda folder, kind=kind: (folder / kind).unlink())  # type: ignore[misc]
    for first, second in (
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("layer_00-model_00-model_states.pt", "layer_01-model_00-model_states.pt"),
        ("rank_00000_state.pt", "rank_00001_state.pt"),
    ):
        damages[f"swap {first}"] = (
            first,
            lambda folder, first=first, second=second: _swap(folder / first, folder / second),  # type: ignore[misc]
        )
    extra = "layer_02-model_01-model_states.pt"
    damages["add a file"] = (extra, lambda folder: shutil.copy(folder / KINDS[2], folder / extra))
    damages["other step"] = (
        "manifest.json",
        lambda folder: (shutil.rmtree(folder), shutil.copytree(folder.with_name("step_00000001"), folder)),  # type: ignore[func-returns-value]
    )
    damages["malicious pickle"] = ("rank_00000_state.pt", _plant)
    return damages


def _damage_one_by_one(folder: str, run_dir: str) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    run = Run()
    run.train(1)
    run.save(folder)
    expected = run.digest()
    run.train(1)
    run.save(folder)
    newest = Path(folder) / "step_00000002"
    backup = Path(run_dir) / "backup"
    if rank == 0:
        shutil.copytree(newest, backup)
    events = EventLog(run_dir, rank)
    found: dict[str, Any] = {}
    for name, (_, damage) in _damages().items():
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(newest)
            shutil.copytree(backup, newest)
            damage(newest)
        torch.distributed.barrier()
        chosen = find_checkpoint(folder, run.dims, CheckpointGroup(events=events))
        assert chosen is not None
        found[name] = (chosen.step, chosen.skipped)
        if name in (f"flip {KINDS[0]}", f"truncate {KINDS[0]}"):
            unverified = find_checkpoint(folder, run.dims, CheckpointGroup(), verify=False)
            assert unverified is not None
            assert unverified.step == (2 if name.startswith("flip") else 1)
    run.resume(folder)
    found["resumed from the one before"] = run.digest() == expected
    torch.distributed.barrier()
    if rank == 0:
        _flip(Path(folder) / "step_00000001" / KINDS[0])
    torch.distributed.barrier()
    try:
        find_checkpoint(folder, run.dims, CheckpointGroup())
    except CheckpointError as error:
        found["none left"] = str(error)
    return found


def test_damage_of_any_kind_is_refused_by_all_ranks(tmp_path: Path) -> None:
    """A flipped byte, a cut, a missing, swapped or foreign file: all ranks fall back together, the file is named."""
    first, second = run_distributed(_damage_one_by_one, 2, str(tmp_path / "run"), str(tmp_path))
    assert first == second
    assert first.pop("resumed from the one before")
    text = first.pop("none left")
    assert "none of the 2 checkpoints" in text
    assert KINDS[0] in text
    for name, (file, _) in _damages().items():
        step, skipped = first[name]
        assert step == 1, name
        assert file in " ".join(skipped[2]), (name, skipped)
    assert "content of zero_pp_rank_1" in " ".join(first["swap zero_pp_rank_0_mp_rank_00_optim_states.pt"][1][2])
    assert "posix.system" in " ".join(first["malicious pickle"][1][2])
    assert not (tmp_path / "executed").exists()
    assert len(list(read_events(tmp_path, kind="skip", name="checkpoint"))) == len(_damages())


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "prepared": (snapshot, "wrapped_writer", 1),
    "one file written": (snapshot, "sync_path", 0),
    "files written": (snapshot, "describe_stored", 1),
    "manifest written": (writer_process, "commit_folder", 0),
    "old one moved aside": (files.os, "rename", 0),
    "renamed": (save.DiskSaver, "_move_latest", 0),
    "deleting": (writer_process, "delete_unheld", 0),
}
"""Which call of the second save a rank is killed before (``os.rename``: after), and which rank."""


def _kill_at(folder: str, moment: str) -> None:
    run = Run()
    run.train(1)
    run.save(folder)
    run.train(1)
    place, name, victim = MOMENTS[moment]
    replaces = moment == "old one moved aside"
    if replaces:
        run.save(folder)
    if torch.distributed.get_rank() == victim:
        (_die_after if replaces else _die_before)(place, name)
    run.save(folder, keep_last=1)


def _die_before(place: Any, name: str) -> None:
    def die(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, name, die)


def _die_after(place: Any, name: str) -> None:
    original = getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, name, call)


def _look_at(folders: list[str]) -> list[tuple[int, list[int]]]:
    found = []
    for folder in folders:
        run = Run(seed=3)
        loaded = run.resume(folder)
        assert loaded is not None
        run.train(1)
        found.append((loaded.step, files.list_steps(folder)))
        assert not list(Path(folder).glob(".tmp*"))
    return found


def test_a_rank_killed_inside_a_save_costs_at_most_that_save(tmp_path: Path) -> None:
    """After SIGKILL at any moment the run resumes: from the new checkpoint once it is named, else the one before."""
    folders = []
    for number, (moment, (_, _, victim)) in enumerate(MOMENTS.items()):
        folders.append(str(tmp_path / str(number)))
        run_distributed(_kill_at, 2, folders[-1], moment, expect_exit={victim: -9}, grace_s=0.2)
    answers = run_distributed(_look_at, 2, folders)
    assert answers[0] == answers[1]
    steps = dict(zip(MOMENTS, answers[0], strict=True))
    for moment in ("prepared", "one file written", "files written", "manifest written"):
        assert steps[moment] == (1, [1]), moment
    assert steps["old one moved aside"] == (2, [1, 2])
    assert steps["renamed"] == (2, [1, 2])
    assert steps["deleting"] == (2, [1, 2])


def _fail_to_save(folder: str, limit_bytes: int | None, width: int) -> tuple[str, int, list[str], int]:
    """Save once, then again where the disk does not take it; return the error and what is left."""
    run = Run(width=width)
    run.train(1)
    run.save(folder)
    run.train(1)
    if limit_bytes is not None and torch.distributed.get_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    text, code = "saved", 0
    try:
        run.save(folder)
    except MegasdcError as error:
        text, code = str(error), error.exit_code
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    names = sorted(path.name for path in Path(folder).iterdir())
    loaded = run.resume(folder)
    assert loaded is not None
    return text, code, names, loaded.step


def test_a_rank_that_cannot_write_stops_all_ranks(tmp_path: Path) -> None:
    """One rank's file is cut off by the system: StorageError on all ranks, the earlier checkpoint is whole."""
    for text, code, names, step in run_distributed(_fail_to_save, 2, str(tmp_path / "run"), 4000, 32):
        assert code == StorageError.exit_code
        assert "rank 1" in text
        assert ".pt" in text
        assert names == ["latest", "step_00000001"]
        assert step == 1


def test_a_full_disk_stops_all_ranks_and_loses_nothing(tmp_path: Path) -> None:
    """A file system that runs full while saving: StorageError on all ranks, the earlier checkpoint is whole."""
    with small_disk(tmp_path / "disk", 300_000) as disk:
        answers = run_distributed(_fail_to_save, 2, str(disk / "run"), None, 48)
    for text, code, names, step in answers:
        assert code == StorageError.exit_code, text
        assert "step 2" in text
        assert names == ["latest", "step_00000001"]
        assert step == 1


def _cannot_point(folder: str) -> tuple[str, int, list[str], int]:
    """Save once, then again where ``latest`` cannot be replaced; return the error and what is left."""
    run = Run()
    run.train(1)
    run.save(folder)
    run.train(1)
    if torch.distributed.get_rank() == 0:
        (Path(folder) / "latest").unlink()
        (Path(folder) / "latest" / "in the way").mkdir(parents=True)
    text, code = "saved", 0
    try:
        run.save(folder)
    except MegasdcError as error:
        text, code = str(error), error.exit_code
    names = sorted(path.name for path in Path(folder).iterdir())
    loaded = run.resume(folder)
    assert loaded is not None
    return text, code, names, loaded.step


def test_a_name_that_cannot_be_written_does_not_deny_the_checkpoint(tmp_path: Path) -> None:
    """After the rename the checkpoint is whole: the error says so, names ``latest``, and a resume takes it."""
    for text, code, names, step in run_distributed(_cannot_point, 2, str(tmp_path / "run")):
        assert code == StorageError.exit_code
        assert "checkpoint of step 2 was saved" in text and "latest could not be written" in text
        assert "not saved" not in text
        assert names == ["latest", "step_00000001", "step_00000002"]
        assert step == 2


def _cannot_create(folder: str) -> tuple[str, int]:
    run = Run()
    run.train(1)
    try:
        run.save(folder)
    except StorageError as error:
        return str(error), error.exit_code
    return "saved", 0


def test_an_unusable_folder_is_a_storage_error(tmp_path: Path) -> None:
    """A checkpoint folder that cannot be created is named, on all ranks, without a hang."""
    (tmp_path / "file").write_text("not a folder")
    for text, code in run_distributed(_cannot_create, 2, str(tmp_path / "file" / "run")):
        assert code == StorageError.exit_code
        assert str(tmp_path / "file") in text


def _save_what_cannot_be_loaded(folder: str) -> str:
    run = Run()
    run.train(1)
    try:
        save.save_checkpoint(run.engine, folder, 1, SavedState({}, {"hook": Payload("x")}), run.dims, CheckpointGroup())
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    """A class outside the allow-list in a rank's state is found when saving, not when it is needed."""
    for text in run_distributed(_save_what_cannot_be_loaded, 2, str(tmp_path / "run")):
        assert "posix.system" in text
        assert "rank_0000" in text
    assert files.list_steps(tmp_path / "run") == []
