"""Ranks that have a secret neither meet nor unpickle what somebody without it has written; attackers are processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_local_ranks import listening

from megasdc.common.errors import LaunchError
from megasdc.lab.studies.replica_link import ReplicaLink
from megasdc.ops.launch.on_host import private
from megasdc.parallel.collectives import broadcast_object, gather_objects, gather_objects_on
from megasdc.parallel.dims import ReplicaWorld
from megasdc.parallel.local_ranks import free_port
from megasdc.parallel.rendezvous import (
    AskedRanks,
    Identity,
    check_size,
    join_store,
    launch_secret,
    private_folder,
    sign,
    signed_store,
    unsigned_store,
    verified_value,
)

RANK = """
import os, sys, torch.distributed as dist
from megasdc.parallel.collectives import broadcast_object, gather_objects, gather_objects_on
from megasdc.parallel.rendezvous import Identity
from megasdc.parallel.rendezvous import meet
rank = int(sys.argv[1])
own = Identity(rank, 2, "launch", None, None, "n", "b", "0", (1, 1))
try:
    store = meet(own, 30.0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = gather_objects({"rank": rank})
    pair = dist.new_group([0, 1], backend="gloo")
    print(found, gather_objects_on(1, "a" * rank, pair), broadcast_object(rank, 1), flush=True)
    input()
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""
"""A rank of a launch."""
STRANGER = """
import contextlib, os, sys, time, torch.distributed as dist
from megasdc.parallel import rendezvous
from megasdc.parallel.rendezvous import Identity


class Code:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[2]}",)


def reach():
    while True:
        with contextlib.suppress(dist.DistNetworkError):
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return dist.TCPStore(*address, is_master=False, wait_for_workers=False)


own = Identity(1, 2, "launch", None, None, "n", "b", "0", (1, 1))
if sys.argv[1] == "forger":  # the rank has met, and he is faster than its gloo
    rendezvous.meet(own, 30.0)
    store = reach()
    while not (keys := [key for key in store.list_keys() if "cpu" in key and key.endswith("/0")]):
        time.sleep(0.01)
    store.set(keys[0][:-1] + "1", b"forged")
    input()
if sys.argv[1] == "insider":  # it has come into the group, by gloo's sockets
    store = rendezvous.meet(own, 30.0)
else:
    store = dist.PrefixStore("meeting/0", reach())
    store.set("rank/1", own.encode())
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
dist.all_gather_object([None, None], Code())
"""
"""Somebody who knows all of a launch but its secret, and comes as rank 1 with an object that runs code."""

FIRST = Identity(0, 2, "launch", None, None, "n", "b", "0", (1, 1))


@pytest.fixture
def variables() -> Iterator[dict[str, str]]:
    """Environment of a rank of a launch over several hosts, whose secret the front has left on this one."""
    name = secrets.token_hex(16)
    private.answer({"name": name, "files": {"secret": "ab" * 32}})
    place = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    yield {**os.environ, **place, "MEGASDC_PRIVATE_NAME": name, "WORLD_SIZE": "2"}
    private.answer({"name": name, "files": None})
    assert not private_folder(name).exists()


@contextlib.contextmanager
def started(program: str, environment: dict[str, str], *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of a rank, as long as it is needed."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_ranks_meet_on_one_address(variables: dict[str, str]) -> None:
    """And exchange what each has, without a word."""
    with started(RANK, variables, 0) as first, started(RANK, variables, 1) as second:
        assert first.stdout and second.stdout
        assert first.stdout.readline() == "[{'rank': 0}, {'rank': 1}] None 1\n"
        assert second.stdout.readline() == "[{'rank': 0}, {'rank': 1}] ['', 'a'] 1\n"
        assert f"0200007F:{int(variables['MASTER_PORT']):04X}" in listening(first.pid)
        assert {one.partition(":")[0] for one in listening(first.pid)} <= {"0100007F", "0200007F"}
        said = [one.communicate("\n")[1] for one in (first, second)]
    assert "not authenticated" not in "".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["outsider", "insider", "forger"])
def test_a_stranger_runs_no_code(variables: dict[str, str], tmp_path: Path, who: str) -> None:
    """Who claims rank 1, or a rank's gloo, without the secret is told as such, and nothing of his is unpickled."""
    theirs = {**variables, "MEGASDC_PRIVATE_NAME": ""} if who == "outsider" else variables
    with started(STRANGER, theirs, who, tmp_path / "ran"), started(RANK, variables, 0) as first:
        assert first.stdout
        said = first.stdout.readline()
    key = {"outsider": "meeting/0/rank/1", "insider": "an object that came for rank 1", "forger": "meeting/0/0//cpu"}
    assert said.startswith(f"LaunchError {key[who]}") and "not signed with the secret of this launch" in said
    assert "--master_port" in said and "security.md" in said
    assert not (tmp_path / "ran").exists()


PROGRAM = """
import sys
assert "torch" not in sys.modules, "a program may set variables that torch reads first"
import torch, torch.distributed as dist
for number in range(2):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    second = dist.TCPStore("127.0.0.1", 0, is_master=True)  # its own
    print("ready", second.port, flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_that_knows_nothing_listens_on_loopback(tmp_path: Path) -> None:
    """Under ``megasdc run`` on one host, each time that it starts its group; its own stores are as it wants them."""
    (tmp_path / "train.py").write_text(PROGRAM)
    settings = {"name": "train.py", "is_module": False, "arguments": [], "run_dir": str(tmp_path)}
    settings |= {"watched": False, "hang_floor_s": 0, "alert_command": [], "wait_for_room_s": 60}
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "MEGASDC_LAUNCH_ID": "a"}
    command = [sys.executable, "-m", "megasdc.ops.launch.user_program", json.dumps(settings)]
    environment, pipes = {**os.environ, **place}, {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, text=True, **pipes) as program:  # type: ignore[call-overload]
        try:
            for _ in range(2):
                own = f":{int(program.stdout.readline().split()[1]):04X}"
                found = listening(program.pid)
                assert f"0100007F:{int(place['MASTER_PORT']):04X}" in found
                others = [one for one in found if not one.endswith(own)]
                assert {one.partition(":")[0] for one in others} == {"0100007F"} and len(others) < len(found)
                program.stdin.write("\n")
                program.stdin.flush()
            assert program.wait(60) == 0
        finally:
            program.kill()


def test_values_of_a_store_are_bound_to_their_names() -> None:
    """A value is not believed under another key, changed, or cut."""
    inner = dist.HashStore()
    store = signed_store(inner, b"secret")
    store.set("a", "1")
    assert store.get("a") == b"1" and store.compare_set("b", "", "2") == store.compare_set("b", "", "3") == b"2"
    for forged in (inner.get("a"), b"", b"\0" * 32 + b"1"):
        inner.set("c", forged)
        with pytest.raises(LaunchError, match=r"^c: not signed with the secret of this launch; .*--master_port"):
            store.get("c")
    assert verified_value(b"x", "n", sign(b"x", "n", b"value")) == b"value"


def test_a_store_that_nobody_uses_any_more_is_closed(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 listens no longer, and may again; a connection over which there was no answer does not stay."""
    for name in ("MEGASDC_PRIVATE_NAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, variables[name])

    def fail(store: dist.Store) -> None:
        store.check(["a"])
        raise RuntimeError("no answer")

    others = listening(os.getpid())  # what earlier tests of this process have left open
    for _ in range(2):
        store = join_store(FIRST, 20.0)
        asked, before = AskedRanks(1, 2), len(os.listdir("/proc/self/fd"))
        assert [asked._call(fail) for _ in range(3)] == [None] * 3
        assert len(os.listdir("/proc/self/fd")) <= before + 1, (
            "what rank 0 has accepted last, which it may not have read"
        )
        below, limit = store, timedelta(seconds=7)
        store.set_timeout(limit)
        while isinstance(below, dist.PrefixStore):
            below = below.underlying_store
        assert below.plain.timeout == limit  # type: ignore[attr-defined]
        assert f"0200007F:{int(variables['MASTER_PORT']):04X}" in listening(os.getpid())
        del store, below
        assert listening(os.getpid()) <= others


def test_a_forged_decision_ends_the_rank_that_asks(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no answer that was lost, as where rank 0 has gone."""
    for name in ("MEGASDC_PRIVATE_NAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, variables[name])
    store = join_store(FIRST, 20.0)
    stranger = dist.TCPStore("127.0.0.2", int(variables["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    dist.PrefixStore("meeting/0", stranger).set("start", "leave")
    for ask in (AskedRanks(1, 2).go_on, lambda: [AskedRanks(rank, 2).record_request() for rank in (0, 1)]):
        with pytest.raises(LaunchError, match="meeting/0/start: not signed with the secret of this launch"):
            ask()
    del store


def test_a_launch_with_another_secret_is_named(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it says who it is; also by ranks that have none."""
    for name in ("MEGASDC_PRIVATE_NAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, variables[name])
    store, second = join_store(FIRST, 20.0), replace(FIRST, rank=1, launch="second")
    name = secrets.token_hex(16)
    private.answer({"name": name, "files": {"secret": "cd" * 32}})
    try:
        for own, why in ((name, "another secret than this one"), ("", "a secret, this one none")):
            monkeypatch.setenv("MEGASDC_PRIVATE_NAME", own)
            with pytest.raises(LaunchError, match=f"says it is launch launch .*launch second .*{why}.*--master_port"):
                join_store(second, 20.0)
    finally:
        private.answer({"name": name, "files": None})
    del store


def test_one_rank_alone_needs_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a launch that has ended has left its variables in a shell; several ranks are told what to do."""
    monkeypatch.setenv("MEGASDC_PRIVATE_NAME", "of-a-launch-that-has-ended")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        value = {"a": [1]}
        (found,) = gather_objects(value)
        assert found == value and found["a"] is not value["a"], "as if it had been sent"
        assert gather_objects_on(0, 1) == [1] and broadcast_object(2, 0) == 2
    finally:
        dist.destroy_process_group()
    with pytest.raises(LaunchError, match=r"or unset that variable .*enable-linger.*RemoveIPC=no"):
        launch_secret()


@pytest.mark.parametrize("size", [-1, 0, 31, 1 << 40])
def test_a_size_that_no_signed_object_has_is_refused(size: int) -> None:
    """Before there is memory for it."""
    with pytest.raises(LaunchError, match=rf"^rank 1: of {size} bytes, a signed one has 32 to .*--master_port"):
        check_size("rank 1", size)


def test_nccl_gets_a_part_of_torchs_own_store() -> None:
    """Under a name that ranks have agreed on by signed values; a store of one host stays as it is."""
    inner = dist.HashStore()
    signed = signed_store(inner, b"secret")
    store = dist.PrefixStore("meeting", dist.PrefixStore("replica/1", signed))
    first, second = unsigned_store(store, True), unsigned_store(store, False)
    first.set("0", b"id")
    assert second.get("0") == b"id" and unsigned_store(inner, True) is inner
    assert isinstance(first.underlying_store, dist.HashStore)
    (name,) = [key for key in inner.list_keys() if key.endswith("unsigned")]
    inner.set(name, "chosen by a stranger")
    with pytest.raises(LaunchError, match=name):
        unsigned_store(store, False)
    del signed


def test_the_secret_is_for_this_user_alone(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its folder is open to others, or there is none, ranks do not start."""
    name = variables["MEGASDC_PRIVATE_NAME"]
    folder = private_folder(name)
    assert folder == private.path_of(name), "ranks look where the front has left it"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "secret")] == [0o700, 0o600]
    with pytest.raises(SystemExit, match="list each machine once"):
        private.answer({"name": name, "files": {"secret": "other"}})
    monkeypatch.setenv("MEGASDC_PRIVATE_NAME", name)
    folder.chmod(0o750)
    with pytest.raises(LaunchError, match=r"there is no secret of this launch in .*this user's alone"):
        launch_secret()
    folder.chmod(0o700)
    assert launch_secret() == bytes.fromhex("ab" * 32)


@pytest.mark.parametrize("text", ["[]", "{}", "\x80", '{"rank": 1}', "[" * 10_000, "x" * 100_000])
def test_what_is_no_identity_is_refused(text: str) -> None:
    """With what to do about it."""
    with pytest.raises(LaunchError, match=r"holds no identity for a rank .*--master_port"):
        Identity.decode(text)


def test_numbers_of_replicas_are_signed(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has come into a study's group without the secret leads no replica to other numbers or texts."""
    monkeypatch.setenv("MEGASDC_PRIVATE_NAME", variables["MEGASDC_PRIVATE_NAME"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def of_launch(store: dist.Store, replica: int) -> tuple[list[list[float]], list[str]]:
        bridge = ReplicaLink(ReplicaWorld(2, replica, 2), 0, store, 60.0)
        return bridge.gather([replica + 0.5, 1e300]), bridge.gather_text("why" * replica)

    def stranger(store: dist.Store) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("bridge/0", store), 1, 2, timedelta(seconds=60))
        forged = torch.zeros(48, dtype=torch.uint8)
        group.allgather([[forged.clone(), forged.clone()]], [forged]).wait()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(partial(of_launch, dist.HashStore()), (0, 1)))
        assert found == [([[0.5, 1e300], [1.5, 1e300]], ["", "why"])] * 2
        store = dist.HashStore()
        theirs = pool.submit(stranger, store)
        with pytest.raises(LaunchError, match="numbers that came for replica 1: not signed with the secret"):
            of_launch(store, 0)
        theirs.result()
