"""A run that is stuck on several hosts without a shared run folder: the front names the rank, the host or the link."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from slow_link import slow_link
from test_launch_train import folder  # noqa: F401 - a fixture

from megasdc.events import Event, read_events
from megasdc.ops.cluster import Cluster, unavailable_reason
from megasdc.ops.health.shared_folder_heartbeat import SIGN, node_name
from megasdc.ops.launch.command import NODE_MODULE
from megasdc.ops.run_folder.summary import summarize_run
from megasdc.ops.supervise import attempt_process as front
from megasdc.ops.supervise.journal import FOLDER, read_journal
from tools.clock import clock_library

REASON = unavailable_reason()
pytestmark = [
    pytest.mark.end_to_end,
    pytest.mark.cluster,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),
]


def test_the_front_names_a_stuck_rank_of_another_host(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    programs: Path,
) -> None:
    """Neither host sees the other's files; all ranks end with 75, and the front writes one incident."""
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["parallel"] |= {"pipeline": 2, "timeout_s": 300.0}
    raw["megasdc"]["health"] = {"enabled": True, "hang_floor_s": 3.0, "slow_floor_s": 8.0}
    raw["megasdc"]["checkpoint"]["storage"] = "node_local"
    raw["megasdc"]["process_faults"] = [{"kind": "hang", "rank": 1, "phase": "forward", "steps": [20, 20]}]
    (folder / "config.json").write_text(json.dumps(raw))
    run = folder / "run"
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 2, env=env, private=[run]) as hosts:
        argv = [str(programs / "python"), "-m", "megasdc", "launch", "--hostfile", str(hosts.hostfile())]
        done = hosts.run("node1", [*argv, "--config", str(folder / "config.json")], cwd=str(folder), timeout_s=200)
        front = hosts.private_dir("node1", run) / "health"
        other = hosts.private_dir("node2", run) / "health"
    assert done.returncode == 75, done.stderr
    assert "health: nothing moved for" in done.stderr and "rank 1 on node2" in done.stderr
    (path,) = (front / "incidents").glob("hang_*.json")
    incident = json.loads(path.read_text())
    assert (incident["kind"], incident["ranks"], incident["hosts"]) == ("hang/behind", [1], ["node2"])
    assert [state["host"] for state in incident["states"]] == ["node1", "node2"], "both hosts were heard"
    assert "waits for rank 1 in receive gradient" in incident["waits"]["0"]
    assert not (other / "incidents").exists() and not list(front.glob("front_*.json"))
    last = json.loads((other / "node_00001.jsonl").read_text().splitlines()[-1])
    assert "problems" not in last and not (other / "node_00001.now").exists()


def test_a_host_whose_agent_and_rank_are_stopped_holds_nobody_up(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    """The others name it once it is silent; what is stopped there is killed from outside, and nothing is left of it."""
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["parallel"] |= {"timeout_s": 300.0}
    raw["megasdc"]["health"] = {"enabled": True, "hang_floor_s": 8.0, "slow_floor_s": 8.0}
    raw["megasdc"]["training"]["steps"] = 100_000
    raw["megasdc"]["checkpoint"] = {"interval": 0, "memory": {"interval": 0}}
    (folder / "config.json").write_text(json.dumps(raw))
    run, own = folder / "run", []
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 2, env=env) as hosts:
        argv = [sys.executable, "-m", "megasdc", "launch", "--hostfile", str(hosts.hostfile())]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        launch = hosts.popen("node1", [*argv, "--config", str(folder / "config.json")], cwd=str(folder), **pipes)
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("train/loss") >= 10, launch)
        for one in psutil.process_iter(["cmdline", "environ"]):
            words, rank = one.info["cmdline"] or [], (one.info["environ"] or {}).get("RANK")
            is_agent = "megasdc.ops.health.agent" in words and '"node": 1,' in words[-1] and str(run) in words[-1]
            if is_agent or (rank == "1" and str(folder / "config.json") in words):
                own.append(one)
        for one in own:
            one.suspend()
        said, _ = launch.communicate(timeout=200)
        _, alive = psutil.wait_procs(own, timeout=30)
    assert len(own) >= 2 and not alive, said
    assert "stopped by a signal: node2: process" in said, said
    assert re.search(r"nothing moved for \d+ s: .*node2", said), said  # of the front, or of rank 0's agent before it
    assert "rank 1 on node2" in said and launch.returncode in (75, 78), said


@pytest.mark.full  # ``test_clocks.py`` has the rule in every run
def test_dates_of_hosts_that_differ_and_jump_blame_nobody(tmp_path: Path, folder: Path) -> None:  # noqa: F811
    """Rank 0's host is two hours ahead, the other's date jumps in mid-run, and a rank there is killed: it is named."""
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["parallel"] |= {"timeout_s": 60.0}
    raw["megasdc"]["health"] = {"enabled": True, "hang_floor_s": 8.0, "slow_floor_s": 8.0}
    raw["megasdc"]["training"]["steps"] = 100_000
    raw["megasdc"]["checkpoint"] = {"interval": 0, "memory": {"interval": 0}}
    (folder / "config.json").write_text(json.dumps(raw))
    run, ranks = folder / "run", []
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "LD_PRELOAD": str(clock_library(tmp_path))}
    with Cluster(tmp_path / "cluster", 2, env=env) as hosts:
        hosts.run("node1", ["sh", "-ec", "echo 7200 >/run/clock_off"])
        argv = [sys.executable, "-m", "megasdc", "launch", "--hostfile", str(hosts.hostfile())]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        launch = hosts.popen("node1", [*argv, "--config", str(folder / "config.json")], cwd=str(folder), **pipes)
        wait_until(lambda: any(read_events(run, kind="clock", broken=[])), launch)
        hosts.run("node2", ["sh", "-ec", "echo 259200 >/run/clock_off"])
        wait_until(lambda: any(one.fields["ahead_s"] > 0 for one in differing_dates(run, "node2")), launch)
        for one in psutil.process_iter(["cmdline", "environ"]):
            words, rank = one.info["cmdline"] or [], (one.info["environ"] or {}).get("RANK")
            if rank == "1" and str(folder / "config.json") in words:
                ranks.append(one)
        for one in ranks:
            one.kill()
        said, _ = launch.communicate(timeout=120)
    assert ranks and launch.returncode not in (0, 143), said
    found = [round(one.fields["ahead_s"]) for one in differing_dates(run, "node2")]
    assert (found[0], found[-1]) == (-7200, 259200 - 7200), found
    assert all(one.fields["uncertainty_s"] < 5 for one in differing_dates(run, "node2"))
    assert not differing_dates(run, "node1"), "the front is on it"
    assert "clocks: the date of node2 is 7,200." in said and "clocks: the date of node2 was set by +2" in said, said
    failure = summarize_run(run).failure
    assert failure is not None and (failure.rank, failure.host) == (1, "node2"), said
    assert any("the date of node2 is 252,00" in one for one in summarize_run(run).clocks)


def differing_dates(run: Path, host: str) -> list[Event]:
    """What a host has told of its date, where that differs from the front's."""
    return [one for one in read_events(run, kind="clock", name="differs", broken=[]) if one.host == host]


CUTS: dict[str, tuple[Sequence[tuple[str, str]], str, list[str]]] = {
    "off": ((), "", ["node2"]),
    "unplugged": ((), "hang/gone", ["node2"]),
    "sends nothing": ((("node2", "node1"), ("node2", "node3")), "hang/gone", ["node2"]),
    "two hosts, both ways": ((("node2", "node3"), ("node3", "node2")), "hang/link", ["node2", "node3"]),
    "two hosts, one way": ((("node3", "node2"),), "hang/link", ["node2", "node3"]),
}
"""Directions in which every frame is lost, and which kind and hosts must be told; no kind: it ends before it hangs."""
FLOOR_S = 15.0


@pytest.mark.full
@pytest.mark.parametrize("pipeline", [1, 3])
@pytest.mark.parametrize("cut", CUTS)
def test_a_lost_host_or_link_is_named_and_the_run_ends(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    cut: str,
    pipeline: int,
) -> None:
    """Three replicas or three stages, a host each: the right host or pair, no rank, and all ranks end ten seconds later
    than their phases may last, also on the host that hears nothing.
    """
    lost, kind, named = CUTS[cut]
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["model"]["num_layers"] = 3
    raw["megasdc"]["parallel"] |= {"pipeline": pipeline, "timeout_s": 600.0}
    raw["megasdc"]["health"] = {"hang_floor_s": FLOOR_S, "slow_floor_s": FLOOR_S, "ping_interval": 0}
    raw["megasdc"]["training"]["steps"] = 100_000
    raw["megasdc"]["checkpoint"] = {"interval": 0}
    (folder / "config.json").write_text(json.dumps(raw))
    run = folder / "run"
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 3, env=env, private=[run]) as hosts, contextlib.ExitStack() as cuts:
        metrics = hosts.private_dir("node1", run) / "metrics.jsonl"
        argv = [sys.executable, "-m", "megasdc", "launch", "--hostfile", str(hosts.hostfile())]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        launch = hosts.popen("node1", [*argv, "--config", str(folder / "config.json")], cwd=str(folder), **pipes)
        wait_until(lambda: metrics.exists() and metrics.read_text().count("train/loss") >= 40, launch)
        if cut == "off":
            hosts.power_off("node2")
        elif cut == "unplugged":
            hosts.unplug("node2")
        for way in lost:
            cuts.enter_context(slow_link(hosts, *way, loss=1.0))
        began = time.monotonic()
        alive = [name for name in hosts.names if (cut, name) != ("off", "node2")]
        wait_until(lambda: all(has_ended(hosts, run, name) for name in alive), None)
        seconds = time.monotonic() - began
        said, _ = launch.communicate(timeout=120)
        paths = list((hosts.private_dir("node1", run) / "health" / "incidents").glob("hang_*.json"))
    incidents = [json.loads(path.read_text()) for path in paths]
    told = [one["message"] for one in incidents]
    print(f"{cut}, pipeline {pipeline}: {seconds:.1f} s, exit code {launch.returncode}, {told}")
    if kind:
        assert [(one["kind"], one["hosts"], one["ranks"]) for one in incidents] == [(kind, named, [])], told
    else:
        assert not told and f"on {named[0]}: no done record" in said, said
    assert seconds <= FLOOR_S + 10, said
    assert launch.returncode == (75 if kind == "hang/link" else 78), said


@pytest.mark.full
@pytest.mark.parametrize("stopped", ["front", "launcher", "agent"])
def test_a_hang_is_told_in_time_whatever_else_is_stopped(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    stopped: str,
) -> None:
    """A rank is stopped (SIGSTOP), and with it the front, the launchers, or its host's agent: the verdict comes ten
    seconds later than phases may last, and the attempt ends, since what is stopped is woken or killed from outside.
    """
    raw = json.loads((folder / "config.json").read_text())
    raw["megasdc"]["parallel"] |= {"timeout_s": 600.0}
    raw["megasdc"]["health"] = {"hang_floor_s": FLOOR_S, "slow_floor_s": FLOOR_S, "ping_interval": 0}
    raw["megasdc"]["training"]["steps"] = 100_000
    raw["megasdc"]["checkpoint"] = {"interval": 0, "memory": {"interval": 0}}
    raw["megasdc"]["supervise"] = {"num_hosts": 2, "pause_s": 1.0, "spare_test_s": 0}
    (folder / "config.json").write_text(json.dumps(raw))
    run, log = folder / "run", folder / "supervise.log"
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    with Cluster(tmp_path / "cluster", 2, env=env) as hosts, open(log, "ab") as said:
        argv = [sys.executable, "-m", "megasdc", "supervise", "--hostfile", str(hosts.hostfile())]
        config = ["--config", str(folder / "config.json")]
        launch = hosts.popen("node1", [*argv, *config], cwd=str(folder), stdout=said, stderr=said)
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("train/loss") >= 40, launch)
        wait_until(lambda: all(signs_of(run, node) > 1 for node in range(2)), launch)  # so that all know of all
        journal = read_journal(run / FOLDER)
        (launch_id,) = (one.fields["launch_id"] for one in journal if one.kind == "planned")
        found = [one for one in psutil.process_iter(["cmdline", "environ"]) if plays(one, stopped, folder, launch_id)]
        for one in found:
            one.suspend()
        began = time.monotonic()
        wait_until(lambda: any((run / "health" / "incidents").glob("hang_*.json")), launch)
        verdict_s = time.monotonic() - began
        wait_until(lambda: any(one.kind == "ended" for one in read_journal(run / FOLDER)), launch)
        ended_s = time.monotonic() - began
        launch.kill()
        (path, *_) = (run / "health" / "incidents").glob("hang_*.json")
        incident = json.loads(path.read_text())
        (ended, *_) = (one.fields for one in read_journal(run / FOLDER) if one.kind == "ended")
    told = f"{incident['kind']}: {incident['message']}"
    print(f"{stopped}, {len(found)} processes: verdict after {verdict_s:.1f} s, end after {ended_s:.1f} s: {told}")
    assert len(found) >= (3 if stopped == "launcher" else 2)
    assert "node2" in incident["hosts"] or incident["ranks"] == [1], told
    assert verdict_s <= FLOOR_S + 10 and ended_s <= FLOOR_S + 10 + END_S, log.read_text()
    assert "node2" in ended["diagnosis"]["hosts"], ended


END_S = 30.0
"""Most seconds from a verdict to the end of its attempt: ranks leave or are killed, what is stopped is woken."""


def plays(process: psutil.Process, stopped: str, folder: Path, launch_id: str) -> bool:  # noqa: F811
    """Whether a process is rank 1, or what else a drill stops."""
    words, rank = process.info["cmdline"] or [], (process.info["environ"] or {}).get("RANK")
    if rank == "1" and str(folder / "config.json") in words:
        return True
    if stopped == "front":
        return front.MODULE in words and launch_id in words[-1]
    if stopped == "launcher":  # also pdsh and ssh, whose command lines have the same words
        return launch_id in words and any(one in words for one in ("megasdc.ops.launch.runner", NODE_MODULE))
    return "megasdc.ops.health.agent" in words and '"node": 1,' in words[-1] and str(folder) in words[-1]


def signs_of(run: Path, node: int) -> int:
    """How many signs of life the agent of a host has given; each some seconds after the one before."""
    path = run / "health" / f"{node_name(node)}.{SIGN}"
    return int(json.loads(path.read_text())["number"]) if path.exists() else 0


def wait_until(done: Callable[[], bool], launch: subprocess.Popen[Any] | None) -> None:
    """Until it is true, at most two minutes, while the launch goes on."""
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end and (launch is None or launch.poll() is None), launch and launch.communicate()
        time.sleep(0.1)


def has_ended(hosts: Cluster, run: Path, name: str) -> bool:
    """Whether the agent of a host has written that its ranks have ended."""
    lines = hosts.private_dir(name, run) / "health" / f"node_{hosts.names.index(name):05d}.jsonl"
    return '"note": "ends' in lines.read_text()
