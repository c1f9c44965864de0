"""The user's request for a launch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import list_steps
from megasdc.common.errors import ConfigError
from megasdc.config.load import load_config

DEFAULT_SCRIPT = Path(__file__).resolve().parents[2] / "entry" / "pretrain_gpt.py"
FAILURE_GRACE_S = 60.0


@dataclass(frozen=True)
class UserProgram:
    """A training that is not megasdc's own, as on a command line after ``deepspeed`` and its options.

    Attributes:
        name: path of a Python script, or of a module for ``python -m``.
        is_module: whether it is the latter.
        arguments: of the program.
        run_dir: folder of records, health and events.
        watched: see ``enabled`` in the section `health` of ``megasdc.config.guard``, as the following.
        protect: word of the command line, which stands in place of that of the program's own guard; None: none.
        guard: settings of a guard for engines of a program that attaches none, as in JSON; None: they get none.
    """

    name: str
    is_module: bool
    arguments: tuple[str, ...]
    run_dir: str
    watched: bool
    hang_floor_s: float
    slow_floor_s: float
    hang_factor: float
    alert_command: tuple[str, ...]
    wait_for_room_s: float
    protect: str | None = None
    guard: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LaunchRequest:
    """The user's request; the names are those of ``megasdc launch``.

    Attributes:
        config_path: the run's JSON file; None: ``program`` is launched.
        hostfile: DeepSpeed's hostfile; None runs on this host only.
        num_gpus: ranks on each host; None means all slots of the hostfile.
        include: ``NAME[:SLOT[,SLOT...]][@NAME...]``, use only these.
        exclude: the same form, use all but these.
        launcher_args: further options for DeepSpeed's launcher.
        overrides: texts ``a.b.c=value``.
        allow_changed: paths ``a.b.c`` of fields that may differ on resume.
        failure_grace_s: seconds that other ranks get after one has failed.
        launch_id: by which its processes and records can be found; empty: a new one.
        ended: ids of launches of the same run whose end its supervisor has seen; their locks are taken over at once.
        program: a training that is not megasdc's own; None: ``script`` is launched with the configuration.
    """

    config_path: Path | None
    hostfile: Path | None = None
    num_gpus: int | None = None
    include: str = ""
    exclude: str = ""
    backend: str = "pdsh"
    launcher_args: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    allow_changed: tuple[str, ...] = ()
    script: Path = DEFAULT_SCRIPT
    failure_grace_s: float = FAILURE_GRACE_S
    launch_id: str = ""
    ended: tuple[str, ...] = ()
    program: UserProgram | None = None


def way_on(request: LaunchRequest, run_dir: Path) -> str:
    """What to do where a run was cut short: this process's command once more; empty: the run has done all its steps.

    From which step is said as the run folder has it here; ranks find out themselves what is newest.
    """
    command = shlex.join(["megasdc", *sys.argv[1:]])
    if request.config_path is None:
        return f"to start again, from what the script has saved: {command}"
    try:
        sections = load_config(request.config_path, request.overrides).megasdc
    except ConfigError as error:  # it was changed meanwhile, which is not how the run has ended
        return f"to go on, with what is wrong now mended ({error}): {command}"
    steps = list_steps(sections.checkpoint.folder or run_dir / "checkpoints")
    if steps and steps[-1] >= sections.training.steps:
        return ""
    return f"{f'to go on from step {steps[-1]}' if steps else 'no step was saved; to start again'}: {command}"
