"""Is every kind of folder known by its files, verified where it can be, and named where another kind is needed?"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_checkpoint_files import make_checkpoint
from typer.testing import CliRunner

from megasdc.checkpoint import files as kinds
from megasdc.checkpoint.files import remove_leftovers
from megasdc.checkpoint.load import open_universal
from megasdc.checkpoint.manifest import (
    Layout,
    UniversalManifest,
    describe_file,
    read_universal_manifest,
    universal_folder,
    write_universal_manifest,
)
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.verify import find_folders, verify_checkpoint
from megasdc.checkpoint.weights import open_start, open_weights
from megasdc.cli import app
from megasdc.common.durable import commit_folder
from megasdc.common.errors import CheckpointError, ConfigError, StorageError
from megasdc.interchange.convert import convert_to_universal
from megasdc.interchange.export_hf import check_out, writing_folder
from megasdc.interchange.import_hf import import_hf
from megasdc.lab.checkpoints.pages.inspection_page import inspection_page
from megasdc.lab.checkpoints.views.inspect import inspect_checkpoint
from megasdc.lab.checkpoints.views.open import open_view
from megasdc.output.page import print_pages


@pytest.fixture
def single_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_universal(folder: Path, step: int = 2) -> Path:
    """Write a universal checkpoint with one file and its manifest."""
    path = folder / universal_folder(step)
    (path / "zero").mkdir(parents=True)
    torch.save({"param": torch.ones(3)}, path / "zero" / "fp32.pt")
    manifest = UniversalManifest(
        format_version=1,
        state="complete",
        step=step,
        conversion_id="x",
        time=0.0,
        source="step_00000002",
        source_save_id="y",
        source_layout=Layout(tensor=1, pipeline=1, data=1),
        precision="fp32",
        engine={},
        parameters={"w": [3]},
        versions={},
        files=[describe_file(path, "zero/fp32.pt", rank=0, node="n")],
    )
    write_universal_manifest(path, manifest)
    return path


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def make_folders(folder: Path) -> dict[str, Path]:
    """One folder of each kind."""
    _write(folder / "initial" / "weights.json", {})
    _write(folder / "data" / "manifest.json", {"splits": {}})
    _write(folder / "model" / "config.json", {"model_type": "gpt2"})
    _write(folder / "run" / "resolved.json", {})
    checkpoint, universal = make_checkpoint(folder / "several"), make_universal(folder / "converted")
    return {
        kinds.CHECKPOINT: checkpoint,
        kinds.CHECKPOINTS: checkpoint.parent,
        kinds.UNIVERSAL: universal,
        kinds.UNIVERSALS: universal.parent,
        kinds.INITIAL: folder / "initial",
        kinds.DATA: folder / "data",
        kinds.MODEL: folder / "model",
        kinds.RUN: folder / "run",
    }


def test_universal_folders_are_verified_and_inspected_too(tmp_path: Path) -> None:
    """With other checkpoints or alone, whole or damaged, a folder's universal checkpoints are in the report."""
    universal = make_universal(tmp_path)

    def verify(code: int) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["verify-checkpoint", str(tmp_path), "--no-contents", "--json"])
        assert done.exit_code == code, done.output
        return {Path(report["path"]).name: report for report in json.loads(done.stdout)}

    assert verify(0)[universal.name]["num_files"] == 1
    make_checkpoint(tmp_path)
    assert list(verify(0)) == ["step_00000002", universal.name]
    shown = CliRunner().invoke(app, ["inspect-checkpoint", str(tmp_path), "--json"])
    assert [one["step"] for one in json.loads(shown.stdout)] == [2, 2]
    content = (universal / "zero" / "fp32.pt").read_bytes()
    (universal / "zero" / "fp32.pt").write_bytes(content[:-1])
    found = verify(72)
    assert found["step_00000002"]["ok"]
    assert "zero/fp32.pt is truncated" in found[universal.name]["problems"][0]
    (universal / "universal.json").unlink()
    assert "has no universal.json" in verify(72)[universal.name]["problems"][0]


def test_every_kind_is_known(tmp_path: Path) -> None:
    """Each kind of folder is told from all others; an empty one and an unknown one are of none."""
    folders = make_folders(tmp_path)
    assert {kind: kinds.kind_of(folder) for kind, folder in folders.items()} == {kind: kind for kind in folders}
    (tmp_path / "empty").mkdir()
    assert kinds.kind_of(tmp_path / "empty") is None
    assert kinds.explain_folder(tmp_path / "empty", "anything") is None


def test_one_checkpoint_of_several_is_named(tmp_path: Path) -> None:
    """Given a run or a folder of checkpoints to compare, the message names the newest in it and nothing else."""
    newest = make_checkpoint(tmp_path / "run" / "checkpoints")
    of_replicas = make_checkpoint(tmp_path / "runs" / "replica_0" / "checkpoints")
    told = kinds.explain_folder(tmp_path / "runs", "a checkpoint")
    assert told is not None and told.endswith(f"its checkpoints are in {of_replicas.parent}")
    with pytest.raises(CheckpointError, match=f"name one of its checkpoints, such as {of_replicas}$"):
        open_view(tmp_path / "runs")
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(CheckpointError) as caught:
            open_view(folder)
        assert str(caught.value).endswith(f"one model: name one of its checkpoints, such as {newest}")
    named = make_checkpoint(tmp_path / "elsewhere" / "replica_1")
    (tmp_path / "named" / "replica_1").mkdir(parents=True)
    section = {"megasdc": {"checkpoint": {"folder": str(named.parent)}}}
    (tmp_path / "named" / "replica_1" / "resolved.json").write_text(json.dumps(section))
    for folder in (tmp_path / "named", tmp_path / "named" / "replica_1"):
        with pytest.raises(CheckpointError, match=f"name one of its checkpoints, such as {named}$"):
            open_view(folder)
        told = kinds.explain_folder(folder, "a checkpoint")
        assert told is not None and told.endswith(f"its checkpoints are in {named.parent}")


READERS: dict[str, tuple[Callable[[Path], Any], set[str]]] = {
    "eval, generate and export-hf": (open_weights, {kinds.CHECKPOINT, kinds.CHECKPOINTS, kinds.INITIAL}),
    "convert-checkpoint": (convert_to_universal, {kinds.CHECKPOINT, kinds.CHECKPOINTS, kinds.UNIVERSAL}),
    "model.initial_weights": (open_start, {kinds.CHECKPOINT, kinds.CHECKPOINTS, kinds.INITIAL}),
    "checkpoint.universal": (read_universal_manifest, {kinds.UNIVERSAL}),
    "import-hf": (lambda path: import_hf(path, path.parent / "out"), {kinds.MODEL}),
}
"""What reads a folder, and which kinds it reads, or answers with a message of its own."""


@pytest.mark.parametrize("name", READERS)
def test_a_folder_of_another_kind_is_named(tmp_path: Path, name: str) -> None:
    """Given a folder of another kind, a command says which it is and what to use, not that a save did not finish."""
    read, takes = READERS[name]
    for kind, folder in make_folders(tmp_path).items():
        if kind in takes:
            continue
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        assert f"{folder} is {kind}; needed is " in str(caught.value)
        assert "did not finish" not in str(caught.value)


def test_a_linked_folder_is_replaced_and_nothing_stays(tmp_path: Path) -> None:
    """A new folder takes the name of a link, whose target stays; left links are removed without touching theirs."""
    target, final = tmp_path / "elsewhere", tmp_path / "step_00000001"
    target.mkdir()
    (target / "file").write_text("mine")
    final.symlink_to(target)
    (tmp_path / ".tmp_new").mkdir()
    commit_folder(tmp_path / ".tmp_new", final)
    assert not final.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "step_00000001"]
    (tmp_path / ".tmp_replaced_step_00000001").symlink_to(target)
    (tmp_path / ".tmp_dangling").symlink_to(tmp_path / "nothing")
    assert len(remove_leftovers(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "step_00000001"]
    assert (target / "file").read_text() == "mine"


def _refused_universal(folder: Path) -> str:
    """The message of a start at a folder that is no universal checkpoint; one process is all ranks."""
    with pytest.raises(CheckpointError) as caught:
        open_universal(folder, CheckpointGroup())
    return str(caught.value)


@pytest.mark.parametrize("name", ["converted", "run"])
def test_a_universal_checkpoint_inside_is_named(tmp_path: Path, single_rank: None, name: str) -> None:
    """Given the folder that holds one, or the run that does, the message names it and no other remedy."""
    made = make_universal(tmp_path / name / ("checkpoints" if name == "run" else ""))
    message = _refused_universal(tmp_path / name)
    assert f"give {made}, which lies in it" in message
    assert "convert-checkpoint" not in message
    assert "eval" not in message


def test_a_wrong_universal_folder_has_one_remedy(tmp_path: Path, single_rank: None) -> None:
    """A checkpoint is to be converted, a mistyped path to be mended; only a damaged one is to be made again."""
    checkpoint = make_checkpoint(tmp_path / "several")
    for folder in (checkpoint, checkpoint.parent):
        message = _refused_universal(folder)
        assert message.count("convert-checkpoint") == 1
        assert f"megasdc convert-checkpoint {folder} --to universal" in message
        assert "eval" not in message
    message = _refused_universal(tmp_path / "unversal")
    assert "unversal is not a folder" in message
    assert "Make it again" not in message
    damaged = make_universal(tmp_path / "damaged")
    (damaged / "zero" / "fp32.pt").unlink()
    assert "Make it again with megasdc convert-checkpoint" in _refused_universal(damaged)


def test_reports_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One problem is one problem, and a universal checkpoint, which knows no nodes, has no empty line for them."""
    universal = make_universal(tmp_path)
    print_pages([inspection_page(inspect_checkpoint(universal))])
    shown = capsys.readouterr().out
    assert "nodes" not in shown
    assert all(line.split()[1:] for line in shown.splitlines()[1:])
    (universal / "zero" / "fp32.pt").unlink()
    assert "DAMAGED, 1 problem," in verify_checkpoint(universal).render()


def test_bad_places_have_a_fitting_remedy(tmp_path: Path) -> None:
    """A file given as folder to write is called one: neither --force nor free space would help; a full disk is."""
    file = tmp_path / "README.md"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"README.md is a file; give another folder$"):
        check_out(file, False, "x", "x", tmp_path)
    with pytest.raises(StorageError, match=r"Not a directory; choose another folder$"), writing_folder(file / "out"):
        pass
    with pytest.raises(StorageError, match=r"free space or choose"), writing_folder(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert file.read_text() == "mine"


def test_what_lies_in_a_checkpoint_does_not_hide_it(tmp_path: Path) -> None:
    """A universal checkpoint in the folder of a checkpoint: that one is verified."""
    folder = make_checkpoint(tmp_path, 3)
    make_universal(folder)
    assert find_folders(folder, universal=True) == [folder]
