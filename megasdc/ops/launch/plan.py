"""Launch plan: a request, checked on this host, becomes hosts, ranks, environment and requirements.

What a launch runs on each rank, and what every host needs for it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from megasdc.common.credentials import words_without_credentials
from megasdc.common.durable import WAIT_S
from megasdc.common.errors import LaunchError
from megasdc.common.program import why_unreadable
from megasdc.common.run_lock import ENDED_LAUNCHES_VARIABLE
from megasdc.common.user_code import file_of
from megasdc.config.checks import check_layout
from megasdc.config.load import RunConfig, load_config, word_of_run
from megasdc.config.sections import STANDARD
from megasdc.ops.launch import command, environment
from megasdc.ops.launch.checks import HostNeeds
from megasdc.ops.launch.hosts import Placement, place_on_hosts, place_on_this_host, place_program_here, read_hostfile
from megasdc.ops.launch.own_lines import logs_folder
from megasdc.ops.launch.rank import RankCommand
from megasdc.ops.launch.records import LAUNCH_ID_VARIABLE
from megasdc.ops.launch.remote import Transport
from megasdc.ops.launch.request import LaunchRequest, UserProgram
from megasdc.parallel.local_ranks import EXTENSIONS_VARIABLE

PROGRAM_MODULE = "megasdc.ops.launch.user_program"


@dataclass(frozen=True)
class RankProgram:
    """What a launch runs.

    Attributes:
        run_dir: folder of the run.
        words: between the interpreter and what DeepSpeed's launcher adds.
        arguments: after that.
        readable: files and folders that each host must be able to read, with the remedy where it cannot.
        data: folders among them of prepared data, the same on all hosts.
        code: files among them that say what is computed, the same on all hosts.
        writable: folders that each host must be able to write to.
        watched: whether agents watch the ranks' health.
        hang_floor_s: least seconds without progress after which they are stuck.
        alert_command: gets an incident of it.
        compilers: needed on hosts without an accelerator, each with the setting that needs it.
        check_ranks: refuses a number of ranks by a ConfigError.
        replicas: replicas of Local-SGD, one of which it is; None: no Local-SGD.
        wait_for_room_s: seconds that are waited while its folder has no room.
        is_users: it knows nothing of megasdc: the front locks the run's folder, and tells each host where it listens.
    """

    run_dir: Path
    words: list[str]
    arguments: list[str]
    readable: Mapping[str, str]
    writable: list[str]
    watched: bool
    alert_command: tuple[str, ...]
    hang_floor_s: float = 0.0
    compilers: Mapping[str, str] = field(default_factory=dict)
    data: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    check_ranks: Callable[[int], object] = lambda _: None
    is_users: bool = False
    replicas: int | None = None
    wait_for_room_s: float = WAIT_S


def program_of(request: LaunchRequest, cwd: Path) -> RankProgram:
    """What a request asks to be run.

    Raises:
        ConfigError: its configuration is wrong.
        LaunchError: its program is not there.
    """
    if request.program is not None:
        return _user_program(request.program, cwd)
    assert request.config_path is not None, "a request has one of both"
    config = load_config(request.config_path, request.overrides, request.allow_changed)
    arguments = ["--config", str(request.config_path.absolute())]
    overrides = list(request.overrides)
    if word_of_run(cwd / config.megasdc.logging.run_dir) not in (None, STANDARD):
        overrides.append(f"megasdc.protect={config.megasdc.protect}")  # hosts without this folder cannot know
    for override in overrides:
        arguments += ["--set", override]
    for name in request.allow_changed:
        arguments += ["--allow-changed", name]
    script, sections = str(request.script.absolute()), config.megasdc
    hooks = [hook.path for hook in sections.optimizer_hooks if hook.hook == "file" and hook.path]
    hooks = [str(cwd / file) for file in [*hooks, *(file_of(one.hook) for one in sections.hooks)] if file is not None]
    folders = [sections.logging.run_dir, *([sections.checkpoint.folder] if sections.checkpoint.folder else [])]
    data = sections.data.prepare_command(request.config_path, request.overrides)
    remedy = (
        f"make it with `{data}`, copy or share it; a relative path of data starts at the folder of the launch, {cwd}"
    )
    return RankProgram(
        run_dir=cwd / sections.logging.run_dir,
        words=[script],
        arguments=arguments,
        readable={
            **dict.fromkeys([script, arguments[1], *hooks], "make, copy or share it"),
            **_read_at_start(config, request, cwd),
            **{str(cwd / folder): remedy for folder in sections.data.folders},
        },
        data=[str(cwd / folder) for folder in sections.data.folders],
        code=[script, arguments[1], *hooks],
        writable=[str(cwd / folder) for folder in folders],
        watched=sections.health.is_on(launched=True, studied=sections.study.replicas is not None),
        alert_command=tuple(sections.health.alert_command),
        hang_floor_s=sections.health.hang_floor_s,
        wait_for_room_s=sections.logging.wait_for_room_s,
        compilers=compilers_on_cpu(config),
        replicas=sections.local_sgd.replicas,
        check_ranks=lambda ranks: check_layout(config, ranks),
    )


def _read_at_start(config: RunConfig, request: LaunchRequest, cwd: Path) -> dict[str, str]:
    """The golden trace and the checkpoint that ranks read at their start, wherever they run, each with its remedy."""
    assert request.config_path is not None, "the configuration was read from it"
    sections, needed = config.megasdc, dict[str, str]()
    if sections.sdc.golden is not None:
        record = sections.sdc.record_command(request.config_path, request.overrides)
        needed[str(cwd / sections.sdc.golden)] = f"record it with `{record}`, copy or share it"
    saved = cwd / (sections.checkpoint.folder or Path(sections.logging.run_dir) / "checkpoints")
    if not any(saved.glob("step_*")):
        begins = sections.checkpoint.universal or sections.model.initial_weights
        needed |= {} if begins is None else {str(cwd / begins): "make, copy or share it: the run starts from it"}
    return needed


def _user_program(program: UserProgram, cwd: Path) -> RankProgram:
    script = cwd / program.name
    if not program.is_module and (problem := why_unreadable(script)):
        raise LaunchError(f"{program.name} {problem}")
    if not program.is_module and not script.is_file():
        raise LaunchError(
            f"{program.name}: no such file; after the options of deepspeed the training script is needed, as in "
            "`megasdc run -- deepspeed --num_gpus 8 train.py --my-option 1`"
        )
    run_dir = cwd / program.run_dir
    given = {name: value for name, value in asdict(program).items() if value is not None}
    settings = {**given, "run_dir": str(run_dir)}
    return RankProgram(
        run_dir=run_dir,
        words=["-m", PROGRAM_MODULE],
        arguments=[json.dumps(settings)],
        readable={} if program.is_module else {str(script): "make, copy or share it"},
        code=[] if program.is_module else [str(script)],
        writable=[str(run_dir)],
        watched=program.watched,
        alert_command=program.alert_command,
        hang_floor_s=program.slow_floor_s,
        wait_for_room_s=program.wait_for_room_s,
        is_users=True,
    )


def compilers_on_cpu(config: RunConfig) -> dict[str, str]:
    """Compilers needed on hosts without an accelerator, each with the setting that needs it.

    Fused modules use the compiler in CXX if set, which a rank checks itself.
    """
    found = {"g++": "megasdc.model.fuse true"} if config.megasdc.model.fuse and not os.environ.get("CXX") else {}
    if not config.deepspeed["optimizer"]["params"]["torch_adam"]:
        found |= dict.fromkeys(("g++", "ninja"), "optimizer.params.torch_adam false")
    return found


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


def plan_launch(request: LaunchRequest, tell: Say) -> LaunchPlan:
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
    if program.replicas is None:  # else the others are those of other replicas
        _report_left_out(request, placement, tell)
    _report_unused(request, options, tell)
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


def launch_needs(request: LaunchRequest) -> tuple[HostNeeds, Transport]:
    """What a request needs of every host, and how hosts are reached over SSH.

    Raises:
        ConfigError, LaunchError: see ``plan_launch``.
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


def _report_left_out(request: LaunchRequest, placement: Placement, tell: Say) -> None:
    """Report the hosts of the hostfile that are not used."""
    if request.hostfile is None:
        return
    left_out = [host for host in read_hostfile(request.hostfile) if host not in placement.slots]
    if left_out:
        tell(f"not used: {', '.join(left_out)}")


def _report_unused(request: LaunchRequest, options: command.LauncherOptions, tell: Say) -> None:
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
