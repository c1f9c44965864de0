"""Who is let in at a door, and what strangers can do to it: attackers are processes of their own."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megasdc.checkpoint.host_memory import (
    GUESTS,
    SLOT_FORMAT_VERSION,
    SLOT_MANIFEST_FILE,
    Partner,
    SlotFile,
    SlotManifest,
    rank_folder,
)
from megasdc.common import wire
from megasdc.common.wire import MAX_UNKNOWN, SECRET_BYTES, Door, WireError, connect, encode_message

TOKEN = bytes(range(SECRET_BYTES))
FLOOD = """
import resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("connected", flush=True)
time.sleep(600)
"""
"""A program that opens connections, says nothing, and keeps them."""
WRITER = """
import resource, sys, time
from pathlib import Path
from megasdc.checkpoint.host_memory import PartnerReplicas
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
guests = PartnerReplicas(Path(sys.argv[1]), "127.0.0.1")
print(guests.port, guests.token.hex(), flush=True)
time.sleep(600)
"""
"""What a writer does for partners, with few descriptors."""


@contextmanager
def program(text: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and the first line that it prints; it is killed in the end."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


def threads_of(pid: int) -> int:
    """Number of threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def slot_of(folder: Path) -> tuple[Path, SlotManifest]:
    """A slot with one file, and its record."""
    folder.mkdir()
    content = os.urandom(1 << 20)
    (folder / "part").write_bytes(content)
    file = SlotFile(name="part", size_bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content), tensors=None)
    record = SlotManifest(
        format_version=SLOT_FORMAT_VERSION, run="r", start=1, step=1, time=1.0, rank=0, host="n", layout=[1, 1, 1],
        engine={}, versions={}, files=[file], finite_step=None,
    )  # fmt: skip
    return folder, record


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", [400, 40])
def test_a_flood_does_not_end_a_partners_door(tmp_path: Path, descriptors: int) -> None:
    """1,000 connections of a stranger; with few descriptors they are more than the writer can open. It goes on, with a
    bounded number of threads, and takes a slot.
    """
    slot, record = slot_of(tmp_path / "slot_a")
    with program(WRITER, tmp_path / "kept", descriptors) as (writer, line):
        port, token = line.split()
        with program(FLOOD, port, 1000):
            assert threads_of(writer.pid) < 3 * MAX_UNKNOWN
            partner = Partner("127.0.0.1", int(port), bytes.fromhex(token))
            partner.send(slot, record)
            partner.close()
            assert writer.poll() is None and threads_of(writer.pid) < 3 * MAX_UNKNOWN
    kept = rank_folder(tmp_path / "kept" / GUESTS, 0) / "slot_a"
    assert (kept / SLOT_MANIFEST_FILE).is_file() and (kept / "part").read_bytes() == (slot / "part").read_bytes()


def test_a_secret_never_travels() -> None:
    """Who listens in a partner's place learns nothing with which it could come in itself, and is not believed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = bytearray()

        def listen() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(encode_message({"number": "1"}))
                heard.extend(connection.recv(1 << 16))
                connection.sendall(encode_message({"proof": "1"}))

        thread = threading.Thread(target=listen)
        thread.start()
        with pytest.raises(WireError, match="does not know the secret"):
            Partner("127.0.0.1", server.getsockname()[1], TOKEN)
        thread.join()
    assert heard and TOKEN not in heard and TOKEN.hex().encode() not in heard


def test_a_slow_stranger_does_not_hold_up_the_next() -> None:
    """Also where callers are taken one after the other, and one with another secret is turned away."""
    said: list[str] = []
    with Door("127.0.0.1", TOKEN, say=said.append) as door, socket.create_connection(("127.0.0.1", door.port)):
        with pytest.raises(OSError):
            connect("127.0.0.1", door.port, bytes(SECRET_BYTES), {"rank": 1}, 5.0)
        began = time.monotonic()
        with connect("127.0.0.1", door.port, TOKEN, {"rank": 7}, 5.0), door.accept(5.0)[1]:
            assert time.monotonic() - began < wire.HANDSHAKE_S / 2
        with pytest.raises(TimeoutError):
            door.accept(0.1)
    assert len(said) == 1 and "does not know the secret" in said[0]


def test_who_listens_on_an_address_is_not_reached_by_another() -> None:
    """A door on one address takes nothing that comes to another of this host's."""
    with Door("127.0.0.1", TOKEN) as door, pytest.raises(OSError):
        connect("127.0.0.2", door.port, TOKEN, {}, 5.0)
    with pytest.raises(OSError, match="not known"):
        Door("", TOKEN)


def test_callers_of_one_address_do_not_push_out_those_of_others() -> None:
    """Where too many are unknown, the oldest of the address with most of them goes."""
    with Door("127.0.0.1", TOKEN) as door:
        place = "127.0.0.1", door.port
        first = socket.create_connection(place, source_address=("127.0.0.3", 0))
        others = [socket.create_connection(place) for _ in range(2 * MAX_UNKNOWN)]
        wire.introduce(first, TOKEN, {"rank": 1}, 5.0)
        hello, connection = door.accept(5.0)
        assert hello == {"rank": 1}
        for one in (first, connection, *others):
            one.close()


def test_a_caller_who_has_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports one that left while it waited (ECONNABORTED) in place of the next."""
    said: list[str] = []
    with Door("127.0.0.1", TOKEN, say=said.append) as door:
        left = [errno.ECONNABORTED, errno.EMFILE, errno.EMFILE]

        def fail() -> None:
            if left:
                raise OSError(left.pop(0), "of a caller")

        _before_accept(door, fail, monkeypatch)
        while left:
            time.sleep(0.01)
        with connect("127.0.0.1", door.port, TOKEN, {}, 5.0):
            door.accept(5.0)[1].close()
    assert not left and said == ["no further connection can be taken: of a caller"]


def test_a_door_whose_socket_is_broken_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that stays is told once, and tried again after a pause."""
    said, calls = [], 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        raise OSError(errno.EINVAL, "for ever")

    with Door("127.0.0.1", TOKEN, say=said.append) as door:
        _before_accept(door, fail, monkeypatch)
        time.sleep(10 * wire.PAUSE_S)
        monkeypatch.undo()
    assert 1 < calls < 100 and said == ["no further connection can be taken: for ever"]


def _before_accept(door: Door, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """``act`` is called before this door alone takes a caller: doors of other tests may be open in this process."""
    accept = socket.socket.accept

    def first(self: socket.socket) -> Any:
        if self is door._server:
            act()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", first)


def test_a_door_without_a_thread_is_an_error_that_its_callers_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that left by another one would keep the others waiting; nothing listens afterwards."""
    opened: list[socket.socket] = []
    create = socket.create_server

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(wire.socket, "create_server", lambda *a, **k: opened.append(create(*a, **k)) or opened[0])
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="can't start new thread"):
        Door("127.0.0.1", TOKEN)
    assert opened[0].fileno() == -1


def test_a_caller_who_was_ended_to_make_room_comes_again() -> None:
    """As often as it may, so that a flood of strangers does not keep it out at once."""

    def listen(turned_away: int) -> None:
        for _ in range(turned_away):
            connection, _ = server.accept()
            with connection:
                connection.sendall(encode_message({"number": "1"}))
                connection.recv(1 << 16)
        if turned_away < wire.ATTEMPTS:
            connection, _ = server.accept()
            with connection:
                came.append(wire.admit(connection, TOKEN, 5.0))

    came: list[dict[str, Any]] = []
    for turned_away in (wire.ATTEMPTS - 1, wire.ATTEMPTS):
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=listen, args=(turned_away,))
            thread.start()
            if turned_away < wire.ATTEMPTS:
                connect("127.0.0.1", server.getsockname()[1], TOKEN, {"rank": 3}, 5.0).close()
            else:
                with pytest.raises(ConnectionError):
                    connect("127.0.0.1", server.getsockname()[1], TOKEN, {"rank": 4}, 5.0)
            thread.join()
    assert came == [{"rank": 3}]


def test_the_limit_of_descriptors_is_raised() -> None:
    """To that of the system, for the processes that are started too."""
    code = (
        "import resource as r; h = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (256, h)); "
        "from megasdc.common.wire import raise_descriptor_limit as up; up(); print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    expected = wire.DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, wire.DESCRIPTORS)
    with program(code) as (_, line):
        assert int(line) == expected
