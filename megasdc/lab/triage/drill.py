"""Drill: the first steps of a run twice, once with a wrong computation; found, named, repaired, end bits equal?

Both runs are ordinary launches in folders of their own, with the preset ``protect`` at least as `standard`, but with an
audit of the step's own micro-batch in the step of the fault, so that nothing is left to chance. Nothing of the run
itself is read or changed but its data.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import step_folder
from megasdc.common.errors import ConfigError, CorruptionError, StorageError, error_of_rank
from megasdc.common.words import number_of
from megasdc.config.checks import check_layout, smallest_layout
from megasdc.config.detection import TRAINING
from megasdc.config.load import RunConfig, parse_config
from megasdc.config.protect import find_gaps
from megasdc.config.sections import OFF, STANDARD
from megasdc.events import Event, read_events
from megasdc.lab.checkpoints.pages.comparison import compare_paths
from megasdc.lab.checkpoints.report import Options
from megasdc.ops.launch.front import launch_run
from megasdc.ops.launch.hosts import read_hostfile
from megasdc.ops.launch.request import LaunchRequest
from megasdc.output.outcome import Outcome
from megasdc.output.page import Page
from megasdc.sdc.incident import Incident, load_incidents

NOT_PASSED = 1
"""Exit code of a drill whose fault was not found, named or repaired, or whose run has ended with other bits."""
CLEAN, FAULTY = "without_fault", "with_fault"
FAULT: dict[str, Any] = {
    "submodule": "*.mlp.linear_fc1",
    "phase": "backward",
    "replica": 1,
    "stage": 0,
    "tensor_rank": 0,
    "micro_batches": [0],
    "bits": "sign",
    "once": True,
}
"""The fault: one element of a gradient gets the other sign, once, which no check for NaN would notice."""


@dataclass(frozen=True)
class DrillPlan:
    """What both runs have in common.

    Args:
        config: the run's, with the preset.
        folder: where they are made.
        step: of the fault; both end after the one that follows.
        ranks: number of ranks.
        hostfile: their hosts; None: this one.
    """

    config: RunConfig
    folder: Path
    step: int
    ranks: int
    hostfile: Path | None


def plan_drill(
    config: RunConfig, step: int | None, ranks: int | None, hostfile: Path | None, folder: Path | None
) -> DrillPlan:
    """Check that a drill can be made.

    Args:
        config: the run's, see ``with_preset``.
        step: step of the fault; None: 7, or the last but one of a shorter run.
        ranks: number of ranks on this host; None: the fewest with two replicas.
        hostfile: hosts to run on instead.
        folder: where the runs are made; None: that of the run with ``_drill`` after its name.

    Raises:
        ConfigError: the layout does not fit, there is one replica alone, it is a study, or no audit is possible.
        LaunchError: the hostfile cannot be read.
    """
    sections = config.megasdc
    if sections.study.mode is not None:
        raise ConfigError(
            "megasdc.study.mode: a study injects its faults itself; make a drill of a run without", config.source
        )
    if not (sections.determinism.enabled and sections.audit.enabled):
        gap = next(find_gaps(sections, config.deepspeed))
        raise ConfigError(f"megasdc.audit.enabled: a drill needs audits, and this run has none: {gap}.", config.source)
    if hostfile is not None:
        ranks = sum(read_hostfile(hostfile).values())
    layout = smallest_layout(config, at_least=2) if ranks is None else check_layout(config, ranks)
    if layout.data < 2:
        raise ConfigError(
            f"megasdc.parallel: got {number_of(layout.world_size, 'rank')}, which make one replica; a drill names a "
            f"rank by comparing two: start at least {2 * layout.tensor * layout.pipeline} ranks",
            config.source,
        )
    last = sections.training.steps - 1
    if last < 1 or (step is not None and step > last):
        raise ConfigError(
            f"megasdc.training.steps: got {sections.training.steps}, and a fault in step {step or 1} with a step after "
            f"it needs {(step or 1) + 1}",
            config.source,
        )
    run_dir = Path(sections.logging.run_dir)
    where = folder or run_dir.with_name(f"{run_dir.name}_drill")
    return DrillPlan(config, where, min(7, last) if step is None else step, layout.world_size, hostfile)


def with_preset(config: RunConfig, load: Callable[[list[str]], RunConfig]) -> RunConfig:
    """A configuration with the preset `standard`, if it has none.

    Args:
        load: loads it again with further overrides.
    """
    return load([f"megasdc.protect={STANDARD}"]) if config.megasdc.protect == OFF else config


def run_drill(plan: DrillPlan, say: Callable[[str], None]) -> Outcome[Any]:
    """Make both runs, and compare what they came to.

    Args:
        say: gets a line before each run.

    Raises:
        MegasdcError: a run could not start, or failed for another reason than the fault.
        StorageError: the folder cannot be written.
    """
    say(f"drill 1 of 2: steps 1 to {plan.step + 1} without a fault, in {plan.folder / CLEAN}, output in {CLEAN}.log")
    _launch(plan, CLEAN, [])
    say(f"drill 2 of 2: the same, in {plan.folder / FAULTY}; in step {plan.step} a rank computes a wrong gradient")
    halted = _launch(plan, FAULTY, [{**FAULT, "steps": [plan.step, plan.step]}])
    faulty = plan.folder / FAULTY
    injected = [one for one in read_events(faulty, kind="fault", name="injected") if one.fields["changed"]]
    notes: list[str] = []
    incidents = [(page, one) for page, one in load_incidents(faulty / "reports", notes) if one.step == plan.step]
    return drill_outcome(plan, injected, incidents, None if halted else _compare(plan), notes)


def drill_outcome(
    plan: DrillPlan,
    injected: list[Event],
    incidents: list[tuple[Path, Incident]],
    compared: Mapping[str, Any] | None,
    notes: list[str],
) -> Outcome[Any]:
    """What a drill came to: exit code 0 if the fault was found, its rank named, the step repaired, and all bits equal.

    Args:
        injected: firings that changed something.
        incidents: of the step, with their pages.
        compared: ``equal`` and ``count`` of the tensors at the end; None: the run with the fault was halted.
        notes: what could not be read.
    """
    page, incident = incidents[-1] if incidents else (None, None)
    wrong = sorted({one.rank for one in injected})
    named = [] if incident is None else sorted({one.rank for one in incident.flagged})
    passed = {
        "injected": bool(injected),
        "found": incident is not None,
        "named": bool(wrong) and named == wrong,
        "repaired": incident is not None and incident.done == "repaired",
        "equal": compared is not None and bool(compared["equal"]),
    }
    contents = {
        "step": plan.step,
        "ranks": plan.ranks,
        "folder": str(plan.folder),
        "wrong_ranks": wrong,
        "named_ranks": named,
        **passed,
        "compared": None if compared is None else compared["count"],
        "incident": None if page is None else str(page),
    }
    sentences = _sentences(plan, injected, incident, named, compared)
    contents["sentence"] = " ".join(sentences)
    if page is not None:
        sentences.append(f"What an engineer would be shown: {page}")
    good = all(passed.values())
    failed = ", ".join(f"not {name}" for name, value in passed.items() if not value)
    verdict = "Drill passed: found, named, repaired, end bits equal" if good else f"Drill failed: {failed}"
    told = Page("Drill", verdict, "same" if good else "different", sentences=sentences, notes=notes)
    return Outcome(0 if good else NOT_PASSED, contents, told)


def _sentences(
    plan: DrillPlan,
    injected: list[Event],
    incident: Incident | None,
    named: list[int],
    compared: Mapping[str, Any] | None,
) -> list[str]:
    """What happened, a sentence each."""
    if not injected:
        return [f"No rank computed anything wrong: nothing in step {plan.step} is what the fault was meant for."]
    first = injected[0]
    what = f"the {first.fields['phase']} of {first.fields['fqn']} ({first.fields['slot']})"
    told = [
        f"In step {plan.step} rank {first.rank} on {first.host} computed {what} wrong: one of "
        f"{_elements(first):,} values got the other sign."
    ]
    if incident is None:
        return [*told, "Nothing was found."]
    who = ", ".join(map(str, named))
    named_as = f"rank{'s' * (len(named) > 1)} {who} named" if named else "no rank could be named"
    done = {
        "repaired": "the step was computed again and came out right",
        "halted": "the run was halted before the step was committed",
    }.get(incident.done, f"the step was {incident.done}")
    told.append(f"The {incident.tier} check found it before the step was committed: {named_as}, {done}.")
    if compared is not None:
        what = f"tensors and values of the checkpoint of step {plan.step + 1}"
        equal = f"All {compared['count']:,} {what} are equal, bit by bit, to those of the run without a fault."
        told.append(
            equal if compared["equal"] else f"{compared['different']:,} of {compared['count']:,} {what} differ."
        )
    return told


def _elements(event: Event) -> int:
    count = 1
    for size in event.fields["shape"]:
        count *= int(size)
    return count


def _launch(plan: DrillPlan, name: str, faults: list[dict[str, Any]]) -> bool:
    """Make one of the runs, in place of an earlier one; returns whether it was halted for its fault."""
    folder, file = plan.folder / name, plan.folder / f"{name}.json"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        file.write_text(json.dumps(_config(plan, folder, faults).resolved(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{plan.folder} cannot be written: {error.strerror}; give another --out") from error
    ranks, log = plan.ranks if plan.hostfile is None else None, plan.folder / f"{name}.log"
    with _stderr_in(log):
        result = launch_run(LaunchRequest(file, hostfile=plan.hostfile, num_gpus=ranks), quiet=True)
    if faults and result.exit_code == CorruptionError.exit_code:
        return True
    if result.exit_code:
        told = f"the drill's run in {folder} failed: {'; '.join(result.lines)}; all that it said is in {log}"
        raise error_of_rank(result.exit_code)(told)
    return False


@contextmanager
def _stderr_in(file: Path) -> Iterator[None]:
    """Write standard error of this process and of those that it starts to a file, in place of an earlier one."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(file, "wb") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _config(plan: DrillPlan, folder: Path, faults: list[dict[str, Any]]) -> RunConfig:
    """The configuration of one of the runs: the first steps of the run, without what would make two differ."""
    raw = plan.config.in_folder(folder)
    sections = raw["megasdc"]
    sections["logging"] |= {"interval": plan.step + 1, "progress_bar": False}
    sections["training"] |= {"stop_step": plan.step + 1, "time_limit_s": None, "eval_interval": 0}
    sections["checkpoint"] |= {"interval": 0, "resume": "never", "keep_last": 0, "require_verified": "never"}
    sections["checkpoint"]["memory"] |= {"interval": 0, "partners": False, "without_room": "refuse"}
    sections["checkpoint"]["archive"] |= {"address": None}
    sections["audit"] |= {"enabled": True, "interval": plan.step, "micro_batch": TRAINING, "longest_interval": None}
    sections["audit"] |= {"verify_checkpoints": False}
    sections["sdc"]["policy"] |= {"not_reproduced": "repair"}
    sections["health"] |= {"alert_command": []}
    sections["drop_compute"] |= {"enabled": False}
    sections |= {"faults": faults, "process_faults": [], "delay": []}
    return parse_config(raw, source=plan.config.source, stored=True)


def _compare(plan: DrillPlan) -> dict[str, Any]:
    """Compare the checkpoints with which both runs have ended.

    Raises:
        CheckpointError: one cannot be read.
    """
    name = step_folder(plan.step + 1)
    paths = [plan.folder / one / "checkpoints" / name for one in (CLEAN, FAULTY)]
    report = compare_paths(paths, Options()).report
    found = report.as_dict()
    return {"equal": found["same"], "count": found["num_compared"], "different": len(found["findings"])}
