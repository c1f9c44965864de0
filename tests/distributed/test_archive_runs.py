"""Real runs and their archive: pushed beside training, pulled bit for bit, and no failure of it stops a run.

The store is moto's server, which speaks S3's protocol, in a process of its own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import run_command
from s3_server import BUCKET, refusing_server, s3_server
from small_disk import small_disk
from tiny import relative_distance
from whole_runs import events_of, metrics_of, prepare_text, state_of, train_run, write_config

from megasdc.archive.pull import pull
from megasdc.archive.push import push
from megasdc.archive.record import BLOCKS, RUNS
from megasdc.archive.store import Store
from megasdc.archive.verify import verify
from megasdc.checkpoint.verify import verify_checkpoint
from megasdc.errors import CheckpointError, StorageError

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
STEPS = 8


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


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """The environment of clients of an S3 server."""
    with s3_server() as variables:
        yield variables


def same_files(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same files with the same bytes."""
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (one, other)]
    return files[0] == files[1]


def test_a_run_archives_to_s3_and_goes_on_from_there(
    tmp_path: Path, data: Path, straight: Path, s3: dict[str, str]
) -> None:
    """The archiving run has the bits of the other; its folder is lost; what is pulled goes on with the same bits."""
    run_dir, address = tmp_path / "run", f"s3://{BUCKET}/straight"
    keys = {"checkpoint": {"interval": 2, "keep_last": 0, "archive": {"address": address, "every": 2}}}
    config = write_config(tmp_path / "c.json", data, run_dir, training__steps=STEPS, **keys)
    assert train_run(config, 2, "megasdc.training.stop_step=5", env=s3) == [(0, None)] * 2
    assert events_of(run_dir, "archive", "failed") == []
    pushed = [event["step"] for event in events_of(run_dir, "archive", "pushed")]
    assert pushed == [2, 4, 5], "every second step, and the last of the run"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum("archive/push_s" in row for row in rows) == 3
    for secret in ("s3cr3t",):
        assert all(secret not in path.read_text(errors="replace") for path in run_dir.rglob("*.json*"))
    kept = shutil.copytree(run_dir / "checkpoints", tmp_path / "kept")
    shutil.rmtree(run_dir / "checkpoints")
    for command in (["pull", address, str(run_dir / "checkpoints"), "--step", "4"], ["verify", address]):
        done = run_command("archive", *command, env=s3)
        assert done.returncode == 0, done.stdout + done.stderr
    assert same_files(run_dir / "checkpoints" / "step_00000004", kept / "step_00000004")
    assert train_run(config, 2, env=s3) == [(0, None)] * 2
    name = f"checkpoints/step_{STEPS:08d}"
    assert state_of(run_dir / name) == state_of(straight / name)
    assert metrics_of(run_dir) == metrics_of(straight)


def test_no_failure_of_the_archive_stops_a_run(tmp_path: Path, data: Path, straight: Path) -> None:
    """Wrong credentials: an event, a warning, a counter; the bits of the run are those of the other."""
    run_dir = tmp_path / "run"
    keys = {"checkpoint": {"interval": 4, "keep_last": 0, "archive": {"address": f"s3://{BUCKET}/a"}}}
    config = write_config(tmp_path / "c.json", data, run_dir, training__steps=STEPS, **keys)
    with refusing_server() as variables:
        assert train_run(config, 2, env=variables) == [(0, None)] * 2
    failed = events_of(run_dir, "archive", "failed")
    assert [event["step"] for event in failed] == [4, 8] and {event["exit_code"] for event in failed} == {77}
    assert "check the credentials" in failed[0]["problem"] and "s3cr3t" not in failed[0]["problem"]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("archive/failures", 0) for row in rows) == 2
    name = f"checkpoints/step_{STEPS:08d}"
    assert state_of(run_dir / name) == state_of(straight / name)


def test_damages_in_an_object_store_are_found(
    tmp_path: Path, straight: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An emptied, a cut and a lost object, a flipped bit: as in a folder."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    address = f"s3://{BUCKET}/damaged"
    push(straight / "checkpoints", address)
    store = Store(address)
    names = [min(store.sizes(BLOCKS)), *store.sizes(RUNS)]
    for name in names:
        whole = store.read(name, 1 << 30)
        assert whole is not None
        flipped = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
        for harmed in (b"", whole[:-1], flipped, None):
            store.delete([name]) if harmed is None else store.write(name, harmed)
            assert not verify(address).ok, name
            with pytest.raises(CheckpointError):
                pull(address, tmp_path / "out")
        store.write(name, whole)
    assert verify(address).ok and pull(address, tmp_path / "out").step == STEPS


def test_commands_name_what_is_wrong_with_a_store(straight: Path, s3: dict[str, str]) -> None:
    """A bucket that is not there, credentials that are refused or missing: 77, with the place and what to do."""
    missing = run_command("archive", "push", str(straight / "checkpoints"), "s3://no-such-bucket/a", env=s3)
    assert missing.returncode == 77 and "s3://no-such-bucket/a" in missing.stderr
    assert "check that the bucket" in missing.stderr
    with refusing_server() as variables:
        refused = run_command("archive", "list", f"s3://{BUCKET}/a", env=variables)
    assert refused.returncode == 77 and "check the credentials" in refused.stderr
    assert "s3cr3t" not in missing.stderr + refused.stderr


def test_quantized_moments_resume_near_by(tmp_path: Path, data: Path, straight: Path) -> None:
    """From both copies of step 4: the exact one has the losses of the run, the quantized one is near, and says so."""
    checkpoint, losses = straight / "checkpoints" / "step_00000004", {}
    for name, bits in (("exact", None), ("quantized", 8)):
        address, run_dir = str(tmp_path / f"archive_{name}"), tmp_path / name
        push(checkpoint, address, quantize_bits=bits)
        pull(address, run_dir / "checkpoints", accept_quantized=bits is not None)
        config = write_config(tmp_path / f"{name}.json", data, run_dir, training__steps=STEPS)
        assert train_run(config, 2) == [(0, None)] * 2
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
    assert train_run(config, 2, "megasdc.training.stop_step=2") == [(0, None)] * 2
    shutil.rmtree(run_dir / "checkpoints")
    pull(address, run_dir / "checkpoints")
    assert train_run(config, 2) == [(0, None)] * 2
    assert events_of(run_dir, "resume", "checkpoint")[0]["step"] == 2
    assert [list(event["removed"].values()) for event in events_of(run_dir, "archive", "pruned")] == [[[2]]]
    assert verify(address).num_steps == 1


def test_full_disks_lose_nothing(tmp_path: Path, straight: Path) -> None:
    """A push to a full disk, and a pull to one: 77, the place is named, what is there is kept for the next try."""
    checkpoint = straight / "checkpoints" / "step_00000004"
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    with small_disk(tmp_path / "small", size // 2) as small:
        with pytest.raises(StorageError, match="No space left on device"):
            push(checkpoint, str(small / "archive"))
        assert list((small / "archive").rglob(".tmp_*")) == []
        push(checkpoint, str(tmp_path / "archive"))
        with pytest.raises(StorageError, match=r"needs .* MB more"):
            pull(str(tmp_path / "archive"), small / "out")
    assert verify_checkpoint(checkpoint).ok and verify(str(tmp_path / "archive")).ok
