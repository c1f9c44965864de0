"""Launch plan: a request, checked on this host, becomes hosts, ranks, environment and requirements."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from megasdc.common.credentials import words_without_credentials
from megasdc.common.errors import LaunchError
from megasdc.common.run_lock import ENDED_LAUNCHES_VARIABLE
from megasdc.ops.launch import command, environment
from megasdc.ops.launch.checks import HostNeeds
from megasdc.ops.launch.hosts import Placement, place_on_hosts, place_on_this_host, place_program_here, read_hostfile
from megasdc.ops.launch.own_lines import logs_folder
from megasdc.ops.launch.rank import RankCommand
from megasdc.ops.launch.rank_program import RankProgram, program_of
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE
from megasdc.ops.launch.remote import Transport
from megasdc.ops.launch.request import LaunchRequest
from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE

Say = Callable[[str], None]
T = TypeVar("T")
SLOTS_VARIABLE = "MEGASDC_SLOTS"
"""Hosts and slots of a launch in the order of ranks, as JSON, for programs that do not gather them."""


@dataclass(frozen=True)
class LaunchPlan:
    """A request that was checked on this host: hosts, ranks, environment, and what every host needs.

    ``master_port`` is None if the launcher options name one, or DeepSpeed's default is used; ``through_runner``:
    whether DeepSpeed's runner is needed.
    """

    request: LaunchRequest
    launch_id: str
    placement: Placement
    transport: Transport
    needs: HostNeeds
    rank: RankCommand
    program: RankProgram
    master_addr: str | None
    through_runner: bool
    master_port: int | None = None

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.program.run_dir

    @property
    def has_own_launchers(self) -> bool:
        """Whether ranks are started by ``megasdc.ops.launch.node``, which sees how they end, or by SLURM or MPI."""
        return self.request.hostfile is None or self.request.backend == "pdsh"

    @property
    def shown_command(self) -> list[str]:
        """The command as it is shown and saved: without what looks like a secret in arguments of the user's."""
        rank, arguments = self.rank, words_without_credentials(self.rank.arguments)
        if self.program.is_users:
            settings = json.loads(rank.arguments[0])
            settings["arguments"] = words_without_credentials(settings["arguments"])
            arguments = [json.dumps(settings)]
        return words_without_credentials(replace(self, rank=replace(rank, arguments=arguments)).command())

    def command(self) -> list[str]:
        """Return the command that starts all ranks."""
        port = self.master_port or self.needs.master_port
        if not self.through_runner and port is not None:
            return command.node_command(
                self.placement,
                self.rank,
                self.launch_id,
                grace_s=environment.stop_grace_s(os.environ),
                logs=str(logs_folder(self.run_dir)),
                master_port=port,
            )
        return command.runner_command(
            self.placement,
            self.rank,
            self.launch_id,
            self.request,
            master_addr=self.master_addr,
            master_port=self.master_port,
        )


def make_plan(request: LaunchRequest, tell: Say) -> LaunchPlan:
    """Check everything that can be checked without leaving this host.

    Args:
        tell: called with messages for the user.

    Raises:
        ConfigError: the configuration or its layout is wrong.
        LaunchError: hostfile, filters, options or environment are wrong; lists all problems.
    """
    cwd = Path.cwd()
    program = program_of(request, cwd)
    problems: list[str] = []
    allowed = () if request.program is None else command.OF_PROGRAMS
    options = _collect_error(problems, lambda: command.parse_launcher_args(request.launcher_args, allowed))
    placement = _collect_error(problems, lambda: _place(request))
    files = environment.env_files(os.environ, cwd)
    if request.hostfile is not None:
        filtered = bool(request.include or request.exclude or request.num_gpus is not None)
        problems += command.backend_problems(request.backend, filtered)
        problems += environment.exported_variable_problems({**os.environ, "PYTHONPATH (working folder)": str(cwd)})
        for file in files:
            problems += environment.env_file_problems(file)
    if problems or placement is None or options is None:
        raise LaunchError("\n".join(problems))
    program.check_ranks(len(placement.host_of_rank))
    _tell_left_out(request, placement, tell)
    _tell_unused(request, options, tell)
    launch_id = request.launch_id or new_launch_id()
    forwarded = environment.forwarded_environment(os.environ, environment.env_file_names(files))
    named = {LAUNCH_ID_VARIABLE: launch_id, ENDED_LAUNCHES_VARIABLE: ",".join(request.ended)}
    named |= {SLOTS_VARIABLE: json.dumps(placement.slots)} if request.program is not None else {}
    rank = replace(
        _rank_command(program, cwd, {**forwarded, **named}, options),
        private=list(environment.private_environment(os.environ)),
    )
    return LaunchPlan(
        request,
        launch_id,
        placement,
        Transport(placement.remote and request.backend != "slurm", options.ssh_port),
        _needs(program, rank, _known_port(request, options)),
        rank,
        program,
        options.master_addr or os.environ.get("MASTER_ADDR"),
        through_runner=request.hostfile is not None or bool(options.others),
    )


def needs_of(request: LaunchRequest) -> tuple[HostNeeds, Transport]:
    """What a request needs of every host, and how hosts are reached over SSH.

    Raises:
        ConfigError, LaunchError: see ``make_plan``.
    """
    cwd = Path.cwd()
    program = program_of(request, cwd)
    allowed = () if request.program is None else command.OF_PROGRAMS
    options = command.parse_launcher_args(request.launcher_args, allowed)
    fixed = environment.env_file_names(environment.env_files(os.environ, cwd))
    rank = _rank_command(program, cwd, environment.forwarded_environment(os.environ, fixed), options)
    port = options.master_port or command.DEFAULT_MASTER_PORT
    return _needs(program, rank, port), Transport(True, options.ssh_port)


def new_launch_id() -> str:
    """An id that no other launch has."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _collect_error(problems: list[str], call: Callable[[], T]) -> T | None:
    """Return the call's result, or add its problems to the list and return None."""
    try:
        return call()
    except LaunchError as error:
        problems.append(str(error))
        return None


def _place(request: LaunchRequest) -> Placement:
    if request.hostfile is not None:
        pool = read_hostfile(request.hostfile)
        return place_on_hosts(pool, include=request.include, exclude=request.exclude, num_gpus=request.num_gpus)
    if request.program is not None:
        return place_program_here(request.include, request.exclude, request.num_gpus, os.environ)
    if request.include or request.exclude:
        raise LaunchError("--include and --exclude choose from a hostfile; give --hostfile")
    return place_on_this_host(request.num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _tell_left_out(request: LaunchRequest, placement: Placement, tell: Say) -> None:
    """Report the hosts of the hostfile that are not used."""
    if request.hostfile is None:
        return
    left_out = [host for host in read_hostfile(request.hostfile) if host not in placement.slots]
    if left_out:
        tell(f"not used: {', '.join(left_out)}")


def _tell_unused(request: LaunchRequest, options: command.LauncherOptions, tell: Say) -> None:
    """Report launcher options that have no effect on this host only."""
    if request.hostfile is not None:
        return
    if options.master_addr not in ("", command.LOCAL_ADDRESS):
        tell(f"--master_addr {options.master_addr} is not used: on one host ranks connect at {command.LOCAL_ADDRESS}")
    if options.ssh_port is not None:
        tell(f"--ssh_port {options.ssh_port} is not used: on one host nothing goes over SSH")


def _rank_command(
    program: RankProgram, cwd: Path, variables: dict[str, str], options: command.LauncherOptions
) -> RankCommand:
    return RankCommand(
        cwd=str(cwd),
        program=program.words,
        arguments=program.arguments,
        environment=variables,
        path=[str(Path(sys.executable).parent)],
        fallback={"MASTER_PORT": str(options.master_port or command.DEFAULT_MASTER_PORT)},
    )


def _known_port(request: LaunchRequest, options: command.LauncherOptions) -> int | None:
    """The port that rank 0 will listen on; None: the launch reserves a free one, possible only without a hostfile."""
    return options.master_port if request.hostfile is None else options.master_port or command.DEFAULT_MASTER_PORT


def _needs(program: RankProgram, rank: RankCommand, master_port: int | None) -> HostNeeds:
    inherited = os.environ.get("PYTHONPATH", "")
    return HostNeeds(
        cwd=rank.cwd,
        python_path=[rank.cwd, *(inherited.split(os.pathsep) if inherited else [])],
        path=rank.path,
        readable=program.readable,
        data=program.data,
        code=program.code,
        writable=program.writable,
        master_port=master_port,
        compilers=program.compilers,
        cpu_only=rank.environment.get("DS_ACCELERATOR") == "cpu",
        gloo_interface="GLOO_SOCKET_IFNAME" in rank.environment,
        always_gloo=not program.is_users,
        extensions=rank.environment.get(EXTENSIONS_VARIABLE),
    )
