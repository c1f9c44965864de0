"""Wrong or hostile input of `megasdc supervise` ends with a sentence that says what to do, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megasdc.common.errors import MegasdcError
from megasdc.ops.launch.remote import Transport
from megasdc.ops.launch.request import LaunchRequest
from megasdc.ops.supervise.command import _allocation, supervise_run
from megasdc.ops.supervise.history import Attempt
from megasdc.ops.supervise.host_reliability_log import HostReliabilityLog, HostUsage
from megasdc.ops.supervise.journal import FOLDER, JOURNAL_FILE, Journal

TWO = "a slots=1\nb slots=1\n"


def config_of(folder: Path, **supervise: Any) -> Path:
    """A configuration whose data are not there: nothing reads them."""
    path = folder / "config.json"
    sections = {
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
        "data": {"path": str(folder / "data")},
        "protect": "off",
        "training": {"steps": 10},
        "logging": {"run_dir": str(folder / "run")},
        "supervise": supervise,
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    batch = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    path.write_text(json.dumps({**batch, "optimizer": optimizer, "megasdc": sections}))
    return path


def supervise(capsys: pytest.CaptureFixture[str], folder: Path, config: Path, hosts: str = TWO) -> tuple[int, str]:
    """Do what the command does; returns exit code and what it said, in one line."""
    (folder / "hosts").write_text(hosts)
    try:
        code, text = supervise_run(config, hostfile=folder / "hosts"), ""
    except MegasdcError as error:
        code, text = error.exit_code, str(error)
    return code, " ".join((capsys.readouterr().err + text).split())


def write_journal(folder: Path, config: str, *entries: tuple[str, dict[str, Any]]) -> Path:
    """A journal of a run on the hosts a and b."""
    with Journal(folder / "run" / FOLDER, print) as journal:
        journal.write("hosts", slots={"a": 1, "b": 1}, num_hosts=1)
        journal.write("opened", config=config)
        for kind, fields in entries:
            journal.write(kind, **fields)
    return folder / "run" / FOLDER / JOURNAL_FILE


@pytest.mark.parametrize(
    ("hosts", "num_hosts", "said"),
    [
        (f"{TWO}a slots=1\n", 1, "hosts:3: host a is already on line 1"),
        (TWO, 3, "megasdc.supervise.num_hosts is 3, and"),
        ("# none\n", 1, "names no host"),
        ("a slots=0\n", 1, "got slots=0, need a whole number above 0"),
    ],
)
def test_wrong_hosts(capsys: pytest.CaptureFixture[str], tmp_path: Path, hosts: str, num_hosts: int, said: str) -> None:
    """A spare that is there twice, too few hosts, none, one without a rank."""
    code, text = supervise(capsys, tmp_path, config_of(tmp_path, num_hosts=num_hosts), hosts)
    assert code == 78 and said in text
    assert not (tmp_path / "run").exists()


def test_all_hosts_are_excluded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The run ends, with what each is away for in the journal."""
    config = config_of(tmp_path, num_hosts=1, returns=0)
    said = {"kind": "corrupt_again", "hosts": ["a"], "step": 3, "text": "a computes wrong results", "incident": None}
    write_journal(
        tmp_path,
        str(config),
        ("planned", {"attempt": 1, "slots": {"a": 1}, "launch_id": "x"}),
        ("started", {"pid": 0, "ticks": 0}),
        ("ended", {"exit_code": 73, "diagnosis": said, "trained": None}),
        ("decided", {"action": "replace hosts", "text": said["text"], "replaced": ["a", "b"], "pause_s": 0.0}),
    )
    code, text = supervise(capsys, tmp_path, config)
    assert code == 78 and "1 hosts are needed, and 0 of" in text


def test_a_journal_of_another_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Another configuration's is not gone on with, also where a line of it is damaged."""
    config = config_of(tmp_path, num_hosts=1)
    journal = write_journal(tmp_path, "/elsewhere/other.json")
    code, text = supervise(capsys, tmp_path, config)
    assert code == 78 and f"is of the run of /elsewhere/other.json, not of {config}; give that file" in text
    journal.write_text(journal.read_text().replace('"num_hosts": 1', '"num_hosts": 2'))
    code, text = supervise(capsys, tmp_path, config)
    assert code == 78 and "line 1 of the supervisor's journal" in text and "is of the run of /elsewhere" in text


def test_a_ledger_of_another_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It knows none of the hosts."""
    ledger = HostReliabilityLog(tmp_path / "ledger.jsonl")
    ledger.add(HostUsage("1", 1.0, 1.0, ("x",)))
    code, text = supervise(capsys, tmp_path, config_of(tmp_path, num_hosts=1, ledger=str(ledger.path)))
    assert code == 78 and "knows none of the hosts a, b" in text and "name another file in" in text


def test_a_hostfile_of_this_host_alone_needs_no_ssh(tmp_path: Path) -> None:
    """It is launched without a hostfile, with all slots unless the command chooses some; nobody is asked over SSH."""
    path = tmp_path / "hosts"
    path.write_text("localhost slots=3\n")
    found = _allocation(path, ())
    attempt = Attempt(1, dict(found.slots), "id", 0.0)
    request = LaunchRequest(None, hostfile=path)
    launched = found.request(request, attempt)
    assert (launched.hostfile, launched.num_gpus, launched.include) == (None, 3, "")
    chosen = found.request(LaunchRequest(None, hostfile=path, include="localhost:0,2"), attempt)
    assert (chosen.hostfile, chosen.num_gpus, chosen.include) == (None, None, "localhost:0,2")
    transport = Transport(remote=True, prefixes={host: found.prefix(host) for host in found.slots})
    assert transport.command("localhost", ["true"])[-1] == "true" and "ssh" not in transport.command("localhost", [])
    assert found.unreachable(attempt) == ()
    path.write_text("localhost slots=3\nb slots=3\n")
    assert _allocation(path, ()).request(request, attempt) == request
