"""What a host lacks for a run is found there, with the exit code that a rank would end with; hosts are told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megasdc.config import parse_config
from megasdc.data.prepare import prepare
from megasdc.launcher.request import LaunchRequest
from megasdc.supervisor.fitness import Checked, HostChecks
from megasdc.supervisor.host_check import HostRequest, check_host


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run with prepared data."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} words of text that are repeated. " * 60)
    data = {
        "path": str(tmp_path / "data"),
        "sequence_length": 32,
        "split": [90, 5, 5],
        "sources": [{"kind": "files", "path": str(tmp_path / "text")}],
        "tokenizer": {"vocab_size": 300, "train_characters": 20_000},
    }
    raw: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "megasdc": {
            "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "max_positions": 64},
            "data": data,
            "training": {"steps": 5},
            "checkpoint": {"memory": {"interval": 1}},
            "logging": {"run_dir": str(tmp_path / "run")},
        },
    }
    prepare(parse_config(raw).megasdc.data, tmp_path / "data", 1, progress=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    return path


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
    assert check_host(request(config, "megasdc.checkpoint.memory.interval=0", snapshot_bytes=1 << 50)) == []
    path = tmp_path / "data" / "train.bin"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)
    (damaged,) = check_host(request(config, whole=True))
    assert damaged.code == 71 and str(path) in damaged.text
    path.unlink()
    (missing,) = check_host(request(config))
    assert missing.code == 71 and "is missing" in missing.text


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


def test_without_a_host_that_answers_nothing_is_found(config: Path, tmp_path: Path) -> None:
    """All hosts are away: that is the diagnosis, and no error of the check."""
    checks = HostChecks(LaunchRequest(config_path=config), tmp_path / "run", {})
    assert checks.check({}, {"a": 1, "b": 1}) == Checked()
