"""Checks of what a run is given: configuration, data, hosts.

Checks of what hosts compute: against golden values, and of the spares, by ``megasdc stress``.

Checks by short runs on the hosts of the run: first steps, resume equality, cost of checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from megasdc.checkpoint.files import MANIFEST_FILE, step_folder
from megasdc.common.errors import CheckpointError, CorruptionError, DataError, LaunchError, StorageError
from megasdc.common.words import number_of
from megasdc.config.checks import check_layout, disturbances, find_warnings
from megasdc.config.deepspeed import MONITORS
from megasdc.config.repeatability import find_causes, find_startup_modules
from megasdc.data.manifest import DataManifest, check_folder, verify_prepared
from megasdc.events import read_events
from megasdc.metrics.writer import read_metrics
from megasdc.ops.launch.checks import inspect_hosts
from megasdc.ops.preflight.commands import COMPARE, Done
from megasdc.ops.preflight.job import Job, spares_only
from megasdc.ops.preflight.result import CheckStatus, PreflightFinding, not_done, with_warnings
from megasdc.ops.preflight.storage import available_bytes, too_small

MOST_BYTES = 64 << 30
"""Of data whose every byte is read; of more what a start reads: a few blocks of the tokens, and all of the rest."""
MIB = 1 << 20


def check_configuration(job: Job) -> PreflightFinding:
    """Look for settings that an unattended run hardly wants; it was loaded before."""
    sections, layout = job.config.megasdc, check_layout(job.config, job.num_ranks)
    warnings = find_warnings(job.config)
    if not job.plan.program.watched:
        warnings.append("megasdc.health.enabled: false: a run that is stuck is not ended")
    if not (sections.checkpoint.interval or sections.checkpoint.memory.interval):
        warnings.append("megasdc.checkpoint.interval: 0: a failure loses all that was done")
    warnings += disturbances(sections)
    text = (
        f"{number_of(layout.world_size, 'rank')} = tensor {layout.tensor} x pipeline {layout.pipeline} "
        f"x data {layout.data}, {number_of(layout.train_batch_size, 'sample')} a step"
    )
    return with_warnings(text, warnings)


def check_data(job: Job) -> PreflightFinding:
    """Compare data with what was prepared, and count how often the run passes through them.

    Raises:
        DataError: they are damaged, missing, or less than a sample.
    """
    section = job.config.megasdc.data
    folders = [Path(folder) for folder in section.folders]
    manifests = [DataManifest.load(folder) for folder in folders]
    size = sum(record.size_bytes for manifest in manifests for record in manifest.files.values())
    is_whole = size <= MOST_BYTES
    if is_whole:
        _read_all(job, folders, size)
    else:
        for folder in folders:
            verify_prepared(folder)
    passes = _passes(job, manifests)
    how = "every byte" if is_whole else "samples of the tokens, all of the rest (megasdc verify-data reads all)"
    text = f"{decimal(size)} unchanged, {how}; {passes:,.2f} passes in {job.config.megasdc.training.steps:,} steps"
    warnings = [f"the data are repeated {passes:,.1f} times"] if passes > 1 else []
    return with_warnings(text, warnings, {"bytes": size, "passes": passes, "every_byte": is_whole})


def _read_all(job: Job, folders: list[Path], size: int) -> None:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        job.on_progress("data, MiB", done // MIB, -(-size // MIB))

    reports = [check_folder(folder, advance) for folder in folders]
    if problems := [problem for report in reports for problem in report.problems]:
        raise DataError(f"{'; '.join(problems)}; mend them, or prepare them again: `megasdc verify-data FOLDER`")


def _passes(job: Job, manifests: list[DataManifest]) -> float:
    """How often the run passes through its training samples, those of a blend that are repeated most."""
    section = job.config.megasdc.data
    needed = check_layout(job.config, job.num_ranks).train_batch_size * job.config.megasdc.training.steps
    needed += sum(end - first for first, end in section.skip)
    weights = [part.weight for part in section.blend] or [1.0]
    found = 0.0
    for folder, manifest, weight in zip(section.folders, manifests, weights, strict=True):
        samples = (manifest.splits["train"].num_tokens - 1) // section.sequence_length
        if samples < 1:
            raise DataError(
                f"{folder} has {manifest.splits['train'].num_tokens:,} tokens to train on, fewer than one sample of "
                f"megasdc.data.sequence_length {section.sequence_length}; prepare more text, or set that lower"
            )
        found = max(found, needed * weight / sum(weights) / samples)
    return found


def check_hosts(job: Job) -> PreflightFinding:
    """Ask all hosts, as a launch does; what is wrong with a spare is a warning, since the run can begin.

    Raises:
        LaunchError: the run cannot start on its hosts.
        DataError, StorageError: data differ, or folders of the run cannot be written there, and nothing else is wrong.
    """
    report = inspect_hosts(job.plan.placement, job.plan.transport, job.plan.needs)
    if report.problems:
        raise report.error("; ".join(report.problems))
    where = "this host" if not job.plan.placement.remote else f"{len(job.slots)} hosts"
    versions = next(iter(report.facts.values()))["versions"]
    ranks = f"{job.num_ranks} rank{'s' if job.num_ranks > 1 else ''}"
    text = f"{where}, {ranks}, torch {versions['torch']}, deepspeed {versions['deepspeed']}"
    if not job.spares:
        return with_warnings(text, [])
    plan = spares_only(job.plan, job.spares)
    trusted = job.plan.placement.hosts
    both = replace(plan.placement, slots={**plan.placement.slots, **job.plan.placement.slots})
    found = inspect_hosts(both, plan.transport, plan.needs, trusted=trusted).found
    warnings = [one.text for one in found if not set(one.hosts) <= set(trusted)]
    counts = set(job.slots.values())
    for host, count in job.spares.items():
        if counts != {count}:
            others = ", ".join(map(str, sorted(counts)))
            warnings.append(f"{host} has slots={count}, hosts of the run {others}: with it the layout is another one")
    spares = f"{len(job.spares)} spare{'s' if len(job.spares) > 1 else ''}"
    return with_warnings(f"{text}; {spares}{', not all fit' if warnings else ''}", warnings)


GOLDEN_TESTS = "gemm,training"
TESTS = "collectives,gemm,training"
LINKS = ",links"
NO_ANSWER, HEALTHY, BY_GOLDEN = "not tested", "healthy", "golden values"
"""Words of a verdict of ``megasdc stress``."""


def check_golden(job: Job) -> PreflightFinding:
    """Compare what all hosts compute with golden values."""
    folder = _golden(job)
    if folder is None:
        return not_done(
            "no golden values: `megasdc stress --record --golden FOLDER` on a trusted host, then --golden FOLDER or "
            "megasdc.supervise.golden"
        )
    hosts = {**job.slots, **job.spares}
    found = _stress(job, "golden", hosts, 1, GOLDEN_TESTS, folder)
    if isinstance(found, PreflightFinding):
        return found
    tested = [host for host in found["hosts"] if host["status"] != NO_ANSWER]
    without = [host["host"] for host in tested if BY_GOLDEN not in host["rests_on"].values()]
    warnings = [f"no golden values for the devices of {', '.join(without)}"] if without else []
    text = f"{len(tested) - len(without)} of {len(hosts)} hosts compared with {folder}"
    finding = judged(found, job.spares, text, warnings)
    if finding.status is not CheckStatus.FAILED and len(without) == len(tested):
        return not_done(f"{text}: it has no values for their devices, `megasdc stress --record` there adds them")
    return finding


def check_spares(job: Job) -> PreflightFinding:
    """Test the spares, or all hosts, as they are tested while a run is supervised."""
    hosts = {**job.slots, **job.spares} if job.request.stress_all else job.spares
    if not hosts:
        return not_done(
            "there are no spares: a hostfile of more hosts than megasdc.supervise.num_hosts; --stress-all tests all"
        )
    tests = TESTS + (LINKS if job.request.stress_all and len(hosts) > 1 else "")
    rounds = job.config.megasdc.supervise.test_rounds
    found = _stress(job, "spares", hosts, rounds, tests, _golden(job))
    if isinstance(found, PreflightFinding):
        return found
    what = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}, {rounds} rounds of {tests.replace(',', ', ')}"
    links = found.get("links")
    slow = [] if links is None or found["exit_code"] == 0 else ["a link is slow or was not measured"]
    return judged(found, job.spares, what, slow)


def _golden(job: Job) -> Path | None:
    named = job.config.megasdc.supervise.golden
    return job.request.golden or (None if named is None else Path(named))


def _stress(
    job: Job, name: str, hosts: dict[str, int], rounds: int, tests: str, golden: Path | None
) -> dict[str, Any] | PreflightFinding:
    """The result of a test of hosts; a finding where there is none."""
    port = job.plan.transport.ssh_port
    done = job.commands.run(
        name,
        [
            *("stress", "--json", "--rounds", str(rounds), "--only", tests, *job.hostfile(hosts, name)),
            *(() if golden is None else ("--golden", str(golden))),
            *(() if port is None else ("--ssh-port", str(port))),
        ],
    )
    if done.value is None:
        return PreflightFinding(CheckStatus.FAILED, done.cause, done.exit_code or LaunchError.exit_code)
    found: dict[str, Any] = done.value
    return found


def judged(found: dict[str, Any], spares: Collection[str], text: str, warnings: list[str]) -> PreflightFinding:
    """What follows from a test of hosts; a spare that could not be tested is a warning, since the run can begin.

    Args:
        found: what ``megasdc stress --json`` prints.
        spares: hosts that the run does not begin on.
        text: what was tested.
        warnings: what else is known.
    """
    figures = {"hosts": {host["host"]: host["status"] for host in found["hosts"]}}
    said = {
        host["host"]: f"{host['host']} is {host['status']}: {'; '.join(reason['text'] for reason in host['reasons'])}"
        for host in found["hosts"]
        if host["status"] != HEALTHY
    }
    wrong = [host for host, status in figures["hosts"].items() if status not in (HEALTHY, NO_ANSWER)]
    unknown = [host for host, status in figures["hosts"].items() if status == NO_ANSWER]
    failing = [*wrong, *(host for host in unknown if host not in spares)]
    if failing:
        code = CorruptionError.exit_code if wrong else LaunchError.exit_code
        told = "; ".join([text, *(said[host] for host in failing), "take them out of the hostfile"])
        return PreflightFinding(CheckStatus.FAILED, told, code, figures)
    return with_warnings(text, [*(said[host] for host in unknown), *warnings], figures)


WHOLE, RESUMED = "whole", "resumed"
"""Run folders: of the run to the last step, and of the one that stops at half of them and goes on."""
DIFFERENT = 1
"""Documented exit code of comparisons."""
POINT = 0.01
"""Share of time that a configured interval of checkpoints may lose against the best without a warning."""
MEMORY_WARNINGS = ("memory_without_partners", "memory_not_kept")
HOUR_S = 3600


def check_steps(job: Job) -> PreflightFinding:
    """Train a few steps with the hosts, layout and data of the run."""
    memory = job.config.megasdc.checkpoint.memory
    values = {"megasdc.checkpoint.memory": "{}"}
    if memory.interval:
        interval = min(memory.interval, max(1, job.steps // 4))
        values = {"megasdc.checkpoint.memory.interval": str(interval), "megasdc.checkpoint.memory.linger_s": "0"}
    done = _launch(job, WHOLE, WHOLE, job.steps, values)
    if done.exit_code:
        return PreflightFinding(CheckStatus.FAILED, done.cause, done.exit_code)
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


def check_resume(job: Job) -> PreflightFinding:
    """Stop a second run at half of the steps, resume it, and compare its last checkpoint with that of the first."""
    half = job.steps // 2
    if not half:
        return not_done("the run has one step, and two are needed")
    values = {"megasdc.checkpoint.memory": "{}"}  # what is resumed is the checkpoint on the disk
    for part, stop_step in (("before", half), ("after", job.steps)):
        done = _launch(job, f"{RESUMED}_{part}", RESUMED, stop_step, values)
        if done.exit_code:
            return PreflightFinding(CheckStatus.FAILED, f"{part} the stop at step {half}: {done.cause}", done.exit_code)
    run_dir = job.folder / RESUMED
    if half not in [one.step for one in read_events(run_dir, kind="resume", rank=0)]:
        return PreflightFinding(
            CheckStatus.FAILED, f"the run did not go on from step {half}", CheckpointError.exit_code
        )
    manifests = [_checkpoints(job, run) / step_folder(job.steps) / MANIFEST_FILE for run in (WHOLE, RESUMED)]
    if not all(map(Path.exists, manifests)):
        return not_done("checkpoints lie on the hosts alone: start the preflight on one of them")
    compared = job.commands.run("compare", ["--json", *map(str, manifests)], COMPARE)
    if compared.exit_code not in (0, DIFFERENT) or compared.value is None:
        return PreflightFinding(CheckStatus.FAILED, compared.cause, CheckpointError.exit_code)
    here = ", files of this host" if job.config.megasdc.checkpoint.storage == "node_local" else ""
    text = f"stopped at step {half} and resumed to {job.steps}"
    if compared.exit_code == 0:
        files = compared.value["num_files"]
        return with_warnings(f"{text}: checkpoints are bit-identical, {files:,} files{here}", [], {"same": True})
    first = compared.value["differences"][0]
    where = f"{text}: the checkpoints differ{here}, first in {first['file']}: {first['name'] or first['detail']}"
    if reasons := _may_differ(job):
        return with_warnings(where, [f"that can be: {'; '.join(reasons)}"], {"same": False})
    return PreflightFinding(CheckStatus.FAILED, where, DIFFERENT, {"same": False})


def _may_differ(job: Job) -> list[str]:
    """Why runs of this configuration may differ; none: they must not."""
    causes = find_causes(job.config, os.environ, find_startup_modules(), cuda=False)
    found = [f"{one.place}: {one.text}" for one in causes if one.between == "runs"]
    if not job.config.megasdc.determinism.enabled:
        found.insert(0, "megasdc.determinism.enabled is false; with true, runs repeat bit for bit")
    return found


def check_cost(job: Job) -> PreflightFinding:
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
        return PreflightFinding(CheckStatus.FAILED, f"{text}; {problem}", StorageError.exit_code, figures)
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
