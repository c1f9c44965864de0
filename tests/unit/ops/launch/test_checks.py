"""Judging hosts: versions, compilers, unreachable hosts."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megasdc.common.errors import LaunchError, StorageError
from megasdc.common.versions import component_versions
from megasdc.common.wire import encode_message
from megasdc.ops.launch import checks, front
from megasdc.ops.launch.checks import (
    DISTRIBUTIONS,
    HostNeeds,
    _host_problems,
    address_from_here,
    code_problems,
    differing_data,
    inspect_hosts,
    left_behind,
    left_locks,
    master_address,
    version_problems,
)
from megasdc.ops.launch.front import first_compilation, launch_run
from megasdc.ops.launch.hosts import Placement
from megasdc.ops.launch.on_host import files, probe
from megasdc.ops.launch.remote import HostModule, HostWatch, Transport, patience_s
from megasdc.ops.launch.request import LaunchRequest

SAME = dict.fromkeys(DISTRIBUTIONS, "1.0")
SMOKE = Path(__file__).parents[4] / "configs" / "smoke.json"


def test_equal_versions_are_fine() -> None:
    """Also on one host alone."""
    assert version_problems({"a": SAME, "b": SAME}, SAME) == []


def test_odd_versions_are_named() -> None:
    """The minority is named, with what the others have."""
    (problem,) = version_problems({"a": SAME, "b": {**SAME, "torch": "2.0"}}, SAME)
    assert problem.hosts == ("b",) and problem.text.startswith("torch: b has 2.0; the others have 1.0")
    (problem,) = version_problems({"a": SAME, "b": SAME}, {**SAME, "torch": "2.0"})
    assert "this host has 2.0" in problem.text and not problem.hosts
    (problem,) = version_problems({"a": SAME, "b": {**SAME, "deepspeed": None}}, SAME)
    assert "b has none" in problem.text and problem.hosts == ("b",)
    none = {**SAME, "deepspeed": None}
    (problem,) = version_problems({"a": none}, none)
    assert "not installed on any host" in problem.text and not problem.hosts


def test_data_that_one_host_has_others_of_are_named() -> None:
    """By what most hosts have, or those that are trusted; of two that differ none is named."""
    same, other = {"d": "1", "e": "5"}, {"d": "2", "e": "5"}
    assert differing_data({"a": same, "b": same}) == [] and differing_data({"a": {"d": None}, "b": {"d": None}}) == []
    (problem,) = differing_data({"a": same, "b": {"d": None, "e": "5"}})
    assert (problem.hosts, problem.code) == (("b",), 71) and "no prepared data in d" in problem.text
    (problem,) = differing_data({"a": other, "b": same, "c": same})
    assert (problem.hosts, problem.code) == (("a",), 71) and problem.text.startswith("a: the data in d are others than")
    (problem,) = differing_data({"a": same, "b": other})
    assert problem.hosts == () and problem.text.startswith("the data in d differ between a, b")
    (problem,) = differing_data({"a": same, "b": other, "c": other}, trusted=["a"])
    assert problem.hosts == ("b", "c")


def test_code_that_one_host_has_others_of_is_named() -> None:
    """A script or configuration; of two hosts it is not known which is right, unless one is trusted."""
    (problem,) = code_problems({"a": {"t.py": "1"}, "b": {"t.py": "2"}, "c": {"t.py": "1"}})
    assert problem.hosts == ("b",) and "b: t.py is another than on the other hosts" in problem.text
    (unknown,) = code_problems({"a": {"t.py": "1"}, "b": {"t.py": "2"}})
    assert unknown.hosts == ()
    assert code_problems({"a": {"t.py": "1"}, "b": {"t.py": "2"}}, trusted=["a"])[0].hosts == ("b",)
    assert not code_problems({"a": {"t.py": "1"}, "b": {"t.py": None}}), "that it cannot be read is another problem"


def test_probe_judges_paths(tmp_path: Path) -> None:
    """A folder that can be made counts as writable; one under a file does not."""
    (tmp_path / "file").touch()
    assert probe._why_unwritable(str(tmp_path / "new" / "deeper")) is None
    assert probe._why_unwritable(str(tmp_path)) is None and [one.name for one in tmp_path.iterdir()] == ["file"]
    assert probe._why_unwritable(str(tmp_path / "file" / "below")) == ""
    assert probe._readable(str(tmp_path)) and not probe._readable(str(tmp_path / "none"))


def test_odd_records_of_a_host_keep_none_of_the_others(tmp_path: Path) -> None:
    """Of one that cannot be read nothing is known, and of one that is not UTF-8 what can be read."""
    (tmp_path / "rank_00000.json").write_text("{}")
    (tmp_path / "rank_00001.json").write_bytes(b'{"message": "\xff"}')
    (tmp_path / "rank_00002.json").symlink_to("nowhere")
    found = files.answer({"folder": str(tmp_path)})
    assert found == {
        "rank_00000.json": "{}",
        "rank_00001.json": '{"message": "\ufffd"}',
        "rank_00002.json": "",
    }


def test_names_that_no_host_can_have_are_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label of 64 characters, which Linux allows, and two dots in a hostfile: both lead nowhere."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 64)
    assert probe._own_address() is None
    assert address_from_here("node..1") is None and address_from_here("a" * 64) is None


def test_sources_that_an_editor_has_locked_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emacs does so by a link of that name that leads nowhere; the check ended with FileNotFoundError."""
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    before = probe._version("megasdc")
    (tmp_path / ".#model.py").symlink_to("me@node1.123:456")
    assert probe._version("megasdc") == before
    (tmp_path / "model.py").write_text("x = 1")
    assert probe._version("megasdc") != before


def test_a_working_folder_that_may_not_be_entered_is_as_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of its host ended with PermissionError."""

    def refuse(path: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "chdir", refuse)
    assert not probe._enters(str(tmp_path))


def test_program_runs_on_this_host(tmp_path: Path) -> None:
    """A request and an answer with any characters go through standard input and output."""
    name = "rank_1.json"
    (tmp_path / name).write_text('quote " and \\ and ä\n')
    (answer,) = Transport(remote=False).run(["here"], Path(files.__file__), {"folder": str(tmp_path)}, timeout_s=60)
    assert answer.value == {name: 'quote " and \\ and ä\n'}


LONG = """
import os, pathlib, subprocess, time
from megasdc.ops.launch.host_process import read_request, send_to_caller
pids = read_request()["pids"]
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(pids).write_text(f"{os.getpid()} {child.pid}")
while True:
    send_to_caller({"progress": "3 of 4"})
    time.sleep(0.5)
"""


@pytest.fixture
def long(tmp_path: Path) -> tuple[HostModule, Path]:
    """A module that works for ever, and the file in which it says who it is."""
    (tmp_path / "long.py").write_text(LONG)
    return HostModule("long", python_path=[str(tmp_path), *filter(None, sys.path)], cwd="/"), tmp_path / "pids"


def have_ended(pids: Path) -> bool:
    """Whether processes end within ten seconds."""
    paths = [Path("/proc") / pid for pid in pids.read_text().split()]
    end = time.monotonic() + 10
    while any(one.exists() and "Z" not in (one / "stat").read_text().split()[2] for one in paths):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.slow
def test_who_waits_for_hosts_hears_how_far_they_are_and_can_give_up(long: tuple[HostModule, Path]) -> None:
    """What a host says comes while it works; once a stop is asked for, or a signal raises, nothing of it is left."""
    module, pids = long
    heard: list[str] = []

    def tell(said: Mapping[str, str]) -> None:
        heard.extend(said.values())

    watch, request = HostWatch(lambda: "3 of 4" in heard, tell), {"pids": str(pids)}
    here = Transport(remote=False)
    (answer,) = here.run(["here"], module, request, timeout_s=600, watch=watch)
    assert answer.problem == "here: was not waited for any longer" and have_ended(pids)

    def interrupt(said: Mapping[str, str]) -> None:
        if "3 of 4" in said.values():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        here.run(["here"], module, request, timeout_s=600, watch=HostWatch(tell=interrupt))
    assert have_ended(pids)


@pytest.mark.slow
def test_a_host_goes_on_with_nothing_that_nobody_reads(long: tuple[HostModule, Path]) -> None:
    """Where the connection is gone, as SSH's is that was ended, a module is ended there, with all it has started."""
    module, pids = long
    pipe = subprocess.PIPE
    with subprocess.Popen(module.argv, stdin=pipe, stdout=pipe, start_new_session=True) as one:
        assert one.stdin is not None and one.stdout is not None
        one.stdin.write(encode_message({"pids": str(pids)}))
        one.stdin.flush()
        while b"3 of 4" not in one.stdout.readline():
            pass
        one.stdin.close()
        assert one.wait(30) != 0
    assert have_ended(pids)


@pytest.mark.parametrize(
    ("stderr", "code", "said"),
    [
        ("ssh: connect: Connection timed out", 255, "cannot be reached over SSH"),
        ("root@h: Permission denied (publickey)", 255, "ssh-copy-id h"),
        ("bash: line 1: /x/python: No such file or directory", 127, "same path on every host"),
        ("Traceback\nSyntaxError: old", 1, "exit code 1: SyntaxError: old"),
    ],
)
def test_failures_give_host_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, code: int, said: str
) -> None:
    """With a stand-in for ssh that fails so."""
    (tmp_path / "ssh").write_text(f"#!/bin/sh\ncat >/dev/null\necho {stderr!r} >&2\nexit {code}\n".replace("\\n", "\n"))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (answer,) = Transport(remote=True).run(["h"], Path(files.__file__), {"folder": "/"}, timeout_s=60)
    assert answer.problem is not None
    assert answer.problem.startswith("h: ") and said in answer.problem


def test_master_address_must_be_on_a_card_of_that_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is the first of its own, else the one that its own name leads to, or its name here; no words."""
    found = {"addresses": ["10.0.0.1", "172.17.0.1"], "own_address": None}
    assert master_address("127.0.0.1", {**found, "addresses": ["10.0.0.1", "127.0.0.1"]}) == "127.0.0.1"
    assert master_address("127.0.0.1", found) == "10.0.0.1"
    assert master_address("no-such-host.invalid", found) == "10.0.0.1"
    assert master_address("no-such-host.invalid", {"addresses": [], "own_address": "10.0.0.7"}) == "10.0.0.7"
    odd = ["hostname:", "invalid", "option"]
    assert master_address("127.0.0.1", {"addresses": [*odd, "10.0.0.1"], "own_address": None}) == "10.0.0.1"
    monkeypatch.setattr(checks, "_resolved", lambda host: "10.0.0.9" if host == "known" else None)
    assert master_address("known", {"addresses": odd, "own_address": "127.0.1.1"}) == "10.0.0.9"
    for own in (None, "127.0.1.1"):
        with pytest.raises(LaunchError, match=r"none of its addresses is known.*--master_addr"):
            master_address("no-such-host.invalid", {"addresses": [], "own_address": own})


LOGIN = (r"printf 'Last login: 28 ao\373t on tty1'; " * 2, r"printf 'Bienvenue \340 tous\n\n'; printf '\351\n' >&2; ")
"""What logins print: without an end of the line, and in another encoding."""


@pytest.mark.parametrize("login", LOGIN, ids=["without end", "with end"])
def test_what_a_login_prints_does_not_matter(tmp_path: Path, login: str) -> None:
    """Neither for the answer of a host nor for how busy it says that it is."""
    (tmp_path / "slow.py").write_text(SLOW)
    told: list[str] = []
    prefixes = {"h": ("sh", "-c", f'{login}exec "$@"', "sh")}
    transport = Transport(remote=True, prefixes=prefixes)
    (answer,) = transport.run(["h"], tmp_path / "slow.py", 0.0, timeout_s=60)
    assert (answer.value, answer.problem) == (0.0, None)
    busy = replace(transport, load_command=("printf", "\\n6.5 1.0 1.0\\n2\\n"))
    assert busy._longer_s("h", 1.0, 1.0, told.append) == 4.25
    assert told == ["h: busy, 6.5 processes want its 2 cores; its answer is awaited 4 s in all"]


@pytest.mark.slow
def test_a_lock_of_a_killed_build_is_named_before_ranks_wait_for_it(tmp_path: Path) -> None:
    """PyTorch's own: one that its writer has open is none, whoever asks; a file of that name is no lock of a build."""
    folder = tmp_path / "an extension"
    folder.mkdir()
    lock = folder / "lock"
    program = "import sys, time; from torch.utils.file_baton import FileBaton; b = FileBaton(sys.argv[1]); "
    program += "assert b.try_acquire(); print('taken', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == b"taken\n"
            (live,) = probe._locks(str(tmp_path))
            assert live["path"] == str(lock) and live["held"] and left_behind({"a": [live], "b": [live]}) == []
        finally:
            writer.kill()
    (left,) = probe._locks(str(tmp_path))
    assert not left["held"] and left["age_s"] >= live["age_s"]
    left |= {"held": False, "local": True}  # as on the host itself, outside of containers
    ((host, name, text),) = left_behind({"a": [left], "b": []})
    assert (host, name) == ("a", "an extension") and text.startswith(f"a: {lock} locks a compiled extension since ")
    assert "no process of this host has it open" in text
    shared = {**left, "local": False}
    assert left_behind({"a": [shared], "b": [{**live, "local": False}]}) == [], "b compiles it for both"
    assert len(left_behind({"a": [left], "b": [{**live, "local": True}]})) == 1, "b compiles on its own disk"
    for unknown in (shared, {**left, "held": None}):
        assert left_behind({"a": [unknown]}) == [], "who compiles may be on a host that is not asked, or not seen"
        assert len(left_behind({"a": [{**unknown, "age_s": 4000.0}]})) == 1
    (told,) = left_locks(["here"], Transport(remote=False), str(tmp_path))
    assert told.startswith(f"here: {lock} locks")
    subprocess.run(told.rpartition("remove it (")[2][:-1], shell=True, check=True)
    assert probe._locks(str(tmp_path)) == [] and probe._locks(None) == []


def test_a_lock_that_its_writer_releases_meanwhile_was_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that another has taken then; in a container, or where a process is not seen, it is not known."""
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(probe, "_process_namespace", lambda: probe.FIRST_PIDS)
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [str(os.getpid())] if path == "/proc" else listed(path))
    own = [str(os.getpid())]
    assert probe._is_open(lock.stat()) is False
    with lock.open("rb"), (tmp_path / "on a dead server").open("w") as other:
        hangs, stat = f"/proc/{os.getpid()}/fd/{other.fileno()}", os.stat

        def looked_at(path: str | Path, **options: bool) -> os.stat_result:
            assert path != hangs, "who looks at it waits for its server"
            return stat(path, **options)

        def other_first(path: str) -> list[str]:
            return own if path == "/proc" else sorted(listed(path), key=lambda name: name != str(other.fileno()))

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", looked_at)
            patch.setattr(os, "listdir", other_first)
            assert probe._is_open(lock.stat()) is True
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_process_namespace", lambda: "pid:[4026532000]")
        assert probe._is_open(lock.stat()) is None
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_user_of", lambda pid: lock.stat().st_uid)
        patch.setattr(os, "listdir", _refused_below(os.listdir))
        assert probe._is_open(lock.stat()) is None
    for taken_again in (False, True):
        lock.touch()

        def released(seen: os.stat_result, taken_again: bool = taken_again) -> bool:
            (tmp_path / "keeps the number").hardlink_to(lock)
            lock.unlink()
            if taken_again:
                lock.touch()
            (tmp_path / "keeps the number").unlink()
            return False

        with monkeypatch.context() as patch:
            patch.setattr(probe, "_is_open", released)
            assert probe._locks(str(tmp_path)) == []


def _refused_below(listed: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    def refuse(path: str) -> list[str]:
        if path.endswith("/fd"):
            raise PermissionError(path)
        return listed(path)

    return refuse


@pytest.mark.parametrize(("compiler", "name"), [("ninja", "cpu_adam"), ("ninja", "own"), ("g++", "cpu_adam")])
def test_a_left_lock_blames_no_host_and_stops_only_runs_that_compile(tmp_path: Path, compiler: str, name: str) -> None:
    """Others are told of it: they may never need the extension."""
    compiles = (compiler, name) == ("ninja", "cpu_adam")
    lock = tmp_path / name / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (1.0, 1.0))
    needs = HostNeeds(
        cwd="/", python_path=[*sys.path], path=[], readable={}, data=[], code=[], writable=[], master_port=None,
        compilers={compiler: "a setting"}, cpu_only=True, gloo_interface=False, always_gloo=False,
        extensions=str(tmp_path),
    )  # fmt: skip
    said: list[str] = []
    placement = Placement({"h": [0]}, remote=False)
    report = inspect_hosts(placement, Transport(remote=False), needs, watch=HostWatch(say=said.append))
    (text,) = report.problems if compiles else said
    assert f"h: {lock} locks a compiled extension since" in text
    assert all(not one.hosts for one in report.found) and len(report.found) == compiles


def test_a_launch_whose_ranks_would_wait_for_a_left_lock_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked for where the ranks would compile."""
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (1.0, 1.0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    sets = (f"megasdc.logging.run_dir={tmp_path}/run", f"megasdc.data.path={tmp_path}")
    sets += ("optimizer.params.torch_adam=false",)
    with pytest.raises(LaunchError, match=f"{lock} locks a compiled extension since"):
        launch_run(LaunchRequest(SMOKE, num_gpus=2, overrides=sets), dry_run=True)


@pytest.mark.parametrize(
    ("remote", "hosts", "extensions", "asked"),
    [(True, 2, "/x", 2), (False, 1, "/x", 1), (False, 2, "/x", 0), (True, 2, None, 0)],
)
def test_locks_are_asked_for_where_they_are(
    monkeypatch: pytest.MonkeyPatch, remote: bool, hosts: int, extensions: str | None, asked: int
) -> None:
    """Under SLURM this host would answer under every other's name."""
    found: list[str] = []
    monkeypatch.setattr(front, "left_locks", lambda of, *_: found.extend(of) or [])
    needs = SimpleNamespace(extensions=extensions)
    placement = Placement({f"h{number}": [0] for number in range(hosts)}, remote=hosts > 1)
    plan = SimpleNamespace(placement=placement, transport=Transport(remote=remote), needs=needs)
    assert front._left_locks(plan, {}) == [] and len(found) == asked  # type: ignore[arg-type]


def test_the_file_system_of_a_path_is_known() -> None:
    """By the deepest mount above it."""
    assert probe._file_system(Path("/proc/self")) == "proc"
    assert probe._file_system(Path("/dev/shm")) in probe.ON_THIS_HOST


def test_mounts_with_blanks_in_their_names_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel writes these as octal numbers."""
    lines = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:5 / /my\\040disk rw - nfs4 s:/x rw\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **options: lines)
    assert probe._file_system(Path("/my disk/x")) == "nfs4" and probe._file_system(Path("/mydisk")) == "ext4"


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_host_whose_own_name_leads_nowhere_is_refused(has_gpu: bool) -> None:
    """Ranks on GPUs have groups of gloo too; not where the launch is of one host, or the interface is given."""
    own = component_versions()
    found = {"missing_cwd": False, "python": own.pop("python"), "versions": own, "unreadable": [], "port_problem": None}
    found |= {"has_gpu": has_gpu, "unwritable": {}, "own_address": "127.0.1.1", "hostname": "h", "programs": {}}
    needs = HostNeeds(
        cwd="/", python_path=[], path=[], readable={}, data=[], code=[], writable=[], master_port=None, compilers={},
        cpu_only=False, gloo_interface=False, always_gloo=True,
    )  # fmt: skip
    (problem,) = _host_problems("h", found, needs, True)
    assert problem.hosts == ("h",) and "its own name h resolves to 127.0.1.1" in problem.text
    (problem,) = _host_problems("h", {**found, "own_address": None}, needs, True)
    assert "its own name h does not resolve" in problem.text
    assert _host_problems("h", found, needs, False) == []
    assert _host_problems("h", found, replace(needs, gloo_interface=True), True) == []
    for address, is_reached in (("10.0.0.7", True), ("fd00::7", True), ("::1", False)):
        assert (_host_problems("h", {**found, "own_address": address}, needs, True) == []) is is_reached
    users = _host_problems("h", found, replace(needs, always_gloo=False), True)
    assert (users == []) is has_gpu, "a program of others may use NCCL alone"


def test_an_address_for_other_hosts_is_none_of_the_loopback() -> None:
    """A name that leads to 127.x.x.x, or to nothing, has none."""
    assert address_from_here("user@10.0.0.1") == "10.0.0.1"
    assert address_from_here("127.0.1.1") is None and address_from_here("no-such-host.invalid") is None


@pytest.mark.parametrize(("data", "kind"), [(".", StorageError), ("none", LaunchError)])
def test_a_folder_that_cannot_be_written_alone_is_a_matter_of_storage(
    tmp_path: Path, data: str, kind: type[Exception]
) -> None:
    """A run folder that cannot be made is 77 before the start as it is in a rank; with other problems 78."""
    (tmp_path / "file").touch()
    sets = (f"megasdc.logging.run_dir={tmp_path}/file/run", f"megasdc.data.path={tmp_path / data}")
    with pytest.raises(kind, match=f"{tmp_path}/file/run cannot be written to there"):
        launch_run(LaunchRequest(SMOKE, num_gpus=2, overrides=sets), dry_run=True)


def test_missing_data_are_told_with_the_command_that_makes_them(tmp_path: Path) -> None:
    """The command has the file and the overrides of data, and the folder where relative paths start is named."""
    sets = (f"megasdc.logging.run_dir={tmp_path}/run", "megasdc.data.path=no where")
    with pytest.raises(LaunchError) as caught:
        launch_run(LaunchRequest(SMOKE, num_gpus=2, overrides=sets), dry_run=True)
    text = str(caught.value)
    assert f"{Path.cwd()}/no where cannot be read there; make it with" in text
    assert f"`megasdc prepare-data --config {SMOKE} --set 'megasdc.data.path=no where'`" in text
    assert f"starts at the folder of the launch, {Path.cwd()}" in text


@pytest.mark.parametrize(
    ("setting", "needs"),
    [
        (("optimizer.params.torch_adam", "true"), None),
        (
            ("optimizer.params.torch_adam", "false"),
            r"g\+\+ is not on PATH, and for optimizer\.params\.torch_adam false",
        ),
        (("megasdc.model.fuse", "true"), r"g\+\+ is not on PATH, and for megasdc\.model\.fuse true"),
    ],
)
def test_a_compiler_is_asked_for_only_where_something_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: tuple[str, str], needs: str | None
) -> None:
    """DeepSpeed compiles its own Adam, Inductor fused modules; else a CPU host needs no compiler."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    sets = (
        f"megasdc.logging.run_dir={tmp_path}/run",
        f"megasdc.data.path={tmp_path}",
        "=".join(setting),
    )
    request = LaunchRequest(SMOKE, num_gpus=2, overrides=sets)
    if needs is None:
        assert launch_run(request, dry_run=True).exit_code == 0
        return
    with pytest.raises(LaunchError, match=needs):
        launch_run(request, dry_run=True)


SLOW = "import time\n\ndef answer(request):\n    time.sleep(request)\n    return request\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "answers", "said"),
    [
        ("6.5 1.0 1.0\n2\n", True, ["here: busy, 6.5 processes want its 2 cores; its answer is awaited 4 s in all"]),
        ("0.5 1.0 1.0\n2\n", False, []),
        ("no number\n", False, []),
    ],
    ids=["busy", "idle", "silent"],
)
def test_a_host_that_is_only_busy_is_waited_for(tmp_path: Path, load: str, answers: bool, said: list[str]) -> None:
    """As much longer as it is loaded, which is told; one that is idle or says nothing hangs."""
    (tmp_path / "slow.py").write_text(SLOW)
    told: list[str] = []
    transport = Transport(remote=False, load_command=("printf", load))
    (answer,) = transport.run(["here"], tmp_path / "slow.py", 1.5, timeout_s=1.0, watch=HostWatch(say=told.append))
    assert (answer.value == 1.5, told) == (answers, said)
    assert answers or "gave no answer in 1 s" in str(answer.problem)


def test_the_load_of_this_host_is_read(tmp_path: Path) -> None:
    """The command that hosts are asked with gives two numbers here."""
    first, *_, last = subprocess.run(Transport(False).load_command, capture_output=True, check=True).stdout.split()
    assert float(first) >= 0 and int(last) == os.cpu_count()
    assert [patience_s(60.0, load, 4) for load in (0.0, 4.0, 8.0, 400.0)] == [60.0, 60.0, 180.0, 600.0]


def test_a_first_start_says_what_is_compiled_and_how_to_avoid_it(tmp_path: Path) -> None:
    """Where DeepSpeed's Adam is asked for and not compiled yet, and in a user's first start of all.

    On a CPU that is the first that forms a group, also where the Adam is there.
    """
    own, plain, extensions = {"ninja": "optimizer.params.torch_adam false"}, dict[str, str](), tmp_path / "some"

    def note(compilers: dict[str, str], is_users: bool, *, on_cpu: bool = False) -> str | None:
        program: Any = SimpleNamespace(compilers=compilers, is_users=is_users)
        return first_compilation(program, str(extensions), on_cpu=on_cpu)

    for found in (note(own, False), note(plain, True)):
        assert found is not None and "optimizer.params.torch_adam true" in found and str(tmp_path) in found
    assert note(plain, False) is None
    for name in ("deepspeed_shm_comm", "cpu_adam"):
        assert note(own, False) is not None
        (extensions / name).mkdir(parents=True)
        (extensions / name / f"{name}.so").touch()
        assert note(plain, True) is None
    assert note(own, False) is None
    extensions = tmp_path / "other"
    for name in ("cpu_adam", "deepspeed_shm_comm"):
        told = note(plain, True, on_cpu=True)
        assert told is not None and "communication" in told and ("Adam" in told) == (name == "cpu_adam"), told
        (extensions / name).mkdir(parents=True)
        (extensions / name / f"{name}.so").touch()
    assert note(plain, True, on_cpu=True) is None
