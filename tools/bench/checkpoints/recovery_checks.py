"""What must be right of a run that was killed or damaged and started again."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megasdc.checkpoint.files import SHARED_STATE_FILE, list_steps, step_folder
from megasdc.checkpoint.manifest import read_manifest
from megasdc.common.errors import CheckpointError
from megasdc.events import read_events
from megasdc.metrics.writer import METRICS_FILE, read_metrics
from tools.bench.checkpoints.recovery_holdings import Holdings, clear_memory, left_in_memory
from tools.bench.checkpoints.recovery_kinds import Kind, Resumed
from tools.bench.checkpoints.recovery_start import Place, agents, send, writers_of

_LEFT_S = 30.0
"""Seconds that agents have to end."""
_POSITION = ("step", "tokens", "samples", "skipped_steps", "loader")


@dataclass(frozen=True)
class End:
    """Losses by step, what the last checkpoint holds by file and by part, and the place in the data after each step."""

    losses: dict[int, float]
    contents: dict[str, Any]
    places: dict[int, int] = field(default_factory=dict)


def read_end(run: Path, *checkpoints: Path) -> End:
    """How a run has ended; its last checkpoint is in one folder, or in parts of its files in those of several hosts.

    Raises:
        MegasdcError: no folder holds a checkpoint, or one is damaged.
    """
    lines = [line for line in read_metrics(run) if "train/loss" in line]
    losses = {line["step"]: line["train/loss"] for line in lines}
    places = {line["step"]: line["data/stream_end"] for line in lines}
    step = max((step for folder in checkpoints for step in list_steps(folder)), default=None)
    if step is None:
        raise CheckpointError(f"{run}: no checkpoint in {', '.join(map(str, checkpoints))}")
    parts = [folder / step_folder(step) for folder in checkpoints if step in list_steps(folder)]
    contents: dict[str, Any] = {}
    for record in (record for part in parts for record in read_manifest(part).files):
        if (content := record.content) is not None and record.name.endswith(".pt"):
            tensors = sorted((one.name, one.type, one.blocks) for one in content.tensors)
            contents[record.name] = (record.tensors, tensors, content.values, content.rest, content.fragments)
    shared = json.loads((parts[0] / SHARED_STATE_FILE).read_text(encoding="utf-8"))
    return End(losses, {**contents, **{name: shared[name] for name in _POSITION}}, places)


def why_different(end: End, right: End, rounding: float = 0.0) -> list[str]:
    """What differs between two runs, a line each.

    Args:
        rounding: largest relative difference of a loss of runs with other numbers of replicas, whose last checkpoints
            are not compared; 0: all bits are to be equal.
    """
    found = []
    for name, one, other in (("losses", end.losses, right.losses), ("places in the data", end.places, right.places)):
        steps = sorted(one.keys() | other.keys())
        tolerance = rounding if name == "losses" else 0.0
        wrong = [step for step in steps if not _equal(one.get(step), other.get(step), tolerance)]
        found += [f"{name} differ in {len(wrong)} steps, the first is {wrong[0]}"] if wrong else []
    if rounding:
        return found
    names = sorted(end.contents.keys() | right.contents.keys())
    return found + [
        f"{name} differs at the end" for name in names if end.contents.get(name) != right.contents.get(name)
    ]


def _equal(one: float | None, other: float | None, rounding: float) -> bool:
    if one is None or other is None:
        return False
    return one == other or math.isclose(one, other, rel_tol=rounding)


def resumed_from(place: Place, since: float, before: int) -> Resumed | None:
    """How a start went on; None: it had ended before.

    Args:
        since: when it began, in seconds since the epoch.
        before: last step that had been done.
    """
    found = [one for one in read_events(place.run, kind="resume", rank=0) if one.time >= since]
    for one in found:
        if one.name == "memory" and one.step is not None:
            source = "partner" if "partners" in one.fields["origin"] else "memory"
            return Resumed(one.step, source, before - one.step)
    for one in found:
        if one.name == "metrics_cut_back" and one.step is not None:
            return Resumed(one.step, "disk", before - one.step)
    return Resumed(0, "start", before) if place.last_step_since(since) else None


def check_start(resumed: Resumed, expected: Holdings) -> list[str]:
    """Whether a start went on from the newest step that was whole."""
    if resumed.step == expected.newest:
        return []
    return [f"resumed from step {resumed.step} ({resumed.source}), whole were {expected}"]


def check_holdings(place: Place, kind: Kind, found: Holdings, earlier: Holdings | None, since: float) -> list[str]:
    """Whether a start has lost no checkpoint.

    Args:
        found: what is whole after it.
        earlier: what was whole before it; None: it was the first.
        since: when it began.
    """
    saved = [one for one in read_events(place.run, kind="save", name="checkpoint", rank=0)]
    lines = read_metrics(place.run) if (place.run / METRICS_FILE).exists() else []
    in_memory = max(
        (int(line["memory/step"]) for line in lines if "memory/step" in line and line["time"] >= since), default=0
    )
    told = {one.step or 0 for one in saved if one.time >= since} | {in_memory}
    if earlier is not None and not kind.has_hosts:
        told.add(earlier.newest)
    # What is destroyed may be the newest; where nothing else was whole yet, the run begins anew.
    least = sorted({0, *told})[-2:][0 if kind.destroys else -1]
    return [f"step {least} was whole, and only {found} is"] if found.newest < least else []


def find_left(place: Place, pids: Sequence[int]) -> list[str]:
    """What a run has left that has ended.

    Args:
        pids: of all its ranks.
    """
    until = time.monotonic() + _LEFT_S
    while agents(place) and time.monotonic() < until:
        time.sleep(0.1)
    found = [f"process {pid}, a writer, has not ended" for pid in writers_of(pids)]
    found += [f"process {pid}, an agent, has not ended" for pid in agents(place)]
    return found + [f"{path} is left" for path in left_in_memory(place.run) if "-memory-" in path.name]


def clear(place: Place) -> None:
    """Remove what faults have left: agents that hold memory, records of agents that were killed."""
    send(agents(place), signal.SIGKILL)
    clear_memory(place.run)
