"""Names that another user has made in shared memory are not used, not followed, and end no start."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from megasdc.checkpoint.host_memory import OWNER_FILE, claim, memory_folder, owner, remove_forgotten
from megasdc.common import host
from megasdc.common.errors import HangError, StorageError
from megasdc.common.host import (
    NAME_VARIABLE,
    deepspeed_buffer,
    is_own_folder,
    make_own_folder,
    own_prefix,
    read_own_json,
    remove_buffers,
    started_at,
)
from megasdc.ops.health.agent import AGENT_FILE, read_agent
from megasdc.ops.health.program_health import ProgramHealth
from megasdc.ops.health.record import (
    LEAVE_FILE,
    HeartbeatWriter,
    RecordReader,
    WatchedIdentity,
    leave_message,
    record_path,
)
from megasdc.ops.health.record_folder import record_folder, remove_old_records
from megasdc.ops.launch.on_host import release
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE, left_buffers, write_started

OTHER = 65_534
"""Id of another user."""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of shared memory."""
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(host, "SHARED_MEMORY", shared)
    return shared


def make_theirs(folder: Path, **files: str | Path) -> Path:
    """A folder of another user's that anybody may enter, with files by name; a path: a link to it."""
    folder.mkdir()
    for name, content in files.items():
        path = folder / name.replace("_json", ".json")
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_text(content)
        os.chown(path, OTHER, OTHER, follow_symlinks=False)
    folder.chmod(0o777)
    os.chown(folder, OTHER, OTHER)
    return folder


def make_old(folder: Path) -> None:
    """Let nothing have changed in it for a day."""
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - 86_400,) * 2, follow_symlinks=False)


def identity(pid: object = None) -> WatchedIdentity:
    """Of a rank, in this process or in that which is given."""
    own = os.getpid()
    return WatchedIdentity("run", 0, 0, 1, 0, 0, 0, "n0", 0, own if pid is None else pid, started_at(own))  # type: ignore[arg-type]


@as_root
def test_a_folder_of_another_user_is_refused_by_its_name(shared: Path) -> None:
    """So is one that others may enter, a file, and a link to a folder of the own; one of the own is taken again."""
    own = shared / "own"
    make_own_folder(own)
    make_own_folder(own)
    theirs, link, file, opened = make_theirs(shared / "theirs"), shared / "link", shared / "file", shared / "open"
    link.symlink_to(own)
    file.touch()
    opened.mkdir()
    opened.chmod(0o750)
    for path in (theirs, link, file, opened):
        assert not is_own_folder(path)
        with pytest.raises(PermissionError, match=path.name):
            make_own_folder(path)


@as_root
def test_what_another_user_has_left_ends_no_start(shared: Path) -> None:
    """Endless files, damaged ones, as records or as memory: nothing of it is read or removed; the own goes."""
    theirs = [
        make_theirs(shared / f"{own_prefix()}a-0", agent_json="{}"),
        make_theirs(shared / f"{own_prefix()}b-0", agent_json=Path("/dev/zero")),
        make_theirs(shared / f"{own_prefix()}memory-c-{os.uname().nodename}", owner=Path("/dev/zero")),
    ]
    own = record_folder("killed.1.0", 0)
    make_own_folder(own)
    HeartbeatWriter(own, identity(pid=2**22 + 1)).close()
    memory = memory_folder("killed")
    claim(memory, "killed.1", 0.0)
    (memory / OWNER_FILE).write_text(json.dumps({"start": "killed.1", "pid": 2**22 + 1, "linger_s": 0.0}))
    for folder in (*theirs, own, memory):
        make_old(folder)
    remove_old_records()
    remove_forgotten(memory_folder("next"))
    assert all(folder.exists() for folder in theirs) and not own.exists() and not memory.exists()


def test_endless_files_are_read_to_their_bound(shared: Path) -> None:
    """A file that is larger than it can be, a pipe, a link, and JSON that is nested for ever: an error each."""
    (large := shared / "large").touch()
    os.truncate(large, 1 << 40)
    (deep := shared / "deep").write_text("[" * 100_000)
    os.mkfifo(pipe := shared / "pipe")
    (link := shared / "link").symlink_to(large)
    for path in (large, deep, pipe, link):
        with pytest.raises((ValueError, OSError)):
            read_own_json(path)


@as_root
def test_memory_whose_name_another_user_has_taken_lies_beside(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on without its name; every process finds the folder, and a supervisor can let it go."""
    plain = memory_folder("run")
    make_theirs(plain, owner='{"start": "run.7", "pid": 1, "linger_s": 1e9}')
    assert owner(memory_folder("run")) is None, "theirs is not read"
    claim(memory_folder("run"), "run.1", 100.0)
    found = memory_folder("run")
    assert found.parent == plain.parent and found != plain and is_own_folder(found) and memory_folder("run") == found
    path = release.pathlib.Path
    with monkeypatch.context() as patch:
        patch.setattr(release.pathlib, "Path", lambda *at: shared if at == ("/dev/shm",) else path(*at))
        released = release.answer({"run": "run"})
    assert released == [str(found)]
    assert (left := owner(found)) is not None and left.linger_s == 0.0
    shutil.rmtree(plain)
    assert memory_folder("run") == found, "he has given the name back"
    taken_meanwhile = memory_folder("other")
    make_theirs(taken_meanwhile)
    assert claim(taken_meanwhile, "other.1", 0.0) == memory_folder("other") and is_own_folder(memory_folder("other"))


def test_a_record_is_not_written_through_a_link(shared: Path) -> None:
    """What the link leads to stays as it is."""
    victim = shared / "victim"
    victim.write_text("precious")
    record_path(shared, 0).with_suffix(".part").symlink_to(victim)
    HeartbeatWriter(shared, identity()).close()
    assert victim.read_text() == "precious" and RecordReader(record_path(shared, 0)).identity == identity()


@pytest.mark.parametrize("change", [{"pid": "1"}, {"pid": 0}, {"pid": -1}, {"pid": True}, {"host": 3}, {"more": 1}])
def test_an_identity_that_no_rank_has_written_is_refused(shared: Path, change: dict[str, object]) -> None:
    """Its process may be killed by it."""
    content = json.dumps({**asdict(identity()), **change}).encode().ljust(4096, b"\0")
    record_path(shared, 0).write_bytes(content)
    with pytest.raises(ValueError, match="no progress record"):
        RecordReader(record_path(shared, 0))


@as_root
def test_a_record_of_another_user_is_not_opened(shared: Path) -> None:
    """Nor is what it says of the agent."""
    HeartbeatWriter(shared, identity()).close()
    (shared / AGENT_FILE).write_text(json.dumps({"pid": 1, "started_at": 0.0}))
    for path in (record_path(shared, 0), shared / AGENT_FILE):
        os.chown(path, OTHER, OTHER)
    with pytest.raises(PermissionError):
        RecordReader(record_path(shared, 0))
    with pytest.raises(PermissionError):
        read_agent(shared)


@pytest.mark.parametrize("text", ['{"exit_code": 0, "message": "x"}', '{"exit_code": "0"}', "[]", "{", "{}"])
def test_nobody_is_told_to_leave_as_if_all_was_done(shared: Path, text: str) -> None:
    """A rank that leaves ends with a documented code other than 0, whatever the file says."""
    (shared / LEAVE_FILE).write_text(text)
    assert leave_message(shared)[0] == HangError.exit_code


def test_an_agent_that_names_no_process_is_an_error(shared: Path) -> None:
    """None is killed by it."""
    for text in ("{}", '{"pid": -1, "started_at": 1}', '{"pid": "7", "started_at": 1}', '{"pid": 7}'):
        (shared / AGENT_FILE).write_text(text)
        with pytest.raises(ValueError, match="names no process"):
            read_agent(shared)


@as_root
def test_ranks_that_tell_each_other_nothing_have_a_folder_that_nobody_can_guess(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its random part is in the environment that the launcher of their host gives them alone."""
    make_theirs(record_folder("launch.1.0", 0))
    monkeypatch.setenv(NAME_VARIABLE, "5eed" * 8)
    health = ProgramHealth({"n0": [0, 1]}, 1, tmp_path, "launch", (60.0, 60.0, 10.0), (), lambda code, message: None)
    try:
        (own,) = (folder for folder in shared.iterdir() if folder.name.count("5eed") == 8)
        assert is_own_folder(own) and record_path(own, 1).exists()
    finally:
        health.close()


@as_root
def test_a_rank_whose_folder_is_taken_says_which(shared: Path) -> None:
    """It is not written into."""
    theirs = make_theirs(record_folder("run.1.0", 0))
    with pytest.raises((PermissionError, StorageError), match="run"):
        make_own_folder(theirs)
    assert not list(theirs.iterdir())


@as_root
def test_buffers_of_deepspeed_are_removed_by_rank_address_and_port(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of earlier launches of the run too; not those of others, of another user, or what a record forges."""
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    own, earlier = deepspeed_buffer(1, launch), deepspeed_buffer(1, launch | {"MASTER_PORT": "29501"})
    stays = [deepspeed_buffer(0, launch), deepspeed_buffer(1, launch | {"MASTER_PORT": "29502"}), "precious"]
    theirs = deepspeed_buffer(1, launch | {"MASTER_ADDR": "::1"})
    for name in (own, earlier, *stays, theirs):
        (shared / name).touch()
    os.chown(shared / theirs, OTHER, OTHER)
    for number, buffer in enumerate((earlier, f"{earlier}/../precious", "precious", None)):
        monkeypatch.setenv(LAUNCH_ID_VARIABLE, f"launch{number}")
        write_started(tmp_path / "run", 1, buffer)
    write_started(tmp_path / "run", 0, stays[0])
    remove_buffers([own, theirs, *left_buffers(tmp_path / "run", 1)])
    assert sorted(path.name for path in shared.iterdir()) == sorted([*stays, theirs])
