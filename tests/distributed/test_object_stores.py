"""Archives in object stores: S3, Google's, Azure's, each an emulator in a process of its own, by its usual client."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from harness import StartedCommand
from object_stores import STORES, ObjectStore
from run_to_archive import RUN, contents, invoke, killed_command, write_run

from megasdc.common.errors import CheckpointError, StorageError
from megasdc.ops.archive import lease
from megasdc.ops.archive.entries import read_entries
from megasdc.ops.archive.prune import prune_archive
from megasdc.ops.archive.pull import pull_checkpoint
from megasdc.ops.archive.push import push_checkpoint
from megasdc.ops.archive.record import BLOCKS, RUNS, open_archive
from megasdc.ops.archive.store import Store
from megasdc.ops.archive.verify import verify_archive

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=STORES)
def running(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    """Each store, for all tests."""
    with STORES[request.param]() as store:
        yield store


@pytest.fixture
def store(running: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The store, with the environment of its clients here."""
    for name, value in running.variables.items():
        monkeypatch.setenv(name, value)
    return running


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the checkpoints 2 and 4 of a run."""
    return write_run(tmp_path / "run", monkeypatch)


def test_steps_come_back_and_what_is_there_is_not_stored_again(
    store: ObjectStore, checkpoints: Path, tmp_path: Path
) -> None:
    """Push, list, verify, pull bit for bit, prune."""
    address = store.address("steps")
    first = push_checkpoint(checkpoints / "step_00000002", address)
    again = push_checkpoint(checkpoints / "step_00000002", address)
    assert again.already and not again.new_blocks and again.known_bytes == first.new_bytes
    second = push_checkpoint(checkpoints, address)
    assert second.step == 4 and second.known_blocks > 0, "the random generators did not change"
    code, text = invoke("list", address, "--json")
    assert code == 0 and [(entry["step"], entry["problems"]) for entry in json.loads(text)] == [(2, []), (4, [])]
    assert verify_archive(address).ok
    for step in (2, 4):
        path = Path(pull_checkpoint(address, tmp_path / "out", step=step).path)
        assert contents(path) == contents(checkpoints / path.name)
    assert prune_archive(address, keep_last=1).removed == {RUN: [2]}
    report = verify_archive(address)
    assert report.ok and (report.num_steps, report.unneeded) == (1, 0)
    assert pull_checkpoint(address, tmp_path / "again").step == 4


def test_content_comes_back_with_its_last_bytes(store: ObjectStore) -> None:
    """Ends of lines, blanks, a zero, dashes at the end of an object: none is cut off."""
    files = Store(store.address("last"))
    for number, end in enumerate((b"\r", b"\n", b"\r\n", b"\n\n", b" ", b"\t", b"\0", b"--", b"\xff")):
        content = b"block" + end
        files.write(f"{number}", content)
        assert files.read(f"{number}", 100) == content


def test_a_push_that_was_killed_is_taken_up(
    store: ObjectStore, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL in the middle: no step is there; the next push stores the rest; a stale lease goes with a prune."""
    address = store.address("killed")
    watched = Store(address)
    killed = killed_command(["push", checkpoints, address, "--workers", 1], lambda: len(watched.sizes(BLOCKS)) >= 5)
    assert killed == -signal.SIGKILL and read_entries(open_archive(address)) == []
    there = watched.sizes(BLOCKS)
    report = push_checkpoint(checkpoints, address)
    assert report.known_blocks >= len(there) >= 5 and report.new_blocks > 0
    assert contents(Path(pull_checkpoint(address, tmp_path / "out").path)) == contents(checkpoints / "step_00000004")
    with pytest.raises(StorageError, match="goes on; prune when it has ended"):
        prune_archive(address)
    monkeypatch.setattr(lease, "STALE_S", 0.0)
    prune_archive(address)
    assert not watched.sizes(lease.LEASES) and verify_archive(address).ok


def test_two_runs_push_to_one_place_at_once(store: ObjectStore, checkpoints: Path, tmp_path: Path) -> None:
    """Both are there, with blocks that both need stored once, and each comes back as it was."""
    address, steps = store.address("shared"), {"one": 2, "other": 4}
    folders = {run: checkpoints / f"step_{step:08d}" for run, step in steps.items()}
    pushes = [
        StartedCommand("megasdc", ["archive", "push", str(folder), address, "--run", run])
        for run, folder in folders.items()
    ]
    for done in [one.wait(120) for one in pushes]:
        assert done.returncode == 0, done.stderr
    report = verify_archive(address)
    assert report.ok and (report.num_steps, report.unneeded) == (2, 0)
    for run, folder in folders.items():
        assert contents(Path(pull_checkpoint(address, tmp_path / run, run=run).path)) == contents(folder)


def test_damages_are_found(store: ObjectStore, checkpoints: Path, tmp_path: Path) -> None:
    """An emptied, a cut and a lost object, a flipped bit: as in a folder."""
    address = store.address("damaged")
    push_checkpoint(checkpoints, address)
    opened = open_archive(address)
    for name in (min(opened.sizes(BLOCKS)), *opened.sizes(RUNS)):
        whole = opened.read(name, 1 << 30)
        assert whole is not None
        flipped = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
        for harmed in (b"", whole[:-1], flipped, None):
            opened.delete([name]) if harmed is None else opened.write(name, harmed)
            assert not verify_archive(address).ok, name
            with pytest.raises(CheckpointError):
                pull_checkpoint(address, tmp_path / "out")
        opened.write(name, whole)
    assert verify_archive(address).ok and pull_checkpoint(address, tmp_path / "out").step == 4


def test_commands_name_what_is_wrong(
    store: ObjectStore, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket that is not there; credentials that are refused or missing: the place, what to do, and no secret."""
    address = store.address("a", bucket="no-such-bucket")
    code, text = invoke("push", checkpoints, address)
    assert code == 77 and address in text and "check that the bucket" in text
    code, text = invoke("list", address)
    assert code == 72 and address in text and "check the address" in text
    address = store.address("a")
    for change in store.refused:
        for name, value in change.items():
            monkeypatch.setenv(name, value)
        for command in (["list", address], ["push", checkpoints, address]):
            code, said = invoke(*command)
            assert code == 77 and address in said and "check the credentials" in said, said
            text += said
    loud = [one for one in caplog.records if one.name.startswith(("gcsfs", "azure")) or one.levelno >= logging.ERROR]
    assert not loud, "clients say it once, by their errors"
    assert not store.secret or store.secret not in text


def test_googles_zonal_buckets_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of gcsfs for them, whose objects are seen before they are whole, is not the one that opens a store."""
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    Store("gs://bucket/a")
    assert fsspec.get_filesystem_class("gs").__module__ == "gcsfs.core"
