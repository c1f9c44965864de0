"""Is what a rename publishes on the disk before it, and the rename itself after it? Files and folders alike."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from checkpoint_model import Run
from harness import run_distributed
from whole_runs import tokenize_text

from megasdc.checkpoint.resume import move_aside
from megasdc.common.durable import commit_folder, write_durably

pytestmark = pytest.mark.distributed

Entry = tuple[str, ...]
"""("sync", path) or ("rename", from, to)."""


@contextmanager
def disk_log() -> Iterator[list[Entry]]:
    """Note every fsync with the path that is synced, and every rename; all of them happen too."""
    log: list[Entry] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noted_fsync(descriptor: int) -> None:
        log.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(source: Path | str, target: Path | str) -> None:
        log.append(("rename", os.path.realpath(source), os.path.realpath(target)))
        rename(source, target)

    def noted_replace(source: Path | str, target: Path | str) -> None:
        log.append(("rename", os.path.realpath(source), os.path.realpath(target)))
        replace(source, target)

    with (
        patch.object(os, "fsync", noted_fsync),
        patch.object(os, "rename", noted_rename),
        patch.object(os, "replace", noted_replace),
    ):
        yield log


def at_risk(log: list[Entry], target: Path) -> list[str]:
    """What of a renamed file or folder a power failure could lose: its name, or names and bytes in it.

    Args:
        log: of the process that renamed it.
        target: what the last rename to this name made.
    """
    name = os.path.realpath(target)
    place = max(number for number, entry in enumerate(log) if entry[0] == "rename" and entry[2] == name)
    source = Path(log[place][1])
    inside = [source / path.relative_to(target) for path in target.rglob("*")] if target.is_dir() else []
    # A file in it may have had another name when it was synced.
    names = {entry[1]: entry[2] for entry in log[:place] if entry[0] == "rename"}
    synced = {names.get(entry[1], entry[1]) for entry in log[:place] if entry[0] == "sync"}
    lost = [str(path) for path in [source, *inside] if str(path) not in synced]
    return lost + ([] if ("sync", str(Path(name).parent)) in log[place:] else [f"the name {name}"])


def _save(folder: str) -> tuple[list[str], list[str]]:
    run = Run()
    run.train(1)
    with disk_log() as log:
        run.save(folder)
    return at_risk(log, Path(folder) / "step_00000001"), at_risk(log, Path(folder) / "latest")


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """All that a save writes is synced before the rename, the checkpoint folder after it; so is `latest`."""
    assert run_distributed(_save, 1, str(tmp_path / "checkpoints")) == [([], [])]


def test_prepared_data_are_on_the_disk_before_they_have_their_name(tmp_path: Path) -> None:
    """Token files, tokenizer, manifest and their folders are synced before the rename, the folder above after it."""
    with disk_log() as log:
        folder = tokenize_text(tmp_path)
    assert at_risk(log, folder) == []


def test_small_files_and_folders(tmp_path: Path) -> None:
    """A text, a committed folder and a checkpoint that is moved aside have durable names when the call returns."""
    written = tmp_path / "written"
    written.mkdir()
    (tmp_path / "step_00000001").mkdir()
    with disk_log() as log:
        write_durably(tmp_path / "latest", "text")
    assert at_risk(log, tmp_path / "latest") == []
    with disk_log() as log:
        commit_folder(written, tmp_path / "final")
    assert at_risk(log, tmp_path / "final") == [str(written)]  # its content is the caller's to sync
    with disk_log() as log:
        assert move_aside(tmp_path, [1]) == [(1, "unverified/step_00000001")]
    aside = tmp_path / "unverified" / "step_00000001"
    assert not [one for one in at_risk(log, aside) if one.startswith("the name")]
    assert log[-1] == ("sync", str(tmp_path))  # the old name is gone, and the new folder's name there
