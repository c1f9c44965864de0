"""Going back to an earlier checkpoint: where to, and the settings of an attempt that does.

torch is imported where checkpoints are looked at after NaN and Inf.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megasdc.common.durable import parse_json
from megasdc.common.origin import Launch
from megasdc.events import read_events
from megasdc.metrics.writer import read_metrics
from megasdc.ops.supervise.diagnosis import Back
from megasdc.ops.supervise.history import Attempt

_END = "data/stream_end"
_RESOLVED = "resolved.json"
_RESUMED = ("checkpoint", "memory", "other_layout")
"""Events of a run that has gone on from a save of its own."""


def find_back(run_dir: Path, launch: Launch, rewind_steps: int) -> Back | None:
    """Where a run can go back to: before a checkpoint that could not be loaded, before NaN and Inf, to its beginning.

    To the beginning where none of its checkpoints can be used, damaged or not verified, and the first that it saved is
    still there: early in a run. A run that has more to lose is not begun anew without a person.

    Without ``rewind_steps`` to the checkpoint of ``find_way_back``, and no data are skipped: newer ones hold NaN or
    Inf, or lead to them. An attempt that went on from there itself has tried that.

    Args:
        launch: of the attempt that failed.
        rewind_steps: least number of steps before the first of the last skipped steps; 0: no data are skipped.

    Returns:
        None: the attempt had no such checkpoints, and no skipped step or one that is not to be gone back before.
    """
    if not run_dir.is_dir():
        return None
    resumes = list(read_events(run_dir, kind="resume", rank=0, launch=launch, broken=[]))
    failed = [one.step for one in resumes if one.name == "not_loaded"]
    if failed and failed[-1] is not None:
        return Back(failed[-1] - 1)
    if unusable := [one for one in resumes if one.name == "none_usable"]:
        saves = read_events(run_dir, kind="save", name="checkpoint", rank=0, broken=[])
        oldest = min(unusable[-1].fields["steps"])
        return None if any(one.step < oldest for one in saves if one.step is not None) else Back(0)
    skipped = list(read_events(run_dir, kind="skip", name="optimizer_step", rank=0, broken=[]))
    if not rewind_steps:
        return _to_finite(run_dir, [one.step for one in resumes if one.name in _RESUMED])
    if not skipped or skipped[-1].step is None:
        return None
    if not launch.wrote(skipped[-1].launch, skipped[-1].time):
        return None
    first, steps = skipped[-1].step, {one.step for one in skipped}
    while first - 1 in steps:  # an earlier attempt may have skipped the first of them
        first -= 1
    rows = [row for row in read_metrics(run_dir) if _END in row and row["step"] <= first - rewind_steps]
    step, start = (rows[-1]["step"], rows[-1][_END]) if rows else (0, 0)
    return Back(step, (int(start), skipped[-1].fields["stream_end"]))


def _to_finite(run_dir: Path, resumed: Sequence[int | None]) -> Back | None:
    """To the checkpoint of ``find_way_back``, if the attempt has gone on from a newer one; ``resumed``: its steps."""
    if not resumed or resumed[-1] is None:
        return None
    from megasdc.checkpoint.marks import find_way_back

    try:
        section = parse_json((run_dir / _RESOLVED).read_text(encoding="utf-8"))["megasdc"]["checkpoint"]
        way = find_way_back(Path(section.get("folder") or run_dir / "checkpoints"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # nothing is known of where they lie
        return None
    return None if way is None or way.step >= resumed[-1] else Back(way.step)


def overrides_of(attempt: Attempt, skip: Sequence[Sequence[int]]) -> list[str]:
    """Settings of an attempt beside the configuration, as of ``--set``.

    Args:
        skip: ranges of samples that the configuration skips.
    """
    overrides = [] if attempt.at_most is None else [f"megasdc.checkpoint.resume_at_most={attempt.at_most}"]
    if attempt.skips_snapshots:
        overrides.append("megasdc.checkpoint.memory.without_room=go_on")
    if attempt.skip:
        overrides.append(f"megasdc.data.skip={json.dumps(union([*skip, *attempt.skip]))}")
    return overrides


def union(ranges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Ranges of the same numbers that ascend and do not touch."""
    found: list[list[int]] = []
    for first, end in sorted(map(tuple, ranges)):
        if found and first <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([first, end])
    return found
