"""Which steps count as held where the writer fails, or a step holds NaN?"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from megasdc.checkpoint.places import Problem
from megasdc.checkpoint.snapshots import memory_saver
from megasdc.checkpoint.snapshots.held import FORMAT_VERSION, HeldFile, HeldRecord
from megasdc.checkpoint.snapshots.memory_saver import MemorySaver
from megasdc.checkpoint.snapshots.messages import Answer
from megasdc.checkpoint.snapshots.partner import Guests, Partner
from megasdc.parallel.dims import ParallelDims
from megasdc.shared_memory import is_own_folder

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


def saver_of(folder: Path, answers: list[Answer]) -> Any:
    """A saver of one rank whose writer answers so."""
    place: Any = SimpleNamespace(gather=lambda own: [own], leader=True, node="here")
    saver: Any = MemorySaver(folder, "run", 1, ParallelDims(1, 1, 1, 0), place, torch.device("cpu"), 1)
    saver._writer = SimpleNamespace(answer=lambda: answers.pop(0) if answers else None, close=lambda: None)
    return saver


def sent(saver: Any, step: int) -> Any:
    """The slot that is being made whole for a step."""
    slot = next(one for one in saver._slots if not one.step)
    slot.step = step
    saver._sent.append(slot)
    return slot


def test_a_slot_that_failed_is_not_whole_where_another_holds_nan(tmp_path: Path) -> None:
    """The step before both counts; the failure is told to all ranks after that."""
    saver = saver_of(tmp_path, [Answer(), Answer("no room")])
    for step in (1, 2):
        sent(saver, step)
    assert saver._own_newest() == 1
    next(one for one in saver._slots if not one.step).step = 3
    saver._give_up_non_finite(3)
    assert saver._own_newest() == 1
    assert saver._problem is not None and saver._problem.text == "no room"


def test_what_a_run_went_on_from_stays_where_its_first_snapshot_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing newer is held yet."""
    held = SimpleNamespace(record=SimpleNamespace(rank=0, step=4), folder=Path("slot_0"))
    monkeypatch.setattr(memory_saver, "find_held", lambda *_: ([held], []))
    saver = saver_of(tmp_path, [])
    assert saver.adopt(4)
    failed = sent(saver, 5)
    saver._problem = Problem("no room", True)
    assert "no room" in saver._give_up()
    assert [one.step for one in saver._slots] == [4, 0, 0] and failed.step == 0


@pytest.mark.parametrize("taken", [False, pytest.param(True, marks=as_root)])
def test_slots_are_made_in_no_folder_of_another_users(tmp_path: Path, taken: bool) -> None:
    """Where the run's folder has gone, a rank and a partner make it for this user alone, and nothing through links in
    one that another user has made in its place.
    """
    folder, victim, slot = tmp_path / "memory", tmp_path / "victim", tmp_path / "slot_0"
    for name in ("victim", "victim/rank_00000", "slot_0"):
        (tmp_path / name).mkdir()
    if taken:
        folder.mkdir()
        for name in ("rank_00000", "guests"):
            (folder / name).symlink_to(victim)
        folder.chmod(0o777)
        os.chown(folder, 65_534, 65_534)
    (slot / "part").write_bytes(b"content")
    file = HeldFile(name="part", size_bytes=7, xxh3_128=xxhash.xxh3_128_hexdigest(b"content"), tensors=None)
    record = HeldRecord(
        format_version=FORMAT_VERSION, run="run", start=1, step=1, time=1.0, rank=0, host="n", layout=[1, 1, 1],
        engine={}, versions={}, files=[file], finite_step=None,
    )  # fmt: skip
    guests = Guests(folder, "127.0.0.1")
    partner = Partner("127.0.0.1", guests.port, guests.token)
    for make in (saver_of(folder, [])._slots[0].empty, lambda: partner.send(slot, record)):
        with pytest.raises(OSError) if taken else contextlib.nullcontext():
            make()
    partner.close()
    guests._door.close()
    assert [one.name for one in victim.rglob("*")] == ["rank_00000"]
    assert is_own_folder(folder) != taken and len(list(folder.glob("guests/rank_*/*/part"))) == int(not taken)
