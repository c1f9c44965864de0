"""Front of a launch, ``megasdc launch``: checks, start, supervision, verdict.

A thin front for DeepSpeed's launcher: everything is checked before anything starts, arguments and environment reach
ranks unchanged, and the exit code is 0 only if every rank has written a done record with 0.

The front's side of health during a launch: agents of all hosts connect to it
(``megasdc.ops.health.front.server``).
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from megasdc.common import durable, run_lock
from megasdc.common.errors import ConfigError, HangError, LaunchError, StorageError
from megasdc.common.host import NAME_VARIABLE
from megasdc.common.program import SHOWN_CURSOR
from megasdc.common.wire import own_address_towards, raise_descriptor_limit
from megasdc.config.local_sgd import ROUNDS_FILE
from megasdc.ops.health.front.address import front_path
from megasdc.ops.health.front.server import Coordinator, HangMonitor
from megasdc.ops.launch import environment, host_failed, own_lines
from megasdc.ops.launch.checks import (
    HostReport,
    address_from_here,
    has_no_accelerator,
    inspect_hosts,
    left_locks,
    master_address,
)
from megasdc.ops.launch.hosts import Placement, without_user
from megasdc.ops.launch.launch_verdict import (
    LaunchVerdict,
    Met,
    after_suspension,
    judge_launch,
    launcher_killed,
    lines_of,
    read_met,
)
from megasdc.ops.launch.on_host import files, private
from megasdc.ops.launch.plan import LaunchPlan, RankProgram, plan_launch
from megasdc.ops.launch.process import LauncherProcess
from megasdc.ops.launch.records import records_dir
from megasdc.ops.launch.remote import MAX_PARALLEL, HostWatch
from megasdc.ops.launch.request import DEFAULT_SCRIPT, LaunchRequest
from megasdc.ops.launch.supervision import (
    STOP_GRACE_S,
    FailureWatch,
    gather_records,
    print_front_message,
    wait_for_ranks,
)
from megasdc.parallel.local_ranks import INTERFACE_VARIABLE, LocalMeeting, reserved_port
from megasdc.parallel.rendezvous import MEETING_VARIABLE, PRIVATE_VARIABLE, ROUNDS_VARIABLE, SECRET_FILE, new_secret

LOCAL_ADDRESS = "127.0.0.1"
"""Where all ranks are on this host."""
WRITE_TIMEOUT_S = 30.0


@contextmanager
def listening_for_agents(plan: LaunchPlan) -> Iterator[HangMonitor | None]:
    """Listen for the agents of this launch while it runs, if the run's health is watched.

    Where and with which secret is left in the run folder of rank 0's host, in a file that its user alone may read.
    Where nothing can listen, or the file cannot be left, that is told, and agents judge by the run folder. Yields what
    is known of the hosts; None: nothing listens.
    """
    server = _open(plan) if plan.program.watched else None
    try:
        yield None if server is None else server.standstill
    finally:
        if server is not None:
            server.close()
            if not server.standstill.has_met_agents:  # else ranks have removed it
                _leave_for_hosts(plan, None)


def _open(plan: LaunchPlan) -> Coordinator | None:
    health = plan.run_dir / "health"
    try:
        address = LOCAL_ADDRESS if plan.master_addr is None else own_address_towards(plan.master_addr)
        server = Coordinator(plan.launch_id, address, health, print_front_message, plan.program.alert_command)
    except OSError as error:
        print_front_message(f"health: hosts cannot be heard: {error}; their agents judge by the run folder")
        return None
    if problems := _leave_for_hosts(plan, json.dumps(asdict(server.front))):
        print_front_message(
            f"health: hosts cannot be told where to connect: {problems[0]}; their agents judge by the run folder"
        )
        server.close()
        return None
    return server


def _leave_for_hosts(plan: LaunchPlan, text: str | None) -> list[str]:
    """Write the file of this front where agents look for it, or remove it; returns what went wrong.

    That is on rank 0's host; of programs whose ranks tell each other nothing, on each host, with a name of its own.
    """
    names = {plan.placement.hosts[0]: plan.launch_id}
    if plan.program.is_users:
        names = {host: f"{plan.launch_id}.{node}" for node, host in enumerate(plan.placement.hosts)}

    def leave(host: str) -> str:
        request = {"path": str(front_path(plan.run_dir / "health", names[host])), "text": text}
        (answer,) = plan.transport.run([host], Path(files.__file__), request, timeout_s=WRITE_TIMEOUT_S)
        return answer.problem or ""

    with ThreadPoolExecutor(min(MAX_PARALLEL, len(names))) as pool:
        return [problem for problem in pool.map(leave, names) if problem]


PRIVATE_TIMEOUT_S, REMOVAL_TIMEOUT_S = 60.0, 10.0
"""For a host to take what is secret of a launch, longer where it is only busy; to remove it, once all has ended."""

MEMORY_UNKNOWN = (
    "whether the kernel has killed a rank for want of memory is not known where SLURM or MPI starts it: srun says "
    "`task N: Out Of Memory` where SLURM counts that (TaskPlugin=task/cgroup), and the kernel's log on its host does"
)


@dataclass(frozen=True, kw_only=True)
class LaunchResult(LaunchVerdict):
    """Result of a launch, as printed by ``--json`` and written to ``launch.json`` beside the records.

    ``met``: faults and standstills of this launch, also where it ended well.
    """

    launch_id: str
    run_dir: str
    hosts: dict[str, list[int]]
    command: list[str]
    launcher_code: int | None
    met: list[Met]


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


def launch_run(
    request: LaunchRequest,
    *,
    dry_run: bool = False,
    quiet: bool = False,
    on_verdict: Callable[[], None] = lambda: None,
) -> LaunchResult:
    """Check, start and supervise a run, and decide how it ended.

    Args:
        dry_run: only check, and show the command; nothing is built, started or written.
        quiet: send the ranks' standard output to standard error, which leaves standard output to the caller.
        on_verdict: called once it is known how ranks have ended, while their launcher still has stop signals.

    Returns:
        How it ended; failed checks raise instead.

    Raises:
        ConfigError: the configuration or its layout is wrong.
        LaunchError: hosts, versions, files, environment or arguments do not allow a start; lists all problems.
        StorageError: folders cannot be written to, and nothing else is wrong.
    """
    raise_descriptor_limit()
    plan = plan_launch(request, print_front_message)
    if plan.program.replicas is not None and not os.environ.get(ROUNDS_VARIABLE):
        raise ConfigError(  # with which no supervisor starts again
            f"megasdc.local_sgd.replicas: got {plan.program.replicas}, and this launch has none to meet; start all "
            f"with megasdc launch --replicas {plan.program.replicas}, or set null to train without Local-SGD"
        )
    if plan.program.replicas is None and (plan.run_dir / ROUNDS_FILE).exists():
        raise ConfigError(
            f"megasdc.logging.run_dir: {plan.run_dir} holds replicas of Local-SGD, which this launch would not go on "
            "from; name another folder, or give --replicas"
        )
    durable.set_limit(plan.program.wait_for_room_s)
    if not dry_run:
        durable.need_room(partial(_probe, plan.run_dir), plan.run_dir, print_front_message)
    if plan.needs.master_port is not None:
        return _launch_planned(plan, dry_run, quiet, on_verdict)
    # Held until the launch ends, so that no other launch takes the port before rank 0 listens on it.
    with reserved_port() as port:
        return _launch_planned(replace(plan, master_port=port), dry_run, quiet, on_verdict)


def _probe(folder: Path) -> None:
    """Raise OSError where this host sees that a folder is full; one that is read-only or absent is checked later."""
    try:
        durable.probe(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise


def check_launch(request: LaunchRequest) -> LaunchPlan:
    """Check all that is checked before a start; nothing is started or written.

    Returns:
        What would be started.

    Raises:
        ConfigError, LaunchError, StorageError: see ``launch_run``.
    """
    plan = plan_launch(request, print_front_message)
    with reserved_port() as port:
        reserved = plan if plan.needs.master_port is not None else replace(plan, master_port=port)
        return _check_hosts(reserved)[0]


def _check_hosts(plan: LaunchPlan) -> tuple[LaunchPlan, HostReport]:
    """Check all hosts and that no other launch uses the run's folders; returns the plan with rank 0's address too.

    Raises:
        LaunchError, StorageError: see ``launch_run``.
    """
    if len(plan.placement.hosts) > 1:
        print_front_message(f"checking {len(plan.placement.hosts)} hosts")
    report = inspect_hosts(_inspected(plan), plan.transport, plan.needs, watch=HostWatch(say=print_front_message))
    if problems := [*_folders_in_use(plan), *report.problems]:
        in_use = len(problems) > len(report.found)
        raise (LaunchError if in_use else report.error)("\n".join(problems))
    return _with_master_address(plan, report), report


def _launch_planned(plan: LaunchPlan, dry_run: bool, quiet: bool, on_verdict: Callable[[], None]) -> LaunchResult:
    plan, report = _check_hosts(plan)
    loading = "" if dry_run or plan.program.is_users else "; loading PyTorch, DeepSpeed and Megatron-core"
    print_front_message(f"launch {plan.launch_id}: {describe_placement(plan.placement)}{loading}")
    if dry_run:
        print_front_message(f"would run: {shlex.join(plan.shown_command)}")
        print_front_message(NOTHING_STARTED)
        return _result(plan, LaunchVerdict(0, None, None, [NOTHING_STARTED]), None)
    on_cpu = any(has_no_accelerator(found, plan.needs) for found in report.facts.values())
    if note := first_compilation(plan.program, plan.needs.extensions, on_cpu=on_cpu):
        print_front_message(note)
    away: dict[str, str] = {}
    with _holding(plan), _meeting(plan, away) as plan:
        with listening_for_agents(plan) as agents:
            verdict, launcher_code, unreachable = _run(plan, quiet, agents, on_verdict)
        away.update(unreachable)
        if verdict.exit_code == HangError.exit_code:
            verdict = replace(verdict, lines=[*verdict.lines, *_left_locks(plan, away)])
        result = _result(plan, verdict, launcher_code)
        _write_result(plan, result)  # before hosts are asked to remove anything, which may take its time
        if sys.stderr.isatty():
            sys.stderr.write(SHOWN_CURSOR)  # which the bar of a rank that was killed has hidden
        for line in (*verdict.console_lines, *lines_of(result.met)):
            print_front_message(line)
    return result


NOTHING_STARTED = "checks passed; nothing was started"
COMMUNICATION = "deepspeed_shm_comm"
"""What DeepSpeed compiles for ranks on CPUs as soon as they form a group."""


def first_compilation(program: RankProgram, extensions: str | None, *, on_cpu: bool) -> str | None:
    """A sentence on what DeepSpeed compiles in the first start on this host, and how to avoid it; None: nothing is.

    Args:
        extensions: folder of compiled extensions; None: not known.
        on_cpu: whether ranks have no accelerator.
    """
    asks = "ninja" in program.compilers  # DeepSpeed's own Adam; which optimizer a user's script takes is not known
    if extensions is None or not (asks or program.is_users):
        return None
    found = {path.parent.name for path in Path(extensions).glob("*/*.so")}
    if any("adam" in name for name in found) if asks else found and (not on_cpu or COMMUNICATION in found):
        return None
    what = "what a training uses, on a CPU its communication and unless told otherwise its Adam"
    if found or asks:
        what = "its own Adam" if asks else "its communication on a CPU"
    told = f"DeepSpeed compiles {what} in the first start on a host, a minute or more, into {extensions}"
    remedy = "; optimizer.params.torch_adam true takes PyTorch's Adam, which needs no compiler"
    return told + remedy * ("Adam" in what)


def _left_locks(plan: LaunchPlan, away: Mapping[str, str]) -> list[str]:
    """Locks of compiled extensions on hosts that answer; under SLURM, where no other is reached, of one host alone."""
    hosts, extensions = [host for host in plan.placement.hosts if host not in away], plan.needs.extensions
    is_reached = plan.transport.remote or len(plan.placement.hosts) == 1
    return left_locks(hosts, plan.transport, extensions) if hosts and extensions is not None and is_reached else []


def _inspected(plan: LaunchPlan) -> Placement:
    """Hosts to probe; under SLURM, where hosts often refuse SSH, only this one, under the first host's name."""
    if plan.request.backend != "slurm" or not plan.placement.remote:
        return plan.placement
    print_front_message("slurm: the other hosts are not checked, they may not be reachable over SSH")
    first = plan.placement.hosts[0]
    return Placement({first: plan.placement.slots[first]}, remote=False)


def _folders_in_use(plan: LaunchPlan) -> list[str]:
    """Problems: other processes that use the run's folders, as seen here; ranks check again on every host."""
    problems = []
    for folder in plan.needs.writable:
        try:
            run_lock.check_free(Path(folder), print_front_message, plan.request.ended)
        except LaunchError as error:
            problems.append(str(error))
    return problems


@contextmanager
def _holding(plan: LaunchPlan) -> Iterator[None]:
    """Lock the folder of a run whose ranks do not; on this host, or all that share it.

    Raises:
        LaunchError: another launch has it.
        StorageError: it cannot be made.
    """
    if not plan.program.is_users:
        yield
        return
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{plan.run_dir} cannot be made: {error.strerror}; choose another by --run-dir") from error
    holder = run_lock.Holder.this_process(secrets.token_hex(8), plan.launch_id)
    lock = run_lock.acquire_lock(plan.run_dir, holder, print_front_message, plan.request.ended)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _meeting(plan: LaunchPlan, away: Mapping[str, str]) -> Iterator[LaunchPlan]:
    """Where ranks meet, as long as they run: those of one host without a port, and with gloo on loopback alone.

    Args:
        away: see ``_private_on_hosts``.

    Raises:
        LaunchError: a host did not take what is secret of the launch.
    """
    if plan.placement.remote:
        with _private_on_hosts(plan, away) as name:
            yield _with_variables(plan, {MEETING_VARIABLE: "", PRIVATE_VARIABLE: name})
        return
    meeting = LocalMeeting()
    try:
        own = {MEETING_VARIABLE: str(meeting.folder), INTERFACE_VARIABLE: meeting.environment[INTERFACE_VARIABLE]}
        yield _with_variables(plan, {**own, PRIVATE_VARIABLE: ""})
    finally:
        meeting.close()


@contextmanager
def _private_on_hosts(plan: LaunchPlan, away: Mapping[str, str]) -> Iterator[str]:
    """Leave on each host, for this user alone, a secret for the ranks, and the variables with secrets for pdsh.

    That passes no environment on. Under SLURM, where hosts often refuse SSH, nothing is left, and the name is empty.

    Args:
        away: why hosts could not be reached at the end, by host: they are not waited for once more.

    Raises:
        LaunchError: a host did not take them.
    """
    if not plan.transport.remote:
        yield ""
        return
    name, files = secrets.token_hex(16), {SECRET_FILE: new_secret()}
    if (variables := environment.private_environment(os.environ)) and plan.request.backend == "pdsh":
        files[private.ENVIRONMENT] = json.dumps(variables)

    def send_files(
        files: dict[str, str] | None, hosts: list[str], timeout_s: float, watch: HostWatch
    ) -> dict[str, str]:
        request, program = {"name": name, "files": files}, Path(private.__file__)
        answers = plan.transport.run(hosts, program, request, timeout_s=timeout_s, watch=watch) if hosts else []
        return {answer.host: answer.problem for answer in answers if answer.problem}

    hosts = plan.placement.hosts
    try:
        if refused := send_files(files, hosts, PRIVATE_TIMEOUT_S, HostWatch(say=print_front_message)):
            hosts = [host for host in hosts if host not in refused]
            raise LaunchError("\n".join(f"the secret of the launch was not taken: {text}" for text in refused.values()))
        yield name
    finally:
        problems = send_files(None, [host for host in hosts if host not in away], REMOVAL_TIMEOUT_S, HostWatch())
        for problem in (*away.values(), *problems.values()):
            print_front_message(f"the secret of the launch, which has ended, may not have been removed: {problem}")


def _with_variables(plan: LaunchPlan, variables: Mapping[str, str]) -> LaunchPlan:
    rank = replace(plan.rank, environment={**plan.rank.environment, **variables})
    return replace(plan, rank=rank)


def _with_master_address(plan: LaunchPlan, report: HostReport) -> LaunchPlan:
    """Fill in the address of rank 0's host, for the launcher and for backends that set no MASTER_ADDR."""
    if not plan.placement.remote:
        return replace(plan, master_addr=None)
    first = plan.placement.hosts[0]
    # DeepSpeed would ask the first host over SSH, and take the first word that its login prints for the address.
    if plan.request.backend == "slurm":  # nodes often refuse SSH, so that the facts are this host's
        address = plan.master_addr or address_from_here(first)
    else:
        address = plan.master_addr or master_address(first, report.facts[first])
    fallback = {**plan.rank.fallback, "MASTER_ADDR": address or without_user(first)}
    return replace(plan, master_addr=address, rank=replace(plan.rank, fallback=fallback))


def describe_placement(placement: Placement) -> str:
    """How many ranks, and on which hosts."""
    ranks = len(placement.host_of_rank)
    shown = [f"{host} ({len(slots)})" for host, slots in list(placement.slots.items())[:8]]
    more = len(placement.hosts) - len(shown)
    return f"{ranks} rank{'s' if ranks > 1 else ''} on {', '.join(shown)}{f' and {more} more hosts' if more else ''}"


def _run(
    plan: LaunchPlan, quiet: bool, agents: HangMonitor | None, on_verdict: Callable[[], None]
) -> tuple[LaunchVerdict, int, dict[str, str]]:
    """Start the launcher, wait for it, and judge the records.

    Args:
        agents: what they tell; None: nothing listens.

    Returns:
        The verdict, the launcher's exit code, and why hosts could not be reached at the end, by host.
    """
    silent = dict if agents is None else agents.silent_s
    # For the runner itself: it exports PYTHON variables, and its kill pattern contains the launch id.
    env = {**os.environ, **plan.rank.environment}
    env["PATH"] = os.pathsep.join([*plan.rank.path, os.environ.get("PATH", os.defpath)])
    environment.stop_grace_s(os.environ)
    env[own_lines.FOLDER_VARIABLE] = str(own_lines.logs_folder(plan.run_dir))
    env[host_failed.FOLDER_VARIABLE] = str(records_dir(plan.run_dir, plan.launch_id))
    env[environment.FRONT_PID_VARIABLE] = str(os.getpid())
    env[NAME_VARIABLE] = secrets.token_hex(16)  # here, not among the ranks' variables: those are arguments on hosts
    process = LauncherProcess(plan.command(), env, stdout=sys.stderr if quiet else None, say=print_front_message)
    try:
        code = process.wait(FailureWatch(plan, silent=silent), plan.request.failure_grace_s)
        number = process.stopped_by  # a signal from now on has not ended the launcher
        records, unreachable = gather_records(plan)
        incomplete = len(records.done) < len(plan.placement.host_of_rank)
        # Also if all have written their records, which they do before they end.
        waited = (incomplete or launcher_killed(records, code)) and wait_for_ranks(plan, set(unreachable))
        if waited:
            records, unreachable = gather_records(plan)
        end = time.monotonic() + STOP_GRACE_S
        while process.stopped_by is not None and len(records.done) < len(records.started) and time.monotonic() < end:
            time.sleep(1)
            records, unreachable = gather_records(plan)
        on_verdict()
    finally:
        process.close()
    hosts = plan.placement.host_of_rank
    if code != 0 and len(records.started) < len(hosts):
        folder = own_lines.logs_folder(plan.run_dir)
        for line in own_lines.last_lines(folder):
            print_front_message(f"DeepSpeed's launcher said: {line}")
        print_front_message(f"its whole log is in {folder}")
    outlived = incomplete and waited
    clocks = None if agents is None else agents.clocks
    verdict = judge_launch(
        hosts, records, code, unreachable=unreachable, stopped_by=number, outlived=outlived, clocks=clocks
    )
    verdict = after_suspension(verdict, records, process.stood_still_s)
    if number is None and not plan.has_own_launchers and records.started.keys() - records.done.keys():
        verdict = replace(verdict, lines=[*verdict.lines, MEMORY_UNKNOWN])
    if len(records.done) < len(hosts) and number is None and (problem := _without_room(plan.run_dir)):
        verdict = replace(verdict, exit_code=StorageError.exit_code, lines=[problem, *verdict.lines])
    return verdict, code, unreachable


def _without_room(folder: Path) -> str:
    """That a folder has no room, so that ranks cannot tell how they have ended; empty: it has some."""
    try:
        durable.probe(folder)
    except OSError as error:
        if durable.lacks_room(error):
            return f"{folder} has no room ({error.strerror}), so that ranks could not write how they have ended"
    return ""


def _result(plan: LaunchPlan, verdict: LaunchVerdict, launcher_code: int | None) -> LaunchResult:
    return LaunchResult(
        **vars(verdict),
        launch_id=plan.launch_id,
        run_dir=str(plan.run_dir),
        hosts=plan.placement.slots,
        command=plan.shown_command,
        launcher_code=launcher_code,
        met=read_met(plan.run_dir, lambda launch: launch == plan.launch_id),
    )


def _write_result(plan: LaunchPlan, result: LaunchResult) -> None:
    folder = records_dir(plan.run_dir, plan.launch_id)
    path, text = folder / "launch.json", json.dumps(asdict(result), indent=2) + "\n"
    try:
        durable.wait_for_room(
            lambda: durable.write_whole(path, text), path, print_front_message, at_most_s=durable.END_S
        )
    except OSError as error:
        print_front_message(f"{folder / 'launch.json'} could not be written: {error}")
