"""Supervised runs between test hosts end with the bits of a run without a fault, and nobody does anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import StartedCommand
from test_launch_train import folder, steps_done  # noqa: F401 - a fixture
from whole_runs import train_run

from megasdc.events import read_events
from megasdc.metrics.writer import read_metrics
from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.supervise.goodput import goodput_of
from megasdc.ops.supervise.history import Attempt, JournalHistory
from megasdc.ops.supervise.journal import Journal, read_journal
from megasdc.ops.supervise.launch_backend import overrides_of

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(600),
]
STEPS = 60
TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Cluster]:
    """Three hosts."""
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 3, env=env) as cluster:
        yield cluster


def write(folder: Path, name: str, **sections: Any) -> Path:  # noqa: F811
    """A configuration of a run in ``folder / name`` on two hosts, with snapshots in memory at the partner."""
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["training"] |= {"steps": STEPS, "eval_interval": 0}
    raw["megasdc"]["logging"] |= {"interval": 1, "run_dir": str(folder / name)}
    raw["megasdc"]["checkpoint"] = {"interval": 0, "memory": {"interval": 2, "partners": True, "linger_s": 120}}
    raw["megasdc"]["health"] = {"enabled": True}
    raw["megasdc"]["supervise"] = {"num_hosts": 2, "pause_s": 1.0, "spare_test_s": 0}
    raw["megasdc"] |= sections
    path = folder / f"{name}.json"
    path.write_text(json.dumps(raw))
    return path


def supervise(hosts: Cluster, config: Path, python: str | Path = sys.executable) -> subprocess.Popen[str]:
    """Start `megasdc supervise --hostfile ...` on the first host; what it says goes to a file."""
    argv = [str(python), "-m", "megasdc", "supervise", "--hostfile", str(hosts.hostfile()), "--config", str(config)]
    log = open(config.with_suffix(".log"), "ab")  # noqa: SIM115 - the process has it
    return hosts.popen("node1", argv, cwd=str(config.parent), stdout=log, stderr=log)


def wait_until(there: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    """Wait at most two minutes; the process may not end before."""
    end = time.monotonic() + 120
    while not there():
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.05)


def ended_as_without_faults(folder: Path, ranks: int = 2, **sections: Any) -> None:  # noqa: F811
    """Losses and the last checkpoint of ``run`` are those of a run that nothing happens to, bit for bit."""
    train_without_faults(folder, ranks, **sections)
    have_equal_checkpoints(folder)
    losses = []
    for name in ("run", "plain"):
        rows = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        losses.append({row["step"]: row["train/loss"] for row in rows if "train/loss" in row})
    assert losses[0] == losses[1] and len(losses[0]) == STEPS


def train_without_faults(folder: Path, ranks: int = 2, **sections: Any) -> None:  # noqa: F811
    """Train ``plain``, as ``run`` but on this host, which nobody launches or supervises, and without snapshots."""
    checkpoint = {"interval": sections.get("checkpoint", {}).get("interval", 0)}
    config = write(folder, "plain", **{**sections, "checkpoint": checkpoint})
    raw = json.loads(config.read_text())
    raw["megasdc"]["data"]["path"] = str(folder / "data")  # ranks are not in the run's folder
    config.write_text(json.dumps(raw))
    assert train_run(config, ranks) == [(0, None)] * ranks


def have_equal_checkpoints(folder: Path) -> None:  # noqa: F811
    """The last checkpoints of ``run`` and ``plain`` are equal, bit for bit."""
    ends = [str(folder / name / "checkpoints" / f"step_{STEPS:08d}") for name in ("run", "plain")]
    compared = StartedCommand(str(TOOLS / "compare_checkpoints.py"), ends).wait(120)
    assert compared.returncode == 0, compared.stdout + compared.stderr


def history_of(folder: Path) -> JournalHistory:  # noqa: F811
    """What the journal says."""
    with Journal(folder / "run" / "supervise", print) as journal:
        return JournalHistory.of(journal.entries)


def test_lost_hosts_are_replaced_and_the_run_ends(hosts: Cluster, folder: Path, programs: Path) -> None:  # noqa: F811
    """A host is powered off, the spare takes its place; that is powered off, too, and the first one is back by then.

    All of the time is in one part or another: twice in detecting, and more than the injected delays in steps. With
    fresh processes ``test_user_program.py`` loses a host.
    """
    once = {"num_hosts": 2, "pause_s": 1.0, "test_rounds": 1, "retest_s": 2.0, "spare_test_s": 0}
    slow = [{"kind": "normal", "mean_s": 0.5, "std_s": 0.0, "steps": [25, STEPS - 5]}]
    config = write(folder, "run", supervise=once, delay=slow)
    began, process, log = time.time(), supervise(hosts, config, programs / "python"), config.with_suffix(".log")
    wait_until(lambda: len(steps_done(folder)) > 15, process, log)
    hosts.power_off("node2")
    wait_until(lambda: "attempt 2 on node1, node3" in log.read_text(), process, log)
    before = max(steps_done(folder))
    hosts.boot("node2")
    wait_until(lambda: "node2 was tested: healthy; it is a spare again" in log.read_text(), process, log)
    wait_until(lambda: max(steps_done(folder), default=0) > before, process, log)  # or there is nothing to detect
    hosts.power_off("node3")
    assert process.wait(timeout=300) == 0, log.read_text()
    goodput = goodput_of(folder / "run", time.time())
    assert goodput is not None and goodput.wall_s == pytest.approx(time.time() - began, abs=15)
    assert [one.parts["detecting"] > 0 for one in goodput.attempts] == [True, True, False]
    assert all(one.parts["starting"] > one.parts["loading"] > 0 for one in goodput.attempts)
    assert sum(goodput.parts[part] for part in ("productive", "recomputed", "stalled")) > 2 * 30 * 0.5
    history = history_of(folder)
    assert list(history.replaced) == ["node3"] and history.given_back == {"node2": 1}
    assert [(one.diagnosis.kind, one.used) for one in history.failures] == [
        ("host_lost", ("node1", "node2")),
        ("host_lost", ("node1", "node3")),
        ("done", ("node1", "node2")),
    ]
    ended_as_without_faults(folder)


@pytest.mark.full
def test_without_a_spare_a_run_goes_on_with_fewer_hosts_and_grows_again(hosts: Cluster, folder: Path) -> None:  # noqa: F811
    """One of three hosts is powered off; two go on from memory, and once it is back and has passed its test, all three.

    The samples of each step are those of three hosts, and the losses too, but for rounding. Of 16 samples two take 8
    each, three 5 or 6.
    """
    sections = {
        "supervise": {"min_hosts": 2, "pause_s": 1.0, "test_rounds": 1, "retest_s": 2.0, "spare_test_s": 0},
        "delay": [{"kind": "normal", "mean_s": 0.2, "std_s": 0.0, "steps": [15, STEPS]}],
    }
    paths = [write(folder, name, **sections) for name in ("run", "plain")]
    for path in paths:
        raw = json.loads(path.read_text())
        raw |= {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 6}
        path.write_text(json.dumps(raw))
    process, log = supervise(hosts, paths[0]), paths[0].with_suffix(".log")
    wait_until(lambda: len(steps_done(folder)) > 15, process, log)
    hosts.power_off("node2")
    wait_until(lambda: "attempt 2 on node1, node3, 2 of 3 hosts" in log.read_text(), process, log)
    hosts.boot("node2")
    assert process.wait(timeout=300) == 0, log.read_text()
    failures = history_of(folder).failures
    assert [(one.diagnosis.kind, len(one.used)) for one in failures] == [("host_lost", 3), ("grown", 2), ("done", 3)]
    changed = list(read_events(folder / "run", kind="resume", name="other_layout"))
    assert [one.fields["layout"] for one in changed] == ["TP1 x PP1 x DP2", "TP1 x PP1 x DP3"]
    from_memory = next(read_events(folder / "run", kind="resume", name="memory"))
    assert from_memory.fields["origin"].startswith("memory, ranks 1"), "its host was lost"
    fresh = supervise(hosts, paths[1])
    assert fresh.wait(timeout=200) == 0, (folder / "plain.log").read_text()
    rows = [
        {row["step"]: row for row in read_metrics(folder / name) if "train/loss" in row} for name in ("run", "plain")
    ]
    assert [len(one) for one in rows] == [STEPS, STEPS]
    for step, row in rows[0].items():
        assert row["data/stream_end"] == rows[1][step]["data/stream_end"]
        assert row["train/loss"] == pytest.approx(rows[1][step]["train/loss"], rel=1e-5)


@pytest.mark.full
def test_the_supervisor_is_killed_and_goes_on(hosts: Cluster, folder: Path) -> None:  # noqa: F811
    """While ranks train, then a rank is killed while nobody looks: the same command takes over, and starts again."""
    config = write(folder, "run")
    process, log = supervise(hosts, config), config.with_suffix(".log")
    wait_until(lambda: len(steps_done(folder)) > 15, process, log)
    words = {one: one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])}
    for one in [one for one, said in words.items() if "supervise" in said and str(config) in said]:
        one.kill()
    process.wait()
    rank = next(one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get("RANK") == "1")
    rank.kill()
    again = supervise(hosts, config)
    assert again.wait(timeout=300) == 0, log.read_text()
    history = history_of(folder)
    assert [one.diagnosis.kind for one in history.failures] == ["rank_lost", "done"] and not history.replaced
    assert [one.kind for one in read_journal(folder / "run" / "supervise")].count("taken_over") == 1
    ended_as_without_faults(folder)


@pytest.mark.full
def test_a_host_that_computes_wrong_results_is_replaced(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    """An audit names it, the run goes on from a checkpoint that was verified before, and the host never comes back."""
    sections = {
        "determinism": {"enabled": True},
        "audit": {"enabled": True, "interval": 10, "verify_checkpoints": True},
        "checkpoint": {"interval": 10, "memory": {"interval": 2, "partners": True, "linger_s": 120}},
        "supervise": {"num_hosts": 3, "pause_s": 1.0, "test_rounds": 1, "spare_test_s": 3600},
    }
    harm = {"host": "node3", "submodule": "*.linear_fc2", "kind": "scale", "factor": 1.5, "elements": 3}
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 4, env=env) as hosts:
        config = write(folder, "run", **sections, faults=[{**harm, "same_elements": True, "steps": [25, None]}])
        assert supervise(hosts, config).wait(timeout=300) == 0, config.with_suffix(".log").read_text()
        history = history_of(folder)
        assert [(one.diagnosis.kind, one.used) for one in history.failures] == [
            ("corrupt_again", ("node1", "node2", "node3")),
            ("done", ("node1", "node2", "node4")),
        ]
        assert {host: (one.kind, one.test) for host, one in history.replaced.items()} == {
            "node3": ("corrupt_again", None)
        }
        ended_as_without_faults(folder, 3, **sections)


@pytest.mark.full
def test_a_run_goes_on_without_a_wrong_host_until_a_spare_takes_its_place(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    """Two replicas go on in the same processes, then all three, and losses are about those of a run without a fault."""
    sections = {
        "determinism": {"enabled": True},
        "audit": {"enabled": True, "interval": 10, "verify_checkpoints": True},
        "sdc": {"policy": {"persistent": "isolate", "intermittent": "isolate"}},
        "checkpoint": {
            "interval": 10,
            "memory": {"interval": 1, "partners": True, "linger_s": 120},
            "other_layout": "convert",
        },
        "supervise": {"num_hosts": 3, "pause_s": 1.0, "test_rounds": 1, "retest_s": 2.0},
        "delay": [{"kind": "normal", "mean_s": 0.3, "std_s": 0.0, "steps": [20, STEPS]}],
    }
    harm = {"host": "node3", "submodule": "*.linear_fc2", "kind": "scale", "factor": 1.5, "elements": 3}
    faults = [{**harm, "same_elements": True, "steps": [25, None]}]
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 4, env=env) as hosts:
        hosts.power_off("node4")
        for name, more in (("run", {"faults": faults}), ("plain", {})):
            config = write(folder, name, **sections, **more)
            raw = json.loads(config.read_text())
            raw |= {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
            config.write_text(json.dumps(raw))
            process, log = supervise(hosts, config), config.with_suffix(".log")
            if name == "run":
                wait_until(lambda: "the run goes on with 2 replicas" in log.read_text(), process, log)  # noqa: B023
                done = len(steps_done(folder))
                wait_until(lambda: len(steps_done(folder)) > done + 3, process, log)  # noqa: B023
                hosts.boot("node4")
            assert process.wait(timeout=300) == 0, log.read_text()
    history = history_of(folder)
    assert [(one.diagnosis.kind, one.used) for one in history.failures] == [
        ("corrupt_again", ("node1", "node2", "node3")),
        ("done", ("node1", "node2", "node4")),
    ]
    assert list(history.replaced) == ["node3"]
    (begun,) = read_events(folder / "run", kind="isolation", name="begun")
    assert (begun.step, begun.fields["wrong"], begun.fields["replicas"]) == (30, [2], 2)
    layouts = [one.fields["layout"] for one in read_events(folder / "run", kind="resume", name="other_layout")]
    assert layouts == ["TP1 x PP1 x DP2", "TP1 x PP1 x DP3"]
    rows = [
        {row["step"]: row for row in read_metrics(folder / name) if "train/loss" in row} for name in ("run", "plain")
    ]
    assert [len(one) for one in rows] == [STEPS, STEPS]
    for step, row in rows[0].items():
        # Not closer: an audited step has fewer samples of its own with three replicas than with two.
        assert row["train/loss"] == pytest.approx(rows[1][step]["train/loss"], rel=0.05)


POISON = """
from megasdc.data.loader import MicroBatchLoader
from megasdc.optim.hooks import GradientHook

read, last = MicroBatchLoader.read, []


def noting(loader, positions):
    last[:] = positions
    return read(loader, positions)


MicroBatchLoader.read = noting


class Poison(GradientHook):
    def apply(self, part):
        if any(100 <= position < 130 for position in last):
            part.gradient.fill_(float("nan"))
"""
"""A hook that makes gradients NaN after some samples, on whatever host and however often."""


@pytest.mark.full
def test_samples_that_give_nan_are_skipped(hosts: Cluster, folder: Path) -> None:  # noqa: F811
    """The run goes back before them, in memory, and ends with the bits of one that never trained on them."""
    (folder / "poison.py").write_text(POISON)
    raw = json.loads((folder / "config.json").read_text())["megasdc"]
    hook = {"hook": "file", "path": str(folder / "poison.py"), "name": "Poison", "parameters": ["*"]}
    sections = {
        "optimizer_hooks": [hook],
        "protect": "off",
        "training": {**raw["training"], "steps": STEPS, "eval_interval": 0, "max_skipped_steps": 2},
        "supervise": {"num_hosts": 2, "pause_s": 1.0, "spare_test_s": 0, "rewind_steps": 2},
    }
    config = write(folder, "run", **sections)
    assert supervise(hosts, config).wait(timeout=300) == 0, config.with_suffix(".log").read_text()
    history = history_of(folder)
    kinds = [one.diagnosis.kind for one in history.failures]
    assert kinds[-1] == "done" and set(kinds[:-1]) == {"non_finite"} and not history.replaced
    assert 1 <= history.went_back == len(history.skip) <= 3, "two skipped steps end an attempt, and more are poisoned"
    attempts = [one for one in read_journal(folder / "run" / "supervise") if one.kind == "planned"]
    (override,) = overrides_of(Attempt(1, {}, "", 0.0, skip=history.skip), [])
    assert attempts[-1].fields["skip"] == [list(one) for one in history.skip]
    skip = json.loads(override.partition("=")[2])
    assert skip[0][0] < 100 and skip[-1][1] < 130 + 16
    ended_as_without_faults(folder, **sections, data={**raw["data"], "skip": skip})
