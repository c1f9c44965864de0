"""Real runs and their archive: pushed beside training, pulled bit for bit, and no failure of it stops a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import run_command
from object_stores import STORES, ObjectStore, s3_store
from small_disk import small_disk
from tiny import relative_distance
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.checkpoint.verify import verify_checkpoint
from megasdc.common.errors import StorageError
from megasdc.ops.archive.pull import pull_checkpoint
from megasdc.ops.archive.push import push_checkpoint
from megasdc.ops.archive.verify import verify_archive

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
STEPS = 8
ARCHIVED = {"timeout_s": 400.0}
"""What pushes to an archive has the time that nobody else wants, and little of it on a busy machine."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared text that all runs share."""
    return prepare_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Folder of a run that nothing interrupts and nobody archives, with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("straight")
    config = write_config(folder / "c.json", data, folder / "run", training__steps=STEPS, checkpoint__interval=4)
    assert train_run(config, 2) == [(0, None)] * 2
    return folder / "run"


@pytest.fixture(
    scope="module", params=["s3", *(pytest.param(name, marks=pytest.mark.full) for name in ("gcs", "azure"))]
)
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    """Each object store."""
    with STORES[request.param]() as running:
        yield running


def same_files(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same files with the same bytes."""
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (one, other)]
    return files[0] == files[1]


def test_a_run_archives_to_a_store_and_goes_on_from_there(
    tmp_path: Path, data: Path, straight: Path, store: ObjectStore
) -> None:
    """The archiving run has the bits of the other; its folder is lost; what is pulled goes on with the same bits."""
    run_dir, address = tmp_path / "run", store.address("straight")
    keys = {"checkpoint": {"interval": 2, "keep_last": 0, "archive": {"address": address, "every": 2}}}
    config = write_config(tmp_path / "c.json", data, run_dir, training__steps=STEPS, **keys)
    assert train_run(config, 2, "megasdc.training.stop_step=5", env=store.variables, **ARCHIVED) == [(0, None)] * 2
    assert events_of(run_dir, "archive", "failed") == []
    pushed = [event["step"] for event in events_of(run_dir, "archive", "pushed")]
    assert pushed == [2, 4, 5], "every second step, and the last of the run"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum("archive/push_s" in row for row in rows) == 3
    files = [path for path in run_dir.rglob("*") if path.suffix in (".json", ".jsonl", ".log")]
    assert "resolved.json" in {path.name for path in files}
    assert not store.secret or all(store.secret not in path.read_text(errors="replace") for path in files)
    kept = shutil.copytree(run_dir / "checkpoints", tmp_path / "kept")
    shutil.rmtree(run_dir / "checkpoints")
    for command in (["pull", address, str(run_dir / "checkpoints"), "--step", "4"], ["verify", address]):
        done = run_command("archive", *command, env=store.variables)
        assert done.returncode == 0, done.stdout + done.stderr
    assert same_files(run_dir / "checkpoints" / "step_00000004", kept / "step_00000004")
    assert train_run(config, 2, env=store.variables, **ARCHIVED) == [(0, None)] * 2
    name = f"checkpoints/step_{STEPS:08d}"
    assert state_of(run_dir / name) == state_of(straight / name)
    assert metrics_of(run_dir) == metrics_of(straight)


def test_no_failure_of_the_archive_stops_a_run(tmp_path: Path, data: Path, straight: Path) -> None:
    """Wrong credentials: an event, a warning, a counter; the bits of the run are those of the other."""
    run_dir = tmp_path / "run"
    with s3_store() as store:
        keys = {"checkpoint": {"interval": 4, "keep_last": 0, "archive": {"address": store.address("a")}}}
        config = write_config(tmp_path / "c.json", data, run_dir, training__steps=STEPS, **keys)
        assert train_run(config, 2, env=store.variables | store.refused[0], **ARCHIVED) == [(0, None)] * 2
    failed = events_of(run_dir, "archive", "failed")
    assert [event["step"] for event in failed] == [4, 8] and {event["exit_code"] for event in failed} == {77}
    assert "check the credentials" in failed[0]["problem"] and "s3cr3t" not in failed[0]["problem"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("archive/failures", 0) for row in rows) == 2
    name = f"checkpoints/step_{STEPS:08d}"
    assert state_of(run_dir / name) == state_of(straight / name)


def test_quantized_moments_resume_near_by(tmp_path: Path, data: Path, straight: Path) -> None:
    """From both copies of step 4: the exact one has the losses of the run, the quantized one is near, and says so."""
    checkpoint, losses = straight / "checkpoints" / "step_00000004", {}
    for name, bits in (("exact", None), ("quantized", 8)):
        address, run_dir = str(tmp_path / f"archive_{name}"), tmp_path / name
        push_checkpoint(checkpoint, address, quantize_bits=bits)
        pull_checkpoint(address, run_dir / "checkpoints", accept_quantized=bits is not None)
        config = write_config(tmp_path / f"{name}.json", data, run_dir, training__steps=STEPS)
        assert train_run(config, 2, **ARCHIVED) == [(0, None)] * 2
        losses[name] = [row["train/loss"] for row in metrics_of(run_dir) if "train/loss" in row]
    expected = [row["train/loss"] for row in metrics_of(straight) if "train/loss" in row and row["step"] > 4]
    assert losses["exact"] == expected
    assert 0 < relative_distance(losses["quantized"], expected) < 2e-3
    assert [event["bits"] for event in events_of(tmp_path / "quantized", "resume", "quantized_moments")] == [8]
    assert events_of(tmp_path / "exact", "resume", "quantized_moments") == []


def test_node_local_storage_is_archived_by_node(tmp_path: Path, data: Path) -> None:
    """The leader of the node's folder pushes its part; what is pulled counts as complete and is resumed from."""
    run_dir, address = tmp_path / "run", str(tmp_path / "archive")
    section = {"interval": 2, "keep_last": 0, "storage": "node_local", "archive": {"address": address, "keep_last": 1}}
    config = write_config(tmp_path / "c.json", data, run_dir, training__steps=4, checkpoint=section)
    assert train_run(config, 2, "megasdc.training.stop_step=2", **ARCHIVED) == [(0, None)] * 2
    shutil.rmtree(run_dir / "checkpoints")
    pull_checkpoint(address, run_dir / "checkpoints")
    assert train_run(config, 2, **ARCHIVED) == [(0, None)] * 2
    assert events_of(run_dir, "resume", "checkpoint")[0]["step"] == 2
    assert events_of(run_dir, "archive", "pruned") == [], (
        "a finite step was taken from step 2, and from step 4 none yet"
    )
    assert verify_archive(address).num_steps == 2


def test_full_disks_lose_nothing(tmp_path: Path, straight: Path) -> None:
    """A push to a full disk, and a pull to one: 77, the place is named, what is there is kept for the next try."""
    checkpoint = straight / "checkpoints" / "step_00000004"
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    with small_disk(tmp_path / "small", size // 2) as small:
        with pytest.raises(StorageError, match="No space left on device"):
            push_checkpoint(checkpoint, str(small / "archive"))
        assert list((small / "archive").rglob(".tmp_*")) == []
        push_checkpoint(checkpoint, str(tmp_path / "archive"))
        with pytest.raises(StorageError, match=r"needs .* MB more"):
            pull_checkpoint(str(tmp_path / "archive"), small / "out")
    assert verify_checkpoint(checkpoint).ok and verify_archive(str(tmp_path / "archive")).ok
