"""Checks by short runs on the hosts of the run: first steps, resume equality, cost of checkpoints."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from megasdc.checkpoint.files import MANIFEST_FILE, step_folder
from megasdc.common.errors import CheckpointError, LaunchError, StorageError
from megasdc.config.repeatability import find_causes, find_startup_modules
from megasdc.events import read_events
from megasdc.metrics.writer import read_metrics
from megasdc.ops.preflight.commands import COMPARE, Done
from megasdc.ops.preflight.job import Job
from megasdc.ops.preflight.result import Finding, Status, not_done, with_warnings
from megasdc.ops.preflight.storage import available_bytes, too_small

WHOLE, RESUMED = "whole", "resumed"
"""Run folders: of the run to the last step, and of the one that stops at half of them and goes on."""
DIFFERENT = 1
"""Documented exit code of comparisons."""
POINT = 0.01
"""Share of time that a configured interval of checkpoints may lose against the best without a warning."""
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")
MEMORY_WARNINGS = ("memory_without_partners", "memory_not_kept")
HOUR_S = 3600


def check_steps(job: Job) -> Finding:
    """Train a few steps with the hosts, layout and data of the run."""
    memory = job.config.megasdc.checkpoint.memory
    values = {"megasdc.checkpoint.memory": "{}"}
    if memory.interval:
        interval = min(memory.interval, max(1, job.steps // 4))
        values = {"megasdc.checkpoint.memory.interval": str(interval), "megasdc.checkpoint.memory.linger_s": "0"}
    done = _launch(job, WHOLE, WHOLE, job.steps, values)
    if done.exit_code:
        return Finding(Status.FAILED, done.cause, done.exit_code)
    rows = _rows(job, WHOLE)
    if not rows:
        raise LaunchError(f"no step was reported in {job.folder / WHOLE}: this host must see the run folder of rank 0")
    step_s = statistics.median(row["speed/step_s"] for row in rows)
    tokens_per_s = statistics.median(row["speed/tokens_per_s"] for row in rows)
    whole_s = step_s * job.config.megasdc.training.steps
    losses = [math.nan if row["train/loss"] is None else row["train/loss"] for row in rows]
    text = (
        f"{len(rows)} steps, {step_s:,.3f} s each, {tokens_per_s:,.0f} tokens/s, loss {losses[0]:.3f} to "
        f"{losses[-1]:.3f}; all {job.config.megasdc.training.steps:,} steps would take {whole_s / HOUR_S:,.2f} h"
    )
    return with_warnings(text, [], {"steps": len(rows), "step_s": step_s, "tokens_per_s": tokens_per_s})


def check_resume(job: Job) -> Finding:
    """Stop a second run at half of the steps, resume it, and compare its last checkpoint with that of the first."""
    half = job.steps // 2
    if not half:
        return not_done("the run has one step, and two are needed")
    values = {"megasdc.checkpoint.memory": "{}"}  # what is resumed is the checkpoint on the disk
    for part, stop_step in (("before", half), ("after", job.steps)):
        done = _launch(job, f"{RESUMED}_{part}", RESUMED, stop_step, values)
        if done.exit_code:
            return Finding(Status.FAILED, f"{part} the stop at step {half}: {done.cause}", done.exit_code)
    run_dir = job.folder / RESUMED
    if half not in [one.step for one in read_events(run_dir, kind="resume", rank=0)]:
        return Finding(Status.FAILED, f"the run did not go on from step {half}", CheckpointError.exit_code)
    manifests = [_checkpoints(job, run) / step_folder(job.steps) / MANIFEST_FILE for run in (WHOLE, RESUMED)]
    if not all(map(Path.exists, manifests)):
        return not_done("checkpoints lie on the hosts alone: start the preflight on one of them")
    compared = job.commands.run("compare", ["--json", *map(str, manifests)], COMPARE)
    if compared.exit_code not in (0, DIFFERENT) or compared.value is None:
        return Finding(Status.FAILED, compared.cause, CheckpointError.exit_code)
    here = ", files of this host" if job.config.megasdc.checkpoint.storage == "node_local" else ""
    text = f"stopped at step {half} and resumed to {job.steps}"
    if compared.exit_code == 0:
        files = compared.value["num_files"]
        return with_warnings(f"{text}: checkpoints are bit-identical, {files:,} files{here}", [], {"same": True})
    first = compared.value["differences"][0]
    where = f"{text}: the checkpoints differ{here}, first in {first['file']}: {first['name'] or first['detail']}"
    if reasons := _may_differ(job):
        return with_warnings(where, [f"that can be: {'; '.join(reasons)}"], {"same": False})
    return Finding(Status.FAILED, where, DIFFERENT, {"same": False})


def _may_differ(job: Job) -> list[str]:
    """Why runs of this configuration may differ; none: they must not."""
    causes = find_causes(job.config, os.environ, find_startup_modules(), cuda=False)
    found = [f"{one.place}: {one.text}" for one in causes if one.between == "runs"]
    if not job.config.megasdc.determinism.enabled:
        found.insert(0, "megasdc.determinism.enabled is false; with true, runs repeat bit for bit")
    return found


def check_cost(job: Job) -> Finding:
    """Say what saves cost in the first short run, and advise on how often to save."""
    config = job.folder / "config.json"
    config.write_text(json.dumps(job.config.resolved()), encoding="utf-8")
    done = job.commands.run(
        "plan",
        [
            *("plan-checkpoints", "--json", "--trials", "0", "--run", str(job.folder / WHOLE), "--config", str(config)),
            *("--hosts", str(len(job.slots)), "--devices-per-host", str(max(job.slots.values()))),
        ],
    )
    if done.exit_code or done.value is None:
        return not_done(done.cause)
    costs, saves = done.value["job"]["costs"], _values(job, "checkpoint/bytes")
    size, memory_s = statistics.median(saves), costs["memory_stall_s"]
    kept = (
        "memory: no snapshots" if memory_s is None else f"memory: snapshots fit, training stands still {memory_s:.3f} s"
    )
    text = (
        f"{decimal(round(size))}, training stands still {costs['disk_stall_s']:,.2f} s, on the disk after "
        f"{costs['disk_duration_s']:,.2f} s; {kept}; {_advice(job, done.value)}"
    )
    best = done.value["best"]["intervals"]
    figures = {**costs, "checkpoint_bytes": size, "best_interval": best["disk"], "best_memory_interval": best["memory"]}
    if problem := too_small(job, size, available_bytes(job)):
        return Finding(Status.FAILED, f"{text}; {problem}", StorageError.exit_code, figures)
    return with_warnings(text, [*_cost_warnings(job, done.value)], figures)


def _advice(job: Job, plan: dict[str, Any]) -> str:
    best, own = plan["best"]["intervals"]["disk"], job.config.megasdc.checkpoint.interval
    rarely = best is None or best >= job.config.megasdc.training.steps
    every = "only at the end" if rarely else f"every {best:,.0f} steps"
    return f"least time is lost by saving {every} (failures as published: preset llama3), configured {own:,}"


def _cost_warnings(job: Job, plan: dict[str, Any]) -> list[str]:
    """What a person should change, or know."""
    found = [*plan["notes"]]
    if plan["own"] is not None and (lost := plan["best"]["expected"] - plan["own"]["expected"]) > POINT:
        found.append(f"megasdc.checkpoint.interval loses {lost:.1%} of the time more than the best")
    events = read_events(job.folder / WHOLE, kind="warning", rank=0)
    return [*found, *(one.fields["message"] for one in events if one.name in MEMORY_WARNINGS)]


def _launch(job: Job, name: str, run: str, stop_step: int, values: dict[str, str]) -> Done:
    """Launch a short run in the folder ``run`` up to a step.

    What it trains is what the whole run trains; it saves into folders of its own, and reports to nobody else.
    """
    sets = {
        "megasdc.training.stop_step": str(stop_step),
        "megasdc.training.time_limit_s": "null",
        "megasdc.logging.run_dir": json.dumps(str(job.folder / run)),
        "megasdc.logging.interval": "1",
        "megasdc.logging.prometheus": "null",
        "megasdc.health.alert_command": "[]",
        "megasdc.checkpoint.interval": str(max(1, job.steps // 2)),
        "megasdc.checkpoint.keep_last": "0",
        "megasdc.checkpoint.keep_every": "0",
        "megasdc.checkpoint.resume": '"auto"',
        "megasdc.checkpoint.resume_at_most": "null",
        "megasdc.checkpoint.require_verified": '"auto"',
        "megasdc.checkpoint.archive": "{}",
        **values,
        **{key: "{}" for key in MONITORS if key in job.config.deepspeed},
    }
    if job.checkpoints is not None:
        sets["megasdc.checkpoint.folder"] = json.dumps(str(_checkpoints(job, run)))
    request = job.plan.request
    ranks = ["--num-ranks", str(job.num_ranks)] if request.hostfile is None else ["--hostfile", str(request.hostfile)]
    arguments = ["launch", "--json", "--config", str(request.config_path), "--script", str(request.script), *ranks]
    arguments += [word for text in (*request.overrides, *map("=".join, sets.items())) for word in ("--set", text)]
    arguments += ["--", *request.launcher_args] if request.launcher_args else []

    def watch() -> None:
        job.on_progress(f"{name}, steps", len(_rows(job, run)), stop_step)

    return job.commands.run(name, arguments, watch=watch)


def _checkpoints(job: Job, run: str) -> Path:
    return job.folder / run / "checkpoints" if job.checkpoints is None else job.checkpoints / run


def _rows(job: Job, run: str) -> list[dict[str, Any]]:
    """Metrics of the steps of a short run."""
    return [row for row in read_metrics(job.folder / run) if "train/loss" in row]


def _values(job: Job, name: str) -> list[float]:
    return [row[name] for row in read_metrics(job.folder / WHOLE) if name in row]
