"""Progress and state of a run, from its record; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megasdc.common.words import clock, duration
from megasdc.ops.run_folder.record import RunRecord

SILENT_S = 120.0
"""A run without a recorded end that has written nothing for longer than this is silent, see ``SILENT_WINDOWS``."""
SILENT_WINDOWS = 5
"""A run is not silent before so many times the interval between its metric lines."""
ALL_DONE = "all steps done"


@dataclass(frozen=True)
class RunStatus:
    """Progress and state of a run; ``planned``: steps of the whole run, None where that is not known.

    State failed: a launch ended with an exit code other than 0; silent: no end was recorded, and nothing was written
    for long.
    """

    state: Literal["done", "stopped", "failed", "running", "silent"]
    step: int
    planned: int | None
    text: str


def status_of(run: RunRecord) -> RunStatus:
    """Progress and state of a run."""
    step, planned = run.last_step, run.setting("megasdc.training.steps")
    planned = planned if isinstance(planned, int) else None
    at = f"step {step:,}" + (f" of {planned:,}" if planned is not None else "")
    at = at if step or run.config else "a step that is not known"
    ending = run.ending
    if ending is not None and not run.is_of_last_start(ending.attempt, ending.launch, ending.time):
        ending = None
    if ending is not None and ending.exit_code:
        text = f"failed at {at} with exit code {ending.exit_code}: {ending.text}"
        return RunStatus("failed", step, planned, text)
    ends = run.since_last_start(run.of("end", "run"))
    if ends:
        reason = str(ends[-1].fields.get("reason", ALL_DONE))
        if reason == ALL_DONE:
            return RunStatus(
                "done", step, planned, f"done, all {step:,} steps." if 1 < step == planned else f"done at {at}."
            )
        return RunStatus("stopped", step, planned, f"stopped at {at}: {reason}.")
    if ending is not None and not run.config:  # of a training that is not megasdc's own
        return RunStatus("done", step, planned, "done.")
    if run.written_at is None:
        return RunStatus("silent", step, planned, "nothing was written yet.")
    quiet_s = run.quiet_s or 0.0
    when = f"{duration(quiet_s)} before this page was made ({clock(run.written_at)})"
    if quiet_s <= max(SILENT_S, SILENT_WINDOWS * _window_s(run)):
        return RunStatus("running", step, planned, f"under way at {at}; the last line was written {when}.")
    text = f"no end was recorded; at {at} the last line was written, {when}. It hangs, or was killed."
    return RunStatus("silent", step, planned, text)


def _window_s(run: RunRecord) -> float:
    """Approximate seconds between two lines of metrics."""
    seconds = run.series.get("speed/step_s")
    if seconds is None:
        return 0.0
    steps = run.series["speed/step_s"].steps
    between = int(steps[-1] - steps[-2]) if len(steps) > 1 else int(steps[-1])
    return between * float(seconds.values[-1])
