"""Does a stress test with real processes find what is wrong, name the host, and survive what happens to it?"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import StartedCommand, run_distributed

from megasdc.config.faults import FaultSpec
from megasdc.faults.injector import Injector
from megasdc.ops.stress.collectives import Group, check_group
from megasdc.ops.stress.drill import ALONE, read_drill
from megasdc.ops.stress.host_verdict import judge_stress
from megasdc.ops.stress.result import stress_outcome
from megasdc.ops.stress.run import StressPlan, run_rounds, stress_hosts
from megasdc.ops.stress.state import ALONE as OWN

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]


def _check(faults: dict[int, dict[str, Any]], absent: int | None = None) -> dict[str, Any]:
    """One round of collectives as a rank of a group of all ranks, but for one that never comes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store is not None else 0]
    dist.broadcast_object_list(port, 0)
    said: dict[str, Any] = {}
    started = time.monotonic()
    if rank != absent:
        harm = Injector([FaultSpec(**faults[rank])], ALONE, 0) if rank in faults else None
        try:
            store = store or dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)
            group = Group(store, rank, ranks, torch.device("cpu"), 4.0 if absent else 60.0)
            said = check_group(group, 1, harm)
            group.close()
        except RuntimeError as error:
            said = {"failed": str(error), "after_s": time.monotonic() - started}
    dist.barrier()
    return said


def test_collectives_give_what_is_known() -> None:
    """On three gloo ranks, all operations, types and sizes: nothing is wrong; all are compared."""
    assert [(said["compared"], said["wrong"]) for said in run_distributed(_check, 3, {})] == [(75, 0)] * 3


def test_a_wrong_contribution_reaches_all_and_a_wrong_result_one() -> None:
    """A flipped bit in what rank 1 gives to one sum is seen by all; one in what rank 2 got, by rank 2 alone."""
    given = {
        "phase": "collective",
        "submodule": "all_reduce.fp32.1000",
        "bits": [30],
        "pattern": "indices",
        "indices": [5],
    }
    got = {**given, "phase": "reduced_grad", "submodule": "broadcast.bf16.65539", "bits": [3]}
    said = run_distributed(_check, 3, {1: given, 2: got})
    assert [one["wrong"] for one in said] == [1, 1, 2]
    first = said[0]["findings"][0]
    assert (first["what"], first["elements"], first["of"], first["first"]) == ("all_reduce.fp32.1000", 1, 1000, 5)
    last = said[2]["findings"][1]
    assert (last["what"], last["elements"], last["bits"]) == ("broadcast.bf16.65539", 1, {"3": 1})


def test_a_rank_that_never_comes_is_waited_for_only_so_long() -> None:
    """The others give up after the group's time and say so; they can go on with other groups."""
    said = run_distributed(_check, 2, {}, absent=1)
    assert said[0]["failed"] and said[0]["after_s"] < 60


def _profile(folder: Path, **fault: Any) -> str:
    file = folder / "profile.json"
    profile = {"description": "x", "source": "x", "published": {}, "assumed": [], "faults": [fault]}
    file.write_text(json.dumps(profile))
    return str(file)


def _agents() -> list[psutil.Process]:
    """The processes of the hosts, in their order."""
    children = sorted(psutil.Process().children(), key=lambda process: process.create_time())
    return [process for process in children if "megasdc.ops.stress.host" in " ".join(process.cmdline())]


def test_of_three_hosts_the_wrong_one_is_named_and_a_dead_one(tmp_path: Path) -> None:
    """Processes of three hosts on this machine: b gives wrong numbers, c dies in the second round, a is healthy.

    b is named by its own group, and without that by the pairs of the first round.
    """
    names = ["a", "b", "c"]
    fault = {"phase": "collective", "submodule": "*.fp32.65539", "bits": [30]}
    drill = read_drill(f"{_profile(tmp_path, **fault)}@b", names)
    plan = StressPlan(dict.fromkeys(names, 1), rounds=2, only=("collectives",), timeout_s=60, drill=drill)

    def after_a_round(number: int, total: int | None) -> None:
        if number == 1:
            _agents()[2].children()[1].kill()

    tested, drilled, interrupted = run_rounds(plan, after_a_round)
    result = stress_outcome(tested, drill, drilled, interrupted)
    by_host = {verdict.host: verdict for verdict in result.verdicts}
    assert {name: verdict.status for name, verdict in by_host.items()} == {
        "a": "healthy",
        "b": "unhealthy",
        "c": "not tested",
    }
    assert result.exit_code == 73
    assert by_host["b"].reasons[0].evidence == "alone" and by_host["b"].rounds == 2
    assert by_host["c"].rounds == 1 and "code -9" in by_host["c"].reasons[0].text
    report = result.contents["drill"]
    assert report["found"] and report["faults"][0]["changed"]
    states = {state.host: state for state in tested}
    assert {partner: bool(count.wrong) for partner, count in states["a"].meetings.items()} == {
        OWN: False,
        "b": True,
        "c": False,
    }
    for state in tested:
        state.lost = None
        state.meetings[OWN].wrong = 0
    assert [(one.status, [reason.evidence for reason in one.reasons]) for one in judge_stress(tested)] == [
        ("healthy", []),
        ("unhealthy", ["pairs"]),
        ("healthy", []),
    ]


HEARS_CTRL_C = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("megasdc", run_name="__main__")
"""
"""The command, also where the shell that runs the tests ignores it."""


def _start(out: Path, *options: str) -> StartedCommand:
    """Start a test; the command is a fork, the host and its workers are fresh processes."""
    script = out.with_suffix(".py")
    script.write_text(HEARS_CTRL_C)
    return StartedCommand(str(script), ["stress", "--only", "gemm", "--json", "--out", str(out), *options])


def _wait_for_rounds(process: StartedCommand, file: Path, rounds: int) -> None:
    while not file.exists() or json.loads(file.read_text())["rounds"] < rounds:
        assert psutil.pid_exists(process.pid)
        time.sleep(0.1)


def test_killed_gone_on_and_interrupted(tmp_path: Path) -> None:
    """After kill -9 no process stays and the whole rounds count; Ctrl-C ends with the verdict so far, exit code 0."""
    out = tmp_path / "result.json"
    file = tmp_path / "result.json.hosts" / "localhost.json"
    process = _start(out, "--rounds", "1000")
    _wait_for_rounds(process, file, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    done = json.loads(file.read_text())
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == [] and len(children) >= 3
    process = _start(out, "--rounds", "1000", "--resume")
    _wait_for_rounds(process, file, done["rounds"] + 1)
    os.kill(process.pid, signal.SIGINT)
    ended = process.wait(60)
    said = json.loads(ended.stdout)
    assert ended.returncode == 0 and said["interrupted"]
    (host,) = said["hosts"]
    assert host["status"] == "healthy" and host["rounds"] > done["rounds"]
    assert host["rates"]["gemm"]["compared"] == host["rounds"] * done["tests"]["gemm"]["compared"] / done["rounds"]
    assert json.loads(out.read_text()) == said
    assert json.loads(file.read_text())["checked"] == done["checked"]  # what was computed before is expected again


@pytest.mark.full
def test_a_host_that_hangs_is_named(tmp_path: Path) -> None:
    """A host that stands still is given up after --timeout; its partner is not accused, and is tested to the end."""
    plan = StressPlan({"a": 1, "b": 1}, rounds=3, timeout_s=20, folder=tmp_path)

    def after_a_round(number: int, total: int | None) -> None:
        if number == 1:
            for process in [_agents()[1], *_agents()[1].children()]:
                process.suspend()

    result = stress_hosts(plan, after_a_round)
    assert [verdict.status for verdict in result.verdicts] == ["healthy", "not tested"]
    assert result.verdicts[0].rounds == 3
    assert "hung after 1 whole rounds: gave no answer in 20 s" in result.verdicts[1].reasons[0].text
    for process in psutil.process_iter():
        if process.status() == psutil.STATUS_STOPPED and "megasdc.ops.stress" in " ".join(process.cmdline()):
            process.kill()
