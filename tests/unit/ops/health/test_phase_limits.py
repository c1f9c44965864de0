"""How long a phase may last: learned, with generous limits where nothing is known or long is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasdc.ops.health.limits import ENOUGH, PhaseLimits, load_durations, merged_counts, percentile_s, save_durations
from megasdc.ops.health.phases import Phase
from megasdc.ops.health.record import BUCKETS, Progress, bucket_of


def counts(*seconds: float) -> list[int]:
    """Counts of these durations."""
    found = [0] * BUCKETS
    for one in seconds:
        found[bucket_of(one)] += 1
    return found


def at(phase: Phase, step: int = 100) -> Progress:
    """A rank in a phase."""
    return Progress(1, 0.0, step, 0, phase)


def test_a_limit_is_a_multiple_of_what_the_phase_took() -> None:
    """Ten times the 99th percentile, but at least the floor; one slow phase in a hundred does not count."""
    durations = {Phase.FORWARD: counts(*[20.0] * 99, 500.0), Phase.BACKWARD: counts(*[0.1] * 100)}
    limits = PhaseLimits(60.0, 900.0, 10.0, durations)
    assert 200 <= limits.of(at(Phase.FORWARD), 1) <= 200 * 2**0.5
    assert limits.of(at(Phase.BACKWARD), 1) == 60.0


def test_what_is_seldom_first_or_rightly_long_has_the_larger_floor() -> None:
    """Phases timed fewer than twenty times, the first three steps of a process, saves and evaluations."""
    durations = {Phase.FORWARD: counts(*[0.1] * (ENOUGH - 1)), Phase.SAVE: counts(*[0.1] * 100)}
    durations[Phase.DATA] = counts(*[0.1] * 100)
    limits = PhaseLimits(60.0, 900.0, 10.0, durations)
    assert limits.of(at(Phase.FORWARD), 1) == 900.0
    assert limits.of(at(Phase.SAVE), 1) == 900.0
    assert limits.of(at(Phase.DATA, 52), 50) == 900.0 and limits.of(at(Phase.DATA, 53), 50) == 60.0


def test_percentiles_of_counts() -> None:
    """The limit of the bucket in which the share is reached; nothing counted is nothing."""
    assert percentile_s(counts(1.0, 1.0, 1.0, 8.0), 0.5) == pytest.approx(1.0, rel=0.42)
    assert percentile_s(counts(1.0, 1.0, 1.0, 8.0), 0.99) == pytest.approx(8.0, rel=0.42)
    assert percentile_s([0] * BUCKETS, 0.99) == pytest.approx(0.001)


def test_durations_are_kept_and_damage_is_no_error(tmp_path: Path) -> None:
    """Counts add up over processes; a damaged or foreign file counts as none."""
    path = tmp_path / "durations.json"
    assert load_durations(path) == {}
    one = {Phase.FORWARD: counts(1.0, 2.0)}
    save_durations(path, merged_counts([one, one]))
    assert sum(load_durations(path)[Phase.FORWARD]) == 4
    for text in ("", "[]", '{"NONE": [1]}', '{"FORWARD": [1, 2]}', '{"FORWARD": 3}'):
        path.write_text(text)
        assert load_durations(path) == {}


def test_what_took_long_where_nothing_is_known_raises_no_limit() -> None:
    """Anything may happen in a program's own code: its durations tell nothing of the next one."""
    limits = PhaseLimits(60.0, 900.0, 10.0, {Phase.TRAINING: counts(*[500.0] * 100)})
    assert limits.of(at(Phase.TRAINING), 1) == 900.0
