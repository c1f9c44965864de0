"""Front of a launch, ``megasdc launch``: checks, start, supervision, verdict.

A thin front for DeepSpeed's launcher: everything is checked before anything starts, arguments and environment reach
ranks unchanged, and the exit code is 0 only if every rank has written a done record with 0.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megasdc import run_lock
from megasdc.errors import LaunchError, StorageError
from megasdc.launcher import environment, host_failed, own_lines, read_on_host, running_on_host
from megasdc.launcher.checks import HostReport, inspect_hosts, master_address
from megasdc.launcher.hosts import Placement
from megasdc.launcher.plan import LaunchPlan, make_plan
from megasdc.launcher.process import LauncherProcess
from megasdc.launcher.records import LaunchRecords, collect, parse_records, records_dir
from megasdc.launcher.request import DEFAULT_SCRIPT, LaunchRequest
from megasdc.launcher.verdict import Verdict, judge, launcher_killed
from megasdc.parallel.local_ranks import held_port

GATHER_TIMEOUT_S = 30.0
ASK_HOSTS_S = 20.0
MAX_ASK_HOSTS_S = 320.0
# Added to limits: records of other hosts may appear shortly after the launcher's end.
STOP_GRACE_S = 35.0
WAIT_POLL_S = 0.5
TELL_S = 10.0


@dataclass(frozen=True)
class LaunchResult:
    """Result of a launch, as printed by ``--json`` and written to ``launch.json`` beside the records."""

    exit_code: int
    launch_id: str
    run_dir: str
    hosts: dict[str, list[int]]
    command: list[str]
    launcher_code: int | None
    failed_rank: int | None
    failed_host: str | None
    lines: list[str]


def launch(
    config_path: Path | str,
    hostfile: Path | str | None = None,
    launcher_args: Sequence[str] = (),
    overrides: Sequence[str] = (),
    script: Path | str = DEFAULT_SCRIPT,
    *,
    num_gpus: int | None = None,
    allow_changed: Sequence[str] = (),
) -> int:
    """Start a run, wait for its end, and return its exit code; problems are printed to standard error.

    Args:
        config_path: the run's JSON file.
        hostfile: DeepSpeed's hostfile; None runs on this host only.
        launcher_args: further options for DeepSpeed's launcher.
        overrides: texts ``a.b.c=value``.
        script: the training script.
        num_gpus: ranks on each host; None means all slots of the hostfile.
        allow_changed: paths ``a.b.c`` of fields that may differ on resume.
    """
    request = LaunchRequest(
        Path(config_path),
        hostfile=None if hostfile is None else Path(hostfile),
        num_gpus=num_gpus,
        launcher_args=tuple(launcher_args),
        overrides=tuple(overrides),
        allow_changed=tuple(allow_changed),
        script=Path(script),
    )
    return launch_run(request).exit_code


def launch_run(request: LaunchRequest, *, dry_run: bool = False, quiet: bool = False) -> LaunchResult:
    """Check, start and supervise a run, and decide how it ended.

    Args:
        request: what to start.
        dry_run: only check, and show the command; nothing is built, started or written.
        quiet: send the ranks' standard output to standard error, which leaves standard output to the caller.

    Returns:
        How it ended; failed checks raise instead.

    Raises:
        ConfigError: the configuration or its layout is wrong.
        LaunchError: hosts, versions, files, environment or arguments do not allow a start; lists all problems.
        StorageError: folders cannot be written to, and nothing else is wrong.
    """
    plan = make_plan(request, say)
    if plan.needs.master_port is not None:
        return _launch_planned(plan, dry_run, quiet)
    # Held until the launch ends, so that no other launch takes the port before rank 0 listens on it.
    with held_port() as port:
        return _launch_planned(replace(plan, master_port=port), dry_run, quiet)


def _launch_planned(plan: LaunchPlan, dry_run: bool, quiet: bool) -> LaunchResult:
    report = inspect_hosts(_inspected(plan), plan.transport, plan.needs)
    if problems := [*_folders_in_use(plan), *report.problems]:
        raise (StorageError if len(problems) == report.num_unwritable else LaunchError)("\n".join(problems))
    plan = _with_master_address(plan, report)
    say(f"launch {plan.launch_id}: {_describe(plan.placement)}")
    if dry_run:
        say(f"would run: {shlex.join(plan.command())}")
        return _result(plan, Verdict(0, None, None, ["checks passed; nothing was started"]), None)
    verdict, launcher_code = _run(plan, quiet)
    result = _result(plan, verdict, launcher_code)
    _write_result(plan, result)
    for line in verdict.lines:
        say(line)
    return result


def say(line: str) -> None:
    """Print a message of the front to standard error."""
    print(f"megasdc launch: {line}", file=sys.stderr, flush=True)


def _inspected(plan: LaunchPlan) -> Placement:
    """Hosts to probe; under SLURM, where hosts often refuse SSH, only this one, under the first host's name."""
    if plan.request.backend != "slurm" or not plan.placement.remote:
        return plan.placement
    say("slurm: the other hosts are not checked, they may not be reachable over SSH")
    first = plan.placement.hosts[0]
    return Placement({first: plan.placement.slots[first]}, remote=False)


def _folders_in_use(plan: LaunchPlan) -> list[str]:
    """Problems: other processes that use the run's folders, as seen here; ranks check again on every host."""
    problems = []
    for folder in plan.needs.writable:
        try:
            run_lock.check_free(Path(folder), say)
        except LaunchError as error:
            problems.append(str(error))
    return problems


def _with_master_address(plan: LaunchPlan, report: HostReport) -> LaunchPlan:
    """Fill in the address of rank 0's host, for the launcher and for backends that set no MASTER_ADDR."""
    if not plan.placement.remote:
        return replace(plan, master_addr=None)
    first = plan.placement.hosts[0]
    address = plan.master_addr or master_address(first, report.facts[first]["addresses"])
    fallback = {**plan.rank.fallback, "MASTER_ADDR": address or first.rpartition("@")[2]}
    return replace(plan, master_addr=address, rank=replace(plan.rank, fallback=fallback))


def _describe(placement: Placement) -> str:
    ranks = len(placement.host_of_rank)
    shown = [f"{host} ({len(slots)})" for host, slots in list(placement.slots.items())[:8]]
    more = len(placement.hosts) - len(shown)
    return f"{ranks} rank{'s' if ranks > 1 else ''} on {', '.join(shown)}{f' and {more} more hosts' if more else ''}"


def _run(plan: LaunchPlan, quiet: bool) -> tuple[Verdict, int]:
    """Start the launcher, wait for it, and judge the records."""
    # For the runner itself: it exports PYTHON variables, and its kill pattern contains the launch id.
    env = {**os.environ, **plan.rank.environment}
    env["PATH"] = os.pathsep.join([*plan.rank.path, os.environ.get("PATH", os.defpath)])
    environment.stop_grace_s(os.environ)
    env[own_lines.FOLDER_VARIABLE] = str(own_lines.logs_folder(plan.run_dir))
    env[host_failed.FOLDER_VARIABLE] = str(records_dir(plan.run_dir, plan.launch_id))
    env[environment.FRONT_PID_VARIABLE] = str(os.getpid())
    process = LauncherProcess(plan.command(), env, stdout=sys.stderr if quiet else None, say=say)
    try:
        code = process.wait(FailureWatch(plan), plan.request.failure_grace_s)
        records, unreachable = _gather(plan)
        incomplete = len(records.done) < len(plan.placement.host_of_rank)
        # Also if all have written their records, which they do before they end.
        waited = (incomplete or launcher_killed(records, code)) and _wait_for_ranks(plan, set(unreachable))
        if waited:
            records, unreachable = _gather(plan)
        end = time.monotonic() + STOP_GRACE_S
        while process.stopped_by is not None and len(records.done) < len(records.started) and time.monotonic() < end:
            time.sleep(1)
            records, unreachable = _gather(plan)
    finally:
        process.close()
    hosts = plan.placement.host_of_rank
    if code != 0 and len(records.started) < len(hosts):
        folder = own_lines.logs_folder(plan.run_dir)
        for line in own_lines.last_lines(folder):
            say(f"DeepSpeed's launcher said: {line}")
        say(f"its whole log is in {folder}")
    outlived = incomplete and waited
    verdict = judge(hosts, records, code, unreachable=unreachable, stopped_by=process.stopped_by, outlived=outlived)
    return verdict, code


class FailureWatch:
    """Checks periodically for a failed rank or host, and selects the signal to end the rest of the launch.

    Records that this host does not see (node-local run folders) are read over SSH in a background thread, so that a
    slow host does not block.

    Args:
        plan: plan of the launch.
        interval_s: seconds between two reads over SSH; doubled while no host answers.
    """

    def __init__(self, plan: LaunchPlan, interval_s: float = ASK_HOSTS_S) -> None:
        self._plan = plan
        self._interval_s = interval_s
        self._ask_at = time.monotonic() + interval_s
        self._asking: threading.Thread | None = None
        self._there: signal.Signals | None = None

    def __call__(self) -> signal.Signals | None:
        """Check the records here, and start reading those of other hosts when due."""
        records = collect(self._plan.run_dir, self._plan.launch_id)
        found = {self._there, _how_to_end(records)}
        if signal.SIGINT in found:
            return signal.SIGINT
        waiting = self._asking is not None and self._asking.is_alive()
        if self._plan.transport.remote and not waiting and time.monotonic() >= self._ask_at:
            hosts = _hosts_without(self._plan, records.started)
            if hosts:
                self._asking = threading.Thread(target=self._ask, args=(hosts,), daemon=True)
                self._asking.start()
        return next(filter(None, found), None)

    def _ask(self, hosts: list[str]) -> None:
        records = LaunchRecords()
        unreachable = _read_from(self._plan, hosts, records)
        self._there = _how_to_end(records) or self._there
        if len(unreachable) == len(hosts):
            self._interval_s = min(2 * self._interval_s, MAX_ASK_HOSTS_S)
        self._ask_at = time.monotonic() + self._interval_s


def _how_to_end(records: LaunchRecords) -> signal.Signals | None:
    """Signal for the other ranks: SIGINT if a rank failed, as they wait for it; SIGTERM, to save, if a launcher did."""
    done = records.done.values()
    if any(record.exit_code != 0 for record in done):
        return signal.SIGINT
    return signal.SIGTERM if records.failed_hosts or any(record.launcher_gone for record in done) else None


def _hosts_without(plan: LaunchPlan, seen: Collection[int]) -> list[str]:
    """Hosts with ranks that are not in ``seen``."""
    missing = {host for rank, host in enumerate(plan.placement.host_of_rank) if rank not in seen}
    return [host for host in plan.placement.hosts if host in missing]


def _gather(plan: LaunchPlan) -> tuple[LaunchRecords, dict[str, str]]:
    """Read the records here, and over SSH those of node-local run folders; also return hosts' read errors."""
    records = collect(plan.run_dir, plan.launch_id)
    hosts = _hosts_without(plan, records.done)
    if not plan.transport.remote or not hosts:
        return records, {}
    return records, _read_from(plan, hosts, records)


def _read_from(plan: LaunchPlan, hosts: list[str], records: LaunchRecords) -> dict[str, str]:
    """Add the records of hosts to ``records``; return the problem of each host that gave none."""
    request = {"folder": str(records_dir(plan.run_dir, plan.launch_id))}
    unreachable = {}
    for answer in plan.transport.run(hosts, Path(read_on_host.__file__), request, timeout_s=GATHER_TIMEOUT_S):
        if answer.problem:
            unreachable[answer.host] = answer.problem
            continue
        found = parse_records(answer.value)
        records.started.update(found.started)
        records.done.update(found.done)
        records.failed_hosts.update(found.failed_hosts)
        records.unreadable.extend(found.unreadable)
    return unreachable


def _wait_for_ranks(plan: LaunchPlan, unreachable: set[str]) -> bool:
    """Wait until no process of this launch is left; return whether there was one.

    If their launcher was killed, ranks save and end by themselves, and hold the port and the run folder until then.
    """
    started = time.monotonic()
    limit_s = environment.stop_grace_s(os.environ) + STOP_GRACE_S
    said_at = -math.inf
    while running := _running(plan, unreachable):
        now = time.monotonic()
        if now - started > limit_s:
            say(f"still running after {limit_s:g} s, end them by hand: {_list(running)}")
            return True
        if now - said_at > TELL_S:
            said_at = now
            say(f"the launcher has ended, but not all processes that it started; waiting for {_list(running)}")
        time.sleep(WAIT_POLL_S)
    return said_at > -math.inf


def _running(plan: LaunchPlan, unreachable: set[str]) -> dict[str, list[int]]:
    """Processes of this launch by host; without hosts that cannot be reached."""
    hosts = [host for host in plan.placement.hosts if host not in unreachable]
    request = {"launch_id": plan.launch_id}
    if not plan.transport.remote:
        found = {"this host": running_on_host.answer(request)}
    else:
        program = Path(running_on_host.__file__)
        answers = plan.transport.run(hosts, program, request, timeout_s=GATHER_TIMEOUT_S) if hosts else []
        found = {answer.host: answer.value for answer in answers if not answer.problem}
    return {host: pids for host, pids in found.items() if pids}


def _list(running: dict[str, list[int]]) -> str:
    return "; ".join(f"{host}: process {', '.join(map(str, pids))}" for host, pids in running.items())


def _result(plan: LaunchPlan, verdict: Verdict, launcher_code: int | None) -> LaunchResult:
    return LaunchResult(
        exit_code=verdict.exit_code,
        launch_id=plan.launch_id,
        run_dir=str(plan.run_dir),
        hosts=plan.placement.slots,
        command=plan.command(),
        launcher_code=launcher_code,
        failed_rank=verdict.rank,
        failed_host=verdict.host,
        lines=verdict.lines,
    )


def _write_result(plan: LaunchPlan, result: LaunchResult) -> None:
    folder = records_dir(plan.run_dir, plan.launch_id)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "launch.json").write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        say(f"{folder / 'launch.json'} could not be written: {error}")
