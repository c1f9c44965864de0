"""Whose memory stays on a host, and whose is removed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import xxhash

from megasdc.checkpoint.host_memory import (
    OWNER_FILE,
    SLOT_FORMAT_VERSION,
    SLOT_MANIFEST_FILE,
    SlotFile,
    SlotManifest,
    claim,
    linger,
    memory_folder,
    partner_of,
    rank_folder,
    remove_forgotten,
)
from megasdc.checkpoint.in_memory import find_in_memory
from megasdc.checkpoint.ranks import CheckpointGroup
from megasdc.checkpoint.records import record_text
from megasdc.common import host as shared_memory
from megasdc.ops.launch.on_host import release
from megasdc.parallel.dims import ParallelDims

GONE = 2**22 + 1
"""No process has this id."""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of shared memory."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    return tmp_path


def folder_of(run: str, age_s: float, linger_s: float = 0.0, pid: int = GONE) -> Path:
    """Memory of a run whose last snapshot is so old."""
    folder = memory_folder(run)
    claim(folder, f"{run}.1", linger_s)
    owner = folder / OWNER_FILE
    owner.write_text(owner.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {pid}'))
    slot = folder / "rank_00000" / "slot_0"
    slot.mkdir(parents=True)
    (slot / "held.json").write_text("{}")
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_what_nobody_uses_is_removed_once_it_is_old(shared: Path) -> None:
    """Not the own, however old; not that of processes that live, of a recent snapshot, or that may stay longer."""
    own = folder_of("own", 1e6)
    stays = [folder_of("lives", 1e6, pid=os.getpid()), folder_of("young", 500), folder_of("long", 1e4, linger_s=2e4)]
    recent = folder_of("recent", 1e6)
    (recent / "rank_00000" / "slot_0" / "held.json").write_text("{} ")
    old = folder_of("old", 700)
    remove_forgotten(own)
    assert [one.exists() for one in (own, *stays, recent)] == [True] * 5
    assert not old.exists() and not list(shared.glob("*removed*"))


@pytest.mark.slow
def test_a_folder_that_lingers_is_not_forgotten(shared: Path) -> None:
    """Whoever keeps it shows that; it goes at its time, and stays for a start that has taken it."""
    folder = folder_of("failed", 1e6, linger_s=3.0)
    keeper = threading.Thread(target=linger, args=(folder, "failed.1"))
    keeper.start()
    time.sleep(0.5)
    remove_forgotten(memory_folder("other"))
    assert folder.exists()
    keeper.join(timeout=30)
    assert not folder.exists()
    taken = folder_of("taken", 0, linger_s=100.0)
    keeper = threading.Thread(target=linger, args=(taken, "taken.1"))
    keeper.start()
    claim(taken, "taken.2", 100.0)
    keeper.join(timeout=30)
    assert not keeper.is_alive() and taken.exists()


@pytest.mark.slow
def test_memory_that_is_let_go_is_removed_at_once(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a supervisor sends to a host that its run does without; that of another run stays."""
    shared_path = release.pathlib.Path
    monkeypatch.setattr(release.pathlib, "Path", lambda *at: shared if at == ("/dev/shm",) else shared_path(*at))
    folder, other = folder_of("excluded", 0, linger_s=100.0), folder_of("other", 0, linger_s=100.0)
    keeper = threading.Thread(target=linger, args=(folder, "excluded.1"))
    keeper.start()
    assert release.answer({"run": "excluded"}) == [str(folder)]
    keeper.join(timeout=30)
    assert not folder.exists() and other.exists()


def test_a_job_has_memory_of_its_own(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier job of SLURM's has left is not taken, and is removed as any other."""
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    earlier = folder_of("run", 1e6)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    own = folder_of("run", 0)
    assert own != earlier and own == memory_folder("run")
    remove_forgotten(own)
    assert own.exists() and not earlier.exists()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert memory_folder("run") != own, "the job was requeued"


@pytest.mark.parametrize(
    ("layout", "hosts", "partners"),
    [
        ((1, 1, 4), [[0], [1], [2], [3]], [1, 2, 3, 0]),
        ((1, 2, 2), [[0], [1], [2], [3]], [1, 2, 3, 0]),
        ((2, 2, 2), [[0, 1], [2, 3], [4, 5], [6, 7]], [2, 3, 4, 5, 6, 7, 0, 1]),
        ((1, 2, 1), [[0], [1]], [1, 0]),
        ((1, 1, 2), [[0, 1]], [None, None]),
    ],
)
def test_each_host_keeps_as_much_as_the_others(
    layout: tuple[int, int, int], hosts: list[list[int]], partners: list[int | None]
) -> None:
    """The partner is on another host, outside those of the rank's replica where there are others, each once."""
    nodes = {f"host{number}": ranks for number, ranks in enumerate(hosts)}
    world = range(len(partners))
    assert [partner_of(ParallelDims(*layout, rank), nodes, rank) for rank in world] == partners


def hold(folder: Path, rank: int, step: int) -> Path:
    """Hold a step of one of two ranks; returns the first of its two files."""
    slot = rank_folder(folder, rank) / f"slot_{step}"
    slot.mkdir(parents=True)
    files = []
    for name in ("a", "b"):
        (slot / name).write_bytes(content := os.urandom(64))
        digest = xxhash.xxh3_128_hexdigest(content)
        files.append(SlotFile(name=name, size_bytes=64, xxh3_128=digest, tensors=None))
    record = SlotManifest(
        format_version=SLOT_FORMAT_VERSION, run="run", start=1, step=step, time=1.0, rank=rank, host="here",
        layout=[1, 1, 2], engine={}, versions={}, files=files, finite_step=step,
    )  # fmt: skip
    (slot / SLOT_MANIFEST_FILE).write_text(record_text(record))
    return slot / "a"


def test_a_host_alone_goes_on_from_no_step_whose_files_were_changed(tmp_path: Path) -> None:
    """A bit that is flipped, a file that is cut or gone: whichever rank's it is, the step before is taken."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        for number, (rank, harm) in enumerate((rank, harm) for rank in (0, 1) for harm in ("flip", "cut", "gone")):
            folder = tmp_path / str(number)
            files = [hold(folder, one, step) for step in (1, 2) for one in (0, 1)]
            ranks, dims = CheckpointGroup("node_local", node="here"), ParallelDims(1, 1, 2, 0)
            whole = find_in_memory(folder, "run", dims, ranks, verified_only=False)
            assert whole is not None and (whole.step, whole.skipped) == (2, {})
            changed, content = files[2 + rank], bytearray(files[2 + rank].read_bytes())
            content[40] ^= 4
            changed.write_bytes(content if harm == "flip" else content[:30])
            if harm == "gone":
                changed.unlink()
            found = find_in_memory(folder, "run", dims, ranks, verified_only=False)
            assert found is not None, harm
            assert (found.step, found.skipped) == (1, {2: f"files of rank {rank} were changed"}), harm
    finally:
        dist.destroy_process_group()
