"""Replays of steps of a run: the same steps from a checkpoint before them, in a folder of their own, recorded whole.

A replay is an ordinary launch with the run's configuration as it was in that step, but without injected faults and
delays, without trackers and archives, and with a trace and ``trace.details``. The checkpoint lies in its folder as
links to the run's files, which nobody writes; nothing is written in the run's own folders.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import step_folder
from megasdc.common.errors import CorruptionError, LaunchError, StorageError, error_of_rank
from megasdc.config import RunConfig, check_layout, parse_config
from megasdc.dropcompute.decisions import DECISIONS_FILE, DecisionLog, StepDecisions
from megasdc.lab.traces.traces import RunTraces, load_traces
from megasdc.metrics.details import StepDetails, read_details
from megasdc.metrics.writer import read_metrics
from megasdc.ops.launch.front import launch_run
from megasdc.ops.launch.hosts import read_hostfile
from megasdc.ops.launch.request import LaunchRequest

MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


@dataclass(frozen=True)
class ReplayPlan:
    """What replays have in common.

    Args:
        config: the run's, of the step.
        run: folder of the run.
        checkpoints: folder of its checkpoints.
        folder: where replays are made.
        since: step of the checkpoint to begin from; 0 or that of ``checkpoint.universal``: as the run began.
        links: whether there is such a checkpoint in ``checkpoints``.
        last: step after which a replay ends.
        world_size: number of ranks.
        decisions: micro-batches that each step starts, of all steps of the run; None: all.
        allow_changed: fields that may differ from the checkpoint, as they did in the run.
    """

    config: RunConfig
    run: Path
    checkpoints: Path
    folder: Path
    since: int
    links: bool
    last: int
    world_size: int
    decisions: dict[int, StepDecisions] | None
    allow_changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replay:
    """What a replay recorded.

    Args:
        details: of each of its steps.
        rows: its metrics, by step.
        found: what its checks found, which ended it; None: it went on to its end.
    """

    folder: Path
    hosts: list[str]
    traces: RunTraces | None
    details: dict[int, StepDetails]
    rows: dict[int, dict[str, Any]]
    found: str | None = None


def replay(plan: ReplayPlan, number: int, hostfile: Path | None) -> Replay:
    """Replay the steps, and read what was recorded; an earlier replay of this number is replaced.

    Args:
        hostfile: hosts to run on; None: this one.

    Raises:
        LaunchError: it cannot be started here.
        MegasdcError: of the class of the rank that failed first.
        StorageError: the folder cannot be written.
    """
    if hostfile is not None and (slots := sum(read_hostfile(hostfile).values())) != plan.world_size:
        raise LaunchError(f"{hostfile} has {slots} slots, {plan.run} has {plan.world_size} ranks; give as many")
    folder = plan.folder / f"replay_{number}"
    file = plan.folder / f"replay_{number}.json"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if plan.links:
            name = step_folder(plan.since)
            shutil.copytree(plan.checkpoints / name, folder / "checkpoints" / name, copy_function=_link)
        if plan.decisions is not None:
            _write_decisions(plan, plan.decisions)
        file.write_text(json.dumps(_config(plan, folder).resolved(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{plan.folder} cannot be written: {error}; replays lie in the run folder") from error
    ranks = plan.world_size if hostfile is None else None
    request = LaunchRequest(file.absolute(), hostfile=hostfile, num_gpus=ranks, allow_changed=plan.allow_changed)
    result = launch_run(request, quiet=True)
    hosts, text = list(result.hosts), "; ".join(result.lines)
    if result.exit_code == CorruptionError.exit_code:
        return Replay(folder, hosts, None, {}, {}, text)
    if result.exit_code:
        raise error_of_rank(result.exit_code)(f"the replay in {folder} failed: {text}")
    rows = {int(row["step"]): row for row in read_metrics(folder) if "train/loss" in row}
    return Replay(folder, hosts, load_traces(folder), read_details(folder), rows)


def _link(source: str, target: str) -> str:
    """Link a file of a checkpoint; copied where the file system or the place does not let it be linked."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _write_decisions(plan: ReplayPlan, decisions: dict[int, StepDecisions]) -> None:
    """The run's decisions, in a file as long as a replay needs."""
    path = plan.folder / DECISIONS_FILE
    path.unlink(missing_ok=True)
    data = len(next(iter(decisions.values())).completed)
    log = DecisionLog(plan.folder, 0, data, check_layout(plan.config, plan.world_size).accumulation_steps)
    for step, one in sorted(decisions.items()):
        log.add(step, one)
    log.close()


def _config(plan: ReplayPlan, folder: Path) -> RunConfig:
    """The configuration of a replay."""
    raw = {key: value for key, value in plan.config.resolved().items() if key not in MONITORS}
    sections = raw["megasdc"]
    audit = sections["audit"]
    sections["logging"] |= {"run_dir": str(folder), "interval": 1, "prometheus": None, "progress_bar": False}
    sections["training"] |= {"stop_step": plan.last, "time_limit_s": None, "eval_interval": 0}
    sections["checkpoint"] |= {"folder": None, "resume": "auto", "keep_last": 0, "require_verified": "never"}
    sections["checkpoint"]["memory"] |= {"interval": 0, "partners": False}
    sections["checkpoint"]["archive"] |= {"address": None}
    if not (audit["enabled"] and audit["verify_checkpoints"]):  # with it, saves decide which steps are audited
        sections["checkpoint"]["interval"] = 0
    sections["health"] |= {"alert_command": []}
    sections["trace"] |= {"enabled": True, "details": True}
    sections |= {"faults": [], "process_faults": [], "delay": []}
    if plan.decisions is not None:
        sections["drop_compute"] |= {"replay_decisions": str(plan.folder / DECISIONS_FILE), "record_times": False}
    return parse_config(raw, source=plan.config.source, stored=True)
