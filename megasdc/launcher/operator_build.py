"""Is DeepSpeed's CPU operator built before ranks need it? Stale locks removed, one build a host, with a time limit.

The first ``init_distributed`` on a CPU compiles ``deepspeed_shm_comm`` (30 to 100 s). A process that is killed
meanwhile leaves PyTorch's ``lock`` file behind, on which every later process waits for ever without a word.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasdc.errors import LaunchError
from megasdc.launcher import build_on_host, remove_on_host
from megasdc.launcher.checks import DISTRIBUTIONS, HostNeeds, HostReport, inspect_hosts
from megasdc.launcher.hosts import LOCAL_HOST, Placement
from megasdc.launcher.remote import Answer, Transport
from megasdc.parallel.cpu_operator import EXTENSIONS_VARIABLE, STAMP, extensions_dir

BUILD_TIMEOUT_S = 600.0
REMOVE_TIMEOUT_S = 60.0
# On a network file system a builder on a host outside this launch cannot be seen; no build is idle for so long.
NETWORK_IDLE_S = 600.0

Say = Callable[[str], None]
logger = logging.getLogger(__name__)


def build_operator_here() -> None:
    """Make the operator ready on this host, for ranks that this process starts itself; ready before, it takes 0.2 s.

    Raises:
        LaunchError: it cannot be built; with the remedy.
    """
    needs = HostNeeds(
        cwd=os.getcwd(),
        python_path=[],
        path=[os.path.dirname(sys.executable)],
        readable=[],
        writable=[],
        master_port=None,
        extensions_dir=extensions_dir(),
        cpu_only=os.environ.get("DS_ACCELERATOR") == "cpu",
        gloo_interface=False,
    )
    transport = Transport(remote=False)
    report = inspect_hosts(Placement({LOCAL_HOST: [0]}, remote=False), transport, needs)
    if report.problems:
        raise LaunchError("\n".join(report.problems))
    build_operators(report, transport, needs, logger.warning)


def build_operators(report: HostReport, transport: Transport, needs: HostNeeds, say: Say) -> None:
    """Make the operator ready on every host without an accelerator.

    Args:
        report: the hosts' facts.
        transport: how to reach them.
        needs: where the operator lies.
        say: told what is done and why.

    Raises:
        LaunchError: a build fails, or waits too long for a lock that may not be removed; with host and remedy.
    """
    hosts = report.hosts_without_gpu(needs)
    if not hosts:
        return
    _remove_stale_locks({host: report.facts[host]["lock"] for host in hosts}, transport, needs, say)
    # Hosts may share the folder, so the first builds alone and the others find its work or build their own.
    problems: list[str] = []
    for group in (hosts[:1], hosts[1:]):
        if group:
            problems += _build_on(group, report, transport, needs, say)
    if problems:
        raise LaunchError("\n".join(problems))


def judge_locks(locks: Mapping[str, Mapping[str, Any] | None]) -> tuple[list[str], list[str]]:
    """Decide about build locks seen on hosts that may share one folder.

    Args:
        locks: what ``megasdc.launcher.probe`` found on each host; None where there is no lock.

    Returns:
        Hosts whose lock is stale and may be removed, and sentences about locks that stay.
    """
    present = {host: lock for host, lock in locks.items() if lock is not None}
    holders = [f"process {lock['holder']} on {host}" for host, lock in present.items() if lock["holder"] is not None]
    if holders:
        return [], [f"another run is building DeepSpeed's CPU operator ({', '.join(holders)}); waiting for it"]
    stale, notes = [], []
    for host, lock in present.items():
        if not lock["judged"]:
            notes.append(f"{host}: the build lock belongs to another user; waiting for its owner")
        elif lock["network"] and lock["idle_s"] < NETWORK_IDLE_S:
            notes.append(f"{host}: the build lock on a network file system may be held by another host; waiting")
        else:
            stale.append(host)
    return stale, notes


def _remove_stale_locks(
    locks: Mapping[str, Mapping[str, Any] | None], transport: Transport, needs: HostNeeds, say: Say
) -> None:
    lock = needs.operator_dir / "lock"
    stale, notes = judge_locks(locks)
    for note in notes:
        say(note)
    if not stale:
        return
    request = {"path": str(lock)}
    for answer in transport.run(stale, Path(remove_on_host.__file__), request, timeout_s=REMOVE_TIMEOUT_S):
        if answer.problem:
            raise LaunchError(f"the stale build lock {lock} could not be removed: {answer.problem}")
        if answer.value:
            say(f"{answer.host}: removed stale build lock {lock}: no process holds it")


def _build_on(hosts: Sequence[str], report: HostReport, transport: Transport, needs: HostNeeds, say: Say) -> list[str]:
    """Build on some hosts in parallel and return the problems."""
    found = report.facts[hosts[0]]
    request = {
        "environment": {EXTENSIONS_VARIABLE: needs.extensions_dir},
        "python_path": needs.python_path,
        "path": needs.path,
        "folder": str(needs.operator_dir),
        "stamp": STAMP,
        "key": {
            "python": found["python"],
            "tools": found["tool_versions"],
            "versions": {name: found["versions"][name] for name in DISTRIBUTIONS if name != "megasdc"},
        },
    }
    answers = transport.run(hosts, Path(build_on_host.__file__), request, timeout_s=BUILD_TIMEOUT_S)
    for answer in answers:
        if answer.value and answer.value["state"] == "built":
            say(f"{answer.host}: built DeepSpeed's CPU operator")
    problems = [_build_problem(answer, needs) for answer in answers]
    return [problem for problem in problems if problem]


def _build_problem(answer: Answer, needs: HostNeeds) -> str | None:
    if answer.problem:
        return (
            f"{answer.problem}; if no other build is running, remove {needs.operator_dir / 'lock'} there and try again"
        )
    if answer.value["state"] == "failed":
        return f"{answer.host}: DeepSpeed's CPU operator could not be built: {answer.value['message']}"
    return None
