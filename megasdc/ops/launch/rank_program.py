"""What a launch runs on each rank, and what every host needs for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megasdc.common.errors import LaunchError
from megasdc.common.room import WAIT_S
from megasdc.config import RunConfig, check_layout, load_config
from megasdc.ops.launch.request import LaunchRequest, UserProgram

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
    for override in request.overrides:
        arguments += ["--set", override]
    for name in request.allow_changed:
        arguments += ["--allow-changed", name]
    script, sections = str(request.script.absolute()), config.megasdc
    hooks = [str(cwd / hook.path) for hook in sections.optimizer_hooks if hook.hook == "file" and hook.path]
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
            **dict.fromkeys([script, arguments[1], *hooks, *_golden(config, cwd)], "make, copy or share it"),
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
        check_ranks=lambda ranks: check_layout(config, ranks),
    )


def _golden(config: RunConfig, cwd: Path) -> list[str]:
    """The golden trace that ranks read at their start, wherever they run."""
    path = config.megasdc.sdc.golden
    return [] if path is None else [str(cwd / path)]


def _user_program(program: UserProgram, cwd: Path) -> RankProgram:
    script = cwd / program.name
    if not program.is_module and not script.is_file():
        raise LaunchError(
            f"{program.name}: no such file; after the options of deepspeed the training script is needed, as in "
            "`megasdc run -- deepspeed --num_gpus 8 train.py --my-option 1`"
        )
    run_dir = cwd / program.run_dir
    settings = {**asdict(program), "run_dir": str(run_dir)}
    return RankProgram(
        run_dir=run_dir,
        words=["-m", PROGRAM_MODULE],
        arguments=[json.dumps(settings)],
        readable={} if program.is_module else {str(script): "make, copy or share it"},
        code=[] if program.is_module else [str(script)],
        writable=[str(run_dir)],
        watched=program.hang_after_s > 0,
        alert_command=program.alert_command,
        hang_floor_s=program.hang_after_s,
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
