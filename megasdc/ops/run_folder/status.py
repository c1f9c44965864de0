"""Progress and state of a run, from its record; pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megasdc.common.errors import CheckpointError, ConfigError, DataError, LaunchError, StorageError
from megasdc.common.words import clock, duration, number_of
from megasdc.ops.run_folder.record import LaunchEnding, RunRecord

SILENT_S = 120.0
"""A run without a recorded end that has written nothing for longer than this is silent, see ``SILENT_WINDOWS``."""
SILENT_WINDOWS = 5
"""A run is not silent before so many times the interval between its metric lines."""
ALL_DONE = "all steps done"
REFUSALS = frozenset(kind.exit_code for kind in (ConfigError, DataError, CheckpointError, StorageError, LaunchError))
"""Exit codes of a start that is refused before its first step."""


@dataclass(frozen=True)
class RunStatus:
    """Progress and state of a run; ``planned``: steps of the whole run, None where that is not known.

    State failed: a launch ended with an exit code other than 0; silent: no end was recorded, and nothing was written
    for long. ``refused``: how a start ended that was refused after all steps were done, which they still are; empty:
    none was.
    """

    state: Literal["done", "stopped", "failed", "running", "silent"]
    step: int
    planned: int | None
    text: str
    refused: str = ""


@dataclass(frozen=True)
class GuardStatus:
    """What the last guard of a training, which is not megasdc's own, has done since its last start.

    ``checks``: what it looks at, empty of an earlier version; ``steps``: None while it is attached, or where its end
    was not recorded; ``findings``: number of findings, each of one step and check.
    """

    layout: str
    checks: tuple[str, ...]
    steps: int | None
    audits_agreed: int
    findings: int
    closed: bool

    def __str__(self) -> str:
        steps = [] if self.steps is None else [number_of(self.steps, "step")]
        told = [*steps, f"{number_of(self.audits_agreed, 'audit')} agreed", number_of(self.findings, "finding")]
        checks = f" ({', '.join(self.checks)})" if self.checks else ""
        return f"{', '.join(told)}; {self.layout}{checks}"


def guard_of(run: RunRecord) -> GuardStatus | None:
    """The guard of a training; None: it has none."""
    bounds = run.since_last_start(run.of("guard", "attached", "closed"))
    begun = [place for place, one in enumerate(bounds) if one.name == "attached"]
    if not begun:
        return None
    attached, ends = bounds[begun[-1]], bounds[begun[-1] + 1 :]
    since = [one for one in run.since_last_start(run.events) if one.time >= attached.time]
    verdicts = {(one.step, one.fields.get("tier")) for one in since if (one.kind, one.name) == ("sdc", "verdict")}
    agreed = sum((one.kind, one.name) == ("audit", "agreed") for one in since)
    return GuardStatus(
        layout=str(attached.fields.get("layout")),
        checks=tuple(map(str, attached.fields.get("checks", ()))),
        steps=int(ends[-1].fields["steps"]) if ends else None,
        audits_agreed=agreed,
        findings=len(verdicts),
        closed=bool(ends),
    )


def status_of(run: RunRecord) -> RunStatus:
    """Progress and state of a run."""
    step, planned = run.last_step, run.setting("megasdc.training.steps")
    planned = planned if isinstance(planned, int) else None
    at = f"step {step:,}" + (f" of {planned:,}" if planned is not None else "")
    at = at if step or run.config else "a step that is not known"
    ending = run.ending
    if ending is not None and not run.is_of_last_start(ending.attempt, ending.launch, ending.time):
        ending = None
    refused = ""
    if ending is not None and _came_to_nothing(run, ending, step == planned):
        refused, ending = f"exit code {ending.exit_code}: {ending.text}", None
    if ending is not None and ending.exit_code:
        text = f"failed at {at} with exit code {ending.exit_code}: {ending.text}"
        return RunStatus("failed", step, planned, text)
    ends = run.of("end", "run") if refused else run.since_last_start(run.of("end", "run"))
    if ends:
        reason = str(ends[-1].fields.get("reason", ALL_DONE))
        if reason == ALL_DONE:
            text = f"done, all {step:,} steps." if 1 < step == planned else f"done at {at}."
            text += f" A later start was refused with {refused}" * bool(refused)
            return RunStatus("done", step, planned, text, refused)
        return RunStatus("stopped", step, planned, f"stopped at {at}: {reason}.")
    guard = guard_of(run)
    if (ending is not None and not run.config) or (guard is not None and guard.closed):  # a training of the user's own
        return RunStatus("done", step, planned, f"done at {at}." if step else "done.")
    if run.written_at is None:
        return RunStatus("silent", step, planned, "nothing was written yet.")
    quiet_s = run.quiet_s or 0.0
    when = f"{duration(quiet_s)} before this page was made ({clock(run.written_at)})"
    if quiet_s <= max(SILENT_S, SILENT_WINDOWS * _window_s(run)):
        return RunStatus("running", step, planned, f"under way at {at}; the last line was written {when}.")
    text = f"no end was recorded; at {at} the last line was written, {when}. It hangs, or was killed."
    return RunStatus("silent", step, planned, text)


def _came_to_nothing(run: RunRecord, ending: LaunchEnding, is_whole: bool) -> bool:
    """Whether the last start was refused, and the run had done all its steps before it.

    Args:
        is_whole: whether the last step is the one that the run ends with.
    """
    ends = run.of("end", "run")
    if not (is_whole and ends and ending.exit_code in REFUSALS) or ends[-1].fields.get("reason", ALL_DONE) != ALL_DONE:
        return False
    done = ends[-1]
    is_other, number = ending.launch != done.launch, done.attempt or 0
    if not is_other and (ending.attempt or 0) <= number:
        return False
    later = [one for one in run.events if (one.attempt or 0) > number or (is_other and one.launch == ending.launch)]
    return all(one.step is None for one in later)


def _window_s(run: RunRecord) -> float:
    """Approximate seconds between two lines of metrics, or of events where there are no metrics."""
    seconds = run.series.get("speed/step_s")
    if seconds is None:  # of a guard, which writes events alone
        times = [one.time for one in run.since_last_start(run.events) if one.rank == 0]
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
    steps = run.series["speed/step_s"].steps
    between = int(steps[-1] - steps[-2]) if len(steps) > 1 else int(steps[-1])
    return between * float(seconds.values[-1])
