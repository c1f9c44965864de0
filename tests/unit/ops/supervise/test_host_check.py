"""What a host lacks for a run is found there, with the exit code that a rank would end with; hosts are told apart."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megasdc.ops.launch.request import LaunchRequest, UserProgram
from megasdc.ops.supervise import host_check
from megasdc.ops.supervise.fitness import HostCheckResult, HostChecks, report_every
from megasdc.ops.supervise.host_check import HostRequest, check_host


def request(config: Path, *overrides: str, **changes: Any) -> HostRequest:
    """Two hosts of a rank."""
    asked = HostRequest(str(config), list(overrides), [], 2, 1, 2, None, None, False)
    return replace(asked, **changes)


def test_a_host_lacks_what_a_rank_would_end_with(config: Path, tmp_path: Path) -> None:
    """Each with its exit code; a byte of the data is looked at where all are asked for."""
    assert check_host(request(config, whole=True)) == []
    assert [one.code for one in check_host(request(config, "megasdc.parallel.tensor=3"))] == [70]
    huge = ("megasdc.model.hidden_size=65536", "megasdc.model.num_layers=200")
    assert [(one.code, one.snapshots) for one in check_host(request(config, *huge))] == [
        (70, False),
        (77, False),
        (70, True),
    ]
    (full,) = check_host(request(config, snapshot_bytes=1 << 50))
    assert (full.code, full.snapshots) == (70, True) and "GiB that are free in /dev/shm" in full.text
    assert "snapshots need 1,048,576.000 GiB" in full.text, "of one rank"
    assert check_host(request(config, "megasdc.checkpoint.memory.interval=0", snapshot_bytes=1 << 50)) == []
    goes_on = "megasdc.checkpoint.memory.without_room=go_on"
    assert check_host(request(config, goes_on, snapshot_bytes=1 << 50)) == [], "the run does without them there"
    path = tmp_path / "data" / "train.bin"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)
    (damaged,) = check_host(request(config, whole=True))
    assert damaged.code == 71 and str(path) in damaged.text
    path.unlink()
    (missing,) = check_host(request(config))
    assert missing.code == 71 and "is missing" in missing.text


def test_who_reads_every_byte_says_how_far_it_is(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host in texts; who waits for several of them in one line, of those that still work."""
    monkeypatch.setattr(host_check, "TELL_S", 0.0)
    texts: list[str] = []
    assert check_host(request(config), texts.append) == [] and not texts
    assert check_host(request(config, whole=True), texts.append) == []
    assert texts and all(text.endswith(" GiB") for text in texts)
    said: list[str] = []
    tell = report_every(said.append, 0.0)
    for hosts in ({"b": "1.0 of 2.0 GiB", "a": ""}, {"b": "2.0 of 2.0 GiB"}, {}):
        tell(hosts)
    assert said == ["hosts are checked: a, b 1.0 of 2.0 GiB", "hosts are checked: b 2.0 of 2.0 GiB"]


@pytest.mark.slow
def test_hosts_are_checked_as_they_are_reached(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the words before a command; one that gives no answer is neither fit nor unfit."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # whatever this host's own name leads to
    hosts = {"a": 1, "b": 1}
    prefixes = {"a": ("env",), "b": ("env", "LANG=C"), "c": ("false",)}
    port = ("--master_port", "29417")
    checks = HostChecks(LaunchRequest(config, launcher_args=port), tmp_path / "run", prefixes)
    found = checks.check({**hosts, "c": 1}, hosts)
    assert (found.unfit, found.fit, list(found.silent)) == ((), ("a", "b"), ["c"])
    (tmp_path / "data" / "train.bin").unlink()
    found = checks.check({"b": 1}, hosts, beside=["a"])
    assert [(one.host, one.code) for one in found.unfit] == [("b", 71)] and not found.fit
    assert checks.check({"b": 1}, hosts, beside=["a"], deep=False).fit == ("b",), "a look reads no data"
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert {one.code for one in checks.check(hosts, hosts, deep=False).unfit} == {78}


def program_of(name: str, is_module: bool) -> UserProgram:
    """A training that nobody watches."""
    limits = {"hang_floor_s": 60.0, "slow_floor_s": 1.0, "hang_factor": 5.0, "wait_for_room_s": 900.0}
    return UserProgram(name, is_module, (), "run", watched=False, alert_command=(), **limits)


@pytest.mark.slow
def test_a_training_that_is_not_megasdcs_own_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that its script imports, the script itself, and shared memory; not what may do without."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "train.py"
    script.write_text("import torch, beside\ntry:\n    import nowhere_a\nexcept ImportError:\n    pass\n")
    program = program_of(str(script), is_module=False)
    request = LaunchRequest(None, launcher_args=("--master_port", "29418"), program=program)
    checks = HostChecks(request, tmp_path / "run", {"a": ("env",), "b": ("env",)})
    hosts = {"a": 1, "b": 1}
    assert checks.check({"b": 1}, hosts, beside=["a"]) == HostCheckResult((), ("b",), {})
    script.write_text("import torch\nfrom nowhere_b.part import thing\n")
    here = tmp_path / "here"
    here.mkdir()
    (here / "nowhere_b.py").touch()
    monkeypatch.syspath_prepend(str(here))  # of this process alone: it is installed here, and not where ranks run
    (lacking,) = checks.check({"b": 1}, hosts, beside=["a"]).unfit
    assert (lacking.host, lacking.code) == ("b", 78) and "needs nowhere_b, not installed" in lacking.text
    assert not checks.check({"b": 1}, hosts, beside=["a"], deep=False).unfit, "a look starts nothing"
    module = HostRequest(None, [], [], 2, 1, 2, None, None, False, "nowhere_c.train", True, ["nowhere_c"])
    assert [one.code for one in check_host(module)] == [78]
    monkeypatch.setattr("megasdc.ops.supervise.host_check.shared_folder", lambda: script)
    assert [one.code for one in check_host(replace(module, script="json.tool", modules=["json"]))] == [77]


@pytest.mark.slow
def test_a_module_that_is_not_found_here_either_is_no_lack_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script extends its path, or ranks alone have another one: all spares were unfit, and replaced."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "somewhere_a.py").touch()
    script = tmp_path / "train.py"
    script.write_text("import __main__, json, sys\nsys.path.append('parts')\nimport somewhere_a, somewhere_b\n")
    request = LaunchRequest(None, launcher_args=("--master_port", "29419"))
    for name, is_module in (("train.py", False), ("somewhere_c.train", True)):
        program = program_of(name, is_module)
        checks = HostChecks(replace(request, program=program), tmp_path / "run", {"a": ("env",), "b": ("env",)})
        assert checks.check({"b": 1}, {"a": 1, "b": 1}, beside=["a"]) == HostCheckResult((), ("b",), {})
    before = list(sys.path)
    assert host_check.modules_of("train.py", False, []) == ["__main__", "json", "sys"]
    monkeypatch.delattr(sys.modules["__main__"], "__spec__", raising=False)
    assert host_check.modules_of("train.py", False, ["parts"])[3:] == ["somewhere_a"] and sys.path == before


def test_without_a_host_that_answers_nothing_is_found(config: Path, tmp_path: Path) -> None:
    """All hosts are away: that is the diagnosis, and no error of the check."""
    checks = HostChecks(LaunchRequest(config_path=config), tmp_path / "run", {})
    assert checks.check({}, {"a": 1, "b": 1}) == HostCheckResult()
