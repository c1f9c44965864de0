"""Weights & Biases: one of its runs for each start of a run, in a group of the run's id.

A run of W&B drops what it gets of steps that it already has, so steps that are done again after a resume are in a run
of their own. ``WANDB_MODE=offline`` writes to the run folder alone, for ``wandb sync``.
"""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megasdc
from megasdc.durable import write_durably
from megasdc.metrics.incidents import IncidentFile, list_incidents, read_incident
from megasdc.metrics.sinks.sink import Sink, Values, number

TOLD_FILE = "told_incidents.json"
"""Incidents that W&B was told of, in the folder ``wandb`` of the run folder."""
GIT_LIMIT_S = 10.0


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
        numbers = {name: number(value) for name, value in values.items()}
        self._run.log({**numbers, "step": step, "_timestamp": at}, step=step)
        self._tell_incidents()

    def close(self) -> None:
        """Tell of new incidents, and wait until W&B has all."""
        self._tell_incidents()
        self._run.finish()
        self._wandb.teardown()  # an offline run's file is whole only when W&B's own process has ended (0.26)

    def _tell_incidents(self) -> None:
        """Alert of each incident that W&B was not told of, by this start or an earlier one, and keep its files."""
        found = [] if self._incidents is None else list_incidents(self._incidents)
        if not found:
            return
        told: list[str] = json.loads(self._told_path.read_text()) if self._told_path.exists() else []
        for path in found:
            if path.name not in told:
                self._tell(read_incident(path))
                told.append(path.name)
                write_durably(self._told_path, json.dumps(told) + "\n")

    def _tell(self, incident: IncidentFile) -> None:
        self._run.alert(incident.title, incident.text, level=self._wandb.AlertLevel.ERROR, wait_duration=0)
        artifact = self._wandb.Artifact(incident.path.stem, type="incident", description=incident.text)
        for path in (incident.path, incident.page):
            if path is not None:
                artifact.add_file(str(path))
        self._run.log_artifact(artifact)


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
