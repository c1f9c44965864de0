"""Triage of a step of a run: replays it, compares bits, looks at its documents, gradients and updates, and decides.

What devices and hosts of a run reported when it took a step, as the agents of its hosts wrote it.

Replays of steps of a run: the same steps from a checkpoint before them, in a folder of their own, recorded whole.

A replay is an ordinary launch with the run's configuration as it was in that step, but without injected faults and
delays, without trackers and archives, and with a trace and ``trace.details``. The checkpoint lies in its folder as
links to the run's files, which nobody writes; nothing is written in the run's own folders.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import step_folder
from megasdc.common.errors import (
    CheckpointError,
    CorruptionError,
    DataError,
    LaunchError,
    StorageError,
    TraceError,
    error_of_rank,
)
from megasdc.config.checks import check_layout
from megasdc.config.load import RunConfig, parse_config
from megasdc.dropcompute.gate import DECISIONS_FILE, DecisionLog, StepDecisions
from megasdc.lab.traces.traces import RunTraces, TraceReport, compare_traces_of_runs, load_traces
from megasdc.lab.triage.conclusion import (
    StepComparison,
    StepEvidence,
    TriageConclusion,
    decide_triage,
    find_far,
    find_far_samples,
    find_large_updates,
)
from megasdc.lab.triage.positions import RunPast
from megasdc.lab.triage.step_data import StepData, Wanted, data_of_run, read_past
from megasdc.lab.triage.step_settings import configs_of_starts
from megasdc.metrics.writer import StepDetails, read_details, read_metrics
from megasdc.ops.launch.front import launch_run
from megasdc.ops.launch.hosts import read_hostfile
from megasdc.ops.launch.request import LaunchRequest
from megasdc.output.page import plain_values

FIT = "fit"


@dataclass(frozen=True)
class DeviceReport:
    """One device, or the host itself, that was not fit or whose counters had grown.

    Args:
        node: index of the host.
        ranks: that ran there.
        text: why it was not fit; empty: it was.
        counters: what was added to them since the start, by name.
    """

    node: int
    ranks: list[int]
    name: str
    verdict: str
    text: str
    counters: dict[str, Any]


def devices_at(run: Path, step: int) -> list[DeviceReport]:
    """Reports of all hosts, from the first line at the step or after it; of the last time that the step was taken.

    Empty where no agent wrote, or nothing was amiss.
    """
    found: list[DeviceReport] = []
    for path in sorted((run / "health").glob("node_*.jsonl")):
        chosen, reached = None, False
        for line in _lines(path):
            now = max((int(rank["step"]) for rank in line["ranks"]), default=0) >= step
            if now and not reached:
                chosen = line
            reached = now
        if chosen is not None:
            found += _reports(int(path.stem.rpartition("_")[2]), chosen)
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines that can be read; a torn or damaged one tells nothing."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("ranks"), list):
            yield line


def _reports(node: int, line: dict[str, Any]) -> Iterator[DeviceReport]:
    ranks = sorted(int(rank["rank"]) for rank in line["ranks"])
    for device in line.get("devices", ()):
        xids = {f"XID {number}": count for number, count in device.get("xid_counts", {}).items()}
        counters = {**device.get("since_start", {}), **xids}
        if device["verdict"] != FIT or counters:
            yield DeviceReport(node, ranks, device["name"], device["verdict"], device["text"], counters)


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
    raw = plan.config.in_folder(folder)
    sections = raw["megasdc"]
    audit = sections["audit"]
    sections["logging"] |= {"interval": 1, "progress_bar": False}
    sections["training"] |= {"stop_step": plan.last, "time_limit_s": None, "eval_interval": 0}
    sections["checkpoint"] |= {"resume": "auto", "keep_last": 0, "require_verified": "never"}
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


TRIAGE_FOLDER = "triage"
BEFORE = 100
"""Lines of metrics before a step that say what is usual."""
COMPARED = ("train/grad_norm", "train/loss")
_EXPLAINING = ("device", "threads", "versions")
"""Headers of traces whose difference may be why bits differ."""


@dataclass(frozen=True)
class Triage:
    """Result of a triage.

    Args:
        since: step of the checkpoint that the replays began from; 0: the run's beginning.
        hosts: of each replay.
        step_details: of the first replay; None: it was ended by its checks.
        data: documents of the step.
        devices: that reported something when the run took the step; it is context, and decides nothing.
    """

    run: str
    step: int
    since: int
    folder: str
    hosts: list[list[str]]
    conclusion: TriageConclusion
    evidence: StepEvidence
    step_details: StepDetails | None
    data: StepData
    devices: list[DeviceReport]

    def as_dict(self) -> dict[str, Any]:
        """As plain values; NaN and infinities are None."""
        return plain_values(asdict(self))


def triage_step(run: Path, step: int, *, hostfile: Path | None = None, second_hostfile: Path | None = None) -> Triage:
    """Replay a step twice and decide what made it what it was.

    Args:
        run: its folder; replays are written to ``triage/step_N`` in it.
        hostfile: hosts of the replays; None: this one.
        second_hostfile: hosts of the second replay; None: those of the first.

    Raises:
        DataError: the folder holds no run, or the step was not run.
        CheckpointError: no checkpoint that is left leads to the step.
        LaunchError: a replay cannot be started.
        MegasdcError: a replay failed; of the class of the rank that failed first.
        StorageError: the folder cannot be written.
    """
    config, past = read_past(run)
    if step > past.last_step:
        raise DataError(f"step {step} was asked for, {run} is known to have run up to step {past.last_step}")
    data = data_of_run(run, Wanted(step, text=True))
    plan = _plan(run, config, past, step)
    first = replay(plan, 1, hostfile)
    second = None if first.found else replay(plan, 2, second_hostfile or hostfile)
    same_hosts = second is None or second.hosts == first.hosts
    evidence = _evidence(past, plan, step, first, second, same_hosts)
    return Triage(
        run=str(run),
        step=step,
        since=plan.since,
        folder=str(plan.folder),
        hosts=[one.hosts for one in (first, second) if one is not None],
        conclusion=decide_triage(evidence),
        evidence=evidence,
        step_details=first.details.get(step),
        data=data,
        devices=devices_at(run, step),
    )


def _plan(run: Path, config: RunConfig, past: RunPast, step: int) -> ReplayPlan:
    """What the replays of a step are: from which checkpoint, with which configuration, and how far."""
    starts = past.history.starts
    own = max(place for place, start in enumerate(starts) if start.step < step)
    changed = max((start.step for start in starts[: own + 1] if start.changed), default=starts[0].step)
    saved = [
        one
        for one in past.history.saved
        if changed <= one < step and (past.checkpoints / step_folder(one) / "manifest.json").is_file()
    ]
    if not saved and changed != starts[0].step:
        raise CheckpointError(
            f"{run}: no checkpoint of steps {changed} to {step - 1} is left in {past.checkpoints}, and the "
            f"configuration was changed at step {changed}, so that the step cannot be replayed; keep more of them "
            "with megasdc.checkpoint.keep_last"
        )
    own_config = configs_of_starts(config, starts)[own]
    if saved and own_config.megasdc.checkpoint.storage == "node_local":
        raise CheckpointError(
            f'{run}: megasdc.checkpoint.storage is "node_local", so that its checkpoints are not in one folder, from '
            "which a step could be replayed; copy those of all nodes into one folder of a run with shared storage"
        )
    parallel, settings = own_config.megasdc.parallel, past.settings[own]
    logged = [int(row["step"]) for row in past.rows if "train/loss" in row and row["step"] >= step]
    last = min(logged, default=step)
    if any(start.changed and step <= start.step < last for start in starts):
        last = step  # what was logged next was of other settings
    return ReplayPlan(
        config=own_config,
        run=run,
        checkpoints=past.checkpoints,
        folder=run / TRIAGE_FOLDER / f"step_{step:08d}",
        since=saved[-1] if saved else starts[0].step,
        links=bool(saved),
        last=last,
        world_size=settings.data * parallel.tensor * parallel.pipeline,
        decisions=_decisions(past, own_config, last) if settings.drops.enabled else None,
        allow_changed=tuple(starts[own].flagged),
    )


def _decisions(past: RunPast, config: RunConfig, last: int) -> dict[int, StepDecisions]:
    """Those of the steps up to ``last``; nothing is dropped in others, which may be of another granularity."""
    settings, found = past.settings[-1], {step: one for step, one in past.decisions.items() if step <= last}
    for step in range(1, max(config.megasdc.training.steps, past.last_step) + 1):
        all_of_them = (settings.micro_batches,) * settings.data
        found.setdefault(step, StepDecisions(settings.micro_batches, all_of_them))
    return found


def _evidence(
    past: RunPast, plan: ReplayPlan, step: int, first: Replay, second: Replay | None, same_hosts: bool
) -> StepEvidence:
    if first.found is not None or second is None or first.traces is None:
        return StepEvidence(StepComparison(0), True, StepComparison(0), found=first.found)
    if second.found is not None or second.traces is None:
        return StepEvidence(StepComparison(0), same_hosts, StepComparison(0), found=second.found)
    replays = compare_replays(first.traces, second.traces)
    details = first.details[step]
    before = [one for at, one in sorted(first.details.items()) if at < step]
    recorded = _recorded(past, plan, first)
    far = find_far({"loss": details.loss, "gradient norm": details.grad_norm}, _usual(past, step, before))
    return StepEvidence(
        replays=replays,
        same_hosts=same_hosts,
        recorded=recorded,
        far=far,
        samples=find_far_samples(details, before),
        num_samples=sum(len(one.losses) for one in details.samples),
        non_finite=[name for name, one in details.parameters.items() if one.non_finite],
        updates=find_large_updates(details, before),
    )


def compare_replays(first: RunTraces, second: RunTraces) -> StepComparison:
    """Compare two replays by their traces, result by result; the rank is that of the first that differs."""
    return _of_report(compare_traces_of_runs(first, second), second)


def _of_report(report: TraceReport, got: RunTraces) -> StepComparison:
    foreign = [note for note in report.notes if note.startswith(_EXPLAINING)]
    if report.same:
        return StepComparison(report.comparison.compared, foreign=foreign)
    one = report.comparison.first[0]
    host = str(got.headers[one.rank].get("host", "?"))
    text = f"{one.address} on rank {one.rank} ({host}); {len(report.comparison.divergences)} results differ"
    return StepComparison(report.comparison.compared, text, one.rank, host, foreign)


def _recorded(past: RunPast, plan: ReplayPlan, first: Replay) -> StepComparison:
    """The run's own trace and metrics against a replay: the trace where there is one that can be compared."""
    start = next(one for one in reversed(past.history.starts) if one.step < plan.last)
    assert first.traces is not None, "the replay went on to its end"
    here = first.traces.header["versions"]
    foreign = [
        f"{name}: {version} in the run, {here[name]} here"
        for name, version in start.versions.items()
        if name in here and here[name] != version
    ]
    numbers = compare_numbers(past.rows, first.rows, plan.since, plan.last)
    try:
        traced = _of_report(compare_traces_of_runs(load_traces(Path(past.name)), first.traces), first.traces)
    except TraceError as error:  # none was recorded, or of other settings: the numbers are what is left
        traced = StepComparison(0, note=f"no trace of the run was compared: {error}")
    return StepComparison(
        compared=traced.compared + numbers.compared,
        first=traced.first or numbers.first,
        rank=traced.rank,
        host=traced.host,
        foreign=list(dict.fromkeys([*traced.foreign, *foreign])),
        note=traced.note,
    )


def compare_numbers(
    recorded: Sequence[Mapping[str, Any]], replayed: Mapping[int, Mapping[str, Any]], since: int, last: int
) -> StepComparison:
    """Compare the gradient norms and losses that a run logged with those of a replay, bit by bit.

    A loss is compared where it is of one step: where the line before is of the step before.

    Args:
        recorded: lines of the run's metrics.
        replayed: those of the replay, which logged each step, by step.
        since: first step is the one after it.
        last: last step.
    """
    lines = [row for row in recorded if "train/loss" in row]
    compared = 0
    for place, row in enumerate(lines):
        step = int(row["step"])
        if not since < step <= last:
            continue
        is_alone = step == 1 or (place > 0 and lines[place - 1]["step"] == step - 1)
        for name in COMPARED if is_alone else COMPARED[:1]:
            theirs, ours = row.get(name), replayed[step].get(name)
            compared += 1
            if theirs != ours:
                return StepComparison(compared, f"{name} of step {step} is {ours!r}, recorded was {theirs!r}")
    return StepComparison(compared)


def _usual(past: RunPast, step: int, before: Sequence[StepDetails]) -> dict[str, list[float]]:
    """Losses and gradient norms of the steps before: as the run logged them, or as replayed where those are more."""
    names = {"loss": ("train/loss", "loss"), "gradient norm": ("train/grad_norm", "grad_norm")}
    rows = [row for row in past.rows if "train/loss" in row and row["step"] < step][-BEFORE:]
    found = {}
    for name, (metric, attribute) in names.items():
        logged = [math.nan if row.get(metric) is None else float(row[metric]) for row in rows]
        replayed = [float(getattr(one, attribute)) for one in before]
        found[name] = logged if len(logged) >= len(replayed) else replayed
    return found
