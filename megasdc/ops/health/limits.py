"""How long a rank may stay in a phase: learned from how long that phase took in this run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasdc.common.durable import parse_json, write_durably
from megasdc.ops.health.phases import SLOW, Phase
from megasdc.ops.health.record import BUCKETS, Progress, bucket_limit_s

FIRST_STEPS = 3
"""Steps of a process in which everything may be slow: code is compiled, memory is mapped, connections are made."""
ENOUGH = 20
"""Durations from which a phase's 99th percentile counts."""
Durations = dict[Phase, list[int]]
"""Counts of durations by phase, [bucket], see ``megasdc.ops.health.record``."""


@dataclass(frozen=True)
class PhaseLimits:
    """Limits of this run's phases.

    Args:
        floor_s: least limit.
        slow_floor_s: least limit of evaluations, saves, starts, and of the first steps of a process.
        factor: times the 99th percentile of a phase's durations.
        durations: of this run, earlier processes included.
    """

    floor_s: float
    slow_floor_s: float
    factor: float
    durations: Durations

    def of(self, progress: Progress, first_step: int) -> float:
        """Seconds that a rank may stay where it is; ``first_step``: of its process."""
        slow = progress.phase in SLOW or progress.step < first_step + FIRST_STEPS
        floor = self.slow_floor_s if slow else self.floor_s
        if progress.phase == Phase.TRAINING:
            return floor  # anything may happen in it, so that its durations tell nothing
        counts = self.durations.get(progress.phase, [])
        if sum(counts) < ENOUGH:
            return max(floor, self.slow_floor_s)
        return max(floor, self.factor * percentile_s(counts, 0.99))


def percentile_s(counts: Sequence[int], share: float) -> float:
    """Duration that this share of the counted ones does not exceed; the last count has no limit and gives its start."""
    wanted, seen = share * sum(counts), 0
    for index, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return bucket_limit_s(min(index, BUCKETS - 2))
    return 0.0


def merged_counts(durations: Sequence[Mapping[Phase, Sequence[int]]]) -> Durations:
    """Sums of counts."""
    empty = [0] * BUCKETS
    return {
        phase: [sum(each) for each in zip(*(one.get(phase, empty) for one in durations), strict=True)]
        for phase in Phase
    }


def load_durations(path: Path) -> Durations:
    """Durations that an earlier process kept; empty where there are none, or the file is damaged."""
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
        found = {Phase[name]: [int(count) for count in counts] for name, counts in raw.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}
    return found if all(len(counts) == BUCKETS for counts in found.values()) else {}


def save_durations(path: Path, durations: Mapping[Phase, Sequence[int]]) -> None:
    """Keep durations for the next process."""
    write_durably(path, json.dumps({phase.name: list(counts) for phase, counts in durations.items()}) + "\n")
