"""Snapshots in the memory of hosts: a restart takes the newest step of which a right copy of every rank is found."""

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_model import Run
from harness import run_distributed

from megasdc.checkpoint import host_memory
from megasdc.checkpoint.host_memory import (
    SLOT_MANIFEST_FILE,
    Lineage,
    find_slots,
    forget,
    mark_verified_up_to,
    rank_folder,
    write_line,
)
from megasdc.checkpoint.in_memory import InMemoryCheckpoint, MemorySaver, find_in_memory, restore
from megasdc.checkpoint.load import load_checkpoint
from megasdc.checkpoint.ranks import CheckpointGroup, find_place
from megasdc.checkpoint.snapshot import SavedState, why_not
from megasdc.common.errors import CheckpointError
from megasdc.determinism import capture_rng, restore_rng
from megasdc.parallel.collectives import StepAgreement

RUN = "run"


def _keep(run: Run, saver: MemorySaver) -> str:
    """Keep the state in memory, on all ranks; returns its digest."""
    step, digest = run.engine.global_steps, run.digest()
    state = SavedState(
        {"positions": [run.consumed], "finite_step": step}, {"rng": capture_rng(), "consumed": run.consumed}
    )
    assert saver.begin(run.engine, step, state)
    saver.wait_for_copy()
    agreement = StepAgreement(None)
    while saver.whole < step:
        agreement.start(saver.fields)
        agreement.finish()
        assert saver.advance() is None
        time.sleep(0.02)
    return digest


def _flip(folder: Path, rank: int, step: int, *, guest: bool) -> None:
    """Flip a bit in what a host holds of a rank."""
    for slot in find_slots(folder, RUN)[0]:
        if (slot.record.rank, slot.record.step, slot.is_guest) == (rank, step, guest):
            path = slot.folder / next(one.name for one in slot.record.files if "optim" in one.name)
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)
            return
    raise AssertionError(f"nothing is held of rank {rank}")


def _harm(what: str, folder: Path, rank: int) -> None:
    """What happens to the memory of a rank's host, each on a host of its own."""
    if what == "lost" and rank == 1:
        shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
    if what in ("own", 1, "both") and rank == 1:
        _flip(folder, 1, 2, guest=False)
    if what == "both" and rank == 0:
        _flip(folder, 1, 2, guest=True)
    if what == "verified":
        mark_verified_up_to(folder, 1)
    if what == "later" and rank == 1:  # rank 0's host was not used by start 2
        write_line(folder, Lineage(start=2, from_start=1, from_step=1))


def _recover(base: str, what: str, pipeline: int, dtype: str) -> tuple[int, str, dict[int, str], bool]:
    rank = torch.distributed.get_rank()
    folder, ranks = Path(base) / f"host{rank}", CheckpointGroup("node_local", node=f"host{rank}")
    folder.mkdir(mode=0o700)
    run = Run(pipeline=pipeline, dtype=dtype)
    saver = MemorySaver(folder, RUN, 1, run.dims, find_place(ranks), torch.device("cpu"), 2)
    assert saver.join_partners("127.0.0.1") is None
    digests = {}
    for step in (1, 2):
        run.train(1)
        digests[step] = _keep(run, saver)
    saver.close()
    torch.distributed.barrier()
    _harm(what, folder, rank)
    torch.distributed.barrier()
    again = Run(pipeline=pipeline, dtype=dtype, seed=9)
    verified_only = what == "verified"
    found = find_in_memory(folder, RUN, again.dims, ranks, verified_only=verified_only)
    assert found is not None
    chosen = restore(found, folder, again.dims, ranks, [])
    assert len([*chosen.path.glob("*optim_states.pt")]) == 1, "no other rank's is sent here"
    assert (chosen.manifest.not_finite, chosen.manifest.finite_step) == ([], found.step)
    loaded = load_checkpoint(again.engine, chosen, again.dims, ranks)
    restore_rng(loaded.rank_state["rng"])
    again.consumed = loaded.rank_state["consumed"]
    if what == "nothing":
        _audit_on(("host0", "host2"), folder, found, ranks)
        assert find_in_memory(folder, RUN, again.dims, ranks, verified_only=True) is None, "host1 took no part"
        _audit_on(("host1", "host0"), folder, found, ranks)
        verified = find_in_memory(folder, RUN, again.dims, ranks, verified_only=True)
        assert verified is not None and verified.verified and verified.step == found.step
        _audit_on(("host0", "host2"), folder, verified, ranks)
        assert find_in_memory(folder, RUN, again.dims, ranks, verified_only=True) is not None, "it was so before"
    return found.step, found.origin, found.skipped, again.digest() == digests[found.step]


def _audit_on(hosts: tuple[str, str], folder: Path, found: InMemoryCheckpoint, ranks: CheckpointGroup) -> None:
    """Start 2 goes on from what was found, on hosts of which each has one rank, and an audit of it agrees."""
    place = replace(find_place(ranks), nodes={host: [rank] for rank, host in enumerate(hosts)})
    write_line(folder, found.line(2, place))
    mark_verified_up_to(folder, found.step + 3)


@pytest.mark.parametrize(
    ("what", "pipeline", "dtype", "step", "origin", "skipped"),
    [
        ("nothing", 1, "bf16", 2, "memory", {}),
        ("lost", 1, "bf16", 2, "memory, ranks 1 from their partners", {}),
        ("lost", 2, "fp32", 2, "memory, ranks 1 from their partners", {}),
        ("own", 1, "fp32", 2, "memory, ranks 1 from their partners", {}),
        ("both", 1, "fp32", 1, "memory", {2: "files of rank 1 were changed"}),
        ("verified", 1, "fp32", 1, "memory", {2: "no audit has agreed after it"}),
        ("later", 1, "fp32", 1, "memory", {2: "start 2 of the run went on without it"}),
    ],
)
def test_the_newest_right_step_is_restored(
    tmp_path: Path, what: str, pipeline: int, dtype: str, step: int, origin: str, skipped: dict[int, str]
) -> None:
    """From the host's own memory, or its partner's where that is lost or changed; else an older step; bit for bit."""
    for found in run_distributed(_recover, 2, str(tmp_path), what, pipeline, dtype):
        assert found == (step, origin, skipped, True)


def _kill_idle_writer(base: str) -> tuple[str | None, list[int]]:
    """Three ranks on two hosts, so that one writer keeps copies for nobody and is missed by nobody."""
    rank = torch.distributed.get_rank()
    host = f"host{min(rank, 1)}"
    folder, ranks = Path(base) / host, CheckpointGroup("node_local", node=host)
    folder.mkdir(mode=0o700, exist_ok=True)
    run = Run()
    saver = MemorySaver(folder, RUN, 1, run.dims, find_place(ranks), torch.device("cpu"), 2)
    assert saver.join_partners("127.0.0.1") is None
    run.train(1)
    _keep(run, saver)
    if rank == 2:
        os.kill(saver._writer.pid or 0, signal.SIGKILL)
        saver._writer._process.wait()  # type: ignore[union-attr]
    run.train(1)
    told = None
    agreement = StepAgreement(None)
    state = SavedState({"positions": [run.consumed], "finite_step": 2}, {"rng": capture_rng()})
    assert saver.begin(run.engine, 2, state)
    saver.wait_for_copy()
    while saver.whole < 2 and told is None:
        agreement.start(saver.fields)
        agreement.finish()
        told = saver.advance()
    run.train(1)
    _keep(run, saver)
    saver.close()
    found = find_slots(Path(base) / "host0", RUN)[0]
    return told, sorted(one.record.rank for one in found if one.is_guest and one.record.step == 3)


def test_a_writer_that_was_killed_is_joined_again(tmp_path: Path) -> None:
    """No snapshot counts as kept by a partner that knows nothing of it; the next one is."""
    for told, guests in run_distributed(_kill_idle_writer, 3, str(tmp_path)):
        assert told is not None
        assert "rank 2 on host1: cannot keep the snapshot: ChildProcessError" in told
        assert guests == [1, 2]


def _room_for(size: int) -> list[str | None]:
    rank = torch.distributed.get_rank()
    own = size if rank == 0 else 0
    return [why_not(own, None, is_asked=True, with_names=with_names) for with_names in (False, True)]


def test_snapshots_that_do_not_fit_are_refused_with_the_numbers() -> None:
    """The same answer on all ranks, by what the host has: a petabyte is refused, a byte is not."""
    for answers in run_distributed(_room_for, 2, 1 << 50):
        for text in answers:
            assert "need 1,073,741,824.0 MiB of memory, and of the " in text and "may take 80%" in text
        assert "in /dev/shm there" in answers[1]
    assert run_distributed(_room_for, 2, 1) == [[None, None]] * 2


def test_a_slot_that_is_filled_again_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that goes while old steps are forgotten belongs to a slot in use; a broken one is removed."""
    slots = [rank_folder(tmp_path, rank) / "slot_0" for rank in (0, 1)]
    for slot in slots:
        slot.mkdir(parents=True)
        (slot / SLOT_MANIFEST_FILE).write_text("broken")

    def read(path: Path, *_: Any) -> Any:
        if path.parent == slots[0]:
            path.unlink()
        raise CheckpointError("it cannot be read")

    monkeypatch.setattr(host_memory, "read_record", read)
    forget(tmp_path)
    assert [slot.exists() for slot in slots] == [True, False]
