"""A ledger names hosts that fail much more often than others, and survives whatever is written beside it."""

from __future__ import annotations

import fcntl
import math
import threading
from pathlib import Path

import numpy as np
import pytest

from megasdc.common.errors import LaunchError, StorageError
from megasdc.common.run_lock import open_lock_file
from megasdc.ops.supervise import host_reliability_log
from megasdc.ops.supervise.command import _suspect
from megasdc.ops.supervise.history import HOSTS, JournalHistory
from megasdc.ops.supervise.host_reliability_log import DAY_S, HostReliabilityLog, HostUsage, judge_host
from megasdc.ops.supervise.journal import Journal

NOW = 100 * DAY_S


def use(number: int, *hosts: str, hours: float = 1.0, failed: str | None = None, time: float = NOW) -> HostUsage:
    """An attempt."""
    return HostUsage(str(number), time, hours, hosts, failed, "it failed" if failed else "")


@pytest.mark.parametrize(
    ("failures", "hours", "others", "others_hours"), [(0, 5, 3, 90), (3, 2, 1, 400), (9, 300, 8, 900)]
)
def test_the_posterior_is_that_of_the_integral(failures: int, hours: int, others: int, others_hours: int) -> None:
    """Prior density times likelihood, integrated in float64 above twice the mean of the others."""
    uses = [use(number, "a", hours=hours / max(failures, 1), failed="a") for number in range(failures)]
    uses += [] if failures else [use(0, "a", hours=hours)]
    uses += [use(100 + number, "b", "c", hours=others_hours / 2 / others, failed="b") for number in range(others)]
    found = judge_host(uses, "a", NOW, 30)
    mean = (others + 0.5) / others_hours
    rates = np.linspace(0, 400 * mean + 60 * (failures + 1) / hours, 2_000_001)
    posterior = np.exp(-rates / mean) * rates**failures * np.exp(-rates * hours)
    expected = posterior[rates > 2 * mean].sum() / posterior.sum()
    assert math.isclose(found.probability, expected, rel_tol=1e-3)
    assert (found.failures, found.hours, found.fleet_per_hour) == (failures, pytest.approx(hours), pytest.approx(mean))


def test_few_hosts_that_fail_often_are_suspect_and_others_are_not() -> None:
    """Of a hundred hosts with equal rates none is; one that fails ten times as often is; old failures do not count."""
    generator = np.random.default_rng(7)
    names = [f"h{number}" for number in range(100)]
    uses = [
        use(number, *names, failed=names[generator.integers(100)] if generator.random() < 0.5 else None)
        for number in range(400)
    ]
    suspects = [name for name in names if judge_host(uses, name, NOW, 30).is_suspect]
    assert len(suspects) <= 5, "a tenth at most would be by chance"
    bad = [use(1000 + number, *names, failed="h3") for number in range(20)]
    assert judge_host(uses + bad, "h3", NOW, 30).is_suspect
    assert "times as likely to fail as the others with a probability of 100%" in str(
        judge_host(uses + bad, "h3", NOW, 30)
    )
    assert not judge_host(uses + bad, "h3", NOW + 31 * DAY_S, 30).is_suspect, "nothing is left of it"
    assert not judge_host([], "h3", NOW, 30).is_suspect


def test_several_supervisors_write_each_line_once(tmp_path: Path) -> None:
    """Also a supervisor that says the same again, and after one was killed within a line."""
    ledger = HostReliabilityLog(tmp_path / "folder" / "ledger.jsonl")
    ledger.add(use(0, "a"))
    with open(ledger.path, "a") as file:
        file.write('{"key": "torn')

    def write(first: int) -> None:
        for number in range(first, first + 20):
            HostReliabilityLog(ledger.path).add(use(number, "a", "b", failed="b"))

    threads = [threading.Thread(target=write, args=(first,)) for first in (1, 11, 21)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(one.key) for one in ledger.read()) == list(range(41))
    ledger.path.write_text("{}\n")
    with pytest.raises(StorageError, match="line 1 of the ledger"):
        ledger.read()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        HostReliabilityLog(tmp_path / "file" / "ledger.jsonl").add(use(1, "a"))


def suspected(tmp_path: Path, ledger: HostReliabilityLog, num_hosts: int) -> list[str]:
    """Hosts that a new run on so many of the hosts a, b, c does not use at first."""
    with Journal(tmp_path / str(num_hosts), print) as journal:
        journal.write(HOSTS, slots={"a": 1, "b": 1, "c": 1}, num_hosts=num_hosts)
        _suspect(journal, ledger, 30)
        return list(JournalHistory.of(journal.entries).replaced)


def test_a_supervisor_that_stands_still_in_the_ledger_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other was told is added once the file is free."""
    monkeypatch.setattr(host_reliability_log, "LOCK_S", 0.1)
    ledger = HostReliabilityLog(tmp_path / "ledger.jsonl")
    with open_lock_file(tmp_path / ".ledger.jsonl.lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert ledger.add(use(1, "a")) == 1
    assert ledger.add(use(2, "b")) == 0
    assert [one.key for one in ledger.read()] == ["1", "2"]


def test_suspects_wait_for_a_test_as_far_as_there_are_others(tmp_path: Path) -> None:
    """The worst first, and never so many that the run lacks hosts."""
    ledger = HostReliabilityLog(tmp_path / "ledger.jsonl")
    assert suspected(tmp_path / "empty", ledger, 1) == []
    others = [f"h{number}" for number in range(40)]
    for number in range(24):
        ledger.add(use(number, "a", "b", "c", *others, failed="ab"[number % 3 > 0], time=2e9))
    assert suspected(tmp_path, ledger, 1) == ["b", "a"]
    assert suspected(tmp_path, ledger, 2) == ["b"]
    assert suspected(tmp_path, ledger, 3) == []


def test_the_ledger_of_another_cluster_is_refused(tmp_path: Path) -> None:
    """It would say nothing of these hosts."""
    ledger = HostReliabilityLog(tmp_path / "ledger.jsonl")
    ledger.add(use(1, "x1", "x2"))
    with pytest.raises(LaunchError, match="knows none of the hosts a, b, c, but x1 and others"):
        suspected(tmp_path, ledger, 2)
