"""Weights & Biases: one of its runs for each start of a run, in a group of the run's id.

A run of W&B drops what it gets of steps that it already has, so steps that are done again after a resume are in a run
of their own. ``WANDB_MODE=offline`` writes to the run folder alone, for ``wandb sync``.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import logging
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import megasdc
from megasdc.common.durable import write_durably
from megasdc.metrics.incidents import UNREADABLE, IncidentFile, list_incidents, read_incident
from megasdc.metrics.sinks.sink import Sink, Values, number_of_value

TOLD_FILE = "told_incidents.json"
"""Incidents that W&B was told of, in the folder ``wandb`` of the run folder."""
GIT_LIMIT_S = 10.0
FINISH_S = 120.0
"""Seconds that W&B may take at the end to send what is left; it repeats for hours where its server does not answer."""
FORGET_S = 5.0
"""Seconds that it may take to forget its process once that was ended."""
SERVICE = "wandb-core"
"""Name of W&B's own process, a child of this one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WandbRun:
    """A run of W&B.

    Args:
        folder: in which its folder ``wandb`` lies.
        run: id of our run, the default of its group.
        name: what the id and the name of this one add to that, such as the number of the start.
        project: of W&B.
        team: entity of W&B; None: that of the login.
        group: None: the run's id.
        config: resolved configuration, without secrets.
        tags: shown beside its name.
        mode: ``offline``; None: as ``WANDB_MODE`` says, else online.
    """

    folder: Path
    run: str
    name: str
    project: str
    team: str | None
    group: str | None
    config: Mapping[str, Any]
    tags: tuple[str, ...]
    mode: str | None = None


class WandbSink(Sink):
    """Logs each line under its step and time, and tells of incidents in the run folder.

    Args:
        where: the run of W&B.
        incidents: run folder whose incidents are told of; None: none are.

    Raises:
        Exception: of W&B, where it cannot start.
    """

    name = "wandb"

    def __init__(self, where: WandbRun, incidents: Path | None) -> None:
        wandb: Any = importlib.import_module("wandb")  # may be absent, also where types are checked
        self._wandb, self._incidents = wandb, incidents
        self._told_path = where.folder / "wandb" / TOLD_FILE
        self._run = wandb.init(
            project=where.project,
            entity=where.team,
            group=where.group or where.run,
            id=f"{where.run}-{where.name}",
            name=f"{where.run} {where.name}",
            config={**where.config, "megasdc_commit": source_commit()},
            tags=where.tags,
            dir=str(where.folder),
            mode=where.mode,
            settings=wandb.Settings(console="off", silent=True, init_timeout=60.0),
        )
        self._run.define_metric("train/tokens")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._tell_incidents()

    def write(self, step: int, at: float, values: Values) -> None:
        """Log the line; W&B merges lines of one step."""
        numbers = {name: number_of_value(value) for name, value in values.items()}
        self._run.log({**numbers, "step": step, "_timestamp": at}, step=step)
        self._tell_incidents()

    def close(self) -> None:
        """Tell of new incidents, and wait until W&B has all.

        Raises:
            TimeoutError: it does not take it in time.
        """
        self._tell_incidents()
        folder = Path(self._run.dir).parent
        if not _within(FINISH_S, self._finish):
            _kill_service()
            with contextlib.suppress(OSError, RuntimeError):  # W&B forgets the process that was killed
                _within(FORGET_S, self._teardown)
            raise TimeoutError(f"W&B has not taken all within {FINISH_S:g} s; `wandb sync {folder}` sends the rest")

    def _tell_incidents(self) -> None:
        """Alert of each incident that W&B was not told of, by this start or an earlier one, and keep its files."""
        found = [] if self._incidents is None else list_incidents(self._incidents)
        if not found:
            return
        told: list[str] = json.loads(self._told_path.read_text()) if self._told_path.exists() else []
        for path in found:
            if path.name not in told:
                self._tell(path.stem, read_incident(path))
                told.append(path.name)
                write_durably(self._told_path, json.dumps(told) + "\n")

    def _tell(self, name: str, incident: IncidentFile) -> None:
        if incident.title == UNREADABLE:
            logger.warning("incident: %s", incident.text)
        self._run.alert(incident.title, incident.text, level=self._wandb.AlertLevel.ERROR, wait_duration=0)
        artifact = self._wandb.Artifact(name, type="incident", description=incident.text)
        for path in incident.files:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def _finish(self) -> None:
        self._run.finish()
        self._teardown()  # an offline run's file is whole only when W&B's own process has ended (0.26)

    def _teardown(self) -> None:
        try:
            self._wandb.teardown()
        except SystemExit as ended:  # so W&B says that its process failed; the run goes on
            raise RuntimeError(f"W&B's own process ended with code {ended.code}") from ended


def _within(limit_s: float, action: Callable[[], None]) -> bool:
    """Do something that may never end, in a thread; returns whether it has ended in time. Raises what it raises."""
    problems: list[Exception] = []

    def act() -> None:
        try:
            action()
        except Exception as error:  # raised below, where somebody hears it
            problems.append(error)

    thread = threading.Thread(target=act, name="finish", daemon=True)
    thread.start()
    thread.join(limit_s)
    if problems:
        raise problems[0]
    return not thread.is_alive()


def _kill_service() -> None:
    """End W&B's own process, which is waited for at the end of this one; what it has not sent lies in its folder."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == SERVICE:
                process.kill()


def shown_config(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration without what may be secret: Comet's key, and the command of alerts."""
    shown = copy.deepcopy(dict(resolved))
    shown.get("comet", {}).pop("api_key", None)
    shown.get("megasdc", {}).get("health", {}).pop("alert_command", None)
    return shown


def source_commit() -> str | None:
    """Commit of the repository that megasdc's source lies in; None: it lies in none, or git is not installed."""
    folder = str(Path(megasdc.__file__).parent)
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
