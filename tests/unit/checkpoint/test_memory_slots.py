"""Which steps count as held where the writer fails, or a step holds NaN?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from megasdc.checkpoint import in_memory, save
from megasdc.checkpoint.host_memory import (
    GUESTS,
    SLOT_FORMAT_VERSION,
    SLOT_MANIFEST_FILE,
    Partner,
    PartnerReplicas,
    SlotFile,
    SlotManifest,
    rank_folder,
)
from megasdc.checkpoint.in_memory import MemorySaver
from megasdc.checkpoint.ranks import CheckpointGroup, RankProblem
from megasdc.checkpoint.records import read_record, record_text
from megasdc.checkpoint.writer_process import TaskResult
from megasdc.common.host import is_own_folder
from megasdc.common.wire import encode_message
from megasdc.parallel.dims import ParallelDims

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


def saver_of(folder: Path, answers: list[TaskResult]) -> Any:
    """A saver of one rank whose writer answers so."""
    place: Any = SimpleNamespace(gather=lambda own: [own], leader=True, node="here", among=CheckpointGroup())
    saver: Any = MemorySaver(folder, "run", 1, ParallelDims(1, 1, 1, 0), place, torch.device("cpu"), 1)
    saver._writer = SimpleNamespace(
        poll_result=lambda: answers.pop(0) if answers else None, close=lambda: None, hurry=lambda: None
    )
    return saver


class Alone:
    """The agreement of one rank."""

    def __init__(self, _group: None) -> None:
        self._fields: Any = ()

    def start(self, fields: Any) -> None:
        """Keep the fields."""
        self._fields = fields

    def finish(self) -> None:
        """Give each field its own number."""
        for one in self._fields:
            one.receive(one.send())


def sent(saver: Any, step: int) -> Any:
    """The slot that is being made whole for a step."""
    slot = next(one for one in saver._slots if not one.step)
    slot.step = step
    saver._sent.append(slot)
    return slot


def filled(slot: Path, files: dict[str, bytes], versions: dict[str, str] | None = None) -> SlotManifest:
    """Write files into a slot; returns its record."""
    held = []
    for name, content in files.items():
        (slot / name).write_bytes(content)
        digest = xxhash.xxh3_128_hexdigest(content)
        held.append(SlotFile(name=name, size_bytes=len(content), xxh3_128=digest, tensors=None))
    return SlotManifest(
        format_version=SLOT_FORMAT_VERSION, run="run", start=1, step=1, time=1.0, rank=0, host="n", layout=[1, 1, 1],
        engine={}, versions=versions or {}, files=held, finite_step=None,
    )  # fmt: skip


def test_a_slot_that_failed_is_not_whole_where_another_holds_nan(tmp_path: Path) -> None:
    """The step before both counts; the failure is told to all ranks after that."""
    saver = saver_of(tmp_path, [TaskResult(), TaskResult("no room")])
    for step in (1, 2):
        sent(saver, step)
    assert saver._own_newest() == 1
    next(one for one in saver._slots if not one.step).step = 3
    saver._discard_non_finite(3)
    assert saver._own_newest() == 1
    assert saver._problem is not None and saver._problem.text == "no room"


def test_what_was_waited_for_leaves_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of a run that has no room on the disk can be kept, whatever was under way before it."""
    monkeypatch.setattr(save, "StepAgreement", Alone)
    saver = saver_of(tmp_path, [TaskResult(), TaskResult(), TaskResult("no room"), TaskResult()])
    for step in (1, 2):
        sent(saver, step)
    assert saver.is_under_way and saver.finish() is None
    assert saver.whole == 2 and sum(one.step < saver.whole for one in saver._slots) == 2
    saver._slots[0].step = 0
    sent(saver, 3)
    assert "no room" in saver.finish() and saver.whole == 2 and not saver.is_under_way


def test_what_a_run_went_on_from_stays_where_its_first_snapshot_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing newer is held yet."""
    held = SimpleNamespace(record=SimpleNamespace(rank=0, step=4), folder=Path("slot_0"))
    monkeypatch.setattr(in_memory, "find_slots", lambda *_: ([held], []))
    saver = saver_of(tmp_path, [])
    assert saver.adopt(4)
    failed = sent(saver, 5)
    saver._problem = RankProblem("no room", True)
    assert "no room" in saver._abort()
    assert [one.step for one in saver._slots] == [4, 0, 0] and failed.step == 0


def test_ranks_that_an_earlier_start_had_not_find_as_many_slots_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks begin or skip the same snapshots, since each of them takes part in taking one."""
    held = SimpleNamespace(record=SimpleNamespace(rank=1, step=4), folder=Path("slot_1"))
    monkeypatch.setattr(in_memory, "find_slots", lambda *_: ([held], []))
    saver = saver_of(tmp_path, [])
    assert saver.adopt(4)
    assert [one.step for one in saver._slots] == [4, 0, 0]


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
    record = filled(slot, {"part": b"content"})
    guests = PartnerReplicas(folder, "127.0.0.1")
    partner = Partner("127.0.0.1", guests.port, guests.token)
    for make in (saver_of(folder, [])._slots[0].empty, lambda: partner.send(slot, record)):
        with pytest.raises(OSError) if taken else contextlib.nullcontext():
            make()
    partner.close()
    guests._door.close()
    assert [one.name for one in victim.rglob("*")] == ["rank_00000"]
    assert is_own_folder(folder) != taken and len(list(folder.glob("guests/rank_*/*/part"))) == int(not taken)


def test_a_slot_that_comes_in_pieces_is_held_as_it_was_sent(tmp_path: Path) -> None:
    """What a connection has ready is less than what is waited for: of the record, of files that are longer than its
    buffers, over longer and shorter ones of before. A bit that is changed on the way is noticed, and nothing is held.
    """
    (slot := tmp_path / "slot_0").mkdir()
    guests = PartnerReplicas(tmp_path / "memory", "127.0.0.1")
    partner = Partner("127.0.0.1", guests.port, guests.token)
    kept = rank_folder(tmp_path / "memory" / GUESTS, 0) / "slot_0"
    versions = {f"library {number}": "1.0" for number in range(30_000)}
    for sizes in ((5 << 20, 0, 70_001), (1, 6 << 20, 0)):
        files = dict(zip("abc", map(os.urandom, sizes), strict=True))
        partner.send(slot, filled(slot, files, versions))
        assert {name: (kept / name).read_bytes() for name in "abc"} == files
        assert read_record(kept / SLOT_MANIFEST_FILE, SlotManifest, SLOT_FORMAT_VERSION).versions == versions
    record = filled(slot, files)
    for place in (0, 5 << 20, -1):
        changed = bytearray(files["b"])
        changed[place] ^= 1
        (slot / "b").write_bytes(changed)
        with pytest.raises(OSError, match="what arrived there is not what its digests say"):
            partner.send(slot, record)
        assert not (kept / SLOT_MANIFEST_FILE).exists(), place
    partner.close()
    guests._door.close()


def test_a_slot_that_comes_byte_by_byte_is_held(tmp_path: Path) -> None:
    """Each byte is read before the next one is sent, of head and names too; a sender that goes leaves nothing."""
    (slot := tmp_path / "slot_0").mkdir()
    record = filled(slot, files := {"a": b"content", "b": b"", "c": bytes(range(40))})
    stream = encode_message({"slot": slot.name, "record": record_text(record)}) + b"".join(files.values())
    for sent in (len(stream), len(stream) - 1):
        guests = PartnerReplicas(memory := tmp_path / str(sent), "127.0.0.1")
        ours, theirs = socket.socketpair()
        reader = threading.Thread(target=guests._serve, args=(theirs, None))
        reader.start()
        for byte in stream[:sent]:
            ours.sendall(bytes([byte]))
            while unread(theirs):
                time.sleep(0)
        ours.shutdown(socket.SHUT_WR)
        reader.join(timeout=30)
        theirs.close()
        whole = sent == len(stream)
        assert ours.recv(100) == (encode_message({"right": True}) if whole else b"")
        kept = rank_folder(memory / GUESTS, 0) / slot.name
        assert (kept / SLOT_MANIFEST_FILE).exists() == whole
        if whole:
            assert {name: (kept / name).read_bytes() for name in files} == files
        ours.close()
        guests._door.close()


def unread(connection: socket.socket) -> int:
    """Bytes that a connection has ready."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))[0]
