"""What one host lacks and others have is its own: it is replaced, the run goes on, and nobody does anything."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_launch_train import folder, steps_done  # noqa: F401 - a fixture
from test_supervise import history_of, supervise, wait_until, write

from megasdc.events import read_events
from megasdc.ops.cluster import Cluster, unavailable_reason

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(400),
]
PACKAGE = Path(__file__).parents[2] / "megasdc"


def cluster(tmp_path: Path, num_hosts: int, *private: Path) -> Cluster:
    """Test hosts."""
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    return Cluster(tmp_path / "cluster", num_hosts, env=env, private=private)


def shorten(config: Path, steps: int) -> Path:
    """A run of so many steps."""
    raw = json.loads(config.read_text())
    raw["megasdc"]["training"]["steps"] = steps
    config.write_text(json.dumps(raw))
    return config


def test_a_host_with_damaged_data_and_a_spare_without_any_are_not_used(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    programs: Path,
) -> None:
    """A byte of one copy is another one, the first spare has no data; the second spare takes the host's place."""
    data = folder / "data"
    shutil.move(data, folder / "whole")
    with cluster(tmp_path, 4, data) as hosts:
        for name in ("node1", "node2", "node4"):
            shutil.copytree(folder / "whole", hosts.private_dir(name, data), dirs_exist_ok=True)
        path = hosts.private_dir("node2", data) / "train.bin"
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        config = shorten(write(folder, "run"), 12)
        assert supervise(hosts, config, programs / "python").wait(timeout=300) == 0, config.with_suffix(
            ".log"
        ).read_text()
    history = history_of(folder)
    assert [(one.diagnosis.kind, one.used, one.exit_code) for one in history.failures] == [
        ("unfit", ("node1", "node2"), 71),
        ("done", ("node1", "node4"), 0),
    ]
    assert "train.bin" in history.failures[0].diagnosis.text and "node2" in history.failures[0].diagnosis.text
    assert set(history.replaced) == {"node2", "node3"} and "no prepared data" in history.replaced["node3"].text


def read_only(hosts: Cluster, run: Path, host: str) -> None:
    """The run's folder cannot be written there."""
    run.mkdir(exist_ok=True)
    for options in (["--bind"], ["-o", "remount,ro,bind"]):
        done = hosts.run(host, ["mount", *options, str(run), str(run)])
        assert done.returncode == 0, done.stderr


def full_checkpoints(hosts: Cluster, run: Path, host: str) -> None:
    """Its own folder of checkpoints has no room."""
    done = hosts.run(host, ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(run.parent / "own")])
    assert done.returncode == 0, done.stderr


def other_version(hosts: Cluster, run: Path, host: str) -> None:
    """A file of the package is another one."""
    changed = run.parent / "origin.py"
    changed.write_text((PACKAGE / "origin.py").read_text() + "# changed\n")
    assert hosts.run(host, ["mount", "--bind", str(changed), str(PACKAGE / "origin.py")]).returncode == 0


def without_name(hosts: Cluster, run: Path, host: str) -> None:
    """Its own name leads to the loopback there."""
    table = hosts.folder / "etc" / host / "hosts"
    table.write_text(f"127.0.0.1 localhost {host}\n" + table.read_text())


LOCAL = {"interval": 5, "storage": "node_local"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("strike", "sections", "code"),
    [
        (read_only, {}, 77),
        (full_checkpoints, {"checkpoint": LOCAL}, 77),
        (other_version, {}, 78),
        (without_name, {}, 78),
    ],
)
@pytest.mark.parametrize("spares", [2, 0])
def test_an_unfit_host_is_replaced_or_named(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    strike: Callable[[Cluster, Path, str], None],
    sections: dict[str, Any],
    code: int,
    spares: int,
) -> None:
    """The second host and the first spare are so, the last one takes its place; else the run ends and names it."""
    sections = {key: {**value, "folder": str(folder / "own")} for key, value in sections.items()}
    with cluster(tmp_path, 2 + spares, folder / "own") as hosts:
        config = shorten(write(folder, "run", **sections), 12)
        for host in ("node2", "node3")[: 1 + spares // 2]:
            strike(hosts, folder / "run", host)
        exit_code = supervise(hosts, config).wait(timeout=300)
    said, history = config.with_suffix(".log").read_text(), history_of(folder)
    first = history.failures[0]
    assert (first.diagnosis.kind, first.diagnosis.hosts, first.exit_code) == ("unfit", ("node2",), code), said
    if spares:
        assert exit_code == 0 and history.failures[-1].used == ("node1", "node4"), said
        assert len(history.failures) == 2 and set(history.replaced) == {"node2", "node3"}, said
    else:
        assert exit_code == code and len(history.failures) == 1 and "finished" in said, said


@pytest.mark.full
@pytest.mark.parametrize("spares", [2, 1])
def test_shared_memory_has_no_room_at_a_restart(tmp_path: Path, folder: Path, spares: int) -> None:  # noqa: F811
    """A spare that has taken a lost host's place has none: another one takes it, or the run goes on and says so."""
    slow = [{"kind": "normal", "mean_s": 0.3, "std_s": 0.0, "steps": [10, 30]}]
    once = {"num_hosts": 2, "pause_s": 1.0, "spare_test_s": 0, "returns": 0}
    with cluster(tmp_path, 2 + spares) as hosts:
        done = hosts.run("node3", ["mount", "-o", "remount,size=1500k", "/dev/shm"])
        assert done.returncode == 0, done.stderr
        config = shorten(write(folder, "run", delay=slow, supervise=once), 30)
        process, log = supervise(hosts, config), config.with_suffix(".log")
        wait_until(lambda: len(steps_done(folder)) > 15, process, log)
        hosts.power_off("node2")
        assert process.wait(timeout=300) == 0, log.read_text()
    failures = history_of(folder).failures
    assert [(one.diagnosis.kind, one.used) for one in failures] == [
        ("host_lost", ("node1", "node2")),
        ("no_room", ("node1", "node3")),
        ("done", ("node1", "node4" if spares == 2 else "node3")),
    ], log.read_text()
    assert failures[1].diagnosis.hosts == ("node3",) and failures[1].exit_code == 70
    told = list(read_events(folder / "run", kind="warning", name="memory_without_room"))
    assert len(told) == ("goes on without snapshots" in log.read_text()) == (spares == 1)
    assert all(one.diagnosis.step >= 15 for one in failures), "nothing begins anew"
