"""Are a checkpoint's names, manifest, pickles and retention right, without an engine?"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import random
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hand_made import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megasdc.checkpoint import files, resume
from megasdc.checkpoint.allowlist import check_pickle, find_unsafe_classes, load_checked
from megasdc.checkpoint.manifest import (
    has_marker,
    read_manifest,
    sorted_records,
    write_manifest,
    write_marker,
)
from megasdc.checkpoint.ranks import FolderRanks
from megasdc.checkpoint.save import plan_retention
from megasdc.checkpoint.verify import verify_checkpoint
from megasdc.cli import app
from megasdc.common import durable
from megasdc.common.errors import CheckpointError
from megasdc.common.program import report_bytes
from megasdc.determinism import capture_rng, restore_rng
from megasdc.lab.checkpoints.views.inspect import inspect_checkpoint


class Malicious:
    """Touches a file when unpickled without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch '{self.target}'",))


class Harmless:
    """A class that is not on the list and does nothing."""


def make_checkpoint(folder: Path, step: int = 2, storage: str = "shared") -> Path:
    """Write a whole checkpoint of one rank."""
    return write_checkpoint(folder, step, storage=storage, not_finite=[])


def test_a_resume_tells_how_far_its_checksums_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In lines of rank 0, of all bytes that it reads; without checksums it reads none, and says nothing."""
    path = make_checkpoint(tmp_path)
    manifest, place = read_manifest(path), FolderRanks(0, "n", {"n": [0]}, [0], "x")
    monkeypatch.setattr(resume, "report_bytes", partial(report_bytes, every_s=0.0))
    with caplog.at_level(logging.INFO):
        assert resume._check_share(path, manifest, place, False) == [] and not caplog.messages
        assert resume._check_share(path, manifest, place, True) == []
    assert len(caplog.messages) == len(manifest.files)
    assert all(text.startswith("checksums of the checkpoint of step 2") for text in caplog.messages)


@pytest.mark.slow
def test_a_manifest_comes_back_and_any_flipped_bit_is_found(tmp_path: Path) -> None:
    """Every single changed bit of a manifest, and every cut, is refused."""
    path = make_checkpoint(tmp_path)
    manifest = read_manifest(path)
    assert manifest.step == 2
    write_manifest(path, manifest.model_copy(update={"files": manifest.files[:2]}))  # each bit is read once
    assert manifest.versions["torch"] == torch.__version__.split("+")[0] or manifest.versions["torch"]
    data = (path / "manifest.json").read_bytes()
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        (path / "manifest.json").write_bytes(changed)
        with pytest.raises(CheckpointError):
            read_manifest(path)
    for length in range(0, len(data), 7):
        (path / "manifest.json").write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            read_manifest(path)


def test_a_manifest_is_in_order_of_name(tmp_path: Path) -> None:
    """Whatever rank wrote a file, and whichever answered first."""
    files = list(read_manifest(make_checkpoint(tmp_path)).files)
    assert len(files) > 2
    ranks = [file.model_copy(update={"rank": rank}) for rank, file in enumerate(files)]
    ordered = sorted(file.name for file in files)
    for shuffled in (ranks, ranks[::-1], ranks[1:] + ranks[:1]):
        assert [file.name for file in sorted_records(shuffled)] == ordered


def test_a_checksum_is_xxh3_of_all_bytes(tmp_path: Path) -> None:
    """A file's checksum equals the library's over the whole content, also past one piece of reading."""
    data = random.Random(1).randbytes((1 << 22) + 17)
    (tmp_path / "x").write_bytes(data)
    assert files.hash_file(tmp_path / "x") == xxhash.xxh3_128_hexdigest(data)


def test_a_marker_counts_for_its_own_save_only(tmp_path: Path) -> None:
    """A node-local checkpoint is incomplete without a marker, and with the marker of another save."""
    path = make_checkpoint(tmp_path, storage="node_local")
    manifest = read_manifest(path)
    assert not has_marker(path, manifest)
    write_marker(path, manifest)
    assert has_marker(path, manifest)
    (path / "complete").write_text("another save\n")
    assert not has_marker(path, manifest)
    assert "marker" in verify_checkpoint(path).problems[0]


def test_a_malicious_pickle_is_named_and_never_run(tmp_path: Path) -> None:
    """The classes of a harmful file are named; neither the check nor the load runs it, in torch's old format either."""
    target, bad = tmp_path / "executed", tmp_path / "bad.pt"
    torch.save({"a": torch.ones(2), "b": Malicious(target)}, bad)
    assert find_unsafe_classes(bad) == ["posix.system"]
    with pytest.raises(CheckpointError, match=r"bad\.pt holds posix\.system.*would run code"):
        load_checked(bad)
    torch.save(Malicious(target), bad, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="not a complete file"):
        load_checked(bad)
    bad.write_bytes(pickle.dumps(Malicious(target)))
    with pytest.raises(CheckpointError):
        load_checked(bad)
    assert not target.exists()
    torch.load(io.BytesIO(_zip_of(tmp_path, target)), weights_only=False)
    assert target.exists(), "the file of this test must be harmful when it is loaded without care"


def _zip_of(folder: Path, target: Path) -> bytes:
    torch.save(Malicious(target), folder / "loaded.pt")
    return (folder / "loaded.pt").read_bytes()


def test_a_pickle_that_hides_its_classes_is_refused(tmp_path: Path) -> None:
    """Opcodes that torch does not write (STACK_GLOBAL, INST) are refused, not passed over."""
    target, good = tmp_path / "executed", tmp_path / "good.pt"
    torch.save({"a": 1}, good)
    command = f"touch '{target}'"
    hidden = {
        "protocol 4": pickle.dumps(Malicious(target), protocol=4),
        "INST": b"(S'" + command.replace("'", "\\'").encode() + b"'\nios\nsystem\n.",
    }
    for name, content in hidden.items():
        bad = tmp_path / f"{name}.pt"
        with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w") as copy:
            for entry in source.infolist():
                copy.writestr(entry, content if entry.filename.endswith("data.pkl") else source.read(entry))
        with pytest.raises(CheckpointError):
            check_pickle(bad)
        with pytest.raises(CheckpointError):
            load_checked(bad)
    assert not target.exists()


def test_an_unlisted_class_is_refused_and_a_listed_one_loads(tmp_path: Path) -> None:
    """Only the record classes of DeepSpeed and Transformer Engine pass; they come back as they were."""
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.save(Harmless(), tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="Harmless"):
        check_pickle(tmp_path / "x.pt")
    torch.save({"f": fragment_address(numel=3, start=4), "extra": io.BytesIO(b"te")}, tmp_path / "y.pt")
    loaded = load_checked(tmp_path / "y.pt")
    assert loaded["f"] == fragment_address(numel=3, start=4)
    assert loaded["extra"].read() == b"te"


@given(
    steps=st.sets(st.integers(1, 60), min_size=1),
    keep_last=st.integers(0, 5),
    keep_every=st.integers(0, 7),
    data=st.data(),
)
@settings(deadline=None)
def test_retention_never_deletes_what_must_stay(
    steps: set[int], keep_last: int, keep_every: int, data: st.DataObject
) -> None:
    """The newest, later ones, the last n up to it and every k-th stay; everything else goes, unless all are kept."""
    newest = data.draw(st.sampled_from(sorted(steps)))
    past = sorted(step for step in steps if step <= newest)
    must_stay = {
        step
        for place, step in enumerate(reversed(past), 1)
        if keep_last == 0 or place <= keep_last or (keep_every and step % keep_every == 0)
    }
    assert plan_retention(steps, newest, keep_last, keep_every) == sorted(set(past) - must_stay - {newest})


def test_leftovers_are_removed_and_a_displaced_checkpoint_returns(tmp_path: Path) -> None:
    """Temporary files and folders go; a checkpoint whose replacement never came gets its name back."""
    make_checkpoint(tmp_path, 1)
    make_checkpoint(tmp_path, 2)
    (tmp_path / ".tmp_step_00000003").mkdir()
    (tmp_path / ".tmp_latest.77").write_text("x")
    (tmp_path / "step_00000002").rename(tmp_path / ".tmp_replaced_step_00000002")
    (tmp_path / "notes.txt").write_text("not ours")
    done = files.remove_leftovers(tmp_path)
    assert len(done) == 3
    assert files.list_steps(tmp_path) == [1, 2]
    assert verify_checkpoint(tmp_path / "step_00000002").ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_00000001", "step_00000002"]
    assert files.remove_leftovers(tmp_path / "absent") == []


def test_random_state_continues_where_it_was(tmp_path: Path) -> None:
    """Draws after a restore equal those after the capture, through a file loaded with weights_only."""

    def draw() -> list[Any]:
        return [random.random(), random.gauss(0, 1), np.random.normal(), np.random.rand(), torch.rand(3).tolist()]

    random.gauss(0, 1)
    np.random.normal()  # leaves a second normal number in NumPy's state
    torch.save(capture_rng(), tmp_path / "rng.pt")
    expected = draw()
    draw()
    restore_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == expected


def test_a_random_state_of_other_devices_is_refused() -> None:
    """A state that was saved on a GPU is refused on a CPU with the way to go on, and changes nothing."""
    state = capture_rng()
    before = torch.get_rng_state()
    state["cuda"] = [] if state["cuda"] else [torch.zeros(16, dtype=torch.uint8)]
    with pytest.raises(CheckpointError, match=r"checkpoint\.universal"):
        restore_rng(state)
    assert torch.equal(torch.get_rng_state(), before)


def test_verify_and_inspect_commands(tmp_path: Path) -> None:
    """Exit code 0 for whole checkpoints, 72 for a damaged one or none, with the file named; --json parses."""
    runner = CliRunner()
    path = make_checkpoint(tmp_path)
    make_checkpoint(tmp_path, 7)
    assert runner.invoke(app, ["verify-checkpoint", str(tmp_path)]).exit_code == 0
    shown = runner.invoke(app, ["inspect-checkpoint", str(path), "--json"])
    said, known = json.loads(shown.stdout)[0], json.loads(json.dumps(inspect_checkpoint(path)))
    assert {**said, "age_s": 0} == {**known, "age_s": 0}
    assert "TP1 x PP1 x DP1" in runner.invoke(app, ["inspect-checkpoint", str(path)]).stdout
    name = files.rank_state_file(0)
    data = bytearray((path / name).read_bytes())
    data[-100] ^= 4
    (path / name).write_bytes(data)
    damaged = runner.invoke(app, ["verify-checkpoint", str(tmp_path), "--json"])
    assert damaged.exit_code == 72
    reports = {report["step"]: report for report in json.loads(damaged.stdout)}
    assert reports[7]["ok"]
    assert name in reports[2]["problems"][0]
    assert isinstance(runner.invoke(app, ["verify-checkpoint", str(tmp_path / "absent")]).exception, CheckpointError)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_rename_that_does_not_reach_the_disk_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    """A save that is told as failed leaves every name as it was, that of a checkpoint it was to replace too."""
    new, final = tmp_path / ".tmp_step_00000002", tmp_path / "step_00000002"
    new.mkdir()
    (new / "new").touch()
    if replaces:
        final.mkdir()
        (final / "old").touch()

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    monkeypatch.setattr(durable, "sync_path", fail)
    with pytest.raises(OSError, match="Input/output error"):
        durable.commit_folder(new, final)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    monkeypatch.undo()
    durable.commit_folder(new, final)
    assert [path.relative_to(final).as_posix() for path in final.iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002"]


def test_checkpoints_that_were_moved_aside_are_listed(tmp_path: Path) -> None:
    """They come back when leftovers are removed, so that who may not remove anything must count them."""
    for name in (".tmp_replaced_step_00000004", ".tmp_step_00000005", ".tmp_replaced_other", "step_00000002"):
        (tmp_path / name).mkdir()
    assert files.list_replaced(tmp_path) == [4]
    assert files.list_replaced(tmp_path / "none") == []
    files.remove_leftovers(tmp_path)
    assert files.list_steps(tmp_path) == [2, 4]
